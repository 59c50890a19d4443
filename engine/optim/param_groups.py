"""Parameter groups of an optimizer, by the canonical names of the full model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigError
from ..placement.layout import Layout

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


def named_groups(
    model_parameters: Iterable[Any] | None, optimizer: Any, names: Mapping[int, str]
) -> tuple[list[dict[str, Any]], bool]:
    """Parameter groups with canonical names in place of the uncut model's parameters, and whether the user gave groups."""
    if isinstance(optimizer, Optimizer):
        if optimizer.state:
            raise ConfigError(
                "sdp.initialize: the optimizer has stepped before, or makes state as it is made, as Adagrad does; give one without state"
            )
        given: list[Any] = optimizer.param_groups
    elif model_parameters is not None:
        given = list(model_parameters)
    else:
        return [{"params": list(names.values())}], False
    grouped = bool(given) and isinstance(given[0], Mapping)
    if not grouped:
        given = [{"params": given}]
    groups = []
    for group in given:
        parameters = group["params"]
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        unknown = [p for p in parameters if id(p) not in names]
        if unknown:
            raise ConfigError(
                f"sdp.initialize: a parameter of shape {tuple(unknown[0].shape)} is given to the optimizer but is none of the model's"
            )
        groups.append({**group, "params": [names[id(p)] for p in parameters]})
    return groups, grouped


def freeze_others(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
    """What no group trains needs no gradient: it would be averaged and kept for nothing, and counted in the norm."""
    trained = {name for group in groups for name in group["params"]}
    for name, parameter in model.named_parameters():
        if name not in trained:
            parameter.requires_grad_(False)


def groups_here(
    groups: list[dict[str, Any]], layout: Layout, parameters: Mapping[str, nn.Parameter]
) -> list[dict[str, Any]]:
    """The groups with this rank's parameters, or slices; a group may become empty, so that all ranks have the same groups."""
    here = []
    for group in groups:
        held = [
            parameters[info.name] for name in group["params"] for info in layout.wholes[name] if info.name in parameters
        ]
        here.append({**group, "params": [parameter for parameter in held if parameter.requires_grad]})
    return here
