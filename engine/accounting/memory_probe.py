"""Peak bytes of live tensors in one training step: what a CPU's resident size cannot say, because it also counts freed memory."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_COLLECTIVES = dist.distributed_c10d.__name__


def peak_tensor_bytes(
    step: Callable[[], None],
    module: nn.Module,
    optimizer: Optimizer,
    device: torch.device,
    *,
    kept: Iterable[torch.Tensor] = (),
) -> int:
    """Peak bytes on ``device`` of parameters, buffers, gradients, optimizer state, activations and temporaries during ``step()``.

    Bytes as the tensors ask for them, alignment excluded; a storage counts once, whatever views of it exist. On CUDA it is the
    allocator's own peak (``torch.cuda.max_memory_allocated``), whose statistics this resets. On a CPU every operator's inputs and
    outputs are watched, which slows the step: probe one step, do not time it. Not seen there: scratch space inside one operator, the
    communication library's buffers, and what lives through the step unused for a while unless it is in ``kept``. ``step`` runs forward,
    backward and update once, and really changes the weights.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    watch = _LiveStorages(device)
    watch.add((*_state_tensors(module, optimizer), *kept))
    with watch:
        step()
    return watch.peak


def _state_tensors(module: nn.Module, optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """What exists before the step; gradients too, if some have been accumulated."""
    yield from module.buffers()
    groups = [module.parameters(), *(group["params"] for group in optimizer.param_groups)]
    for parameter in (parameter for group in groups for parameter in group):
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


class _LiveStorages(TorchDispatchMode):
    """Knows every live storage on ``device`` that an operator has touched.

    ``torch.distributed._tools.MemTracker`` counts the same (its "parameters" include FSDP2's gathered copies), but refuses a
    module that is called twice in a step, which gradient accumulation does.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.peak = 0
        self._device = device.type
        self._storages: dict[
            int, weakref.ref[torch.UntypedStorage]
        ] = {}  # by id(); torch keeps one Python object a storage
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper such as DTensor runs first; the operators on its local tensors then come by here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _inside_a_collective():
            return result
        # Inputs are alive while an operator runs, outputs from then on: here both exist.
        self.add(leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor))
        return result

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take notice of the tensors' storages; the peak can have moved only if one of them is new or has grown."""
        grown = [self._notice(tensor) for tensor in tensors]  # a list: every tensor must be noticed
        if any(grown):
            self.peak = max(self.peak, self._live_bytes())

    def _notice(self, tensor: torch.Tensor) -> bool:
        if is_traceable_wrapper_subclass(tensor):
            inner = (
                getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]
            )  # DTensor names its mesh there too
            grown = [self._notice(part) for part in inner if isinstance(part, torch.Tensor)]
            return any(grown)
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return False  # sparse and opaque tensors have none
        if storage.device.type != self._device:
            return False  # also the fake tensors of DTensor's shape propagation, which lie on "meta"
        key, size = id(storage), storage.nbytes()
        known = self._storages.get(key)
        if known is None or known() is not storage:
            self._storages[key] = weakref.ref(storage)
            self._sizes[key] = 0
        grown = size > self._sizes[key]
        self._sizes[key] = size
        return grown

    def _live_bytes(self) -> int:
        """Sizes are read anew: FSDP2 frees gathered parameters by ``resize_(0)`` on the storage, which no operator shows."""
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
    """Whether a function of ``torch.distributed`` called the operator that runs. What it is given and returns was seen where it was made;
    the rest is the communication library's: gloo's reduce-scatter copies its input, which NCCL's does not.
    """
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == _COLLECTIVES:
            return True
        frame = frame.f_back
    return False
