"""Apex's fused Adam kernel on plain tensors and on the shards of DTensors."""

from __future__ import annotations

import importlib
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed.tensors import local_tensor
from .param_groups import Parameters


class AdamKernel:
    """Apex's multi-tensor Adam kernel on one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._apply = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
        self._adam = importlib.import_module("amp_C").multi_tensor_adam
        self._overflow = torch.zeros(1, dtype=torch.int, device=device)

    def __call__(self, tensors: list[list[Tensor]], group: Mapping[str, Any], step: int, decoupled: bool) -> None:
        """Update in place; ``tensors`` are gradients, parameters, first and second moments."""
        beta1, beta2 = group["betas"]
        mode, bias_correction = int(decoupled), 1
        self._apply(
            *(self._adam, self._overflow, tensors),
            *(group["lr"], beta1, beta2, group["eps"], step, mode, bias_correction, group["weight_decay"]),
        )


def apex_kernel(device: torch.device) -> tuple[AdamKernel | None, str]:
    """Apex's kernel where it can be used on ``device``, and a phrase that names it or the reason against it."""
    if device.type != "cuda":
        return None, f"NVIDIA Apex's kernel needs CUDA and this run is on {device.type}"
    if importlib.util.find_spec("apex") is None:
        return None, "NVIDIA Apex is not installed"
    # amp_C is asked for first: PyPI's package of the same name should not even be imported.
    if importlib.util.find_spec("amp_C") is None:
        return None, (
            "the installed package apex has no amp_C: it is PyPI's unrelated project of that name, "
            "or NVIDIA Apex without its CUDA extensions (install NVIDIA's from github.com/NVIDIA/apex)"
        )
    try:
        importlib.import_module("apex.optimizers").FusedAdam  # noqa: B018 - its absence is what is tested
        return AdamKernel(device), "the kernel of NVIDIA Apex's apex.optimizers.FusedAdam"
    except (ImportError, AttributeError, RuntimeError) as error:
        return None, f"the installed package apex cannot be used ({error})"


class ApexFusedAdam(Optimizer):
    """Apex's FusedAdam for sharded parameters, with the state of ``torch.optim.AdamW``.

    Apex's own class hands tensors to CUDA as they are, which a DTensor does not survive, and keeps the step in the
    parameter group. This one hands over local shards, and its state (step, exp_avg, exp_avg_sq per parameter) loads
    into torch's AdamW and back. ``kernel`` is called as :class:`AdamKernel`.
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
        """Update every parameter that has a gradient; a ``closure`` is evaluated first, and its result returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for (_, step), tensors in self._buckets(group["params"]).items():
                self._kernel([list(column) for column in zip(*tensors, strict=True)], group, step, self._decoupled)
        return loss

    def _buckets(self, parameters: list[nn.Parameter]) -> dict[tuple[torch.dtype, int], list[tuple[Tensor, ...]]]:
        """Local (gradient, parameter, first, second moment), by dtype and step: one kernel launch takes one of each."""
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
            # An empty shard at the end of the list would keep the kernel from its last launch.
            if local[1].numel():
                buckets[parameter.dtype, int(state["step"])].append(tuple(local))
        return buckets
