"""The anchors of the full model, and the outer steps on them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..config.method import SyncSection
from ..errors import ServiceError, quote
from ..optim.optimizer_state import materialise_state
from ..placement.layout import Layout
from ..placement.tensor_info import TensorInfo
from ..sync.outer import fragments_of, make_outer_optimizer


class Slice(NamedTuple):
    """A box of a parameter of the full model.

    Attributes:
        name: the canonical name of the parameter.
        offset: the index of the first element.
        shape: the size in each dimension.
    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Delivery(NamedTuple):
    """What a group has learned of a fragment: anchor − weights, by slice.

    Attributes:
        slot: the group's number in the placement.
        tokens: on which the group has trained since its last delivery of the fragment.
        changes: the slices that it sent.
    """

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
        self.layout, self._sync = layout, sync
        self._infos = layout.parameters
        self._whole = {name: values[name].detach().to(infos[0].dtype).clone() for name, infos in layout.wholes.items()}
        # The anchor of a slice is a view, because each slice has a state of its own.
        self._tensors = {
            name: nn.Parameter(self._whole[info.canonical][_index(_box(info), ())], requires_grad=False)
            for name, info in self._infos.items()
        }
        self.fragments = fragments_of(layout, sync.fragments)
        trained = [tensor for name, tensor in self._tensors.items() if self._infos[name].trainable]
        self.optimizer = make_outer_optimizer(sync, trained)
        self.lock = threading.Lock()  # held while anchors change

    def info_of(self, piece: Slice) -> TensorInfo:
        """Return the parameter, or the slice of neurons, in which ``piece`` lies.

        Raises:
            ServiceError: there is none.
        """
        for info in self.layout.wholes.get(piece.name, ()):
            box = _box(info)
            sizes = len(piece.offset) == len(piece.shape) == len(box.shape)
            inside = (
                low <= start and size >= 0 and start + size <= low + most
                for start, size, low, most in zip(piece.offset, piece.shape, box.offset, box.shape, strict=False)
            )
            if sizes and all(inside):
                return info
        raise ServiceError(f"{quote(piece.name)} at {piece.offset} with shape {piece.shape} is not in the model")

    def read(self, pieces: Iterable[Slice], snapshot: Mapping[str, torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Return copies of the anchors of some slices, or those of an earlier :meth:`snapshot`."""
        pieces = list(pieces)
        for piece in pieces:
            self.info_of(piece)
        with self.lock:
            whole = self._whole if snapshot is None else snapshot
            return [whole[piece.name][_index(piece, ())].clone() for piece in pieces]

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return copies of the weights of the full model, by canonical name."""
        with self.lock:
            return {name: tensor.clone() for name, tensor in self._whole.items()}

    def check(self, slot: int, fragment: int, changes: Mapping[Slice, torch.Tensor]) -> None:
        """Raise ServiceError unless ``changes`` cover the parameters that the group trains in the
        fragment, and no others.
        """
        counted: dict[str, int] = {}
        for piece in changes:
            info = self.info_of(piece)
            counted[info.name] = counted.get(info.name, 0) + torch.Size(piece.shape).numel()
        expected = {
            info.name: info.numel
            for info in self.layout.held(slot)
            if info.trainable and self.fragments[info.name] == fragment
        }
        wrong = next((name for name in {*counted, *expected} if counted.get(name) != expected.get(name)), None)
        if wrong is not None:
            raise ServiceError(
                f"group {slot} delivers {counted.get(wrong, 0)} elements of {wrong} in fragment {fragment}, not "
                f"{expected.get(wrong, 0)}"
            )

    @torch.no_grad()
    def step(self, fragment: int, deliveries: Sequence[Delivery]) -> None:
        """Let the outer optimizer step on every unit of ``fragment`` that was delivered.

        Its gradient is the mean of the changes, weighted by the tokens of the groups.
        """
        gradients: dict[str, torch.Tensor] = {}
        tokens: dict[str, int] = {}
        ordered = sorted(deliveries, key=lambda delivery: delivery.slot)
        for delivery in ordered:
            for name in {self.info_of(piece).name for piece in delivery.changes}:
                tokens[name] = tokens.get(name, 0) + delivery.tokens
        for delivery in ordered:
            for piece, change in delivery.changes.items():
                info = self.info_of(piece)
                if info.name not in gradients:  # bfloat16 is added in bfloat16, as by an all-reduce
                    gradients[info.name] = torch.zeros(info.shape, dtype=change.dtype)
                share = change.float() * (delivery.tokens / max(1, tokens[info.name]))
                gradients[info.name][_index(piece, _box(info).offset)] += share.to(change.dtype)
        with self.lock:
            for name, gradient in gradients.items():
                if self._sync.single_holder == "skip" and len(self._infos[name].holders) == 1:
                    self._tensors[name].sub_(gradient)  # its weights become the anchor
                else:
                    self._tensors[name].grad = gradient.float()
            self.optimizer.step()
            for name in gradients:
                self._tensors[name].grad = None

    # -- state -------------------------------------------------------------------------------------

    def state(self, *, to_load: bool = False) -> dict[str, torch.Tensor]:
        """Return copies of the outer optimizer's state by key ``outer/NAME/KEY``, as a checkpoint
        has it.

        Of slices of one parameter that have no state yet, the state is zero. ``to_load``: return
        zeros for all parameters.
        """
        found: dict[str, torch.Tensor] = {}
        if to_load:
            materialise_state(self.optimizer)
        with self.lock:
            for name, info in self._infos.items():
                for key, value in self.optimizer.state.get(self._tensors[name], {}).items():
                    if not isinstance(value, torch.Tensor):
                        continue
                    full = f"outer/{info.canonical}/{key}"
                    if value.dim() == 0 and info.shape:
                        found[full] = torch.maximum(found[full], value) if full in found else value.clone()
                    else:
                        whole = found.setdefault(full, torch.zeros(info.full_shape, dtype=value.dtype))
                        whole[_index(_box(info), ())] = value
        return found

    @torch.no_grad()
    def load(self, weights: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
        """Take weights and outer state of a checkpoint, in the form of :meth:`snapshot` and
        :meth:`state`.
        """
        materialise_state(self.optimizer)
        for name, tensor in weights.items():
            self._whole[name].copy_(tensor)
        for name, info in self._infos.items():
            values: dict[str, Any] = self.optimizer.state.get(self._tensors[name], {})
            if not any(key.startswith(f"outer/{info.canonical}/") for key in state):
                self.optimizer.state.pop(self._tensors[name], None)
            for key, value in values.items():
                saved = state.get(f"outer/{info.canonical}/{key}")
                if isinstance(value, torch.Tensor) and saved is not None:
                    value.copy_(saved if value.dim() == 0 and info.shape else saved[_index(_box(info), ())])


def _box(info: TensorInfo) -> Slice:
    """Return the place of a parameter, or of a slice of neurons, in the full model's parameter."""
    offset = [0] * len(info.shape)
    if info.cut is not None:
        offset[info.cut.dim] = info.cut.start
    return Slice(info.canonical, tuple(offset), tuple(info.shape))


def _index(piece: Slice, origin: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the index of ``piece`` in a tensor whose first element is at ``origin``."""
    origin = origin or (0,) * len(piece.offset)
    return tuple(
        slice(start - low, start - low + size)
        for start, size, low in zip(piece.offset, piece.shape, origin, strict=True)
    )
