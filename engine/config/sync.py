"""The section ``sdp.sync``: groups that average their weights every few steps (local steps)."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from ..errors import ConfigError
from .section import Beta, NonNegative, NonNegativeInt, Section

Steps = Annotated[int, Field(gt=0, le=2**24)]


class OuterSGDParams(Section):
    """Parameters of the outer SGD, as in torch.

    Without any of them, those of DiLoCo (arXiv 2311.08105) hold.
    """

    lr: NonNegative = 0.7
    momentum: Beta = 0.0
    nesterov: bool = False
    weight_decay: NonNegative = 0.0

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs momentum above 0; raise momentum, or set nesterov to false")
        return self


DILOCO = OuterSGDParams(lr=0.7, momentum=0.9, nesterov=True)


class OuterAdamWParams(Section):
    """Parameters of the outer AdamW, as in torch."""

    lr: NonNegative = 0.001
    betas: list[Beta] = Field(default=[0.9, 0.999], min_length=2, max_length=2)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.01


class OuterSGD(Section):
    """SGD on the anchors. The rate 1 without momentum makes the anchor the mean of the holders."""

    type: Literal["SGD"] = "SGD"
    params: OuterSGDParams = DILOCO


class OuterAdamW(Section):
    """AdamW on the anchors."""

    type: Literal["AdamW"]
    params: OuterAdamWParams = OuterAdamWParams()


def _type_of(value: Any) -> Any:
    return value.get("type", "SGD") if isinstance(value, dict) else getattr(value, "type", None)


OuterOptimizer = Annotated[
    Annotated[OuterSGD, Tag("SGD")] | Annotated[OuterAdamW, Tag("AdamW")],
    Discriminator(_type_of, custom_error_type="outer_type", custom_error_message='Type must be "SGD" or "AdamW"'),
]


class SyncSection(Section):
    """Local steps: groups train on their own, and average their weights every ``every`` steps.

    ``every``: the number H of steps in a round. ``start_after``: the number of steps at the start
    that average gradients in every step. ``outer_optimizer``: how the mean change of the holders
    moves the anchor of a unit. ``single_holder``: what happens to a unit with one holder. "outer"
    treats it like the others; "skip" makes its weights the anchor. ``fragments``: the number of
    parts that are averaged at different steps of a round. It divides ``every``. ``overlap``: the
    number of steps during which an average may travel. It is less than ``every`` / ``fragments``.
    ``compression``: the format in which changes are sent. "int8" has one scale per row and keeps
    the error for the next round. ``offload``: "cpu" keeps the anchors and the state of the outer
    optimizer in the host's memory.
    """

    every: Steps
    start_after: NonNegativeInt = 0
    outer_optimizer: OuterOptimizer = OuterSGD()
    single_holder: Literal["outer", "skip"] = "outer"
    fragments: Steps = 1
    overlap: NonNegativeInt = 0
    compression: Literal["none", "bf16", "int8"] = "none"
    offload: Literal["none", "cpu"] = "none"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.every % self.fragments:
            raise ValueError(
                f"every {self.every} is not divisible by fragments {self.fragments}; choose a divisor of every as "
                "fragments"
            )
        apart = self.every // self.fragments
        if self.overlap >= apart:
            raise ValueError(
                f"overlap {self.overlap} must be less than every / fragments = {apart}, so that an average has "
                "arrived before the next one starts"
            )
        return self


def refuse_with_sync(config: Any) -> None:
    """Raise ConfigError for what a Config with local steps cannot be combined with."""
    sdp, spikes = config.sdp, config.training.on_spike
    if sdp.sync is None:
        return
    if sdp.engine == "deepspeed":
        raise ConfigError(
            'sdp.sync: local steps are not available with sdp.engine "deepspeed"; use sdp.engine "fsdp2", or remove '
            "sdp.sync"
        )
    if config.scales_loss:
        key = "fp16.enabled" if config.fp16.enabled else "torch_autocast.enabled"
        raise ConfigError(f"{key}: float16 is not available together with sdp.sync; use bf16")
    if spikes != "none":
        raise ConfigError(
            f'training.on_spike: "{spikes}" is not available together with sdp.sync, because it needs an average in '
            'every step; use "none"'
        )
    if sdp.lr_scale != "none":
        raise ConfigError(
            f"sdp.lr_scale: {json.dumps(sdp.lr_scale)} has no meaning with sdp.sync, where the noise of a local step "
            'does not depend on the holders; use "none"'
        )
