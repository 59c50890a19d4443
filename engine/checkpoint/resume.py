"""Continues from a checkpoint, in a sequence of named steps.

Nothing in the run changes before all parts of the checkpoint are known to fit.
"""

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
from ..errors import CheckpointError, quote
from ..optim import optimizer_state
from ..optim.param_groups import conflicting_rates, set_rates
from ..optim.schedules import adapt_state, of_another_kind
from .averaged import has_groups, keys_of_moments, load_means
from .load import check, keys_in, load
from .local_state import LocalState
from .state import SavedState, set_random_state, weights_of

log = logging.getLogger("sdp")


def check_weights(path: Path, state: Mapping[str, Any], own: StateToSave, ranks: Ranks) -> dict[str, Any]:
    """Check that no file is damaged, and that the weights and buffers fit. Collective.

    Returns:
        The checkpoint's ``state.json`` without the hashes of files, so that no load checks them
        again.
    """
    weights = {key: of for key, of in own.tensors(to_load=True).items() if key.startswith("model/")}
    check(path, weights, state["files"], alone=ranks.alone)
    return {**state, "files": {}}


def resume(
    path: Path,
    state: Mapping[str, Any],
    backend: Backend,
    own: StateToSave,
    scheduler: Any,
    loader: Any,
    *,
    ranks: Ranks,
) -> bool:
    """Load the whole state of a training run from a checkpoint. Collective.

    The state is the weights, the optimizer's state, the random numbers, the loss scale, the
    schedule and the position in the data.

    Args:
        path: The checkpoint, written under any layout.
        state: Its ``state.json``.
        backend: The backend with this rank's part of the model and its optimizer.
        own: This rank's share of a checkpoint. It is filled in place.
        scheduler: The learning-rate schedule, or None.
        loader: The loader of the training data, or None.
        ranks: The ranks that load together.

    Returns:
        Whether groups go on with weights of their own, in the middle of a round of local steps.

    Raises:
        CheckpointError: On every rank, if the checkpoint is damaged or does not fit this run.
    """
    saved = keys_in(path)
    names = backend.names_of_param_groups()
    rates = state.get("learning_rates", {})
    _refuse_what_does_not_fit(path, state, scheduler, loader)
    problem = conflicting_rates(names, rates)
    ranks.agree(f"{path}: {problem}" if problem else None)
    random = _random_numbers(path, state, own, saved, tell=ranks.rank == 0)
    in_round = False
    if backend.local is not None or has_groups(saved):
        in_round = _load_between_averages(path, state, backend, own, saved, random, ranks)
    else:
        _load_tensors(path, state, backend, own, saved, random, ranks)
    backend.refresh(after_step=False)
    set_random_state(random)
    backend.load_loss_scale(state.get("loss_scale"))
    _continue_schedule(path, state, backend, scheduler, tell=ranks.rank == 0)
    set_rates(backend.optimizer, names, rates)  # torch's schedulers do not set the rates when they are loaded
    if loader is not None and state["loader"] is not None:
        loader.load_state_dict(state["loader"])
    return in_round


def _refuse_what_does_not_fit(path: Path, state: Mapping[str, Any], scheduler: Any, loader: Any) -> None:
    if loader is not None and state["loader"] is not None:
        loader.check_state(state["loader"])
    if scheduler is not None and of_another_kind(state["scheduler"], scheduler.state_dict()):
        raise CheckpointError(
            f"{path}: has the state of another kind of learning-rate scheduler; take the one that wrote it"
        )


def _random_numbers(
    path: Path, state: Mapping[str, Any], own: StateToSave, saved: set[str], *, tell: bool
) -> dict[str, torch.Tensor]:
    """Return the generator states to load.

    There are none if another mesh wrote the checkpoint, because random numbers belong to a rank.
    """
    same = state["mesh"] == own.mesh_shape()
    random = {key: value for key, value in own.random_state().items() if same and key in saved}
    if not random and tell:
        log.info("%s: was written under another layout or device, so random numbers (dropout) start again", path)
    return random


