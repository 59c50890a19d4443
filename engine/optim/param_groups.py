"""Parameter groups that list parameters by their canonical names in the full model."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigError, quote
from ..placement.layout import Layout

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


def named_groups(
    model_parameters: Iterable[Any] | None, optimizer: Any, names: Mapping[int, str]
) -> tuple[list[dict[str, Any]], bool]:
    """Return the user's parameter groups, with canonical names in place of parameters.

    Args:
        model_parameters: The user's parameters, pairs of name and parameter, or parameter groups.
            None means all parameters.
        optimizer: The user's optimizer over the uncut model, a function that makes one, or None.
        names: The canonical name of each parameter of the uncut model, by ``id``.

    Returns:
        The groups, and whether the user gave groups.

    Raises:
        ConfigError: The optimizer has state already, or a parameter is not one of the model's.
    """
    if isinstance(optimizer, Optimizer):
        if optimizer.state:
            raise ConfigError(
                "sdp.initialize: the optimizer already has state, from earlier steps or (as Adagrad) from the start; "
                "give an optimizer without state"
            )
        given: list[Any] = optimizer.param_groups
    elif model_parameters is not None:
        given = [model_parameters] if isinstance(model_parameters, Mapping) else list(model_parameters)
    else:
        return [{"params": list(names.values())}], False
    grouped = bool(given) and isinstance(given[0], Mapping)
    if not grouped:
        given = [{"params": given}]
    param_groups = []
    for group in given:
        parameters = group["params"]
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # Pairs of name and parameter, as of model.named_parameters(). Canonical names replace the
        # names.
        parameters = [parameter[1] if isinstance(parameter, tuple) else parameter for parameter in parameters]
        unknown = [p for p in parameters if id(p) not in names]
        if unknown:
            raise ConfigError(
                f"sdp.initialize: a parameter of shape {tuple(unknown[0].shape)} is given to the optimizer but is not "
                "in the model"
            )
        options = {key: value for key, value in group.items() if key != "param_names"}
        param_groups.append({**options, "params": [names[id(p)] for p in parameters]})
    return param_groups, grouped


def without_decay(
    param_groups: list[dict[str, Any]], model: nn.Module, patterns: Sequence[str]
) -> list[dict[str, Any]]:
    """Move parameters that fit ``patterns`` into groups of their own, without weight decay.

    Args:
        param_groups: Groups that list canonical names, with the user's options.
        model: The uncut model.
        patterns: "norms" (all of a module whose class has Norm in its name), "biases" (names that
            end in bias), "embeddings" (all of torch's Embedding), or patterns of names with ``*``.

    Raises:
        ConfigError: A pattern fits no parameter.
    """
    if not patterns:
        return param_groups
    kinds: dict[str, set[str]] = {"norms": set(), "biases": set(), "embeddings": set()}
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        members = {canonical[id(parameter)] for parameter in module.parameters(recurse=False)}
        if "norm" in type(module).__name__.lower():
            kinds["norms"] |= members
        if isinstance(module, nn.Embedding):
            kinds["embeddings"] |= members
    kinds["biases"] = {name for name in canonical.values() if name.rpartition(".")[2] == "bias"}
    exempt: set[str] = set()
    for pattern in patterns:
        found = kinds[pattern] if pattern in kinds else set(fnmatch.filter(canonical.values(), pattern))
        if not found and pattern not in kinds:  # many models have no biases
            raise ConfigError(
                f"optimizer.params.no_decay: {quote(pattern)} fits no parameter; name norms, biases, embeddings, or a "
                "pattern such as model.layers.*.norm.weight"
            )
        exempt |= found
    split = []
    for group in param_groups:
        decayed = [name for name in group["params"] if name not in exempt]
        rest = [name for name in group["params"] if name in exempt]
        split += [{**group, "params": decayed}, {**group, "params": rest, "weight_decay": 0.0}]
    return [group for group in split if group["params"]]


def freeze_others(model: nn.Module, param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Freeze the parameters that are in no parameter group.

    Otherwise their gradients would be averaged and stored for nothing, and would count in the norm.
    """
    trained = {name for group in param_groups for name in group["params"]}
    for name, parameter in model.named_parameters():
        if name not in trained:
            parameter.requires_grad_(False)


def groups_here(
    param_groups: list[dict[str, Any]], layout: Layout, parameters: Mapping[str, nn.Parameter]
) -> list[dict[str, Any]]:
    """Replace canonical names in the groups by the parameters or slices that this rank has.

    Empty groups are kept, so that all ranks have the same groups.
    """
    groups = []
    for group in param_groups:
        held = [
            parameters[info.name]
            for path in group["params"]
            for info in layout.by_path[path]
            if info.name in parameters
        ]
        groups.append({**group, "params": [parameter for parameter in held if parameter.requires_grad]})
    return groups


def named_rates(optimizer: Optimizer, names: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the learning rate of each parameter, by canonical name.

    ``names`` has the canonical names of the parameters in each parameter group.
    """
    pairs = zip(optimizer.param_groups, names, strict=True)
    return {name: float(group["lr"]) for group, members in pairs for name in members}


def conflicting_rates(names: Sequence[Sequence[str]], rates: Mapping[str, float]) -> str | None:
    """Return why saved ``rates`` do not fit the parameter groups, or None if they fit.

    They do not fit if parameters of one group have different rates. ``names`` has the canonical
    names of the parameters in each group, and ``rates`` has the rate of each parameter.
    """
    for members in names:
        known = [name for name in members if name in rates]
        other = next((name for name in known if rates[name] != rates[known[0]]), None)
        if other is not None:
            return (
                f"has the learning rate {rates[known[0]]:g} for {known[0]} and {rates[other]:g} for {other}, which "
                "are in one group of this optimizer; make the same parameter groups as in the run that saved"
            )
    return None


def set_rates(optimizer: Optimizer, names: Sequence[Sequence[str]], rates: Mapping[str, float]) -> None:
    """Set the learning rate of each parameter group to the rate of its parameters in ``rates``.

    A group keeps its rate if ``rates`` has none of its parameters. ``names`` has the canonical
    names of the parameters in each group.
    """
    for group, members in zip(optimizer.param_groups, names, strict=True):
        rate = next((rates[name] for name in members if name in rates), group["lr"])
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)  # the optimizer's kernels read this tensor
        else:
            group["lr"] = rate
