"""Counts the memory and operations of a step that runs on fake tensors (tensors without data).

It gives the live bytes by kind, their peak, and the floating-point operations.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

ACTIVATIONS, COMMUNICATION, GRADIENTS = "activations", "communication", "gradients"
KINDS = ("parameters", GRADIENTS, "optimizer", "frozen", "outer", "buffers", COMMUNICATION, ACTIVATIONS)
"""``communication``: gathered copies of weights, and what collectives read and write.
``activations``: everything else, temporary tensors too.
"""

_PROPAGATE = "_propagate_tensor_meta_non_cached"
_COLLECTIVES = ("c10d", "fsdp", "_c10d_functional")


@dataclass
class Window:
    """The peak memory in one part of a step, such as the forward pass of a block.

    Attributes:
        at_peak: Bytes by kind when the sum of all kinds was largest.
        most: For activations and for communication, the largest number of bytes at any time.
        combined: Bytes of activations and communication when the sum of these two was largest.
    """

    at_peak: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    combined: Counter[str] = field(default_factory=Counter)

    def notice(self, live: Counter[str]) -> None:
        if live.total() > self.at_peak.total():
            self.at_peak = live.copy()
        if live[ACTIVATIONS] + live[COMMUNICATION] > self.combined.total():
            self.combined = Counter({kind: live[kind] for kind in (ACTIVATIONS, COMMUNICATION)})
        for kind in (ACTIVATIONS, COMMUNICATION):
            self.most[kind] = max(self.most[kind], live[kind])

    def plus(self, other: Window, before: Window, times: int) -> Window:
        """Return this window + ``times`` × (``other`` − ``before``), to predict more blocks.

        ``other`` is from a trace with one more repetition of blocks than the trace of ``before``.
        """
        sums = []
        for name in ("at_peak", "most", "combined"):
            mine, its, old = (getattr(window, name) for window in (self, other, before))
            sums.append(Counter({kind: mine[kind] + times * (its[kind] - old[kind]) for kind in KINDS}))
        return Window(*sums)


@dataclass
class _Entry:
    storage: weakref.ref[torch.UntypedStorage]
    kind: str
    size: int = 0


class Ledger(TorchDispatchMode):
    """A context that counts the bytes of all storages on ``device`` that operators use.

    ``windows`` has the peaks of each part of the step, by the name given to :meth:`enter_window`.
    The tensors may be fake. Reading a number out of a tensor gives 1, because fake tensors have no
    values.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.windows: dict[str, Window] = {}
        self.flops = 0
        self._live: Counter[str] = Counter()
        self._entries: dict[int, _Entry] = {}  # by the storage's id(); torch keeps one object per storage
        self._device = device.type
        self._is_propagating = False
        self.enter_window("")

    def enter_window(self, name: str) -> None:
        """Count what follows in ``windows[name]``. If no window has this name yet, make it."""
        self._window = self.windows.setdefault(name, Window())
        self._window.notice(self._live)

    def know(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Count ``tensors`` as ``kind``, one of :data:`KINDS`. Other tensors are "activations"."""
        for tensor in tensors:
            self._notice(tensor)
            entry = self._entries[id(tensor.untyped_storage())]
            self._change(entry, kind, entry.size)
        self._window.notice(self._live)

    def __enter__(self) -> Ledger:
        # FSDP2 frees and regrows gathered copies by resizing the storage, which no operator shows.
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_
        resize = self._resize

        def resizing(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            entry = self._entries.get(id(storage))
            if entry is not None and entry.storage() is storage:
                self._change(entry, entry.kind, storage.nbytes())
                self._window.notice(self._live)
            return result

        torch.UntypedStorage.resize_ = resizing  # type: ignore[method-assign]
        # When DTensor meets an operator for the first time, it runs it on fake tensors to learn
        # the shape of the result. No device allocates these tensors.
        self._propagate: Callable[..., Any] = getattr(ShardingPropagator, _PROPAGATE)
        propagate = self._propagate

        def propagating(*args: Any, **kwargs: Any) -> Any:
            self._is_propagating = True
            try:
                return propagate(*args, **kwargs)
            finally:
                self._is_propagating = False

        setattr(ShardingPropagator, _PROPAGATE, propagating)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        setattr(ShardingPropagator, _PROPAGATE, self._propagate)
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # of a fake tensor: half of all calls
            return args[0].device
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # A wrapper such as DTensor runs first. It then runs operators on its local tensors.
            return NotImplemented
        kwargs = kwargs or {}
        if self._is_propagating:
            return func(*args, **kwargs)
        # For example, the norm of the gradient is read. Any number will do.
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten.nonzero.default and isinstance(args[0], FakeTensor):
            # The number of documents is unknown, and at most that of the tokens.
            result = args[0].new_empty(args[0].numel(), args[0].dim(), dtype=torch.int64)
        elif func is torch.ops.aten._grouped_mm.default and isinstance(args[0], FakeTensor):
            result = _grouped_product(*args[:3])  # torch knows the result's shape only in bfloat16
        else:
            result = func(*args, **kwargs)
        tensors = [*_tensors_in(args), *_tensors_in(kwargs.values()), *_tensors_in((result,))]
        # A skeleton on the meta device, which runs only to show a result's form, does not count.
        if tensors and tensors[-1].device.type == self._device:
            self.flops += _flops(func, args, kwargs, result)
        grown = [self._notice(tensor) for tensor in tensors]  # a list: every tensor must be noticed
        if func.namespace in _COLLECTIVES:
            self._take_part(tensors)
        if any(grown):
            self._window.notice(self._live)
        return result

    def _take_part(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            entry = self._entries.get(id(tensor.untyped_storage()))
            if entry is not None and entry.kind == ACTIVATIONS:
                self._change(entry, COMMUNICATION, entry.size)

    def _notice(self, tensor: torch.Tensor) -> bool:
        if tensor.device.type != self._device:
            return False
        storage = tensor.untyped_storage()
        key = id(storage)
        entry = self._entries.get(key)
        if entry is None or entry.storage() is not storage:
            entry = self._entries[key] = _Entry(weakref.ref(storage, self._forget(key)), ACTIVATIONS)
        size, before = storage.nbytes(), entry.size
        if size != before:
            self._change(entry, entry.kind, size)
        return size > before

    def _forget(self, key: int) -> Callable[[Any], None]:
        def gone(reference: Any) -> None:
            entry = self._entries.get(key)
            if entry is not None and entry.storage is reference:
                self._live[entry.kind] -= entry.size
                del self._entries[key]

        return gone

    def _change(self, entry: _Entry, kind: str, size: int) -> None:
        self._live[entry.kind] -= entry.size
        self._live[kind] += size
        entry.kind, entry.size = kind, size


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments or results of an operator.

    Operators have tensors and lists of tensors, and no other containers. torch's function for all
    kinds of containers would take a tenth of the time of a trace.
    """
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _grouped_product(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
    """Return a result of ``torch._grouped_mm``, a product of matrices for each expert."""
    batch = [len(ends)] if left.dim() + right.dim() == 4 and ends is not None else left.shape[:-2][: right.dim() - 2]
    return left.new_empty(*batch, left.shape[-2], right.shape[-1])


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the operations of one operator.

    A multiplication with its addition counts 2. Matrix products, convolutions and attention count.
    Attention counts all of S × S, as torch does.
    """
    packet = func.overloadpacket
    if packet is torch.ops.aten.addmm_:  # torch only knows the operator that makes a new tensor
        packet = torch.ops.aten.addmm
    name = packet.__name__
    if name == "_varlen_attn":  # as if each sequence were one document
        return 4 * prod(args[0].shape) * args[6]
    if name == "_varlen_attn_backward":
        return 10 * prod(args[1].shape) * args[9]
    if name == "_grouped_mm":
        return 2 * prod(args[0].shape if args[1].dim() == 3 else args[0].shape[-2:]) * args[1].shape[-1]
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=result)
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        return _attention_flops(args[0], args[2])
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return 5 * _attention_flops(args[1], args[3]) // 2  # the scores again, then gradients of four factors
    return 0


def _attention_flops(query: torch.Tensor, value: torch.Tensor) -> int:
    """Return the operations of the scores and of their product with the values.

    The query's shape is (B, H, S, E), and the value's is (B, K, S, E).
    """
    return 2 * prod(query.shape) * value.shape[2] + 2 * prod(query.shape[:3]) * value.shape[2] * value.shape[3]
