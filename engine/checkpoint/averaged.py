"""Reads the optimizer state of groups that trained on their own, as the mean over the holders.

A layout that did not write the checkpoint cannot continue each group. It continues from the anchors
with these means. Moments in codes of 8 bits whose blocks another layout has cut are read in the
same way, also if groups did not train on their own: as numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..distributed.agreement import Ranks
from ..optim.small_state import BLOCK, SCALES, Codes
from .load import load
from .storage.dcp import Chunks, SafeReader

_KEY = re.compile(r"(?:local/(\d+)/)?optimizer/(.+)/([^/]+)")
_SLICE = re.compile(r"(.+)@(\d+):(\d+)")


class _Source(NamedTuple):
    """A piece of a state tensor that one group saved. ``moment``: its name, if it is in codes."""

    key: str
    group: int
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    moment: str = ""


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


def load_means(path: Path, targets: Mapping[str, Any], files: Mapping[str, str], *, alone: bool) -> set[str]:
    """Fill ``targets`` with means over the groups that saved them. Collective unless ``alone``.

    Args:
        path: The checkpoint.
        targets: By key ``optimizer/NAME/KEY``, a :class:`Chunks` of the full tensor, or a scalar. A
            scalar, such as a step count, becomes the largest value of all groups.
        files: The hash of each of the checkpoint's files by name.
        alone: Whether this process loads by itself.

    Returns:
        The keys that this rank has read.

    Raises:
        CheckpointError: On every rank, if it has no such state.
    """
    sources = _sources(SafeReader(path).read_metadata().state_dict_metadata)
    missing = next((key for key in targets if key not in sources), None)
    Ranks(alone).agree(
        f"{path}: holds no {missing!r}; it was written for another optimizer, choose the configuration that wrote it"
        if missing else None
    )  # fmt: skip
    groups = sorted({source.group for pieces in sources.values() for source in pieces})
    parts = {key: target for key, target in targets.items() if isinstance(target, Chunks)}
    counts = {key: [torch.zeros_like(tensor) for tensor in target.locals] for key, target in parts.items()}
    scalars: dict[str, list[torch.Tensor]] = {}
    for held in targets.values():
        for tensor in held.locals if isinstance(held, Chunks) else ():
            tensor.zero_()
    done = set[str]()
    for group in groups:  # one after the other, so that memory holds one group's state at a time
        wanted: dict[str, Any] = {}
        boxes: list[tuple[torch.Tensor, Callable[[], torch.Tensor], torch.Tensor]] = []
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
                    at = [o + b.start - s for o, b, s in zip(offset, box, source.start, strict=True)]
                    boxes.append((local[box], _reader(wanted, source, at, local[box]), count[box]))
        load(path, wanted, files, alone=alone)
        done |= wanted.keys()
        for inside, read, count in boxes:
            inside += read()
            count += 1
    for key, target in targets.items():
        if not isinstance(target, Chunks):
            if key in scalars:
                target.copy_(torch.stack(scalars[key]).amax(0))
            continue
        for local, count in zip(target.locals, counts[key], strict=True):
            local.div_(count.clamp(min=1))
    return done


def _reader(wanted: dict[str, Any], source: _Source, at: list[int], like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Add to what is ``wanted`` of a source the box at ``at``, and return what gives its values."""

    def want(key: str, piece: Chunks) -> None:
        wanted[key] = wanted[key].joined(piece) if key in wanted else piece

    if not source.moment:
        read = torch.zeros_like(like, memory_format=torch.contiguous_format)
        want(source.key, Chunks([read], [at], torch.Size(source.sizes)))
        return lambda: read
    # Only whole rows can be decoded. Two boxes may need the same ones.
    blocks = -(-torch.Size(source.sizes[1:]).numel() // BLOCK)
    rows, first = len(like), torch.Size((at[0], *(0 for _ in at[1:])))
    known = wanted.get(source.key)
    if known is None or first not in known.offsets:
        codes = torch.zeros((rows, *source.sizes[1:]), dtype=torch.uint8, device=like.device)
        scales = torch.zeros((rows, blocks), device=like.device)
        want(source.key, Chunks([codes], [first], torch.Size(source.sizes)))
        want(source.key + SCALES, Chunks([scales], [first[:2]], torch.Size((source.sizes[0], blocks))))
    index = wanted[source.key].offsets.index(first)
    columns = tuple(slice(start, start + size) for start, size in zip(at[1:], like.shape[1:], strict=True))

    def decode() -> torch.Tensor:
        both = wanted[source.key].locals[index], wanted[source.key + SCALES].locals[index]
        return Codes(source.moment, like.device).decode(*both)[(slice(None), *columns)]

    return decode


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
        moment = match[3] if key + SCALES in metadata else ""
        source = _Source(key, int(match[1] or 0), tuple(start), sizes, moment)
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
