"""Checkpoints under the canonical names of the full model: any layout in, any layout out.

``torch.distributed.checkpoint`` writes and reads tensors: every rank its own shards, holders' equal copies once. ``state.json``
beside them holds the rest. A checkpoint is written aside and renamed, so that a name never stands for half of one.
"""

from __future__ import annotations

import json
import pickle
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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from .checkpoint_reader import SafeReader
from .errors import CheckpointError

FORMAT = 1
STATE, LATEST = "state.json", "latest.json"
_KEYS = {"global_steps", "global_samples", "mesh", "placement", "scheduler", "loader", "client_state"}


def weights_of(parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The model's tensors by key, ``model/NAME``; shards stay shards."""
    return {f"model/{name}": tensor.detach() for name, tensor in (*parameters.items(), *buffers.items())}


def tensors_of(parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor], optimizer: Optimizer) -> dict[str, Any]:
    """Everything that is a tensor, by key: ``model/NAME`` and ``optimizer/NAME/KEY``; shards stay shards."""
    tensors = weights_of(parameters, buffers)
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
    """Write the checkpoint ``directory/tag``; collective if ``distributed``. Returns its path.

    Raises :class:`CheckpointError` on every rank if ``state`` is not JSON or nothing can be written.
    """
    try:
        text = json.dumps({"format": FORMAT, **state}, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the client state or the scheduler's state is not JSON ({error}); give plain numbers, text, lists") from None
    final, aside, old = directory / tag, directory / f".{tag}.partial", directory / f".{tag}.old"

    def prepare() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)

    def finish() -> None:
        (aside / STATE).write_text(text, encoding="utf-8")
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        aside.rename(final)
        pointer = directory / f".{LATEST}"
        pointer.write_text(json.dumps({"tag": tag}), encoding="utf-8")
        pointer.rename(directory / LATEST)
        shutil.rmtree(old, ignore_errors=True)

    _on_rank_0(prepare, distributed)
    with _without_single_process_warning():
        dcp.save(tensors, checkpoint_id=str(aside), no_dist=not distributed)
    _on_rank_0(finish, distributed)
    return final


def latest(directory: Path) -> str | None:
    """The tag of the newest whole checkpoint in ``directory``, or None."""
    try:
        tag = json.loads((directory / LATEST).read_text(encoding="utf-8"))["tag"]
    except FileNotFoundError:  # lost, or killed before it was written: the newest whole one stands for it
        whole = checkpoints_in(directory)
        return whole[-1].name if whole else None
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
        state = None
    if not isinstance(state, dict) or not state.keys() >= {"format"}:
        raise CheckpointError(f"{path / STATE}: damaged; resume from an older checkpoint")
    if state["format"] != FORMAT:
        raise CheckpointError(f"{path}: has format {state['format']!r}, this version reads {FORMAT}; use the version that wrote it")
    missing = _KEYS - state.keys()
    if missing:
        raise CheckpointError(f"{path / STATE}: damaged, {min(missing)!r} is missing; resume from an older checkpoint")
    return state


def load(path: Path, tensors: dict[str, Any], *, distributed: bool) -> None:
    """Fill ``tensors`` in place from the checkpoint at ``path``, whatever the layout that wrote it; collective if ``distributed``.

    Raises :class:`CheckpointError` on every rank if it is damaged, or of another model or optimizer.
    """
    _agree(_obstacle(path, tensors), distributed)
    try:
        with _without_single_process_warning():
            dcp.load(tensors, storage_reader=SafeReader(str(path)), no_dist=not distributed)
    except CheckpointException as error:  # the same on every rank
        reason = _first_line(next(iter(error.failures.values()))[0])
        raise CheckpointError(f"{path}: its tensors are damaged or missing, resume from an older checkpoint ({reason})") from None


def _obstacle(path: Path, tensors: Mapping[str, Any]) -> str | None:
    """Why this rank's ``tensors`` cannot be loaded from ``path``."""
    try:
        saved = SafeReader(str(path)).read_metadata().state_dict_metadata
    except (OSError, pickle.UnpicklingError, EOFError, ValueError, KeyError, AttributeError, IndexError) as error:
        return f"{path}: its metadata is damaged or missing, resume from an older checkpoint ({_first_line(error)})"
    for key, tensor in tensors.items():
        entry = saved.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            return f"{path}: holds no {key!r}; it was written for another model or optimizer, choose the configuration that wrote it"
        if tuple(entry.size) != tuple(tensor.shape):
            return f"{path}: {key!r} has shape {tuple(entry.size)} there and {tuple(tensor.shape)} here; it is of another model"
    return None


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
    problem = None
    if not distributed or dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            problem = f"cannot write the checkpoint: {error}"
    _agree(problem, distributed)


def _agree(problem: str | None, distributed: bool) -> None:
    """Raise the first rank's problem on every rank, so that none waits for another in a collective."""
    problems = [problem]
    if distributed:
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    first = next((found for found in problems if found is not None), None)
    if first is not None:
        raise CheckpointError(first)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _without_single_process_warning() -> Iterator[None]:
    """DCP warns that one process writes alone, which is what the reference engine means to do."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
