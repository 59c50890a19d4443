"""Weights from DeepSpeed's own checkpoints of a dense model."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ...checkpoint.storage.directory import check_tag
from ...distributed.agreement import Ranks
from ...distributed.hosts import machine_id
from ...errors import CheckpointError, ModelError
from ...subnetwork.weight_files import INDEX, WeightFiles
from .private import load

T = TypeVar("T")

# DeepSpeed's own classes in the optimizer part of a checkpoint. They hold only data.
_IN_CHECKPOINTS = {
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
}


# The errors of a conversion that finds unexpected content in a file.
_DAMAGED = (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, AssertionError)


class _SafeTorch:
    """``torch`` with a ``load`` that reads only weights.

    Without it, DeepSpeed's conversion would run any code that a file holds.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        return torch.load(file, **{**options, "weights_only": True})


@contextmanager
def _silence() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def is_zero_checkpoint(directory: Path) -> bool:
    """Whether DeepSpeed wrote a checkpoint of ZeRO 1–3 to ``directory``."""
    tag = _latest(directory)
    return tag is not None and any((directory / tag).glob("*_optim_states.pt"))


def _latest(directory: Path) -> str | None:
    pointer = directory / "latest"
    if not pointer.is_file():  # reading a FIFO would hang
        return None
    try:
        tag = pointer.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{directory / 'latest'}: must name the checkpoint to read, but it is not text in UTF-8 ({error.reason})"
        ) from None
    try:
        return check_tag(tag)
    except CheckpointError as error:
        raise CheckpointError(f"{pointer}: {error}") from None


def weights_of_zero_checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    """Read float32 weights and buffers of a dense model, by name, with DeepSpeed's
    ``zero_to_fp32``.

    DeepSpeed's output is dropped. Raises CheckpointError if the checkpoint is damaged, or if it
    holds anything but tensors and DeepSpeed's own records.
    """
    for file in (directory / (_latest(directory) or "")).glob("*"):
        if not (file.is_file() or file.is_dir()):  # opening a FIFO would hang
            raise CheckpointError(f"{file}: is not a regular file; remove it, or take another checkpoint")
    load()
    convert: Any = importlib.import_module("deepspeed.utils.zero_to_fp32")
    allowed = [
        getattr(importlib.import_module(module), name) for module, names in _IN_CHECKPOINTS.items() for name in names
    ]
    kept = convert.torch
    convert.torch = _SafeTorch()
    try:
        with torch.serialization.safe_globals(allowed), _silence():
            return convert.get_fp32_state_dict_from_zero_checkpoint(str(directory))
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0][:160]
        raise CheckpointError(
            f"{directory}: holds more than weights, which could run code and is not read ({reason})"
        ) from None
    except _DAMAGED as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        raise CheckpointError(f"{directory}: DeepSpeed cannot read its checkpoint there ({reason})") from None
    finally:
        convert.torch = kept


FILE_BYTES = 2**30


def convert_zero_checkpoint(directory: Path, ranks: Ranks) -> WeightFiles:
    """Convert a DeepSpeed checkpoint of a dense model and open the result. Collective.

    One rank of each host writes the weights to a temporary folder (4 bytes per parameter). The
    files are removed when all ranks have opened them, and their space is freed when they are
    closed.

    Raises:
        CheckpointError: The conversion failed on any rank. It is raised on every rank.
    """
    with contextlib.ExitStack() as undo:
        # Every rank makes a folder. Ranks on one host see each other's, while names of hosts may be
        # equal.
        scratch = tempfile.TemporaryDirectory
        own = _together(
            directory, ranks, lambda: undo.enter_context(scratch(prefix="sdp-weights-", ignore_cleanup_errors=True))
        )
        # Hosts may share a temporary folder. If one of them removed the files, the others would
        # lose them.
        folders: list[tuple[str, str]] = ranks.gather((own, machine := machine_id()))
        first = next(rank for rank, (folder, other) in enumerate(folders) if other == machine and os.path.isdir(folder))  # noqa: PTH112
        converts = ranks.rank in ranks.gather(first)
        _together(
            directory, ranks, lambda: _write(weights_of_zero_checkpoint(directory), Path(own)) if converts else None
        )
        return _together(directory, ranks, lambda: WeightFiles(Path(folders[first][0])))


def _together(directory: Path, ranks: Ranks, action: Callable[[], T]) -> T:
    """Return the result of ``action``, or raise CheckpointError on every rank if it fails on
    any.
    """

    def explained() -> T:
        try:
            return action()
        except ModelError as error:
            raise CheckpointError(str(error)) from error
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the weights of {directory} cannot be written to a temporary folder ({error}); let TMPDIR name one "
                "with more room"
            ) from error

    return ranks.all_or_none(explained)


def _write(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write safetensors files and an index.

    Each file's tensors are in memory twice for a moment.
    """
    where: dict[str, str] = {}
    while tensors:
        part: dict[str, torch.Tensor] = {}
        while tensors and sum(tensor.nbytes for tensor in part.values()) < FILE_BYTES:
            name = next(iter(tensors))
            # Tensors of a parameter group share one storage, which safetensors refuses.
            part[name] = tensors.pop(name).clone(memory_format=torch.contiguous_format)
        file = f"model-{len(set(where.values()))}.safetensors"
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}), encoding="utf-8")
