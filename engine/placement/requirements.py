"""Refuses layouts that cannot work, such as neurons that cannot be cut evenly among ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ..distributed.mesh import Mesh
from ..distributed.tensor_parallel import TP
from ..errors import ConfigError, ModelError
from ..model_interface import get_random_options
from .placement import Placement
from .units import Unit


def require_inside(units: Sequence[Unit], blocks: Sequence[str]) -> None:
    for unit in units:
        if not any(unit.name.startswith(f"{block}.") for block in blocks):
            raise ModelError(
                f'{unit.name}: is in none of the blocks that "auto" finds '
                f"({', '.join(blocks) or 'there are none'}); branches of neurons must be in the model's blocks "
                "(unit_patterns())"
            )


def require_whole_tensors_if_random(model: nn.Module, mesh: Mesh) -> None:
    """Raise ConfigError for tensor parallelism with a model that draws random numbers.

    Such a model names its options, for example dropout, in ``random_options()``. Every rank draws
    different numbers, but tensor-parallel ranks would need equal numbers for the tensors that all
    of them have.
    """
    options = get_random_options(model)
    if options and mesh.tp > 1:
        raise ConfigError(
            f"{options[0]}: tensor-parallel ranks would draw different numbers; remove this option, or set {TP} to 1"
        )


def require_a_block_in_each_group(placement: Placement, mesh: Mesh) -> None:
    """Raise ModelError if the model has only one block and a group would skip it.

    The model may apply this block several times, so the group would have no layers at all.
    """
    if len(placement.units) == 1 and len(placement.holders[0]) < mesh.sdp:
        raise ModelError(
            f'sdp.units: "auto" finds only one block, {placement.units[0]}, and a group that skips it would have no '
            'layers; use sdp.masking "backward" or sdp.granularity "neuron"'
        )


def require_even(units: Sequence[Unit], cuts: Mapping[str, int | None], ranks: int) -> None:
    """Raise ModelError unless all tensor-parallel ranks get equally many whole neurons of a unit.

    ``cuts`` maps each parameter to the dimension along which tensor parallelism cuts it.
    """
    for unit in units if ranks > 1 else ():
        for part in unit.slices:
            if part.dim is not None and part.dim != cuts[part.parameter]:
                raise ModelError(
                    f"{part.parameter}: neurons lie along dimension {part.dim}, but tensor_parallel_plan() does not "
                    f"cut along it; change the plan, set {TP} to 1"
                    f', or use sdp.granularity "block"'
                )
        if unit.neurons % ranks:
            raise ModelError(
                f"{unit.name}: {unit.neurons} neurons (in attention, key/value heads) cannot be cut evenly among {TP} "
                f"= {ranks} ranks; choose sdp.neuron_groups so that every group has a multiple of {ranks}"
            )
