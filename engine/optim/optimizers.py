"""Builds optimizers by DeepSpeed's names, with the fused kernels of torch or NVIDIA Apex.

A line in the log always says which implementation is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..config.named_params import AdamParams, SGDParams, check_optimizer_params
from ..config.schema import Config, NamedParams
from ..config.section import parse_section
from ..errors import ConfigError
from .apex import ApexFusedAdam, apex_kernel
from .muon.setup import build_muon
from .param_groups import Parameters


def build_optimizer(
    type: str, params: Mapping[str, Any], parameters: Parameters, device: torch.device
) -> tuple[Optimizer, str]:
    """Build the optimizer of the configuration's ``optimizer`` section.

    Args:
        type: "AdamW", "Adam", "FusedAdam", "SGD" or "Muon". Upper and lower case do not matter.
        params: The section's ``params``.
        parameters: Parameters or parameter groups, as plain tensors or DTensors.
        device: The device of the parameters.

    Returns:
        The optimizer, and a line that says which implementation is used and why.

    Raises:
        ConfigError: The type or a key is unknown, or a value has the wrong type.
    """
    builders = {
        "AdamW": _build_adam,
        "Adam": _build_adam,
        "FusedAdam": _build_adam,
        "SGD": _build_sgd,
        "Muon": build_muon,
    }
    name = check_optimizer_params(type, params)
    return builders[name](name, params, list(parameters), device)


def make_optimizer(
    section: NamedParams | None,
    given: Any,
    param_groups: list[dict[str, Any]],
    device: torch.device,
    *,
    grouped: bool,
    arrangement: str = "",
) -> tuple[Optimizer, str]:
    """Make this rank's optimizer over ``param_groups``.

    Args:
        section: The configuration's ``optimizer`` section. None means AdamW.
        given: The user's choice, or None. It takes precedence over ``section``. It is an optimizer
            over the uncut model, whose groups are replaced, or a function that makes an optimizer.
        param_groups: The parameter groups of this rank.
        device: The device of the parameters.
        grouped: Whether a ``given`` function gets the groups. If not, it gets the list of
            parameters of the only group, as with DeepSpeed.
        arrangement: How the parameters are arranged. This text ends the line.

    Returns:
        The optimizer, and a line that says which one it is.
    """
    if isinstance(given, Optimizer):
        given.param_groups.clear()
        for group in param_groups:
            given.add_param_group(group)
        return given, f"optimizer: {type(given).__name__}, as given to sdp.initialize{arrangement}"
    if given is not None:
        built = given(param_groups if grouped else param_groups[0]["params"])
        return built, f"optimizer: {type(built).__name__}, as given to sdp.initialize{arrangement}"
    built, note = build_optimizer(
        section.type if section else "AdamW", section.params if section else {}, param_groups, device
    )
    return built, f"optimizer: {note}{arrangement}{'' if section else ' (the configuration names none)'}"


def _build_adam(
    name: str, params: Mapping[str, Any], parameters: list[Any], device: torch.device
) -> tuple[Optimizer, str]:
    settings = parse_section(AdamParams, params, "optimizer.params")
    decoupled = name == "AdamW" or settings.adam_w_mode
    chosen = settings.model_dump(include={"lr", "eps", "weight_decay"})
    chosen["betas"] = (settings.betas[0], settings.betas[1])
    note = ""
    if name == "FusedAdam":
        kernel, reason = apex_kernel(device)
        if kernel is not None:
            return ApexFusedAdam(parameters, kernel, **chosen, decoupled=decoupled), f"{name}: {reason}"
        note = f", because {reason}"
    implementation = torch.optim.AdamW if decoupled else torch.optim.Adam
    label = f"{name}: torch.optim.{implementation.__name__}"
    obstacle = _obstacle_to_fusing(implementation, device)
    if obstacle is None:
        return implementation(parameters, **chosen, fused=True), f"{label}, fused{note}"
    line = f"{label}, foreach, because fused fails here ({obstacle}){note}"
    return implementation(parameters, **chosen, foreach=True), line


def check_optimizer(config: Config, given: Any) -> None:
    """Refuse Muon where no rank has whole matrices.

    Args:
        config: The run's configuration.
        given: The optimizer that the script passes in place of the configuration's, or None.

    Raises:
        ConfigError: The optimizer cannot be honoured. The message has one line.
    """
    if given is not None or config.optimizer is None or config.optimizer.type.lower() != "muon":
        return
    obstacle = ('sdp.engine "deepspeed"', 'use "fsdp2"') if config.sdp.engine == "deepspeed" else None
    if config.zero_optimization.offloads:
        obstacle = ("zero_optimization.offload_optimizer", "remove the offload")
    if obstacle is not None:
        raise ConfigError(
            f'optimizer.type: "{config.optimizer.type}" gathers matrices on the device, which is not possible '
            f"with {obstacle[0]}; {obstacle[1]}, or take AdamW"
        )


def _obstacle_to_fusing(implementation: type[torch.optim.Adam], device: torch.device) -> str | None:
    """Return why torch has no fused kernel on ``device``, or None if it has one.

    torch reports this only in the first step, so this function tries one step.
    """
    probe = nn.Parameter(torch.zeros(1, device=device))
    probe.grad = torch.zeros_like(probe)
    try:
        implementation([probe], fused=True).step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def _build_sgd(
    name: str, params: Mapping[str, Any], parameters: list[Any], device: torch.device
) -> tuple[Optimizer, str]:
    settings = parse_section(SGDParams, params, "optimizer.params")
    if settings.nesterov and (settings.momentum == 0 or settings.dampening != 0):
        raise ConfigError("optimizer.params.nesterov: needs momentum above 0 and dampening 0")
    optimizer = torch.optim.SGD(parameters, **settings.model_dump(), foreach=True)
    return optimizer, f"{name}: torch.optim.SGD, foreach, because torch's fused SGD does not take sharded parameters"
