"""NVIDIA Apex's fused Adam kernel, for plain tensors and for the shards of DTensors."""

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
from .closure import call_closure
from .param_groups import Parameters


class AdamKernel:
    """Apex's multi-tensor Adam kernel on one CUDA device."""

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
    """Return Apex's kernel for ``device``, or None, and a phrase for the log.

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
    (step, exp_avg, exp_avg_sq) can be loaded into torch's AdamW and back. ``kernel`` has the
    signature of :class:`AdamKernel`.
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

        A ``closure`` is called before the update, and its result is returned.
        """
        loss = call_closure(closure)
        for group in self.param_groups:
            for (_, step), tensors in self._buckets(group["params"]).items():
                self._kernel([list(column) for column in zip(*tensors, strict=True)], group, step, self._decoupled)
        return loss

    def _buckets(self, parameters: list[nn.Parameter]) -> dict[tuple[torch.dtype, int], list[tuple[Tensor, ...]]]:
        """Group the local tensors by dtype and step. One kernel launch takes one of each.

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
