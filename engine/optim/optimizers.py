"""Builds the optimizer that a configuration names, with fused kernels of torch or NVIDIA Apex.

The names are DeepSpeed's. A line in the log always says which implementation is used.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..config.named_params import AdamParams, SGDParams, check_optimizer_params
from ..config.schema import Config, NamedParams
from ..config.section import parse_section
from ..distributed.collectives import local_tensor
from ..errors import ConfigError
from .muon import build_muon
from .optimizer_state import call_closure
from .param_groups import Parameters
from .small_state import SmallStateAdam

_ADAMS = ("FusedAdam", "DeepSpeedCPUAdam")


def with_torch_kernels(given: Any) -> Any:
    """Return torch's Adam in place of DeepSpeed's, which does not take sharded parameters.

    The result has the parameter groups of ``given``, so a schedule of ``given`` also sets its
    rates. Other optimizers are returned unchanged.

    Raises:
        ConfigError: ``given`` is a DeepSpeed optimizer other than Adam, or has the setting
            ``bias_correction`` false, which torch's Adam does not have.
    """
    kind = type(given)
    if not isinstance(given, torch.optim.Optimizer) or not kind.__module__.startswith("deepspeed."):
        return given
    if kind.__name__ not in _ADAMS:
        raise ConfigError(
            f"optimizer: DeepSpeed's {kind.__name__} does not take sharded parameters; use an optimizer of torch, or "
            'sdp.engine "deepspeed"'
        )
    if not all(group["bias_correction"] for group in given.param_groups):
        raise ConfigError(
            f"optimizer: {kind.__name__} with bias_correction false does not take sharded parameters; use true, or "
            'sdp.engine "deepspeed"'
        )
    adam: Any = given
    decoupled = bool(adam.adam_w_mode)
    settings = {key: adam.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}
    made = torch.optim.Adam(adam.param_groups, **settings, decoupled_weight_decay=decoupled)
    adam.param_groups = made.param_groups
    adam._opt_called = True  # torch's schedules warn of an optimizer that has not stepped
    return made


class AdamKernel:
    """Calls Apex's Adam kernel, which updates many tensors on one CUDA device at once."""

    def __init__(self, device: torch.device) -> None:
        self._apply = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
        self._adam = importlib.import_module("amp_C").multi_tensor_adam
        self._overflow = torch.zeros(1, dtype=torch.int, device=device)

    def __call__(self, tensors: list[list[Tensor]], group: Mapping[str, Any], step: int, decoupled: bool) -> None:
        """Update parameters and moments in place.

        Args:
            tensors: Four lists: gradients, parameters, first moments and second moments.
            group: The parameter group with the settings.
            step: The number of this step, from 1.
            decoupled: Whether weight decay is decoupled, as in AdamW.
        """
        beta1, beta2 = group["betas"]
        mode, bias_correction = int(decoupled), 1
        self._apply(
            *(self._adam, self._overflow, tensors),
            *(group["lr"], beta1, beta2, group["eps"], step, mode, bias_correction, group["weight_decay"]),
        )


def apex_kernel(device: torch.device) -> tuple[AdamKernel | None, str]:
    """Return Apex's Adam kernel for ``device``, or None, with a phrase for the log.

    The phrase names the kernel, or says why it cannot be used.
    """
    if device.type != "cuda":
        return None, f"NVIDIA Apex's kernel needs CUDA and this run is on {device.type}"
    if importlib.util.find_spec("apex") is None:
        return None, "NVIDIA Apex is not installed"
    # Look for amp_C first, so that PyPI's unrelated package named apex is never imported.
    if importlib.util.find_spec("amp_C") is None:
        return None, (
            "the installed package apex has no amp_C: it is PyPI's unrelated project of that name, "
            "or NVIDIA Apex without its CUDA extensions (install NVIDIA's from github.com/NVIDIA/apex)"
        )
    try:
        importlib.import_module("apex.optimizers").FusedAdam  # noqa: B018 - this tests whether the class exists
        return AdamKernel(device), "the kernel of NVIDIA Apex's apex.optimizers.FusedAdam"
    except (ImportError, AttributeError, RuntimeError) as error:
        return None, f"the installed package apex cannot be used ({error})"


