"""``sdp.ops``: the names of DeepSpeed's optimizers, as optimizers of torch with the same arguments
and results.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..optim.own_optimizers import Lion
from .namespace import attributes, refusing

__path__: list[str] = []


class FusedAdam(torch.optim.Adam):
    """Adam or AdamW in torch's kernels, with the arguments of ``deepspeed.ops.adam.FusedAdam``."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ):
        """Make the optimizer.

        Args:
            params: Parameters, or parameter groups.
            lr: The learning rate.
            bias_correction: Must be True.
            betas: The decay rates of the moments.
            eps: Added to the root of the second moment.
            adam_w_mode: Whether weight decay is decoupled (AdamW).
            weight_decay: The weight decay.
            amsgrad: Whether to use the largest second moment so far.
            set_grad_none: Has no effect.
        """
        if not bias_correction:
            raise ValueError("FusedAdam: bias_correction must be True here; give the optimizer in the configuration")
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
            decoupled_weight_decay=adam_w_mode
        )  # fmt: skip


class DeepSpeedCPUAdam(FusedAdam):
    """The same optimizer, with the arguments of ``deepspeed.ops.adam.DeepSpeedCPUAdam``."""

    optimizer_id = 0

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ):
        """Make the optimizer.

        Args:
            model_params: Parameters, or parameter groups.
            lr: The learning rate.
            bias_correction: Must be True.
            betas: The decay rates of the moments.
            eps: Added to the root of the second moment.
            weight_decay: The weight decay.
            amsgrad: Whether to use the largest second moment so far.
            adamw_mode: Whether weight decay is decoupled (AdamW).
            fp32_optimizer_states: Has no effect: states have the type of the master weights,
                float32.
        """
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """torch's Adagrad, with the arguments of ``deepspeed.ops.adagrad.DeepSpeedCPUAdagrad``."""

    def __init__(
        self, model_params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0, amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ):  # fmt: skip
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class FusedLion(Lion):
    """Lion, with the arguments of ``deepspeed.ops.lion.FusedLion``."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0,
        set_grad_none: bool = True, fp32_optimizer_states: bool = True,
    ):  # fmt: skip
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


DeepSpeedCPULion = FusedLion
FusedLamb = refusing(
    "ops.lamb.FusedLamb", 'LAMB needs the norms of whole layers; give {"type": "Lamb"} in the configuration'
)
OnebitAdam = refusing("ops.OnebitAdam", "1-bit optimizers are not supported")
OnebitLamb = refusing("ops.OnebitLamb", "1-bit optimizers are not supported")
ZeroOneAdam = refusing("ops.ZeroOneAdam", "1-bit optimizers are not supported")
DeepSpeedTransformerConfig = refusing(
    "ops.DeepSpeedTransformerConfig", "DeepSpeed's transformer kernels are not supported"
)
DeepSpeedTransformerLayer = refusing(
    "ops.DeepSpeedTransformerLayer", "DeepSpeed's transformer kernels are not supported"
)
adam = adagrad = lamb = lion = sys.modules[__name__]  # deepspeed.ops.adam and others

__getattr__ = attributes(__name__)
