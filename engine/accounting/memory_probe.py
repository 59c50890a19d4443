"""Measures the peak bytes of live tensors in one training step.

On a CPU, resident memory cannot show this peak, because it also counts freed memory.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_COLLECTIVES = dist.distributed_c10d.__name__


def peak_tensor_bytes(
    step: Callable[[], object],
    module: nn.Module,
    optimizer: Optimizer,
    device: torch.device,
    *,
    kept: Iterable[torch.Tensor] = (),
) -> int:
    """Return the peak bytes of live tensors on ``device`` during ``step()``.

    Parameters, buffers, gradients, optimizer state, activations and temporaries count. Bytes are
    those that the tensors ask for, without alignment. A storage counts once, even if it has several
    views.

    On CUDA, the result is the allocator's own peak (``torch.cuda.max_memory_allocated``). This
    function resets the allocator's statistics.

    On a CPU, the inputs and outputs of every operator are watched. That slows the step, so do not
    time it. Scratch space inside an operator and the communication library's buffers are not
    counted. A tensor counts when an operator first uses it. List tensors in ``kept`` to count them
    from the start.

    Args:
        step: Runs forward, backward and update once. It really changes the weights.
        module: The model.
        optimizer: The optimizer.
        device: The device to measure.
        kept: Tensors that live through the step but are not used for a while.
    """
    with watched_peak(module, optimizer, device, kept=kept) as peak:
        step()
    return peak()


@contextmanager
def watched_peak(
    module: nn.Module, optimizer: Optimizer, device: torch.device, *, kept: Iterable[torch.Tensor] = ()
) -> Iterator[Callable[[], int]]:
    """A context in which to run a training step. It yields a function that returns the step's peak.

    For the arguments and the peak see :func:`peak_tensor_bytes`.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: torch.cuda.max_memory_allocated(device)
        torch.cuda.synchronize(device)
        return
    watch = LiveStorages(device)
    watch.add((*_state_tensors(module, optimizer), *kept))
    with watch:
        yield lambda: watch.peak


def _state_tensors(module: nn.Module, optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors that exist before the step, including gradients accumulated so far."""
    yield from module.buffers()
    groups = [module.parameters(), *(group["params"] for group in optimizer.param_groups)]
    for parameter in (parameter for group in groups for parameter in group):
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


class LiveStorages(TorchDispatchMode):
    """A context that records every storage on ``device`` that an operator uses, and the peak bytes.

    ``torch.distributed._tools.MemTracker`` counts the same. But it refuses a module that is called
    twice in a step, as in gradient accumulation.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.peak = 0
        self._device = device.type
        # The key is id(). torch keeps one Python object per storage.
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # A wrapper such as DTensor runs first. It then runs operators on its local tensors.
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _inside_a_collective():
            return result
        # At this point the operator's inputs and outputs are both alive.
        self.add(leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor))
        return result

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record the storages of ``tensors``, and raise the peak if their bytes exceed it."""
        grown = [self._notice(tensor) for tensor in tensors]  # a list, so that no tensor is left out
        if any(grown):
            self.peak = max(self.peak, self._live_bytes())

    def _notice(self, tensor: torch.Tensor) -> bool:
        if is_traceable_wrapper_subclass(tensor):
            # DTensor lists its mesh there too.
            inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            grown = [self._notice(part) for part in inner if isinstance(part, torch.Tensor)]
            return any(grown)
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return False  # sparse and opaque tensors have no storage
        if storage.device.type != self._device:
            return False  # for example the fake tensors of DTensor's shape propagation, on "meta"
        key, size = id(storage), storage.nbytes()
        known = self._storages.get(key)
        if known is None or known() is not storage:
            self._storages[key] = weakref.ref(storage)
            self._sizes[key] = 0
        grown = size > self._sizes[key]
        self._sizes[key] = size
        return grown

    def _live_bytes(self) -> int:
        """Return the bytes of all live storages.

        Sizes are read again each time. FSDP2 frees gathered parameters with ``resize_(0)`` on the
        storage, which no operator shows.
        """
        live = 0
        for key, reference in list(self._storages.items()):
            storage = reference()
            if storage is None:
                del self._storages[key], self._sizes[key]
                continue
            self._sizes[key] = storage.nbytes()
            live += self._sizes[key]
        return live


def _inside_a_collective() -> bool:
    """Return whether a function of ``torch.distributed`` called the running operator.

    Such operators are not watched. Inputs and outputs of the function were recorded when they were
    made. All other tensors belong to the communication library: gloo's reduce-scatter copies its
    input, and NCCL's does not.
    """
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == _COLLECTIVES:
            return True
        frame = frame.f_back
    return False
