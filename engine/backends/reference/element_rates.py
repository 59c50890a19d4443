"""Learning rates by holders for whole parameters, of which slices have holders of their own."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from ...optim.rate_scale import HolderScale, ScaledRates
from ...placement.layout import Layout
from .local_steps import ones_along


def scale_rates(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    layout: Layout,
    scale: HolderScale,
) -> None:
    """Give each unit a learning rate by its number of holders.

    Args:
        optimizer: The optimizer of the whole parameters.
        parameters: The parameters of the full model, by name.
        layout: The units and their holders.
        scale: The factor of a unit.
    """
    elementwise: dict[Tensor, Tensor] = {}
    for unit, holders in zip(layout.units, layout.placement.holders, strict=True):
        for part in unit.slices:
            if part.dim is not None:
                parameter = parameters[part.parameter]
                if parameter not in elementwise:
                    elementwise[parameter] = ones_along(parameter, part.dim)
                part.of(elementwise[parameter]).fill_(scale.of(unit.name, holders))
    infos = layout.parameters
    whole = {id(p): scale.of(infos[name].unit, infos[name].holders) for name, p in parameters.items()}
    ScaledRates(optimizer, lambda _, p: 1.0 if p in elementwise else whole[id(p)], elementwise)
