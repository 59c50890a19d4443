"""What the groups of the reference run in place of the blocks that they do not hold."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ...placement.layout import Layout
from ...subnetwork.carve import PassThrough, frozen_view, refuse_together


def make_stand_ins(module: nn.Module, layout: Layout, group: int) -> dict[str, nn.Module]:
    """Make the stand-ins of ``group`` by block: views that are not trained, or pass-throughs.

    Args:
        module: The full model.
        layout: The layout of one phase of the run, which says whether groups run frozen copies.
        group: The index of the group.
    """
    absent = [unit.name for unit in layout.units if unit.is_block and not layout.placement.holds(group, unit.index)]
    if layout.keeps_frozen:
        return {name: frozen_view(module.get_submodule(name)) for name in absent}
    skipped: dict[str, Any] = {name: PassThrough(name, copy.deepcopy(module.get_submodule(name))) for name in absent}
    refuse_together(module, skipped.values())
    return skipped


def cast_inputs(modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Make each module cast its floating-point inputs to ``dtype``."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    for module in modules:
        module.register_forward_pre_hook(lambda _, args, kwargs: tree_map(cast, (args, kwargs)), with_kwargs=True)
