"""Predicts and measures the bytes of parameters, gradients and optimizer state of a rank."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ..config.method import SyncSection
from ..config.schema import Config
from ..distributed.collectives import local_tensor, stored_tensor
from ..optim.muon import Muon, is_matrix
from ..optim.small_state import SmallStateAdam
from ..placement.layout import Layout
from ..placement.tensor_info import TensorInfo, quantised_row
from ..stores.store import GroupStore, frozen_copies
from ..sync.between import BetweenGroups

# Tensors of a parameter's size that each optimizer keeps, in float32.
STATE_TENSORS = {"AdamW": 2, "Adam": 2, "ApexFusedAdam": 2}


@dataclass(frozen=True)
class StateBytes:
    """Bytes of state on one rank, after the backward pass and before the optimizer step.

    ``frozen`` counts the copies of parameters that the rank does not train. ``outer`` counts what
    local steps keep between averages: anchors, the state of the outer optimizer, and the errors of
    compression. ``outer_on_host`` is the part of ``outer`` that is in the host's memory.
    """

    parameters: int
    gradients: int
    optimizer: int
    frozen: int = 0
    outer: int = 0
    outer_on_host: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device: all state except the part that is in the host's memory."""
        return self.parameters + self.gradients + self.optimizer + self.frozen + self.outer - self.outer_on_host

    def to_json(self) -> dict[str, int]:
        """Return all fields by name, but ``outer`` and ``outer_on_host`` only if they are not 0."""
        return {key: value for key, value in asdict(self).items() if value or not key.startswith("outer")}


def predicted_state(store: GroupStore, config: Config) -> StateBytes:
    """Predict the bytes of this rank's state from the placement, with FSDP2 or DeepSpeed."""
    if config.sdp.engine == "deepspeed":
        return _predict_partitions(store, config.zero_optimization.stage)
    return predict_state_bytes(store.layout, store.context.rank, store.optimizer, config)


