"""What an engine's rank needs and sends, by the placement, and the bytes of its tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..config.schema import Config
from ..distributed.collectives import Traffic, local_tensor, stored_tensor
from ..optim.muon import planned_gathers
from ..placement.layout import Layout
from ..stores.store import GroupStore, frozen_copies
from ..sync.between import BetweenGroups
from .local_traffic import LocalTraffic
from .memory import StateBytes, predict_state_bytes
from .traffic_plan import plan_traffic, plan_waking


def predicted_state(store: GroupStore, config: Config) -> StateBytes:
    """Return the bytes of parameters, gradients, optimizer state and frozen copies, by the
    placement.
    """
    if config.sdp.engine == "deepspeed":
        from . import deepspeed_plan  # deepspeed is optional

        return deepspeed_plan.predicted_state(store)
    shards = store.layout.mesh.shards(config.zero_optimization.stage)
    return predict_state_bytes(
        store.layout,
        store.context.rank,
        store.optimizer,
        shards=shards,
        compute_bytes=config.compute_bytes,
        sync=config.sdp.sync,
    )


def measured_state(groups: BetweenGroups, gradient_bytes: int) -> StateBytes:
    """Return the bytes of this rank's tensors as they are now.

    Args:
        groups: What this rank has.
        gradient_bytes: Bytes of the gradients, counted before the step that freed them.
    """
    store, local = groups.store, groups.local
    held = {id(parameter): stored_tensor(parameter) for parameter in store.parameters.values()}
    held |= {id(one.tensor): one.tensor for one in store.stepped.values() if one.group is not None}
    states = (value for state in store.optimizer.state.values() for value in state.values())
    moments = (value for value in states if isinstance(value, torch.Tensor) and value.dim())
    copies = (stored_tensor(copy) for copy in frozen_copies(store).values())
    outer = local.outer.nbytes() if local is not None else 0
    on_host = outer if local is not None and local.sync.offload == "cpu" else 0
    return StateBytes(_nbytes(held.values()), gradient_bytes, _nbytes(moments), _nbytes(copies), outer, on_host)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local_tensor(tensor.detach()).nbytes for tensor in tensors)


def planned_traffic(groups: BetweenGroups, config: Config, accumulation: int, step: int | None = None) -> Traffic:
    """Return the bytes that a rank sends in a step of ``accumulation`` micro-batches, by the
    placement.

    With local steps these are the bytes of step number ``step``. None: of a whole round.
    """
    context, sync = groups.context, config.sdp.sync
    rank, stage, compute_bytes = context.rank, context.stage, config.compute_bytes
    weighted = config.training.loss_weighting == "tokens"
    if config.sdp.engine == "deepspeed":
        from . import deepspeed_plan  # deepspeed is optional

        planned = deepspeed_plan.planned_traffic(groups.store)
        if weighted:
            _plan_weights(groups, planned, local=False)
        return planned
    gathers = planned_gathers(groups.store.optimizer, groups.store.layout, context.at.sdp, context.shards)
    if sync is not None:
        plan = LocalTraffic(
            groups.store.layout, rank, sync, stage=stage, accumulation=accumulation, compute_bytes=compute_bytes
        )
        planned = plan.of_round() if step is None else plan.of_step(step)
        for _ in range(sync.every if step is None else 1):
            planned.add(gathers)
            if weighted:
                _plan_weights(groups, planned, local=step is None or step > sync.start_after)
        return planned
    layout = _layout_at(groups, config, step)
    planned = plan_traffic(layout, rank, stage=stage, accumulation=accumulation, compute_bytes=compute_bytes)
    schedule = config.masking_schedule
    if step is not None and schedule.switches_after(step) and schedule.at(step + 1) == "backward":
        # All frozen copies are refreshed after the step, because their phase begins.
        waking = groups.store.layout.in_phase("backward")
        planned.add(plan_waking(waking, rank, stage=stage, compute_bytes=compute_bytes))
    planned.add(gathers)
    if weighted:
        _plan_weights(groups, planned, local=False)
    return planned


def _plan_weights(groups: BetweenGroups, planned: Traffic, *, local: bool) -> None:
    """Add the messages about the weights of the losses of a step."""
    mesh = groups.context.mesh
    planned.record("control", "all_reduce", 8 * mesh.data_ranks, mesh.fsdp * mesh.tp if local else mesh.world_size)
    if local:  # with the loss
        planned.record("control", "all_reduce", 8, mesh.world_size)


def _layout_at(groups: BetweenGroups, config: Config, step: int | None) -> Layout:
    """Return the layout of a step's phase. None: of the present phase."""
    schedule = config.masking_schedule
    return groups.store.layout if step is None or not schedule.ends else groups.store.layout.in_phase(schedule.at(step))
