"""Frozen copies that sleep in phases of forward masking, when a schedule of maskings has both
kinds.

A model is built with its frozen copies. :class:`DormantCopies` puts them aside: pass-throughs
replace whole blocks, and slices of neurons leave their layers. A sleeping block is not in the
module tree, computes nothing, receives nothing and takes no memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..distributed.collectives import local_tensor
from ..placement.layout import Layout
from .carve import PassThrough, refuse_together
from .neurons import Slices


def make_pass_throughs(
    model: nn.Module, layout: Layout, group: int, shared: Iterable[object] = ()
) -> dict[str, PassThrough]:
    """Make the stand-ins of the blocks that ``group`` does not hold, by name. ``model`` stays as it
    is.

    Args:
        model: The model with its frozen copies. Hooks that it has by now work in the stand-ins'
            skeletons, too.
        layout: The layout of the run.
        group: The index of the group.
        shared: Objects that the skeletons have in common with the model, such as communicators.
    """
    absent = [unit.name for unit in layout.units if unit.is_block and not layout.placement.holds(group, unit.index)]
    stand_ins = {name: PassThrough(name, _without_values(model.get_submodule(name), shared)) for name in absent}
    refuse_together(model, stand_ins.values())
    return stand_ins


def _without_values(block: nn.Module, shared: Iterable[object]) -> nn.Module:
    """Copy a block to the meta device."""
    known: dict[int, Any] = {id(one): one for one in shared}
    known |= {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in block.parameters()}
    known |= {id(buffer): buffer.detach().to("meta") for buffer in block.buffers()}
    return copy.deepcopy(block, known)


class DormantCopies:
    """The frozen copies of one rank, awake or asleep. They are awake at first.

    Args:
        model: The rank's model with its frozen copies, sharded, on its device.
        frozen: The frozen copies by name.
        stand_ins: What replaces whole blocks in phases of forward masking.
    """

    def __init__(
        self,
        model: nn.Module,
        frozen: Mapping[str, nn.Parameter],
        stand_ins: Mapping[str, PassThrough],
    ):
        self._model, self.frozen, self.stand_ins = model, frozen, stand_ins
        self._blocks: dict[str, nn.Module] = {}  # those that sleep
        self._layers: list[tuple[nn.Module, Slices]] = []  # those that have frozen slices
        for module in model.modules():
            every: Mapping[str, Slices] = getattr(module, "slices", {})
            self._layers += [(module, slices) for slices in every.values() if slices.frozen]
        self._indices = [list(slices.frozen) for _, slices in self._layers]
        self._sleeping: list[dict[str, nn.Parameter]] = []  # by layer
        self._sizes: dict[str, int] = {}  # bytes of the storages that were freed

    def sleep(self) -> None:
        """Put the copies aside, and free their memory. They must be in their sharded form."""
        for name, stand_in in self.stand_ins.items():
            self._blocks[name] = self._model.get_submodule(name)
            stand_in.training = self._blocks[name].training
            _copy_modes(self._blocks[name], stand_in.skeleton)
            self._model.set_submodule(name, stand_in)
        for layer, slices in self._layers:
            keys = [f"{slices.key}:{index}" for index in slices.frozen]
            self._sleeping.append({key: layer.get_parameter(key) for key in keys})
            for key in keys:
                delattr(layer, key)
            slices.frozen = ()
        for name, storage in self._storages():
            self._sizes[name] = storage.nbytes()
            storage.resize_(0)

    def wake(self) -> None:
        """Put the copies back. Their values are undefined until they are refreshed."""
        for name, storage in self._storages():
            if name in self._sizes:
                storage.resize_(self._sizes.pop(name))
        for name, block in self._blocks.items():
            _copy_modes(self.stand_ins[name].skeleton, block)
            self._model.set_submodule(name, block)
        for (layer, slices), indices in zip(self._layers, self._indices, strict=True):
            for key, parameter in self._sleeping.pop(0).items():
                layer.register_parameter(key, parameter)
            slices.frozen = list(indices)
        self._blocks.clear()

    def _storages(self) -> Iterable[tuple[str, torch.UntypedStorage]]:
        """Yield the memory of this rank's part of each copy."""
        return ((name, local_tensor(copied.detach()).untyped_storage()) for name, copied in self.frozen.items())


def _copy_modes(source: nn.Module, target: nn.Module) -> None:
    """Put the modules of ``target`` into training or evaluation mode like those of ``source``."""
    for theirs, own in zip(source.modules(), target.modules(), strict=True):
        own.training = theirs.training