def _load_tensors(
    path: Path,
    state: Mapping[str, Any],
    backend: Backend,
    own: StateToSave,
    saved: set[str],
    random: dict[str, torch.Tensor],
    ranks: Ranks,
) -> None:
    """Fill weights, buffers and random numbers. Fill optimizer state if the checkpoint has any."""
    optimizer = backend.basic_optimizer
    has_stepped = state["global_steps"] > state.get("skipped_steps", 0) or any(
        key.startswith("optimizer/") for key in saved
    )
    had_state = bool(backend.optimizer.state)
    if has_stepped and not had_state:
        backend.materialise_optimizer_state()
    tensors, problem = {}, None
    try:
        tensors = own.tensors(to_load=True)
    except CheckpointError as error:  # no checkpoint can hold this optimizer's state
        problem = str(error)
    if not has_stepped:
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith("optimizer/")}
    layout = backend.layout
    try:
        ranks.agree(problem)
        load(path, tensors | random, state["files"], alone=ranks.alone, names={*layout.wholes, *layout.buffers})
    except CheckpointError:
        if not had_state:
            optimizer_state.clear(optimizer)
        raise
    own.finish_load()
    backend.zero_grad()  # drop the gradients of micro-batches before the load
    if not has_stepped:
        optimizer_state.clear(optimizer)


def _load_between_averages(
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
    position = _position_in_round(path, state)
    if local is not None and position["travelling"] is not None:  # its fragment must be the same here
        same = same and position["fragments"] == local.sync.fragments and local.sync.overlap > 0
    files, alone = state["files"], ranks.alone
    if local is not None:
        _make_outer_state(local, backend, saved)
    if local is not None and has_groups(saved) and same:
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
    weights = {key: of for key, of in own.tensors(to_load=True).items() if key.startswith("model/")}
    load(path, weights | random, files, alone=alone)
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
        if outer := mine.outer():
            load(path, outer, files, alone=alone)
        local.reset()
    mine.finish_load()
    backend.zero_grad()
    return False


def _position_in_round(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint's ``sync`` entry, whose values are checked."""
    position = {"travelling": None, "fragments": 1, "steps_alone": 0} | (state.get("sync") or {})
    for key, value in position.items():
        if not (type(value) is int and 0 <= value < 2**63) and not (key == "travelling" and value is None):
            raise CheckpointError(f"{path}: damaged, {quote(key)} of 'sync' is {quote(value)}, not a count")
    return position


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


def _continue_schedule(path: Path, state: Mapping[str, Any], backend: Backend, scheduler: Any, *, tell: bool) -> None:
    saved = state["scheduler"]
    if scheduler is not None and saved is not None:
        scheduler.load_state_dict(adapt_state(backend.shared_schedule(saved), scheduler.state_dict()))
    elif scheduler is not None and tell:
        log.warning("%s: has no scheduler's state, and this run has a schedule, which begins at its first step", path)
    elif saved is not None and tell:
        log.warning("%s: has a scheduler's state, and this run has no schedule: the saved rates stay", path)


def resume_without_optimizer(
    path: Path,
    state: Mapping[str, Any],
    backend: Backend,
    own: StateToSave,
    scheduler: Any,
    loader: Any,
    *,
    ranks: Ranks,
) -> None:
    """Load weights and buffers, and not the optimizer's state. Collective.

    Args:
        path: The checkpoint, written under any layout.
        state: Its ``state.json``.
        backend: The backend with this rank's part of the model and its optimizer.
        own: This rank's share of a checkpoint. Its weights and buffers are filled in place.
        scheduler: The learning-rate schedule to continue, or None.
        loader: The loader of the training data to continue, or None.
        ranks: The ranks that load together.

    Raises:
        CheckpointError: On every rank, if the checkpoint is damaged or does not fit this run.
    """
    if backend.local is not None or has_groups(keys_in(path)):
        raise CheckpointError(
            f"{path}: weights cannot be loaded without the optimizer's state between two averages of sdp.sync; load "
            "all of it"
        )
    _refuse_what_does_not_fit(path, state, scheduler, loader)
    weights = {key: of for key, of in own.tensors(to_load=True).items() if key.startswith("model/")}
    load(path, weights, state["files"], alone=ranks.alone)
    own.finish_load()
    backend.zero_grad()
    backend.refresh(after_step=False)
    if scheduler is not None:
        _continue_schedule(path, state, backend, scheduler, tell=ranks.rank == 0)
        set_rates(backend.optimizer, backend.names_of_param_groups(), state.get("learning_rates", {}))
    if loader is not None and state["loader"] is not None:
        loader.load_state_dict(state["loader"])