class ApexFusedAdam(Optimizer):
    """Apex's FusedAdam for sharded parameters, with the state of ``torch.optim.AdamW``.

    Apex's own class passes tensors to CUDA unchanged, which fails for a DTensor. It also keeps the
    step count in the parameter group. This class passes local shards. Its state per parameter
    (step, exp_avg, exp_avg_sq) can be loaded into torch's AdamW and back. ``kernel`` is an
    :class:`AdamKernel`, or a function with the same arguments.
    """

    def __init__(
        self,
        parameters: Parameters,
        kernel: Callable[..., None],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = True,
    ) -> None:
        self._kernel, self._decoupled = kernel, decoupled
        super().__init__(parameters, {"lr": lr, "eps": eps, "weight_decay": weight_decay, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient.

        If a ``closure`` is given, it is called before the update, and its result is returned.
        """
        loss = call_closure(closure)
        for group in self.param_groups:
            for (_, step), tensors in self._buckets(group["params"]).items():
                self._kernel([list(column) for column in zip(*tensors, strict=True)], group, step, self._decoupled)
        return loss

    def _buckets(self, parameters: list[nn.Parameter]) -> dict[tuple[torch.dtype, int], list[tuple[Tensor, ...]]]:
        """Group the local tensors by dtype and step count, because a kernel launch has one of each.

        Each tuple has a gradient, a parameter, a first moment and a second moment.
        """
        buckets: dict[tuple[torch.dtype, int], list[tuple[Tensor, ...]]] = defaultdict(list)
        for parameter in parameters:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["step"] += 1
            local = [local_tensor(t) for t in (parameter.grad, parameter, state["exp_avg"], state["exp_avg_sq"])]
            # With an empty shard at the end of the list, the kernel would skip its last launch.
            if local[1].numel():
                buckets[parameter.dtype, int(state["step"])].append(tuple(local))
        return buckets


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
    """Make the optimizer of this rank, over ``param_groups``.

    Args:
        section: The configuration's ``optimizer`` section. None means AdamW.
        given: The optimizer that the user passes in place of ``section``, or None. It is an
            optimizer over the uncut model, whose groups are replaced, or a function that makes an
            optimizer.
        param_groups: The parameter groups of this rank.
        device: The device of the parameters.
        grouped: Whether a function ``given`` gets parameter groups. If not, it gets a list of
            parameters, as with DeepSpeed.
        arrangement: A text about the parameter groups, for the end of the line for the log.

    Returns:
        The optimizer, and a line for the log that names it.
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
    if settings.state_dtype != "float32":
        built = SmallStateAdam(parameters, settings.state_dtype, **chosen, decoupled=decoupled)
        return built, f"{name}: SDP's implementation, with moments in {settings.state_dtype} and torch's formulas"
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
    """Raise ConfigError if the configured optimizer cannot run on this engine.

    Muon gathers whole matrices on the device, so it needs FSDP2 without offload. Moments in int8
    have a scale for each block of a row, so DeepSpeed cannot shard them, because it cuts rows.
    Nothing is checked if the script passes an optimizer of its own (``given``).
    """
    if given is not None or config.optimizer is None:
        return
    if config.sdp.engine == "deepspeed" and config.optimizer.params.get("state_dtype") == "int8":
        raise ConfigError(
            'optimizer.params.state_dtype: "int8" has a scale for each block of a row, and ZeRO cuts rows; use '
            '"bfloat16", or sdp.engine "fsdp2"'
        )
    if config.optimizer.type.lower() != "muon":
        return
    obstacle = ('sdp.engine "deepspeed"', 'use "fsdp2"') if config.sdp.engine == "deepspeed" else None
    if config.zero_optimization.offloads:
        obstacle = ("zero_optimization.offload_optimizer", "remove the offload")
    if obstacle is not None:
        raise ConfigError(
            f'optimizer.type: "{config.optimizer.type}" gathers matrices on the device, which is not possible '
            f"with {obstacle[0]}; {obstacle[1]}, or use AdamW"
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
    optimizer = torch.optim.SGD(parameters, **settings.model_dump(exclude={"no_decay"}), foreach=True)
    return optimizer, f"{name}: torch.optim.SGD, foreach, because torch's fused SGD does not take sharded parameters"
