"""Checkpoints under the canonical names of the full model: any layout in, any layout out.

``torch.distributed.checkpoint`` (DCP) writes and reads the tensors. Every rank writes its own shards, and
holders' equal copies are written once. ``metadata.json`` lists the tensors. ``state.json`` holds the
rest, and a hash of every file. A checkpoint is written under a hidden name and then renamed, so that a
tag never names half a checkpoint.
"""

from __future__ import annotations

import functools
import operator
import shutil
import socket
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from .checkpoint_files import (
    PARTIAL,
    STATE,
    check_tag,
    damaged_file,
    encode_state,
    hash_files,
    is_ours,
    latest,
    locate,
    make_room,
    prune,
    publish,
    read_state,
    share_of,
    write_durably,
)
from .checkpoint_metadata import METADATA, MetadataWriter
from .checkpoint_part import Part
from .checkpoint_pieces import PiecewisePlanner
from .checkpoint_reader import SafeReader
from .distributed.agreement import Ranks
from .errors import CheckpointError
from .optim.optimizer_state import COUNT, OptimizerState

T = TypeVar("T")

_SHARED_SECONDS = 30.0  # how long a network file system may hide from one host what another wrote


def find(directory: Path, tag: str | None) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint ``directory/tag`` (None: the newest) and its state.

    None if ``tag`` is None and there is no checkpoint. Nothing in ``directory`` is changed. The path is a hidden one
    where a save that replaces the checkpoint was killed; see :func:`~sdp.engine.checkpoint_files.locate`.
    """
    tag = check_tag(tag) if tag is not None else latest(directory)
    if tag is None and (directory / STATE).exists():
        raise CheckpointError(f"{directory}: is a checkpoint itself; name the directory it is in, with the tag {directory.name!r}")
    if tag is None:
        return None
    path = locate(directory, tag)
    return path, read_state(path)


def keys_in(path: Path) -> set[str]:
    """The keys of the tensors in the checkpoint at ``path``; none where its metadata cannot be read, which :func:`load` tells."""
    try:
        return set(SafeReader(path).read_metadata().state_dict_metadata)
    except CheckpointError:
        return set()


def weights_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The model's tensors by key, ``model/NAME``; shards stay shards."""
    return {f"model/{name}": tensor.detach() for name, tensor in tensors.items()}


def tensors_of(
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    states: OptimizerState,
    placed: Callable[[str, torch.Tensor], tuple[str, Any]],
) -> dict[str, Any]:
    """Everything that is a tensor, by key: ``model/NAME`` and ``optimizer/NAME/KEY``; shards stay shards.

    ``placed(name, tensor)``: the canonical name of the parameter ``name`` here, and a tensor of its shape as DCP is to see it. Several
    slices of one parameter become one part of it; of a number (a step count) they have equal ones: the first's. Raises
    :class:`CheckpointError` for slices with any other state.
    """
    tensors = weights_of(buffers)
    for name, parameter in parameters.items():
        here = {"model/{}": parameter.detach()}
        here |= {f"optimizer/{{}}/{key}": value for key, value in states.of(parameter, placed(name, here["model/{}"])[0]).items()}
        for pattern, value in here.items():
            canonical, part = placed(name, value)
            key = pattern.format(canonical)
            if value.shape != parameter.shape:
                if value.dim() and canonical != name:
                    raise CheckpointError(
                        f"the optimizer's {key.rpartition('/')[2]!r} of {name} has not the shape of its parameter, so that no other layout "
                        'could go on with it; use AdamW or SGD, or sdp.granularity "block"'
                    )
                tensors.setdefault(key, value)
            elif isinstance(part, Part) and key in tensors:
                tensors[key] = tensors[key].joined(part)
            else:
                tensors[key] = part
    return tensors


