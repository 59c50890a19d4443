"""The full model's weights in the service (the anchors), and the outer steps that change them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..config.method import SyncSection
from ..errors import ServiceError, quote
from ..placement.layout import Layout
from ..placement.tensor_info import Shard, TensorInfo
from ..sync.outer import fragments_of, make_outer_optimizer


class Slice(NamedTuple):
    """The place of a tensor in the parameter ``name``: a rectangle that begins at ``offset``."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def indices(self, origin: Sequence[int] = ()) -> tuple[slice, ...]:
        """Return the index of this slice in a tensor that has the parameter from ``origin`` on."""
        starts = [start - low for start, low in zip(self.offset, origin or [0] * len(self.offset), strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


@dataclass
class Delivery:
    """The changes of weights that the group ``slot`` sends for an average, as they arrive."""

    slot: int
    changes: dict[Slice, torch.Tensor] = field(default_factory=dict)  # anchor − weights
    nbytes: int = 0  # the bytes of the changes
    ranks: set[int] = field(default_factory=set)  # ranks that have sent all changes
    samples: int = 0  # that the group has read since its last delivery of this fragment
    new_samples: int = 0  # that it has read since its last delivery of any fragment
    loss: float = 0.0  # the mean loss of the new samples
    seconds: float = 0.0  # how long the new samples took


class Anchors:
    """The full model's weights after the last outer step (the anchors), and the outer optimizer.

    ``weights`` are the anchors, and ``momenta`` the state of the optimizer, by canonical name. Both
    change in place. In the ``layout``, every group has one rank.
    """

    def __init__(self, layout: Layout, sync: SyncSection, values: Mapping[str, torch.Tensor]):
        self.layout, self._sync, self.fragments = layout, sync, fragments_of(layout, sync.fragments)
        self.weights = {name: values[name].detach().to(infos[0].dtype).clone() for name, infos in layout.wholes.items()}
        infos = layout.parameters.items()
        self._skips = {name for name, info in infos if sync.single_holder == "skip" and len(info.holders) == 1}
        stepped = [info for name, info in infos if info.trainable and name not in self._skips]
        has_momentum = sync.outer_optimizer.params.momentum > 0
        self.momenta = {info.canonical: torch.zeros(info.full_shape) for info in stepped if has_momentum}
        self._lock = threading.Lock()  # locked while anchors change

    def info_of(self, piece: Slice) -> TensorInfo:
        """Return the parameter (or slice) that contains ``piece``, or raise ServiceError."""
        for info in self.layout.wholes.get(piece.name, ()):
            box = _box(info)
            bounds = zip(piece.offset, piece.shape, box.offset, box.shape, strict=False)
            inside = all(low <= at and size >= 0 and at + size <= low + most for at, size, low, most in bounds)
            if inside and len(piece.offset) == len(piece.shape) == len(box.shape):
                return info
        raise ServiceError(f"{quote(piece.name)} at {piece.offset}, shape {piece.shape}, is not in the model")

    def read(self, pieces: Iterable[Slice], snapshot: Mapping[str, torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Return copies of parts (``pieces``) of the weights, or of an earlier :meth:`snapshot`."""
        with self._lock:
            whole = self.weights if snapshot is None else snapshot
            return [whole[piece.name][piece.indices()].clone() for piece in pieces if self.info_of(piece)]

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return copies of the weights. Later outer steps do not change them."""
        with self._lock:
            return {name: tensor.clone() for name, tensor in self.weights.items()}

    def check(self, slot: int, fragment: int, changes: Mapping[Slice, torch.Tensor]) -> None:
        """Raise ServiceError unless ``changes`` are all that a group trains of ``fragment``."""
        held = (info for info in self.layout.held(slot) if info.trainable and self.fragments[info.name] == fragment)
        expected, found = Counter({info.name: info.numel for info in held}), Counter[str]()
        for piece in changes:
            found[self.info_of(piece).name] += torch.Size(piece.shape).numel()
        for name in {name for name in {*found, *expected} if found[name] != expected[name]}:
            elements = f"{found[name]} elements of {name} for fragment {fragment}, but trains {expected[name]}"
            raise ServiceError(f"group {slot} sent {elements}")

    @torch.no_grad()
    def step(self, fragment: int, deliveries: Sequence[Delivery]) -> None:
        """Let the outer optimizer take a step on the weights of ``fragment``.

        The gradient is the mean of the groups' changes, weighted by the samples of each group. All
        samples have the same number of tokens.
        """
        gradients: dict[str, torch.Tensor] = {}
        for delivery in sorted(deliveries, key=lambda delivery: delivery.slot):
            for piece, change in delivery.changes.items():
                info = self.info_of(piece)
                if info.name not in gradients:  # bfloat16 is added in bfloat16, as by an all-reduce
                    gradients[info.name] = torch.zeros(info.shape, dtype=change.dtype)
                together = sum(other.samples for other in deliveries if other.slot in info.holders)
                share = change.float() * (delivery.samples / max(1, together))
                gradients[info.name][piece.indices(_box(info).offset)] += share.to(change.dtype)
        with self._lock:
            for name, gradient in gradients.items():  # each slice of neurons steps on its own
                info = self.layout.parameters[name]
                anchor = self.weights[info.canonical][_box(info).indices()]
                if name in self._skips:
                    anchor.sub_(gradient)  # the holder's weights become the anchor
                    continue
                optimizer, anchor.grad = make_outer_optimizer(self._sync, [anchor]), gradient.float()
                if self.momenta:
                    optimizer.state[anchor]["momentum_buffer"] = self.momenta[info.canonical][_box(info).indices()]
                optimizer.step()


def _box(info: TensorInfo) -> Slice:
    """Return the place of a parameter, or of a slice of neurons, in the full model's parameter."""
    return Slice(info.canonical, info.offset(Shard()), tuple(info.shape))
