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
from ..placement.tensor_info import Shard, TensorInfo
from .dcp import Part

Tensors = dict[str, Any]


class LocalState:
    """This process's share of the tensors, which a load fills in place."""

    def __init__(self, backend: Backend):
        self._backend, self._layout = backend, backend.layout
        self._counts: list[OptimizerState] = []
        self._twins: list[tuple[torch.Tensor, torch.Tensor]] = []  # scalars that slices share: first, and another's

    def tensors(self) -> Tensors:
        """Return the tensors of all groups and what they have in common, by key. Nothing may be under way."""
        local = self._backend.local
        assert local is not None
        self._counts, self._twins = [], []
        found = self.outer()
        for name, mean in local.common_part().means.items():
            found = self._merged(
                found, f"travelling/{self._layout.parameters[name].canonical}", self._whole(name, mean)
            )
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
            canonical = self._layout.parameters[name].canonical
            for key, value in states.of(anchor, canonical).items():
                of = self._whole(name, value) if value.shape == anchor.shape else value
                found = self._merged(found, f"outer/{canonical}/{key}", of)
        return found

    def model(self) -> Tensors:
        """Return the weights of the full model by key: anchors, and parameters that are not trained."""
        local, found = self._backend.local, Tensors()
        assert local is not None
        for name, weight in {**self._backend.parameters, **local.common_part().anchors}.items():
            key = f"model/{self._layout.parameters[name].canonical}"
            found = self._merged(found, key, self._whole(name, weight.detach()))
        return found

    def moments(self, part: GroupPart) -> Tensors:
        """Return the inner optimizer's state by key ``optimizer/NAME/KEY``, as parts of the full parameters."""
        states, found = OptimizerState(part.optimizer), Tensors()
        self._counts.append(states)
        for name, parameter in part.parameters.items():
            info = self._layout.parameters[name]
            for key, value in states.of(parameter, info.canonical).items():
                tensor = local_tensor(value)
                same = tensor.shape == part.weights[name].shape and tensor.dim() > 0
                of = self._whole(name, tensor) if same else value
                found = self._merged(found, f"optimizer/{info.canonical}/{key}", of)
        return found

    def finish_load(self) -> None:
        """Apply loaded scalars to all slices of a parameter, and to optimizers that keep them as plain numbers."""
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
                if tensor is not None:
                    found |= {f"{start}/{kind}/{piece}": of for piece, of in self._pieces(part.group, name, tensor)}
            canonical = self._layout.parameters[name].canonical
            for key, value in states.of(part.parameters[name], canonical).items():
                tensor = local_tensor(value)
                if tensor.shape == weight.shape and tensor.dim():
                    pieces = self._pieces(part.group, name, tensor)
                    found |= {f"{start}/optimizer/{piece}/{key}": of for piece, of in pieces}
                else:
                    found = self._merged(found, f"{start}/optimizer/{canonical}/{key}", value)
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

    def _whole(self, name: str, tensor: torch.Tensor) -> Part:
        """Return a tensor of a parameter's shape as a part of the full parameter."""
        info = self._layout.parameters[name]
        return Part([local_tensor(tensor)], [info.offset(self._backend.shard)], info.full_shape)

    def _pieces(self, group: int, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, Part]]:
        """Yield the pieces of a parameter that ``group`` holds, by their names."""
        info, shard = self._layout.parameters[name], self._backend.shard
        if info.cut is not None:
            yield f"{info.canonical}@{info.cut.dim}:{info.cut.start}", _within_slice(info, tensor, shard)
            return
        sliced = [(part, holders) for part, holders in self._layout.slices() if part.parameter == name]
        if not sliced:
            yield name, self._whole(name, tensor)
        for part, holders in sliced:  # only the reference has whole parameters of which slices are held
            if group in holders:
                assert part.dim is not None
                ((first, last),) = part.ranges
                held = tensor.narrow(part.dim, first, last - first)
                yield f"{name}@{part.dim}:{first}", Part([held], [[0] * held.dim()], held.shape)


def _within_slice(info: TensorInfo, tensor: torch.Tensor, shard: Shard) -> Part:
    assert info.cut is not None
    offset = list(info.offset(shard))
    offset[info.cut.dim] -= info.cut.start
    return Part([local_tensor(tensor)], [offset], info.shape)
