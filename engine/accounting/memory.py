"""Bytes of parameters, gradients and optimizer state: predicted from the placement, and counted in the tensors that exist."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from ..distributed.tensors import local_tensor
from ..placement.layout import Layout

STATE_TENSORS = {"AdamW": 2, "Adam": 2, "ApexFusedAdam": 2}  # of a parameter's size, float32


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank between the backward pass and the optimizer step; ``frozen``: copies of what it does not train."""

    parameters: int
    gradients: int
    optimizer: int
    frozen: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.frozen

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def predict_state_bytes(
    layout: Layout, rank: int, optimizer: Optimizer, *, shards: int, compute_bytes: int, everything: bool = False
) -> StateBytes:
    """State of ``rank`` by the placement: float32 master weights and gradients of what its group holds, and frozen copies of
    ``compute_bytes`` an element, cut into ``shards``.

    ``everything``: of the full model, which the reference keeps whole.
    """
    at = layout.mesh.coordinates(rank)
    index = at.fsdp if shards > 1 else 0
    parameters = layout.parameters.values() if everything else layout.held(at.sdp)
    held = [(info, info.shard_numel(shards, index)) for info in parameters]
    kept = 4 * sum(numel for _, numel in held)
    trained = 4 * sum(numel for info, numel in held if info.trainable)
    frozen = () if everything else layout.frozen(at.sdp)
    copies = compute_bytes * sum(info.shard_numel(shards, index) for info in frozen)
    return StateBytes(kept, trained, trained * state_tensors(optimizer), copies)


def state_tensors(optimizer: Optimizer) -> int:
    """Tensors of a parameter's size that the optimizer keeps for it."""
    if isinstance(optimizer, torch.optim.SGD):
        return int(any(group["momentum"] for group in optimizer.param_groups))
    known = STATE_TENSORS.get(type(optimizer).__name__)
    if known is not None:
        return known
    # An optimizer of the user's: what it keeps for one parameter tells, once it has stepped.
    for parameter, state in optimizer.state.items():
        return sum(isinstance(value, torch.Tensor) and value.shape == parameter.shape for value in state.values())
    return 0


def measure_state_bytes(
    parameters: Iterable[nn.Parameter], frozen: Iterable[nn.Parameter], optimizer: Optimizer, gradient_bytes: int
) -> StateBytes:
    """Bytes of the local tensors that exist; ``gradient_bytes`` as counted before the step that freed them."""
    held, copies = (sum(local_tensor(parameter.detach()).nbytes for parameter in kind) for kind in (parameters, frozen))
    states = (
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )
    return StateBytes(held, gradient_bytes, sum(local_tensor(value).nbytes for value in states), copies)


class PeakMemory:
    """Peak memory of this process since :meth:`reset`.

    On CUDA: bytes allocated by torch. On a CPU: anonymous resident bytes, interpreter and libraries' heaps included; the kernel's
    high-water mark is reset where it allows that, so start processes with glibc's thresholds set (``allocator_settings``), or freed
    memory stays resident.
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
            return  # then the peak is that of the whole process so far: never too low

    def read(self) -> int:
        """Bytes."""
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
