"""Loads checkpoints of runs with local steps (``sdp.sync``): groups have weights of their own."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ..distributed.agreement import Ranks
from ..local_steps import LocalSteps
from ..optim import optimizer_state
from ..stores.store import materialise_state
from ..sync.between import BetweenGroups
from .averaged import has_groups, keys_of_moments, load_means
from .load import load
from .state import SavedState, weights_of

log = logging.getLogger("sdp")


def load_between_averages(
    path: Path,
    state: Mapping[str, Any],
    groups: BetweenGroups,
    share: SavedState,
    saved: set[str],
    random: dict[str, torch.Tensor],
    ranks: Ranks,
) -> bool:
    """Load a checkpoint if it, or this run, is in the middle of a round of local steps.

    Returns whether groups go on with weights of their own.
    """
    local: LocalSteps | None = groups.local
    # As JSON text, in which a tuple is a list.
    placements = groups.store.layout.placement.to_json(), state["placement"]
    ours, there = (json.dumps(placement, sort_keys=True) for placement in placements)
    same = state["mesh"] == share.mesh_shape() and ours == there
    position = state["sync"] or {"under_way": None, "fragments": 1, "steps_alone": 0}
    if local is not None and position["under_way"] is not None:  # its fragment must be the same here
        same = same and position["fragments"] == local.sync.fragments
    files, alone = state["files"], ranks.alone
    if local is not None and has_groups(saved) and same:
        _make_outer_state(local, groups, saved)
        _make_inner_state(groups, saved, f"local/{groups.context.at.sdp}/optimizer/")
        local.outer.restart(position["under_way"])
        buffers = weights_of(local.anchor_buffers)
        load(path, share.anchors(local) | buffers | share.of_local_steps(local) | random, files, alone=alone)
        share.finish_load()
        return position["steps_alone"] > 0 or position["under_way"] is not None
    if ranks.rank == 0 and has_groups(saved):
        log.warning(
            "%s: was written between two averages, under another layout or other settings of sdp.sync, so each group "
            "starts from the anchors with the mean of the holders' moments; this drops %d inner steps",
            path, position["steps_alone"],
        )  # fmt: skip
    load_anchors(path, files, groups, share, saved, random, alone=alone)
    return False


def load_anchors(
    path: Path,
    files: Mapping[str, str],
    groups: BetweenGroups,
    share: SavedState,
    saved: set[str],
    random: Mapping[str, torch.Tensor],
    *,
    alone: bool,
) -> None:
    """Fill what this rank has as after an average: weights from the anchors, and inner moments with
    the means of the groups that saved them. Collective unless ``alone``.

    Args:
        path: The checkpoint, written under any layout, with or without local steps.
        files: The hash of each of the checkpoint's files by name.
        groups: What this rank has. It may have no local steps.
        share: This rank's share of a checkpoint. Its weights and buffers are filled in place.
        saved: The keys of the checkpoint's tensors.
        random: Generator states to fill.
        alone: Whether this process loads by itself.
    """
    local: LocalSteps | None = groups.local
    weights = {key: value for key, value in share.tensors(to_load=True).items() if key.startswith("model/")}
    load(path, weights | dict(random), files, alone=alone)
    _make_inner_state(groups, keys_of_moments(saved) | saved, "optimizer/")
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


def _make_inner_state(groups: BetweenGroups, saved: set[str], start: str) -> None:
    """Create the optimizer state of the parameters for which the checkpoint has some, and only of
    those.
    """
    tensors = {key: one.tensor for key, one in groups.store.stepped.items()}
    _make_state(groups, groups.store.optimizer, tensors, saved, start, lambda: materialise_state(groups.store))


def _make_outer_state(local: LocalSteps, groups: BetweenGroups, saved: set[str]) -> None:
    optimizer = local.outer.optimizer
    _make_state(groups, optimizer, local.anchors, saved, "outer/", lambda: optimizer_state.materialise_state(optimizer))


def _make_state(
    groups: BetweenGroups,
    optimizer: Optimizer,
    tensors: Mapping[str, torch.Tensor],
    saved: set[str],
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
