"""The schemas of ``optimizer.params`` and ``scheduler.params``, one for each type.

This file does not import torch, so that a misspelt key is found before a process starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ..errors import ConfigError, shorten, suggestion
from .removed import refuse_removed_keys
from .schema import NamedParams
from .section import Beta, NonNegative, NonNegativeInt, PositiveInt, Section, parse_section

Betas = Annotated[Sequence[Beta], Field(min_length=2, max_length=2)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Rates = NonNegative | list[NonNegative]  # one rate for all parameter groups, or one per group
_NO_COMPRESSION = "its step sends compressed gradients between ranks, and DeepSpeed has removed it"
_OUT_OF_SCOPE = "it is not available here; make it yourself and pass it as optimizer="
# Optimizers of DeepSpeed that are refused, by the name in lower case.
_REFUSED = {
    **dict.fromkeys(("onebitadam", "zerooneadam", "onebitlamb"), f'{_NO_COMPRESSION}; use "Adam"'),
    **dict.fromkeys(("muadam", "muadamw", "musgd", "adagrad"), _OUT_OF_SCOPE),
}


class AdamParams(Section):
    """``optimizer.params`` of AdamW, Adam and FusedAdam, with DeepSpeed's names and defaults.

    So by default, ``weight_decay`` is 0, and is decoupled for all three types.
    """

    lr: NonNegative = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    adam_w_mode: bool = True
    torch_adam: bool = False
    bias_correction: Literal[True] = True
    amsgrad: Literal[False] = False
    no_decay: Sequence[str] = ()
    state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"


class SGDParams(Section):
    """``optimizer.params`` of SGD, with torch's names and in addition ``no_decay``."""

    lr: NonNegative = 1e-3
    momentum: NonNegative = 0.0
    dampening: NonNegative = 0.0
    weight_decay: NonNegative = 0.0
    nesterov: bool = False
    no_decay: Sequence[str] = ()


class MuonParams(Section):
    """``optimizer.params`` of Muon, which steps on matrices, and of AdamW for all other parameters.

    Keys for matrices have torch's names, and those for AdamW have DeepSpeed's.
    """

    lr: NonNegative = 1e-3
    momentum: Beta = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Field(gt=0, lt=100)] = 5
    ns_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    weight_decay: NonNegative = 0.0
    adam_lr: NonNegative | None = None
    betas: Betas = (0.9, 0.999)
    eps: NonNegative = 1e-8
    state_dtype: Literal["float32", "bfloat16"] = "float32"


class WarmupParams(Section):
    """Settings of the warm-up, which all of DeepSpeed's schedules have."""

    warmup_num_steps: PositiveInt = 1000
    warmup_type: Literal["log", "linear"] = "log"
    last_batch_iteration: Literal[-1] = -1  # the checkpoint says where a run continues


class WarmupLRParams(WarmupParams):
    """``scheduler.params`` of WarmupLR. With null, ``warmup_max_lr`` is the optimizer's rate."""

    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates | None = None


class WarmupDecayLRParams(WarmupLRParams):
    """``scheduler.params`` of WarmupDecayLR, in which the rate falls linearly after the warm-up."""

    total_num_steps: PositiveInt
    warmup_max_lr: Rates | None = 0.001


class WarmupCosineLRParams(WarmupParams):
    """``scheduler.params`` of WarmupCosineLR. Ratios are fractions of the optimizer's rate."""

    total_num_steps: PositiveInt
    warmup_min_ratio: Ratio = 0.0
    cos_min_ratio: Ratio = 0.0001


class WSDParams(Section):
    """``scheduler.params`` of WSD: warm-up, a stable phase, and decay.

    ``min_lr_ratio`` is a fraction of the optimizer's learning rate.
    """

    total_num_steps: PositiveInt
    decay_num_steps: PositiveInt
    warmup_num_steps: NonNegativeInt = 0
    decay_type: Literal["linear", "cosine", "1-sqrt"] = "1-sqrt"
    min_lr_ratio: Ratio = 0.0

    @model_validator(mode="after")
    def _phases_fit(self) -> Self:
        if self.warmup_num_steps + self.decay_num_steps > self.total_num_steps:
            raise ValueError(
                f"warmup_num_steps {self.warmup_num_steps} + decay_num_steps {self.decay_num_steps} "
                f"exceed total_num_steps {self.total_num_steps}; raise total_num_steps, or lower one of them"
            )
        return self


OPTIMIZERS: Mapping[str, type[Section]] = {
    "AdamW": AdamParams,
    "Adam": AdamParams,
    "FusedAdam": AdamParams,
    "SGD": SGDParams,
    "Muon": MuonParams,
}
SCHEDULES: Mapping[str, type[Section]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "WSD": WSDParams,
}


def check_optimizer_params(type: str, params: Mapping[str, Any]) -> str:
    """Check the ``optimizer`` section, and return the type as this project spells it.

    Raises:
        ConfigError: The type or a key is unknown, or a value has the wrong type.
    """
    refuse_removed_keys({"optimizer": {"type": type, "params": params}})
    if type.lower() in _REFUSED:
        raise ConfigError(f"optimizer.type: {_name(type)} cannot be honoured: {_REFUSED[type.lower()]}")
    name = next((known for known in OPTIMIZERS if known.lower() == type.lower()), None)
    if name is None:
        hint = suggestion(type, OPTIMIZERS) or f"; known: {', '.join(OPTIMIZERS)}"
        raise ConfigError(f"optimizer.type: unknown optimizer {_name(type)}{hint}")
    if "max_grad_norm" in params:
        raise ConfigError(
            "optimizer.params.max_grad_norm: not an optimizer's setting; use gradient_clipping at top level"
        )
    parse_section(OPTIMIZERS[name], params, "optimizer.params")
    return name


def read_scheduler_params(type: str, params: Mapping[str, Any]) -> Section:
    """Check the ``scheduler`` section, and return its ``params`` as an object of their schema.

    Raises:
        ConfigError: The type or a key is unknown, or a value has the wrong type.
    """
    refuse_removed_keys({"scheduler": {"type": type, "params": params}})
    if type not in SCHEDULES:
        hint = suggestion(type, SCHEDULES) or f"; known: {', '.join(SCHEDULES)}"
        raise ConfigError(f"scheduler.type: unknown schedule {_name(type)}{hint}")
    return parse_section(SCHEDULES[type], params, "scheduler.params")


def check_named_params(optimizer: NamedParams | None, scheduler: NamedParams | None) -> None:
    """Raise ConfigError if the ``optimizer`` or the ``scheduler`` section is not valid."""
    if optimizer is not None:
        check_optimizer_params(optimizer.type, optimizer.params)
    if scheduler is not None:
        read_scheduler_params(scheduler.type, scheduler.params)


def _name(type: str) -> str:
    return f'"{shorten(type)}"'
