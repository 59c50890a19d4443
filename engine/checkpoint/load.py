"""Finds and loads checkpoints, whatever the layout that wrote them.

Checkpoints use the full model's names of tensors. ``torch.distributed.checkpoint`` (DCP) writes and
reads the tensors. Every rank writes its shards, and only one of several holders writes a unit.
``metadata.json`` lists the tensors. ``state.json`` has everything else, and a hash of every file. A
checkpoint is written under a hidden name and then renamed. So a tag never names an incomplete
checkpoint.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..distributed.agreement import Ranks
from ..errors import CheckpointError
from ..object_store import is_url
from ..optim.optimizer_state import COUNT
from .storage.dcp import SafeReader, _cause, _without_single_process_warning
from .storage.directory import check_tag, latest, locate
from .storage.files import STATE, damaged_file, read_state
from .storage.remote import fetch_checkpoint, newest


def find(directory: Path, tag: str | float | None) -> tuple[Path, dict[str, Any]] | None:
    """Return the path and the ``state.json`` of the checkpoint ``tag`` in ``directory``.

    If ``tag`` is None, take the newest checkpoint, or return None if there is none. If a save was
    killed while it replaced the checkpoint, the path is the hidden name of the old checkpoint.
    """
    tag = check_tag(tag) if tag is not None else latest(directory)
    if tag is None and (directory / STATE).exists():
        raise CheckpointError(
            f"{directory}: is itself a checkpoint; give the directory that contains it, with the tag {directory.name!r}"
        )
    if tag is None:
        return None
    path = locate(directory, tag)
    return path, read_state(path)


def find_together(directory: str | Path, tag: str | float | None, ranks: Ranks) -> tuple[Path, dict[str, Any]] | None:
    """Return the result of :func:`find` on rank 0 to all ``ranks``. Collective.

    Only rank 0 searches, because two hosts may see different states of a shared file system. If
    ``directory`` is a URL, each host copies the checkpoint, and the path is that of the copy.
    """
    if is_url(directory):
        url = str(directory)
        chosen = (lambda: check_tag(tag) if tag is not None else newest(url)) if ranks.rank == 0 else lambda: None
        name = ranks.first(ranks.all_or_none(chosen))
        if name is None:
            return None
        path = ranks.all_or_none(lambda: fetch_checkpoint(url, name)) / name
        return path, ranks.all_or_none(lambda: read_state(path))

    def look() -> list[Any] | None:
        found = find(Path(directory), tag) if ranks.rank == 0 else None
        return None if found is None else [str(found[0]), found[1]]

    answer = ranks.first(ranks.all_or_none(look))
    return None if answer is None else (Path(answer[0]), answer[1])


def shapes_in(path: Path) -> dict[str, torch.Size]:
    """Return the shapes of the tensors in the checkpoint at ``path``, by key.

    If the list of tensors is damaged, the result is empty, and :func:`load` raises the error later.
    """
    try:
        entries = SafeReader(path).read_metadata().state_dict_metadata
    except CheckpointError:
        return {}
    return {key: entry.size for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def check(path: Path, tensors: Mapping[str, Any], files: Mapping[str, str], *, alone: bool) -> SafeReader:
    """Check that a checkpoint is undamaged and that ``tensors`` can be loaded from it.

    Nothing is changed. The arguments and errors are those of :func:`load`. Collective unless
    ``alone``. Returns the reader with which :func:`load` reads the checkpoint.
    """
    ranks, reader = Ranks(alone), SafeReader(path)
    share = sorted(files)[ranks.rank :: ranks.count]  # this divides the reading among ranks
    ranks.agree(damaged_file(path, {name: files[name] for name in share}))
    ranks.agree(_obstacle(path, reader, tensors))
    return reader


def load(
    path: Path,
    tensors: dict[str, Any],
    files: Mapping[str, str],
    *,
    alone: bool,
    names: Collection[str] | None = None,
    have_read: Collection[str] = (),
) -> None:
    """Fill ``tensors`` in place from the checkpoint at ``path``. Collective unless ``alone``.

    Args:
        path: The checkpoint, written under any layout.
        tensors: What this rank loads, by key.
        files: The hash of each of the checkpoint's files by name, from its state.
        alone: Whether only this process loads the checkpoint.
        names: The names of all tensors of the full model. If given, a checkpoint with other weights
            or with optimizer state that no rank loads is refused. If None, tensors may be left out.
        have_read: The keys that this rank has loaded before.

    Raises:
        CheckpointError: On every rank, if the checkpoint is damaged, or belongs to another model or
            optimizer.
    """
    ranks = Ranks(alone)
    reader = check(path, tensors, files, alone=alone)
    if names is not None:
        saved = sorted(reader.read_metadata().state_dict_metadata)
        # Each key takes one bit, because there are thousands of keys on thousands of ranks. The
        # text is hexadecimal, because Python limits the decimal digits of an integer.
        mine = sum(1 << index for index, key in enumerate(saved) if key in tensors or key in have_read)
        everyones = functools.reduce(operator.or_, (int(bits, 16) for bits in ranks.gather(f"{mine:x}")))
        ranks.agree(_left_out(path, names, [key for index, key in enumerate(saved) if not everyones >> index & 1]))
    try:
        with _without_single_process_warning():
            dcp.load(tensors, storage_reader=reader, no_dist=alone)
    except CheckpointException as error:  # the same on every rank
        raise CheckpointError(
            f"{path}: its tensors are damaged or missing, resume from an older checkpoint ({_cause(error)})"
        ) from None


def _obstacle(path: Path, reader: SafeReader, tensors: Mapping[str, Any]) -> str | None:
    """Return why this rank's ``tensors`` cannot be loaded from ``path``, or None if they can."""
    try:
        saved = reader.read_metadata().state_dict_metadata
    except CheckpointError as error:
        return str(error)
    for key, tensor in tensors.items():
        entry = saved.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            return (
                f"{path}: has no {key!r}; it was written for another model or optimizer, use the configuration "
                "of the run that wrote it"
            )
        if tuple(entry.size) != tuple(tensor.shape):
            return (
                f"{path}: {key!r} has shape {tuple(entry.size)} in the checkpoint, and {tuple(tensor.shape)} in this "
                "run; it belongs to "
                "another model"
            )
        if torch.uint8 in (entry.properties.dtype, tensor.dtype) and entry.properties.dtype != tensor.dtype:
            return (
                f"{path}: {key!r} is {entry.properties.dtype} in the checkpoint, and {tensor.dtype} in this run; "
                "use the "
                "optimizer.params.state_dtype of the run that wrote the checkpoint"
            )
    return None


def _left_out(path: Path, names: Collection[str], unread: Iterable[str]) -> str | None:
    """Return an error message if a load would lose a tensor of the checkpoint, else None.

    ``unread`` lists the tensors that no rank would load. An error is a weight that is not among the
    model's ``names``, or optimizer state. A step count is no error: some optimizers have none.
    """
    other = "it was written for another {}, use the configuration of the run that wrote it"
    for key in unread:
        if key.startswith("model/") and key.removeprefix("model/") not in names:
            return f"{path}: has {key!r}, which this model does not have; {other.format('model')}"
        if key.startswith("optimizer/") and key.rpartition("/")[2] != COUNT:
            return (
                f"{path}: has {key!r}, which this optimizer does not have after its first step; "
                f"{other.format('optimizer, or with that parameter trained')}, or start another run from its weights"
            )
    return None
