"""Carve a group's subnetwork out of a model: blocks that are not held become parameterless pass-throughs at the same index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .errors import ModelError
from .placement import Placement
from .units import Unit


class PassThrough(nn.Module):
    """Stands where a block is not held and returns its input in the block's own output structure: the skip connection alone.

    It keeps the block's skeleton on the meta device (no memory, not part of the module tree): to learn the structure that the
    block returns, and to run the block as a guest when the full model is evaluated. Plain attributes are the block's own.
    """

    def __init__(self, name: str, block: nn.Module):
        super().__init__()
        self.name = name
        self._hidden = (block.to(device="meta"),)  # in a tuple, so that it does not become a child module
        self._structure: tuple[Any, int] | None = None
        self.training = block.training

    def train(self, mode: bool = True) -> PassThrough:
        """As any module's; the skeleton, which runs as a guest, follows."""
        self.skeleton.train(mode)
        return super().train(mode)

    @property
    def skeleton(self) -> nn.Module:
        """The block on the meta device."""
        return self._hidden[0]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(self.__dict__["_hidden"][0], name)
            if isinstance(value, torch.Tensor | nn.Module):
                raise  # its parameters and children are not here
            return value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _first_tensor(args, kwargs)
        if hidden is None:
            raise ModelError(f"{self.name}: was called without a tensor, so it cannot be skipped; leave it out of sdp.units")
        if self._structure is None:
            self._structure = self._probe(hidden, args, kwargs)
        spec, position = self._structure
        leaves: list[Any] = [None] * spec.num_leaves
        leaves[position] = hidden
        return tree_unflatten(leaves, spec)

    def _probe(self, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """Run the skeleton on the meta device: the tree that the block returns, and which leaf of it is the hidden state."""
        dtype = next((p.dtype for p in self.skeleton.parameters() if p.is_floating_point()), hidden.dtype)

        def to_meta(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return torch.empty_like(value, device="meta", dtype=dtype if value.is_floating_point() else value.dtype)

        meta_args, meta_kwargs = tree_map(to_meta, (args, kwargs))
        with torch.no_grad():
            leaves, spec = tree_flatten(self.skeleton(*meta_args, **meta_kwargs))
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if not tensors or leaves[tensors[0]].shape != hidden.shape:
            found = f"{tuple(leaves[tensors[0]].shape)} from {tuple(hidden.shape)}" if tensors else "no tensor"
            raise ModelError(f"{self.name}: returns {found}, so it cannot be skipped; leave it out of sdp.units or list it in sdp.protect")
        if any(leaf is not None for i, leaf in enumerate(leaves) if i != tensors[0]):
            raise ModelError(f"{self.name}: returns more than its hidden state, so it cannot be skipped; leave it out of sdp.units")
        return spec, tensors[0]


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)


def carve(model: nn.Module, units: Sequence[Unit], placement: Placement, group: int) -> dict[str, PassThrough]:
    """Replace, in place, every unit that ``group`` does not hold; what it held in memory is freed. Returns the stand-ins by unit name."""
    stand_ins = {}
    for unit in units:
        if not placement.holds(group, unit.index):
            stand_ins[unit.name] = PassThrough(unit.name, model.get_submodule(unit.name))
            model.set_submodule(unit.name, stand_ins[unit.name])
    return stand_ins


@contextmanager
def masked(model: nn.Module, stand_ins: dict[str, PassThrough]) -> Iterator[None]:
    """While inside, the modules named by ``stand_ins`` are replaced by them: the subnetwork of one group, cut out of the full model."""
    originals = {name: model.get_submodule(name) for name in stand_ins}
    try:
        for name, stand_in in stand_ins.items():
            model.set_submodule(name, stand_in)
        yield
    finally:
        for name, module in originals.items():
            model.set_submodule(name, module)
