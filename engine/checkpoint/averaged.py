"""Reads the optimizer state of groups that trained on their own, as the mean over the holders.

A layout that did not write the checkpoint cannot continue each group. It continues from the anchors
with these means.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .load import load
from .storage.dcp import Chunks, SafeReader

_KEY = re.compile(r"local/(\d+)/optimizer/(.+)/([^/]+)")
_SLICE = re.compile(r"(.+)@(\d+):(\d+)")


class _Source(NamedTuple):
    """A piece of a state tensor that one group saved."""

    key: str
    group: int
    start: tuple[int, ...]
    sizes: tuple[int, ...]


def has_groups(keys: set[str]) -> bool:
    """Return whether a checkpoint with these keys was written between averages."""
    return any(key.startswith("local/") for key in keys)


def keys_of_moments(keys: set[str]) -> set[str]:
    """Return the keys ``optimizer/NAME/KEY`` whose means the checkpoint has."""
    found = set()
    for match in filter(None, map(_KEY.fullmatch, keys)):
        cut = _SLICE.fullmatch(match[2])
        found.add(f"optimizer/{cut[1] if cut else match[2]}/{match[3]}")
    return found


def load_means(path: Path, targets: Mapping[str, Any], files: Mapping[str, str], *, alone: bool) -> None:
    """Fill ``targets`` with means over the groups that saved them. Collective unless ``alone``.

    Args:
        path: The checkpoint.
        targets: By key ``optimizer/NAME/KEY``, a :class:`Chunks` of the full tensor, or a scalar. A
            scalar, such as a step count, becomes the largest value of all groups.
        files: The hash of each of the checkpoint's files by name.
        alone: Whether this process loads by itself.
    """
    sources = _sources(SafeReader(path).read_metadata().state_dict_metadata)
    groups = sorted({source.group for pieces in sources.values() for source in pieces})
    parts = {key: target for key, target in targets.items() if isinstance(target, Chunks)}
    counts = {key: [torch.zeros_like(tensor) for tensor in target.locals] for key, target in parts.items()}
    scalars: dict[str, list[torch.Tensor]] = {}
    for held in targets.values():
        for tensor in held.locals if isinstance(held, Chunks) else ():
            tensor.zero_()
    for group in groups:  # one after the other, so that memory holds one group's state at a time
        wanted: dict[str, Any] = {}
        boxes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for key, target in targets.items():
            for source in (source for source in sources.get(key, ()) if source.group == group):
                if not isinstance(target, Chunks):
                    wanted[source.key] = torch.zeros_like(target)
                    scalars.setdefault(key, []).append(wanted[source.key])
                    continue
                for local, offset, count in zip(target.locals, target.offsets, counts[key], strict=True):
                    box = _overlap(tuple(offset), tuple(local.shape), source)
                    if box is None:
                        continue
                    inside = local[box]
                    read = torch.zeros_like(inside, memory_format=torch.contiguous_format)
                    at = [o + b.start - s for o, b, s in zip(offset, box, source.start, strict=True)]
                    piece = Chunks([read], [at], torch.Size(source.sizes))
                    wanted[source.key] = wanted[source.key].joined(piece) if source.key in wanted else piece
                    boxes.append((inside, read, count[box]))
        load(path, wanted, files, alone=alone)
        for inside, read, count in boxes:
            inside += read
            count += 1
    for key, target in targets.items():
        if not isinstance(target, Chunks):
            if key in scalars:
                target.copy_(torch.stack(scalars[key]).amax(0))
            continue
        for local, count in zip(target.locals, counts[key], strict=True):
            local.div_(count.clamp(min=1))


def _sources(metadata: Mapping[str, Any]) -> dict[str, list[_Source]]:
    """Return what the groups saved, by the key of the full tensor."""
    found: dict[str, list[_Source]] = {}
    for key, entry in metadata.items():
        match = _KEY.fullmatch(key)
        if match is None or not isinstance(entry, TensorStorageMetadata):
            continue
        sizes, name = tuple(entry.size), match[2]
        start = [0] * len(sizes)
        if (cut := _SLICE.fullmatch(name)) is not None and int(cut[2]) < len(sizes):
            name, start[int(cut[2])] = cut[1], int(cut[3])
        source = _Source(key, int(match[1]), tuple(start), sizes)
        found.setdefault(f"optimizer/{name}/{match[3]}", []).append(source)
    return found


def _overlap(offset: tuple[int, ...], shape: tuple[int, ...], source: _Source) -> tuple[slice, ...] | None:
    """Return the indices of a local tensor at ``offset`` that ``source`` has, or None."""
    box = []
    for at, size, start, length in zip(offset, shape, source.start, source.sizes, strict=True):
        first, last = max(at, start), min(at + size, start + length)
        if first >= last:
            return None
        box.append(slice(first - at, last - at))
    return tuple(box)
