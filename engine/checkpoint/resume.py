"""Continues a run from a checkpoint. The checkpoint is checked before the run changes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..distributed.agreement import Ranks
from ..errors import CheckpointError
from ..optim import optimizer_state
from ..optim.clip import LossScaler
from ..optim.param_groups import conflicting_rates, set_rates
from ..optim.schedules import adapt_state, keep_shared_state, of_another_kind
from ..stores.store import materialise_state
from ..sync.between import BetweenGroups
from .between_averages import has_groups, load_between_averages, load_means
from .load import check, load, shapes_in
from .state import SavedState, set_random_state

log = logging.getLogger("sdp")


def check_weights(path: Path, state: Mapping[str, Any], share: SavedState, ranks: Ranks) -> dict[str, Any]:
    """Check that a checkpoint is undamaged and has the weights of this model. Collective.

    Returns:
        The checkpoint's ``state.json`` without the hashes of files, so that later loads do not
        check the files again.
    """
    weights = {key: tensor for key, tensor in share.tensors(to_load=True).items() if key.startswith("model/")}
    check(path, weights, state["files"], alone=ranks.alone)
    return {**state, "files": {}}


def resume(
    path: Path,
    state: Mapping[str, Any],
    groups: BetweenGroups,
    share: SavedState,
    scheduler: Any,
    loader: Any,
    scaler: LossScaler | None,
    *,
    ranks: Ranks,
    with_optimizer: bool = True,
) -> bool:
    """Load the whole state of a training run from a checkpoint. Collective.

    The state consists of the weights, the optimizer's state, the random numbers, the loss scale,
    the schedule and the position in the data.

    Args:
        path: The checkpoint, written under any layout.
        state: The content of the checkpoint's ``state.json``.
        groups: The model, the optimizer and, with local steps, the anchors of this rank.
        share: Lists this rank's tensors, which are filled in place.
        scheduler: The learning-rate schedule, or None.
        loader: The loader of the training data, or None.
        scaler: The loss scale, or None.
        ranks: The ranks that load together.
        with_optimizer: If False, load only the weights, the schedule and the position in the data.

    Returns:
        Whether groups now have different weights, because the checkpoint was saved between two
        averages of local steps.

    Raises:
        CheckpointError: On every rank, if the checkpoint is damaged or does not fit this run.
    """
    saved = shapes_in(path)
    names = groups.names_of_param_groups()
    rates = state["learning_rates"]
    _refuse_what_does_not_fit(path, state, scheduler, loader)
    sets_rates = with_optimizer or scheduler is not None
    problem = conflicting_rates(names, rates) if sets_rates else None
    ranks.agree(f"{path}: {problem}" if problem else None)
    in_groups, in_round = groups.local is not None or has_groups(saved), False
    random = _random_numbers(path, state, share, saved, logs=ranks.rank == 0) if with_optimizer else {}
    if not with_optimizer:
        if in_groups:
            raise CheckpointError(
                f"{path}: the run that saved this checkpoint or the run that loads it makes local steps (sdp.sync), so "
                "weights cannot be loaded without the optimizer's state; load both"
            )
        weights = {key: tensor for key, tensor in share.tensors(to_load=True).items() if key.startswith("model/")}
        load(path, weights, state["files"], alone=ranks.alone)
        share.finish_load()
        groups.forget_gradients()
    elif in_groups:
        in_round = load_between_averages(path, state, groups, share, saved, random, ranks)
    else:
        _load_tensors(path, state, groups, share, saved, random, ranks)
    groups.refresh_all(groups.local.anchors if groups.local is not None else None)
    every = groups.store.layout.copies.refresh_every
    if state["global_steps"] % every and ranks.rank == 0:
        log.info(
            "%s: sdp.copies.refresh_every: after this load, copies have the weights of step %d; in a run without "
            "interruption, they would have the weights of step %d",
            path, state["global_steps"], state["global_steps"] // every * every,
        )  # fmt: skip
    set_random_state(random)
    if with_optimizer and scaler is not None:
        scaler.load_state_dict(state["loss_scale"])
    if sets_rates:
        _continue_schedule(path, state, groups, scheduler, logs=ranks.rank == 0)
        set_rates(groups.store.optimizer, names, rates)  # torch's schedulers do not set the rates when they are loaded
    if loader is not None and state["loader"] is not None:
        loader.load_state_dict(state["loader"])
    return in_round


def _refuse_what_does_not_fit(path: Path, state: Mapping[str, Any], scheduler: Any, loader: Any) -> None:
    if loader is not None and state["loader"] is not None:
        loader.check_state(state["loader"])
    if scheduler is not None and of_another_kind(state["scheduler"], scheduler.state_dict()):
        raise CheckpointError(
            f"{path}: has the state of another kind of learning-rate scheduler; use the kind of the saved run"
        )


def _random_numbers(
    path: Path, state: Mapping[str, Any], share: SavedState, saved: Mapping[str, torch.Size], *, logs: bool
) -> dict[str, torch.Tensor]:
    """Return the tensors for generator states, which a load fills.

    There are none if another mesh wrote the checkpoint, because each rank has random numbers of its
    own.
    """
    same = state["mesh"] == share.mesh_shape()
    random = {key: value for key, value in share.random_state().items() if same and key in saved}
    if not random and logs:
        log.info("%s: was written under another layout or device, so random numbers (dropout) start again", path)
    return random


def _load_tensors(
    path: Path,
    state: Mapping[str, Any],
    groups: BetweenGroups,
    share: SavedState,
    saved: Mapping[str, torch.Size],
    random: dict[str, torch.Tensor],
    ranks: Ranks,
) -> None:
    """Fill weights, buffers and random numbers. Fill optimizer state if the checkpoint has any."""
    store, optimizer = groups.store, groups.store.optimizer
    has_stepped = state["global_steps"] > state["skipped_steps"] and "service" not in state["client_state"]
    has_stepped = has_stepped or any(key.startswith("optimizer/") for key in saved)  # a service has no moments
    had_state = bool(optimizer.state)
    if has_stepped and not had_state:
        materialise_state(store)
    tensors, problem = {}, None
    try:
        tensors = share.tensors(to_load=True)
    except CheckpointError as error:  # no checkpoint can hold this optimizer's state
        problem = str(error)
    if not has_stepped:
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith("optimizer/")}
    layout, files, have_read = store.layout, state["files"], set[str]()
    try:
        ranks.agree(problem)
        if has_stepped and any(ranks.gather(share.has_other_blocks(saved))):
            if ranks.rank == 0:
                log.info("%s: moments are converted, because optimizer.params.state_dtype or the layout differs", path)
            moments = {key: tensors.pop(key) for key in list(tensors) if key.startswith("optimizer/")}
            with share.decoded(moments) as targets:
                have_read = load_means(path, targets, files, alone=ranks.alone)
        names = {*layout.wholes, *layout.buffers}
        load(path, tensors | random, files, alone=ranks.alone, names=names, have_read=have_read)
    except CheckpointError:
        if not had_state:
            optimizer_state.clear(optimizer)
        raise
    share.finish_load()
    groups.forget_gradients()  # drop the gradients of micro-batches before the load
    if not has_stepped:
        optimizer_state.clear(optimizer)


def _continue_schedule(
    path: Path, state: Mapping[str, Any], groups: BetweenGroups, scheduler: Any, *, logs: bool
) -> None:
    saved = state["scheduler"]
    if scheduler is not None and saved is not None:
        # If a script's optimizer has parameter groups, those of the schedule depend on the held
        # units.
        shared = saved if groups.context.user_groups is None else keep_shared_state(saved)
        scheduler.load_state_dict(adapt_state(shared, scheduler.state_dict()))
    elif scheduler is not None and logs:
        log.warning("%s: has no state of a scheduler, so the schedule of this run begins at its first step", path)
