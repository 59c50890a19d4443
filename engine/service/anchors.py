"""The anchors of the full model, and the outer steps on them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..config.method import SyncSection
from ..errors import ServiceError, quote
from ..optim.optimizer_state import materialise_state
from ..placement.layout import Layout
from ..placement.tensor_info import TensorInfo
from ..sync.outer import fragments_of, make_outer_optimizer


class Slice(NamedTuple):
    """A box of the full model's parameter ``name``."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def indices(self, origin: Sequence[int] = ()) -> tuple[slice, ...]:
        """Return the index of the box in a tensor whose first element is at ``origin``."""
        starts = [start - low for start, low in zip(self.offset, origin or [0] * len(self.offset), strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.shape, strict=True))


class Delivery(NamedTuple):
    """What the group ``slot`` has learned from some tokens: anchor − weights, by slice."""

    slot: int
    tokens: int
    changes: Mapping[Slice, torch.Tensor]


class Anchors:
    """The weights of the full model after the last outer step, and the outer optimizer.

    Args:
        layout: the layout of the run, in which every group has one rank.
        sync: the settings.
        values: the first weights by canonical name.
    """

    def __init__(self, layout: Layout, sync: SyncSection, values: Mapping[str, torch.Tensor]):
        self.layout, self._sync, self._infos = layout, sync, layout.parameters
        self._whole = {name: values[name].detach().to(infos[0].dtype).clone() for name, infos in layout.wholes.items()}
        # The anchor of a slice of neurons is a view, because each slice has a state of its own.
        self._tensors = {
            name: nn.Parameter(self._whole[info.canonical][_box(info).indices()], requires_grad=False)
            for name, info in self._infos.items()
        }
        self.fragments = fragments_of(layout, sync.fragments)
        trained = [tensor for name, tensor in self._tensors.items() if self._infos[name].trainable]
        self.optimizer = make_outer_optimizer(sync, trained)
        self._lock = threading.Lock()  # held while anchors change

    def info_of(self, piece: Slice) -> TensorInfo:
        """Return the parameter, or the slice of neurons, in which ``piece`` lies.

        Raises:
            ServiceError: there is none.
        """
        for info in self.layout.wholes.get(piece.name, ()):
            box = _box(info)
            bounds = zip(piece.offset, piece.shape, box.offset, box.shape, strict=False)
            inside = all(low <= at and size >= 0 and at + size <= low + most for at, size, low, most in bounds)
            if inside and len(piece.offset) == len(piece.shape) == len(box.shape):
                return info
        raise ServiceError(f"{quote(piece.name)} at {piece.offset} with shape {piece.shape} is not in the model")

    def read(self, pieces: Iterable[Slice], snapshot: Mapping[str, torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Return copies of the anchors of some slices, or those of an earlier :meth:`snapshot`."""
        with self._lock:
            whole = self._whole if snapshot is None else snapshot
            return [whole[piece.name][piece.indices()].clone() for piece in pieces if self.info_of(piece)]

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return copies of the weights of the full model, by canonical name."""
        with self._lock:
            return {name: tensor.clone() for name, tensor in self._whole.items()}

    def check(self, slot: int, fragment: int, changes: Mapping[Slice, torch.Tensor]) -> None:
        """Raise ServiceError unless ``changes`` cover the parameters that the group trains in the
        fragment, and no others.
        """
        counted: dict[str, int] = {}
        for piece in changes:
            name = self.info_of(piece).name
            counted[name] = counted.get(name, 0) + torch.Size(piece.shape).numel()
        held = (info for info in self.layout.held(slot) if info.trainable and self.fragments[info.name] == fragment)
        expected = {info.name: info.numel for info in held}
        for name in {*counted, *expected}:
            if (found := counted.get(name, 0)) != (most := expected.get(name, 0)):
                raise ServiceError(
                    f"group {slot} delivers {found} elements of {name} in fragment {fragment}, not {most}"
                )

    @torch.no_grad()
    def step(self, fragment: int, deliveries: Sequence[Delivery]) -> None:
        """Let the outer optimizer step on what was delivered of ``fragment``.

        Its gradient is the mean of the changes, weighted by the tokens of the groups.
        """
        parts = [
            (self.info_of(piece), piece, delivery.tokens, change)
            for delivery in sorted(deliveries, key=lambda delivery: delivery.slot)
            for piece, change in delivery.changes.items()
        ]
        groups: dict[str, dict[int, int]] = {}
        for delivery in deliveries:
            for piece in delivery.changes:
                groups.setdefault(self.info_of(piece).name, {})[id(delivery)] = delivery.tokens
        gradients: dict[str, torch.Tensor] = {}
        for info, piece, tokens, change in parts:
            if info.name not in gradients:  # bfloat16 is added in bfloat16, as by an all-reduce
                gradients[info.name] = torch.zeros(info.shape, dtype=change.dtype)
            share = change.float() * (tokens / max(1, sum(groups[info.name].values())))
            gradients[info.name][piece.indices(_box(info).offset)] += share.to(change.dtype)
        with self._lock:
            for name, gradient in gradients.items():
                if self._sync.single_holder == "skip" and len(self._infos[name].holders) == 1:
                    self._tensors[name].sub_(gradient)  # its weights become the anchor
                else:
                    self._tensors[name].grad = gradient.float()
            self.optimizer.step()
            self.optimizer.zero_grad()

    # -- state -------------------------------------------------------------------------------------

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of the outer optimizer's momentum by key, as a checkpoint has it.

        Of slices of one parameter that have none yet, it is zero.
        """
        found: dict[str, torch.Tensor] = {}
        with self._lock:
            for name, info in self._infos.items():
                if (value := self.optimizer.state.get(self._tensors[name], {}).get(_MOMENTUM)) is not None:
                    whole = found.setdefault(f"outer/{info.canonical}/{_MOMENTUM}", torch.zeros(info.full_shape))
                    whole[_box(info).indices()] = value
        return found

    def empty_state(self, saved: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return tensors to load those of the ``saved`` keys into that :meth:`state` has."""
        sizes = {f"outer/{name}/{_MOMENTUM}": infos[0].full_shape for name, infos in self.layout.wholes.items()}
        return {key: torch.empty(sizes[key]) for key in saved if key in sizes}

    @torch.no_grad()
    def load(self, weights: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
        """Take what :meth:`snapshot` and :meth:`state` returned."""
        materialise_state(self.optimizer)
        for name, tensor in weights.items():
            self._whole[name].copy_(tensor)
        for name, info in self._infos.items():
            saved = state.get(f"outer/{info.canonical}/{_MOMENTUM}")
            if saved is None:
                self.optimizer.state.pop(self._tensors[name], None)
            elif info.trainable:
                self.optimizer.state[self._tensors[name]][_MOMENTUM].copy_(saved[_box(info).indices()])


_MOMENTUM = "momentum_buffer"  # all that SGD keeps


def _box(info: TensorInfo) -> Slice:
    """Return the place of a parameter, or of a slice of neurons, in the full model's parameter."""
    offset = [0] * len(info.shape)
    if info.cut is not None:
        offset[info.cut.dim] = info.cut.start
    return Slice(info.canonical, tuple(offset), tuple(info.shape))
