"""The tensors of a checkpoint that was written between two averages of local steps (``sdp.sync``).

The full model (``model/NAME``) is the anchors, so any layout can read it. Besides, there are

- ``outer/NAME/KEY``: the state of the outer optimizer, and ``travelling/NAME``: changes that have
  been averaged and are not applied yet. They are equal at all holders.
- ``local/GROUP/model/PIECE`` and ``local/GROUP/optimizer/PIECE/KEY``: the weights and the optimizer
  state of each group. ``local/GROUP/before/PIECE`` and ``local/GROUP/error/PIECE`` are the weights
  at the start of an average under way, and what compression has not sent.
- ``local/POSITION/buffer/NAME``: the running statistics of each rank.

PIECE is the name of a parameter, or ``NAME@DIM:START`` for a slice that begins at START.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..backend import Backend, GroupPart
from ..distributed.tensors import local_tensor
from ..optim.optimizer_state import OptimizerState
from ..placement.tensor_info import TensorInfo
from .storage.dcp import Part

Tensors = dict[str, Any]


class LocalState:
    """This process's share of the tensors, which a load fills in place."""

    def __init__(self, backend: Backend):
        self._backend, self._layout = backend, backend.layout
        self._counts: list[OptimizerState] = []
        self._twins: list[tuple[torch.Tensor, torch.Tensor]] = []  # scalars that slices share: first, and another's

    def tensors(self) -> Tensors:
        """Return the tensors of all groups and what they have in common, by key.

        Nothing may be under way.
        """
        local = self._backend.local
        assert local is not None
        self._counts, self._twins = [], []
        found = self.outer()
        for name, mean in local.common_part().means.items():
            found = self._merged(found, f"travelling/{self._info(name).canonical}", self._whole(name, mean))
        for part in local.groups_here():
            found |= self._of_group(part)
        return found

    def outer(self) -> Tensors:
        """Return the state of the outer optimizer by key."""
        local = self._backend.local
        assert local is not None
        common = local.common_part()
        states, found = OptimizerState(common.optimizer), Tensors()
        self._counts.append(states)
        for name, anchor in common.anchors.items():
            canonical = self._info(name).canonical
            for key, value in states.of(anchor, canonical).items():
                of = self._whole(name, value) if value.shape == anchor.shape else value
                found = self._merged(found, f"outer/{canonical}/{key}", of)
        return found

    def model(self) -> Tensors:
        """Return the weights of the full model by key: anchors, and parameters that are not
        trained.
        """
        local, found = self._backend.local, Tensors()
        assert local is not None
        for name, weight in {**local.untrained(), **local.common_part().anchors}.items():
            key = f"model/{self._info(name).canonical}"
            found = self._merged(found, key, self._whole(name, weight.detach()))
        return found

    def moments(self, part: GroupPart) -> Tensors:
        """Return the inner optimizer's state by key ``optimizer/NAME/KEY``, as parts of the full
        parameters.
        """
        states, found = OptimizerState(part.optimizer), Tensors()
        self._counts.append(states)
        for name in part.weights:
            for key, value, is_part in self._state_of(part, states, name):
                full_key = f"optimizer/{self._info(name).canonical}/{key}"
                found = self._merged(found, full_key, self._whole(name, value) if is_part else value)
        return found

    def _state_of(self, part: GroupPart, states: OptimizerState, name: str) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Yield the inner optimizer's state of a weight: key, tensor, and whether it has the
        weight's shape.
        """
        owner, weight, flat = part.parameters[name], part.weights[name], part.flat.get(name)
        group = flat.param_group if flat is not None else None
        for key, value in states.of(owner, self._info(name).canonical, group).items():
            tensor = local_tensor(value)
            if flat is not None and tensor.dim() and tensor.shape == owner.shape:
                yield key, tensor[flat.start : flat.start + weight.numel()].view(weight.shape), True
            elif tensor.dim() and tensor.shape == weight.shape:
                yield key, tensor, True
            else:
                yield key, value, False

    def finish_load(self) -> None:
        """Apply loaded scalars to all slices of a parameter, and to optimizers that keep them as
        plain numbers.
        """
        for first, other in self._twins:
            other.copy_(first)
        for states in self._counts:
            states.write_back()

    def _of_group(self, part: GroupPart) -> Tensors:
        found: Tensors = {f"local/{part.position}/buffer/{name}": buffer for name, buffer in part.buffers.items()}
        states = OptimizerState(part.optimizer)
        self._counts.append(states)
        start = f"local/{part.group}"
        for name, weight in part.weights.items():
            kinds = {"model": weight, "error": part.errors.get(name), "before": part.before.get(name)}
            for kind, tensor in kinds.items():
                for piece, of in self._pieces(part.group, name, tensor) if tensor is not None else ():
                    found = self._merged(found, f"{start}/{kind}/{piece}", of)
            for key, value, is_part in self._state_of(part, states, name):
                if is_part:
                    for piece, of in self._pieces(part.group, name, value):
                        found = self._merged(found, f"{start}/optimizer/{piece}/{key}", of)
                else:
                    found = self._merged(found, f"{start}/optimizer/{self._info(name).canonical}/{key}", value)
        return found

    def _merged(self, found: Tensors, key: str, value: Any) -> Tensors:
        """Add a tensor. Parts of one tensor are joined, and of equal scalars the first is kept."""
        if isinstance(value, Part) and key in found:
            found[key] = found[key].joined(value)
        elif key in found:
            self._twins.append((found[key], value))
        else:
            found[key] = value
        return found

    def _info(self, name: str) -> TensorInfo:
        """Return the parameter or slice to which the part of a weight belongs."""
        return self._layout.parameters[self._backend.spot_of(name).name]

    def _whole(self, name: str, tensor: torch.Tensor) -> Part:
        """Return a tensor of a parameter's shape as a part of the full parameter."""
        return Part([local_tensor(tensor)], [self._backend.spot_of(name).offset], self._info(name).full_shape)

    def _pieces(self, group: int, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, Part]]:
        """Yield the pieces of a parameter that ``group`` holds, by their names."""
        info = self._info(name)
        if info.cut is not None:
            offset = self._backend.spot_of(name).offset
            yield f"{info.canonical}@{info.cut.dim}:{info.cut.start}", _within_slice(info, tensor, offset)
            return
        sliced = [(part, holders) for part, holders in self._layout.slices() if part.parameter == name]
        if not sliced:
            yield info.name, self._whole(name, tensor)
        for part, holders in sliced:  # only the reference has whole parameters of which slices are held
            if group in holders:
                assert part.dim is not None
                ((first, last),) = part.ranges
                held = tensor.narrow(part.dim, first, last - first)
                yield f"{name}@{part.dim}:{first}", Part([held], [[0] * held.dim()], held.shape)


def _within_slice(info: TensorInfo, tensor: torch.Tensor, offset: tuple[int, ...]) -> Part:
    assert info.cut is not None
    inside = [at - info.cut.start if dim == info.cut.dim else at for dim, at in enumerate(offset)]
    return Part([local_tensor(tensor)], [inside], info.shape)
