"""Loads checkpoints of runs with local steps (``sdp.sync``): groups have weights of their own."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ..backend import Backend, GroupPart, LocalSteps, StateToSave
from ..distributed.agreement import Ranks
from ..errors import CheckpointError
from ..optim import optimizer_state
from .averaged import has_groups, keys_of_moments, load_means
from .load import load
from .local_state import LocalState
from .state import SavedState, weights_of

log = logging.getLogger("sdp")


def load_between_averages(
    path: Path,
    state: Mapping[str, Any],
    backend: Backend,
    own: StateToSave,
    saved: set[str],
    random: dict[str, torch.Tensor],
    ranks: Ranks,
) -> bool:
    """Load a checkpoint if it, or this run, is in the middle of a round of local steps.

    Returns whether groups go on with weights of their own.
    """
    local, layout = backend.local, backend.layout
    if not isinstance(own, SavedState):
        raise CheckpointError(
            f"{path}: was written between two averages of sdp.sync, and this engine has no local steps; use the engine "
            "that wrote it"
        )
    # As JSON text, in which a tuple is a list.
    here, there = (json.dumps(of, sort_keys=True) for of in (layout.placement.to_json(), state["placement"]))
    same = state["mesh"] == own.mesh_shape() and here == there
    position = state["sync"] or {"travelling": None, "fragments": 1, "steps_alone": 0}
    if local is not None and position["travelling"] is not None:  # its fragment must be the same here
        same = same and position["fragments"] == local.sync.fragments
    files, alone = state["files"], ranks.alone
    if local is not None and has_groups(saved) and same:
        _make_outer_state(local, backend, saved)
        for part in local.groups_here():
            _make_inner_state(part, saved, f"local/{part.group}/optimizer/", backend)
        local.restart(position["travelling"])
        mine = LocalState(backend)
        buffers = weights_of(local.common_part().buffers)
        load(path, mine.model() | buffers | mine.tensors() | random, files, alone=alone)
        mine.finish_load()
        return position["steps_alone"] > 0 or position["travelling"] is not None
    if ranks.rank == 0 and has_groups(saved):
        log.warning(
            "%s: was written between two averages, under another layout or other settings of sdp.sync, so each group "
            "starts from the anchors with the mean of the holders' moments; this drops %d inner steps",
            path, position["steps_alone"],
        )  # fmt: skip
    load_anchors(path, files, backend, own, saved, random, alone=alone)
    return False


def load_anchors(
    path: Path,
    files: Mapping[str, str],
    backend: Backend,
    own: SavedState,
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
        backend: The backend, which may have no local steps.
        own: This rank's share of a checkpoint. Its weights and buffers are filled in place.
        saved: The keys of the checkpoint's tensors.
        random: Generator states to fill.
        alone: Whether this process loads by itself.
    """
    local = backend.local
    weights = {key: of for key, of in own.tensors(to_load=True).items() if key.startswith("model/")}
    load(path, weights | dict(random), files, alone=alone)
    own.finish_load_of_weights()
    mine = LocalState(backend)
    for part in local.groups_here() if local is not None else [backend.only_part()]:
        _make_inner_state(part, keys_of_moments(saved) | saved, "optimizer/", backend)
        moments = mine.moments(part)
        if has_groups(saved):
            load_means(path, moments, files, alone=alone)
        else:
            load(path, moments, files, alone=alone)
    if local is not None:
        _make_outer_state(local, backend, saved)
        if outer := mine.outer():
            load(path, outer, files, alone=alone)
        local.reset()
    mine.finish_load()
    backend.zero_grad()


def _make_inner_state(part: GroupPart, saved: set[str], start: str, backend: Backend) -> None:
    """Create the optimizer state of the parameters for which the checkpoint has some, and only of
    those.
    """
    _make_state(part.optimizer, _owners(part.parameters, backend), saved, start, part.materialise)


def _make_outer_state(local: LocalSteps, backend: Backend, saved: set[str]) -> None:
    common = local.common_part()
    _make_state(common.optimizer, _owners(common.anchors, backend), saved, "outer/", None)


def _owners(tensors: Mapping[str, torch.Tensor], backend: Backend) -> dict[torch.Tensor, set[str]]:
    """Return the tensors to which optimizer state belongs, with the full model's parameters that
    they have.
    """
    owners: dict[torch.Tensor, set[str]] = {}
    for name, tensor in tensors.items():
        owners.setdefault(tensor, set()).add(backend.layout.parameters[backend.spot_of(name).name].canonical)
    return owners


def _make_state(
    optimizer: Optimizer,
    owners: Mapping[torch.Tensor, set[str]],
    saved: set[str],
    start: str,
    materialise: Callable[[], None] | None,
) -> None:
    have = {key.removeprefix(start).rpartition("/")[0].rpartition("@")[0] or key.removeprefix(start).rpartition("/")[0]
            for key in saved if key.startswith(start)}  # fmt: skip
    optimizer_state.clear(optimizer)
    if have:
        if materialise is not None:
            materialise()
        else:
            optimizer_state.materialise_state(optimizer)
        for tensor, names in owners.items():
            if not names & have:
                optimizer.state.pop(tensor, None)