class Saver:
    """Writes checkpoints one after the other; in a thread of its own where asked, on a copy in host memory."""

    def __init__(self, *, alone: bool, device: torch.device):
        self._alone, self._device = alone, device
        self._group: dist.ProcessGroup | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[Path] | None = None

    def save(
        self, directory: Path, tag: str, tensors: dict[str, Any], state: Mapping[str, Any], *, keep: int | None, background: bool
    ) -> None:
        """Write the checkpoint ``directory/tag`` and remove all but the newest ``keep``. Collective; waits for the one before.

        In the ``background`` it returns once the tensors are copied, and what fails is raised by :meth:`wait`.
        """
        self.wait()
        encode_state(state)  # what is not JSON is said now
        if not background:
            write(directory, tag, tensors, state, Ranks(self._alone), keep=keep)
            return
        if self._thread is None:
            # A thread begins on the first device, whoever starts it.
            use = (lambda: torch.cuda.set_device(self._device)) if self._device.type == "cuda" else None
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=use)
            # Its collectives must not mix with those of the training loop.
            self._group = None if self._alone else dist.new_group(backend="gloo")  # type: ignore[assignment]
        self._pending = self._thread.submit(write, directory, tag, _copied(tensors), state, Ranks(self._alone, self._group), keep=keep)

    def wait(self, *, block: bool = True) -> None:
        """Raise what the save in the background failed with; unless ``block``, only if it has ended."""
        pending = self._pending
        if pending is not None and (block or pending.done()):
            self._pending = None
            pending.result()