def _predict_partitions(store: Any, stage: int) -> StateBytes:
    """Predict the state of this rank under DeepSpeed.

    Weights are the model's tensors in compute precision, and ZeRO's padded float32 partitions.
    """
    from ..stores.deepspeed.partitions import partition_numel  # deepspeed is optional

    layout, context = store.layout, store.context
    group, fsdp, compute_bytes = context.at.sdp, context.mesh.fsdp, context.compute_dtype.itemsize
    ranks, kind = fsdp if stage == 3 else 1, layout.copies.dtype
    held = compute_bytes * sum(-(-info.numel // ranks) for info in layout.held(group))
    copies = 0
    for info in layout.frozen(group):
        rows = quantised_row(info.shape[1:].numel(), kind) if info.is_quantised(kind) else ()
        sizes = [info.shape[0] * row for row in rows]
        copies += sum(-(-size // ranks) for size in sizes) if rows else compute_bytes * -(-info.numel // ranks)
    numel = sum(partition_numel(bundle, stage, fsdp) for bundle in store.bundles)
    if isinstance(store.optimizer, SmallStateAdam):
        moments = store.optimizer.state_bytes(numel, None)
    else:
        moments = 4 * numel * state_tensors(store.optimizer)
    return StateBytes(held + 4 * numel, 4 * numel, moments, copies)


def measured_state(groups: BetweenGroups, gradient_bytes: int) -> StateBytes:
    """Return the bytes of this rank's state, counted on the tensors in ``groups``.

    ``gradient_bytes`` are the bytes of the gradients, counted before the step freed them.
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


def predict_state_bytes(layout: Layout, rank: int, optimizer: Optimizer, config: Config) -> StateBytes:
    """Predict the bytes of the state of ``rank`` from the placement, with FSDP2.

    A rank has float32 master weights, gradients and optimizer state for the parameters that its
    group holds. It also has the group's frozen copies. ``optimizer`` determines the number of state
    tensors.
    """
    at, sync = layout.mesh.coordinates(rank), config.sdp.sync
    shards = layout.mesh.shards(config.zero_optimization.stage)
    index = at.fsdp if shards > 1 else 0
    held = [(info, info.shard_numel(shards, index)) for info in layout.held(at.sdp)]
    kept = 4 * sum(numel for _, numel in held)
    trained = 4 * sum(numel for info, numel in held if info.trainable)
    kind = layout.copies.dtype
    copies = sum(info.copy_nbytes(kind, config.compute_bytes, shards, index) for info in layout.frozen(at.sdp))
    outer = 0 if sync is None else predict_outer_bytes(sync, [(info, numel) for info, numel in held if info.trainable])
    on_host = outer if sync is not None and sync.offload == "cpu" else 0
    optimizer_bytes = sum(state_bytes(optimizer, layout, info, numel) for info, numel in held if info.trainable)
    return StateBytes(kept, trained, optimizer_bytes, copies, outer, on_host)


def predict_outer_bytes(sync: SyncSection, trained: Sequence[tuple[TensorInfo, int]]) -> int:
    """Return the bytes of anchors, outer optimizer state and rounding errors of local steps.

    ``trained`` has the trained parameters of a rank, with the number of elements in the rank's
    shard. With ``single_holder`` "skip", a parameter with one holder has no outer optimizer state.
    But a slice of neurons has this state, because a checkpoint has the whole parameter's state.
    """
    shared = sum(numel for info, numel in trained if len(info.holders) > 1)
    everything = sum(numel for _, numel in trained)
    slices = sum(numel for info, numel in trained if len(info.holders) == 1 and info.cut is not None)
    stepped = everything if sync.single_holder == "outer" else shared + slices
    states = int(sync.outer_optimizer.params.momentum > 0 and sync.service is None)
    return 4 * (everything + states * stepped + (shared if sync.compression == "int8" else 0))


def state_bytes(optimizer: Optimizer, layout: Layout, info: TensorInfo, numel: int) -> int:
    """Return the bytes of the optimizer's state for ``numel`` elements of a parameter."""
    if isinstance(optimizer, Muon):
        return optimizer.state_bytes(numel, is_matrix=is_matrix(info, layout))
    if isinstance(optimizer, SmallStateAdam):
        return optimizer.state_bytes(numel, info.tp_shape[1:] if len(info.shape) > 1 else None)
    return 4 * numel * state_tensors(optimizer)


def state_tensors(optimizer: Optimizer) -> int:
    """Return how many tensors the optimizer keeps for a parameter, each of the parameter's size."""
    if isinstance(optimizer, torch.optim.SGD):
        return int(any(group["momentum"] for group in optimizer.param_groups))
    known = STATE_TENSORS.get(type(optimizer).__name__)
    if known is not None:
        return known
    # The user's own optimizer: after its first step, its state of one parameter shows the number.
    for parameter, state in optimizer.state.items():
        return sum(isinstance(value, torch.Tensor) and value.shape == parameter.shape for value in state.values())
    return 0


class PeakMemory:
    """Measures the peak memory of this process since the last :meth:`reset`.

    On CUDA, these are the bytes that torch allocated. On a CPU, they are anonymous resident bytes,
    including the heaps of the interpreter and the libraries. If the kernel does not allow a reset,
    the peak is that since the start of the process.

    On a CPU, start processes with the variables of ``allocator_settings()``. Otherwise freed memory
    counts, too, because glibc keeps it resident.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._clear = Path("/proc/self/clear_refs")

    def reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            self._clear.write_text("5")  # resets VmHWM (proc(5))
        except OSError:
            return  # then the peak is that of the whole process, so it is never too low

    def read(self) -> int:
        """Return the peak memory since the last :meth:`reset`, in bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        try:
            status = dict(
                line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
            )
            peak, files, shared = (int(status[key].split()[0]) * 1024 for key in ("VmHWM", "RssFile", "RssShmem"))
            return peak - files - shared
        except (OSError, KeyError, ValueError):
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # no /proc
            return peak if sys.platform == "darwin" else peak * 1024
