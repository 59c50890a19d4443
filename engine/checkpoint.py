"""Checkpoints under the canonical names of the full model: any layout in, any layout out.

``torch.distributed.checkpoint`` writes and reads tensors: every rank its own shards, holders' equal copies once. ``state.json``
beside them holds the rest. A checkpoint is written aside and renamed, so that a name never stands for half of one.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import Optimizer

from .errors import CheckpointError

FORMAT = 1
STATE, LATEST = "state.json", "latest.json"


def tensors_of(parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor], optimizer: Optimizer) -> dict[str, Any]:
    """Everything that is a tensor, by key: ``model/NAME`` and ``optimizer/NAME/KEY``; shards stay shards."""
    tensors: dict[str, Any] = {f"model/{name}": tensor.detach() for name, tensor in (*parameters.items(), *buffers.items())}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer/{name}/{key}"] = value
    return tensors


def materialise_state(optimizer: Optimizer) -> None:
    """Give every parameter the optimizer state that its first step would make, without changing any weight."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def save(directory: Path, tag: str, tensors: dict[str, Any], state: Mapping[str, Any], *, distributed: bool) -> Path:
    """Write the checkpoint ``directory/tag``; collective if ``distributed``. Returns its path."""
    final, aside = directory / tag, directory / f".{tag}.partial"
    _on_rank_0(lambda: shutil.rmtree(aside, ignore_errors=True), distributed)
    with _without_single_process_warning():
        dcp.save(tensors, checkpoint_id=str(aside), no_dist=not distributed)

    def finish() -> None:
        (aside / STATE).write_text(json.dumps({"format": FORMAT, **state}, indent=1), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        pointer = directory / f".{LATEST}"
        pointer.write_text(json.dumps({"tag": tag}), encoding="utf-8")
        pointer.rename(directory / LATEST)

    _on_rank_0(finish, distributed)
    return final


def latest(directory: Path) -> str | None:
    """The tag of the newest whole checkpoint in ``directory``, or None."""
    try:
        tag = json.loads((directory / LATEST).read_text(encoding="utf-8"))["tag"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{directory / LATEST}: cannot be read; name the checkpoint yourself, or remove this file") from None
    return str(tag)


def read_state(path: Path) -> dict[str, Any]:
    """``state.json`` of the checkpoint at ``path``. Raises :class:`CheckpointError`."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no checkpoint of this engine ({STATE} is missing); choose another or start anew") from None
    except (OSError, ValueError):
        raise CheckpointError(f"{path / STATE}: damaged; resume from an older checkpoint") from None
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{path}: has format {state.get('format')!r}, this version reads {FORMAT}")
    return state


def load(path: Path, tensors: dict[str, Any], *, distributed: bool) -> None:
    """Fill ``tensors`` in place from the checkpoint at ``path``, whatever the layout that wrote it; collective if ``distributed``."""
    saved = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    for key, tensor in tensors.items():
        if key not in saved:
            raise CheckpointError(f"{path}: holds no {key!r}; it was written for another model or optimizer")
        size = getattr(saved[key], "size", None)
        if size is not None and tuple(size) != tuple(tensor.shape):
            raise CheckpointError(f"{path}: {key!r} has shape {tuple(size)} there and {tuple(tensor.shape)} here: another model")
    with _without_single_process_warning():
        dcp.load(tensors, checkpoint_id=str(path), no_dist=not distributed)


def checkpoints_in(directory: Path) -> list[Path]:
    """The whole checkpoints in ``directory`` that carry a step's name, oldest first."""
    named = [path for path in directory.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step-")))


def prune(paths: Sequence[Path], keep: int) -> None:
    """Remove all but the last ``keep`` of the checkpoints at ``paths``, oldest first."""
    for path in paths[:-keep]:
        shutil.rmtree(path, ignore_errors=True)


def _on_rank_0(action: Callable[[], None], distributed: bool) -> None:
    """Run ``action`` on rank 0 while the others wait; its failure is everyone's."""
    problem: list[str | None] = [None]
    if not distributed or dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            problem = [str(error)]
    if distributed:
        dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise CheckpointError(f"cannot write the checkpoint: {problem[0]}")


@contextmanager
def _without_single_process_warning() -> Iterator[None]:
    """DCP warns that one process writes alone, which is what the reference engine means to do."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