def _copied(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Copies in host memory."""
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )  # fmt: skip
    copies = DefaultStager(options).stage({key: value.locals if isinstance(value, Part) else value for key, value in tensors.items()})
    assert isinstance(copies, dict)
    parts = {key: Part(copies[key], value.offsets, value.shape) for key, value in tensors.items() if isinstance(value, Part)}
    return {**copies, **parts}


def write(
    directory: Path, tag: str, tensors: dict[str, Any], state: Mapping[str, Any], ranks: Ranks, *, keep: int | None = None
) -> Path:  # fmt: skip
    """Write the checkpoint ``directory/tag``; collective among ``ranks``. Returns its path.

    Raises :class:`CheckpointError` on every rank if ``state`` is not JSON or nothing can be written; what was half written is removed.
    """
    aside = directory / f".{tag}{PARTIAL}"

    def finish(files: dict[str, str]) -> None:
        files |= hash_files([aside / METADATA])
        write_durably(aside / STATE, encode_state({**state, "files": files}))
        publish(directory, tag)
        if keep is not None:
            prune(directory, keep, tag)

    _on_rank_0(lambda: make_room(directory, tag), ranks)
    try:
        ranks.agree(_unless_shared(aside, ranks.rank))
        _write_tensors(aside, tensors, ranks)
        own = _attempt(lambda: hash_files(aside.glob(f"__{ranks.rank}_*.distcp")))
        everyones = ranks.gather(own)
        ranks.agree(own if isinstance(own, str) else None)
        _on_rank_0(lambda: finish({name: digest for files in everyones for name, digest in files.items()}), ranks)
    except CheckpointError:
        if ranks.rank == 0 and is_ours(aside):
            shutil.rmtree(aside, ignore_errors=True)  # a full disk needs the room
        raise
    return directory / tag


def load(
    path: Path, tensors: dict[str, Any], files: Mapping[str, str], *, alone: bool, names: Collection[str] | None = None
) -> None:  # fmt: skip
    """Fill ``tensors`` in place from the checkpoint at ``path``, whatever the layout that wrote it; collective unless ``alone``.

    ``files``: their hashes by name, from its state. ``names``: all tensors of the full model, where nothing that the checkpoint holds may
    be left out; else ``tensors`` may be some of it. Raises :class:`CheckpointError` on every rank if it is damaged, or of another model or
    optimizer.
    """
    ranks = Ranks(alone)
    ranks.agree(damaged_file(path, share_of(files, ranks.rank, ranks.count)))
    reader = SafeReader(path)
    ranks.agree(_obstacle(path, reader, tensors))
    if names is not None:
        saved = sorted(reader.read_metadata().state_dict_metadata)
        # A bit for each: there are thousands, on thousands of ranks.
        mine = sum(1 << index for index, key in enumerate(saved) if key in tensors)
        everyones = functools.reduce(operator.or_, ranks.gather(mine))
        ranks.agree(_left_out(path, names, [key for index, key in enumerate(saved) if not everyones >> index & 1]))
    try:
        with _without_single_process_warning():
            dcp.load(tensors, storage_reader=reader, no_dist=alone)
    except CheckpointException as error:  # the same on every rank
        raise CheckpointError(f"{path}: its tensors are damaged or missing, resume from an older checkpoint ({_cause(error)})") from None


def _write_tensors(aside: Path, tensors: dict[str, Any], ranks: Ranks) -> None:
    try:
        with _without_single_process_warning():
            dcp.save(
                tensors,
                storage_writer=MetadataWriter(aside),
                planner=PiecewisePlanner(),
                no_dist=ranks.alone,
                process_group=ranks.group,
            )
    except CheckpointException as error:  # the same on every rank
        raise CheckpointError(f"cannot write the checkpoint: {_cause(error)}") from None


def _obstacle(path: Path, reader: SafeReader, tensors: Mapping[str, Any]) -> str | None:
    """Why this rank's ``tensors`` cannot be loaded from ``path``."""
    try:
        saved = reader.read_metadata().state_dict_metadata
    except CheckpointError as error:
        return str(error)
    for key, tensor in tensors.items():
        entry = saved.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            return f"{path}: holds no {key!r}; it was written for another model or optimizer, choose the configuration that wrote it"
        if tuple(entry.size) != tuple(tensor.shape):
            return f"{path}: {key!r} has shape {tuple(entry.size)} there and {tuple(tensor.shape)} here; it is of another model"
    return None


def _left_out(path: Path, names: Collection[str], unread: Iterable[str]) -> str | None:
    """What of ``unread``, the tensors of the checkpoint that no rank would load, may not be left: weights that are none of ``names``, and
    optimizer state. Counts of steps are left to the optimizers, of which some have none.
    """
    other = "it was written for another {}, choose the configuration that wrote it"
    for key in unread:
        if key.startswith("model/") and key.removeprefix("model/") not in names:
            return f"{path}: holds {key!r}, which this model has not; {other.format('model')}"
        if key.startswith("optimizer/") and key.rpartition("/")[2] != COUNT:
            return (
                f"{path}: holds {key!r}, which this optimizer does not keep from its first step on; "
                f"{other.format('optimizer, or with that parameter trained')}, or start another run from its weights"
            )
    return None


def _unless_shared(aside: Path, rank: int) -> str | None:
    """What is wrong if this rank does not see the directory that rank 0 made."""
    deadline = time.monotonic() + _SHARED_SECONDS
    while not aside.is_dir():
        if time.monotonic() > deadline:
            return (
                f"rank {rank} on {socket.gethostname()} does not see {aside.parent}, which rank 0 made; checkpoints need a directory "
                "that all hosts share"
            )
        time.sleep(0.1)
    return None


def _on_rank_0(action: Callable[[], Any], ranks: Ranks) -> None:
    """Run ``action`` on rank 0 while the others wait; its failure is everyone's."""
    problem = None
    if ranks.rank == 0:
        try:
            action()
        except OSError as error:
            problem = _cannot_write(error)
        except CheckpointError as error:
            problem = str(error)
    ranks.agree(problem)


def _attempt(action: Callable[[], Any]) -> Any:
    """What ``action`` returns, or the text of its OSError."""
    try:
        return action()
    except OSError as error:
        return _cannot_write(error)


def _cannot_write(error: OSError) -> str:
    return f"cannot write the checkpoint: {error}"


def _cause(error: CheckpointException) -> str:
    return _first_line(next(iter(error.failures.values()))[0])


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _without_single_process_warning() -> Iterator[None]:
    """DCP warns that one process writes alone, which is what the reference engine means to do."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
