"""Scales what a unit adds to the hidden state (``sdp.branch_scale``).

If k of N groups hold a unit, the unit adds, on average over the groups, k / N of what it adds in
the full model. There are two ways to correct for this:

- "train" multiplies by N / k wherever a subnetwork runs: in training, and when a group's own
  subnetwork is evaluated.
- "eval" multiplies by k / N when the full model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..placement.layout import Layout
from ..placement.units import Unit, goes_into_sum
from .carve import PassThrough, hidden_state, signature_of
from .neurons import Slices


class BranchScale:
    """Scales the units of a model, each with a factor of its own.

    Normally, a unit has its factor for a subnetwork. Inside :meth:`of_full_model`, it has its
    factor for the full model.
    """

    def __init__(self, layout: Layout):
        self._layout = layout
        self._full = False
        self._layers: dict[str, tuple[Slices, dict[int, Unit]]] = {}  # by the parameter's name

    def factor(self, unit: Unit) -> float:
        """Return the number by which the contribution of ``unit`` is multiplied now."""
        if self._layout.keeps_frozen:
            return 1.0
        share = len(self._layout.placement.holders[unit.index]) / self._layout.mesh.sdp
        if self._layout.branch_scale == "train" and not self._full:
            return 1 / share
        return share if self._layout.branch_scale == "eval" and self._full else 1.0

    @contextmanager
    def of_full_model(self) -> Iterator[None]:
        """A context in which each unit's contribution has the factor for the full model."""
        self._switch(full=True)
        try:
            yield
        finally:
            self._switch(full=False)

    def _switch(self, *, full: bool) -> None:
        self._full = full
        for slices, units in self._layers.values():
            slices.factors = {index: self.factor(unit) for index, unit in units.items()}

    def use(self, layout: Layout) -> None:
        """Use the factors of ``layout`` from now on, for example in a new phase of a schedule."""
        self._layout = layout
        self._switch(full=self._full)

    def install(self, model: nn.Module) -> None:
        """Make the units of ``model`` scale their contributions, by hooks or by factors of slices.

        Skipped blocks are scaled, too, because they run when the full model is evaluated. A second
        call, for a rebuilt ``model``, replaces the slices of the first model.
        """
        if self._layout.branch_scale == "none":
            return
        for unit in self._layout.units:
            if unit.is_block and len(self._layout.placement.holders[unit.index]) < self._layout.mesh.sdp:
                block = model.get_submodule(unit.name)
                block = block.skeleton if isinstance(block, PassThrough) else block
                block.register_forward_hook(self._scaled(unit, block), with_kwargs=True)
        units = {unit.name: unit for unit in self._layout.units}
        for name, infos in self._layout.wholes.items():
            path, _, key = name.rpartition(".")
            if infos[0].cut is not None and goes_into_sum(name, infos[0].cut.dim):
                layer: Any = model.get_submodule(path)
                indices = {int(info.name.rpartition(":")[2]): units[info.unit] for info in infos}
                self._layers[name] = layer.slices[key], indices
        self._switch(full=False)

    def _scaled(self, unit: Unit, block: nn.Module) -> Callable[..., Any]:
        signature = signature_of(block)

        def scaled(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            factor = self.factor(unit)
            if factor == 1.0:
                return output
            hidden = hidden_state(unit.name, signature, args, kwargs)
            leaves, spec = tree_flatten(output)
            position = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
            leaves[position] = hidden + factor * (leaves[position] - hidden)
            return tree_unflatten(leaves, spec)

        return scaled
