"""Loads checkpoints that were saved between two averages of local steps (``sdp.sync``).

Such a checkpoint has the anchors, which are the full model's weights after the last average. It
also has the weights and optimizer state of each group. A run with local steps and the same mesh and
placement continues with the weights of each group. Any other run continues from the anchors, with
the mean of the holders' optimizer state.

This file also converts the optimizer's moments if only the checkpoint or only this run has 8-bit
moments, or if their blocks of elements with one scale differ.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from ..distributed.agreement import Ranks
from ..local_steps import LocalSteps
from ..optim import optimizer_state
from ..optim.small_state import BLOCK, SCALES, Codes
from ..stores.store import materialise_state
from ..sync.between import BetweenGroups
from .load import load
from .state import SavedState, weights_of
from .storage.dcp import Chunks, SafeReader

log = logging.getLogger("sdp")

_KEY = re.compile(r"(?:local/(\d+)/)?optimizer/(.+)/([^/]+)")
_SLICE = re.compile(r"(.+)@(\d+):(\d+)")


def load_between_averages(
    path: Path,
    state: Mapping[str, Any],
    groups: BetweenGroups,
    share: SavedState,
    saved: Mapping[str, torch.Size],
    random: dict[str, torch.Tensor],
    ranks: Ranks,
) -> bool:
    """Load a checkpoint when this run, or the run that saved it, makes local steps. Collective.

    Each group continues with its saved weights if this run makes local steps, too, with the same
    mesh and placement (and the same fragments, if an average was under way). Otherwise all groups
    continue from the anchors (the weights after the last average).

    Returns:
        Whether groups now have different weights, because the checkpoint was saved between
        averages.
    """
    local: LocalSteps | None = groups.local
    # compared as JSON text, because JSON turns tuples into lists
    placements = groups.store.layout.placement.to_json(), state["placement"]
    ours, there = (json.dumps(placement, sort_keys=True) for placement in placements)
    same = state["mesh"] == share.mesh_shape() and ours == there
    position = state["sync"] or {"under_way": None, "fragments": 1, "steps_alone": 0}
    if local is not None and position["under_way"] is not None:  # it must be of the same fragment in this run
        same = same and position["fragments"] == local.sync.fragments
    files, alone = state["files"], ranks.alone
    if local is not None and has_groups(saved) and same:
        _make_outer_state(local, groups, saved)
        _make_inner_state(groups, saved, f"local/{groups.context.at.sdp}/optimizer/")
        local.outer.restart(position["under_way"])
        buffers = weights_of(local.anchor_buffers)
        load(path, share.weights(local) | buffers | share.of_local_steps(local) | random, files, alone=alone)
        share.finish_load()
        return position["steps_alone"] > 0 or position["under_way"] is not None
    if ranks.rank == 0 and has_groups(saved):
        log.warning(
            "%s: was written in the middle of a round, under another layout or other settings of sdp.sync, so each "
            "group starts from the weights after the last average; %d local steps are lost",
            path, position["steps_alone"],
        )  # fmt: skip
    load_anchors(path, files, groups, share, saved, random, alone=alone)
    return False


def load_anchors(
    path: Path,
    files: Mapping[str, str],
    groups: BetweenGroups,
    share: SavedState,
    saved: Mapping[str, torch.Size],
    random: Mapping[str, torch.Tensor],
    *,
    alone: bool,
) -> None:
    """Load a checkpoint such that all holders of a unit continue with equal weights.

    The weights are the anchors (the weights after the last average). If groups saved optimizer
    state of their own, each moment becomes the mean over these groups. Collective unless ``alone``.

    Args:
        path: The checkpoint, written under any layout, with or without local steps.
        files: The hash of each of the checkpoint's files, by name.
        groups: The model, the optimizer and, with local steps, the anchors of this rank.
        share: Lists this rank's tensors, which are filled in place.
        saved: The shapes of the checkpoint's tensors, by key.
        random: States of random generators, which are filled in place.
        alone: Whether only this process loads the checkpoint.
    """
    local: LocalSteps | None = groups.local
    weights = {key: value for key, value in share.tensors(to_load=True).items() if key.startswith("model/")}
    load(path, weights | dict(random), files, alone=alone)
    _make_inner_state(groups, keys_of_moments(saved) | saved.keys(), "optimizer/")
    moments = share.moments()
    if has_groups(saved) or any(Ranks(alone).gather(share.has_other_blocks(saved))):
        with share.decoded(moments) as targets:
            load_means(path, targets, files, alone=alone)
    else:
        load(path, moments, files, alone=alone)
    if local is not None:
        _make_outer_state(local, groups, saved)
        if outer := share.outer(local):
            load(path, outer, files, alone=alone)
        local.reset()
    share.finish_load()
    groups.forget_gradients()


def _make_inner_state(groups: BetweenGroups, saved: Collection[str], start: str) -> None:
    """Create optimizer state for the parameters that have state in the checkpoint."""
    tensors = {key: one.tensor for key, one in groups.store.stepped.items()}
    _make_state(groups, groups.store.optimizer, tensors, saved, start, lambda: materialise_state(groups.store))


def _make_outer_state(local: LocalSteps, groups: BetweenGroups, saved: Collection[str]) -> None:
    optimizer = local.outer.optimizer
    _make_state(groups, optimizer, local.anchors, saved, "outer/", lambda: optimizer_state.materialise_state(optimizer))


def _make_state(
    groups: BetweenGroups,
    optimizer: Optimizer,
    tensors: Mapping[str, torch.Tensor],
    saved: Collection[str],
    start: str,
    materialise: Callable[[], None],
) -> None:
    have = {key.removeprefix(start).rpartition("/")[0].rpartition("@")[0] or key.removeprefix(start).rpartition("/")[0]
            for key in saved if key.startswith(start)}  # fmt: skip
    optimizer_state.clear(optimizer)
    if not have:
        return
    materialise()
    infos = groups.store.layout.parameters
    for key, tensor in tensors.items():
        if not have & {infos[name].canonical for name in groups.store.stepped[key].names}:
            optimizer.state.pop(tensor, None)


# -- means over groups ----------------------------------------------------------------------------


class _Source(NamedTuple):
    """A saved part of a moment. ``moment`` is empty unless the part is stored in 8-bit codes."""

    key: str
    group: int
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    moment: str = ""


def has_groups(keys: Collection[str]) -> bool:
    """Return whether a checkpoint with the tensors ``keys`` has separate weights for each group."""
    return any(key.startswith("local/") for key in keys)


def keys_of_moments(keys: Collection[str]) -> set[str]:
    """Return the key ``optimizer/NAME/KEY`` of each moment, also if only its slices are saved."""
    found = set()
    for match in filter(None, map(_KEY.fullmatch, keys)):
        cut = _SLICE.fullmatch(match[2])
        found.add(f"optimizer/{cut[1] if cut else match[2]}/{match[3]}")
    return found


def load_means(path: Path, targets: Mapping[str, Any], files: Mapping[str, str], *, alone: bool) -> set[str]:
    """Load optimizer state as the mean over the groups that saved it. Collective unless ``alone``.

    Args:
        path: The checkpoint.
        targets: What is filled in place, by the key ``optimizer/NAME/KEY``: a scalar, or the pieces
            of a tensor that this rank has. A scalar, such as a step count, becomes the largest
            value of all groups.
        files: The hash of each of the checkpoint's files, by name.
        alone: Whether only this process loads the checkpoint.

    Returns:
        The keys in the checkpoint that this rank has read.

    Raises:
        CheckpointError: On every rank, if the checkpoint lacks the state of one of the ``targets``.
    """
    sources = _sources(SafeReader(path).read_metadata().state_dict_metadata)
    missing = next((key for key in targets if key not in sources), None)
    Ranks(alone).agree(
        f"{path}: has no {missing!r}; it was written for another optimizer, use the configuration of the run that "
        "wrote it"
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
    for group in groups:  # one after the other, so that memory holds the state of one group at a time
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
    """Add a part of ``source`` to the next load. The result gives its values afterwards."""

    def want(key: str, piece: Chunks) -> None:
        wanted[key] = wanted[key].joined(piece) if key in wanted else piece

    if not source.moment:
        read = torch.zeros_like(like, memory_format=torch.contiguous_format)
        want(source.key, Chunks([read], [at], torch.Size(source.sizes)))
        return lambda: read
    # Only whole rows can be decoded. Boxes that begin at the same row share what is read.
    width, rows, index = source.sizes[1:], len(like), 0
    blocks = (-(-torch.Size(width).numel() // BLOCK),)
    for key, sizes, dtype in ((source.key, width, torch.uint8), (source.key + SCALES, blocks, torch.float32)):
        whole, first = torch.Size((source.sizes[0], *sizes)), torch.Size((at[0], *(0 for _ in sizes)))
        read = torch.zeros((rows, *sizes), dtype=dtype, device=like.device)
        if key not in wanted or first not in wanted[key].offsets:
            want(key, Chunks([read], [first], whole))
        index = wanted[key].offsets.index(first)
        if len(wanted[key].locals[index]) < rows:
            wanted[key].locals[index] = read
    columns = tuple(slice(start, start + size) for start, size in zip(at[1:], like.shape[1:], strict=True))

    def decode() -> torch.Tensor:
        both = wanted[source.key].locals[index], wanted[source.key + SCALES].locals[index]
        return Codes(source.moment, like.device).decode(*both)[(slice(rows), *columns)]

    return decode


def _sources(metadata: Mapping[str, Any]) -> dict[str, list[_Source]]:
    """Return the saved parts of each moment, by the key of the whole moment."""
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
    """Return the indices of a local tensor at ``offset`` that ``source`` can fill, or None."""
    box = []
    for at, size, start, length in zip(offset, shape, source.start, source.sizes, strict=True):
        first, last = max(at, start), min(at + size, start + length)
        if first >= last:
            return None
        box.append(slice(first - at, last - at))
    return tuple(box)
