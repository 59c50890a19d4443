"""The bytes that a rank under DeepSpeed needs and sends, computed from the placement."""

from __future__ import annotations

from typing import Any

from ..distributed.collectives import Traffic
from ..stores.deepspeed.partitions import partition_numel
from .memory import StateBytes, state_tensors
from .traffic_plan import CONTROL_BYTES

FLOAT32, CHECK_BYTES = 4, 16  # two float64 checks of the parameters that ZeRO has reduced


def predicted_state(store: Any) -> StateBytes:
    """Return the bytes of weights, gradients, optimizer state and frozen copies.

    Weights are the model's own, in compute precision, and ZeRO's float32 partitions with their
    padding.
    """
    layout, at = store.layout, store.context.at
    compute = store.context.compute_dtype.itemsize
    held = compute * sum(_stored_numel(store, info.name) for info in layout.held(at.sdp))
    copies = compute * sum(_stored_numel(store, info.name) for info in layout.frozen(at.sdp))
    partitions = FLOAT32 * sum(_partition_numels(store))
    return StateBytes(held + partitions, partitions, partitions * state_tensors(store.optimizer), copies)


def planned_traffic(store: Any) -> Traffic:
    """Return the bytes that a rank sends in a step.

    DeepSpeed's own messages inside the group are not counted (see ``comms_logger``).
    """
    layout, context, planned = store.layout, store.context, Traffic()
    for bundle, numel in zip(store.bundles, _partition_numels(store), strict=True):
        planned.record("between groups", "all_reduce", FLOAT32 * numel, len(bundle.holders))
    for refresh in layout.refreshes:
        if refresh.sent_by(context.at.sdp):
            names = [name for name in refresh.names if layout.parameters[name].trainable]
            nbytes = context.compute_dtype.itemsize * sum(_stored_numel(store, name) for name in names)
            planned.record("between groups", "broadcast", nbytes, len(refresh.members))
    planned.record("control", "all_reduce", CONTROL_BYTES + CHECK_BYTES, context.mesh.world_size)
    return planned


def _partition_numels(store: Any) -> list[int]:
    """Return the elements of each partition, including padding."""
    return [partition_numel(bundle, store.context.stage, store.context.mesh.fsdp) for bundle in store.bundles]


def _stored_numel(store: Any, name: str) -> int:
    """Return the elements of a parameter that this rank has in compute precision."""
    numel = store.layout.parameters[name].numel
    return -(-numel // store.context.mesh.fsdp) if store.context.stage == 3 else numel
