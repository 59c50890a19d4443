"""The schemas of ``sdp.masking``, ``sdp.copies``, ``sdp.sync`` (local steps) and ``sdp.paths``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ..errors import ConfigError, shorten
from .section import Beta, NonNegative, NonNegativeInt, PathText, PositiveInt, RankCount, Section

Masking = Literal["forward", "backward"]


def _refuse_whole_run(value: Any) -> Any:
    """Refuse 1.0: as a fraction it means the whole run, and as a number the first step."""
    if isinstance(value, float) and value == 1.0:
        raise ValueError("1.0 means the whole run; give a fraction below 1, or the integer 1 for the first step")
    return value


class MaskingPhase(Section):
    """One phase of a masking schedule, which ends after the step ``until``.

    ``until`` is a step number or a fraction of ``training.steps``. The last phase ends with the
    run, and has no ``until``.
    """

    masking: Masking
    until: Annotated[PositiveInt | Annotated[float, Field(gt=0, lt=1)] | None, BeforeValidator(_refuse_whole_run)] = (
        None
    )


def _take_single_phase(value: Any) -> Any:
    """Return the masking of a schedule with one phase, which is the whole run."""
    alone = value[0] if isinstance(value, list) and len(value) == 1 else None
    return alone["masking"] if isinstance(alone, dict) and list(alone) == ["masking"] else value


MaskingSetting = Annotated[
    Masking | Annotated[list[MaskingPhase], Field(min_length=1)], BeforeValidator(_take_single_phase)
]


@dataclass(frozen=True)
class MaskingSchedule:
    """Says which masking, forward or backward, each step of a run has.

    Attributes:
        maskings: The masking of each phase, in order. Neighbouring phases differ.
        ends: The last step of each phase, in ascending order. The last phase has no entry.
    """

    maskings: tuple[Masking, ...]
    ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, setting: Masking | Sequence[MaskingPhase], steps: int | None) -> MaskingSchedule:
        """Return the schedule that a value of ``sdp.masking`` means.

        Args:
            setting: The value of the key.
            steps: The value of ``training.steps``, or None if it is not set.

        Raises:
            ConfigError: The phases are not possible. The message names the phase by its index.
        """
        if isinstance(setting, str):
            return cls((setting,))
        ends: list[int] = []
        for index, (phase, following) in enumerate(zip(setting, [*setting[1:], None], strict=True)):
            where, until = f"sdp.masking.{index}.until", phase.until
            stated = shorten(json.dumps(until), 20)
            if following is None and until is not None:
                raise ConfigError(
                    f"{where}: {stated} ends the last phase, which must last until the run ends; remove until, or add "
                    "a phase"
                )
            if following is None:
                break
            if until is None:
                raise ConfigError(
                    f"{where}: this key is required, because another phase follows; give its last step, or a fraction "
                    "of training.steps"
                )
            if isinstance(until, float) and steps is None:
                raise ConfigError(
                    f"{where}: {stated} is a fraction of training.steps, which is not set; give the number of a step, "
                    "or set training.steps"
                )
            end = round(until * steps) if isinstance(until, float) and steps is not None else int(until)
            before = ends[-1] if ends else 0
            if end <= before or (steps is not None and end >= steps):
                named = f"{stated} (step {shorten(end, 20)})" if isinstance(until, float) else f"step {stated}"
                last = "" if steps is None else f" and before the last one, training.steps {shorten(steps, 20)}"
                raise ConfigError(
                    f"{where}: {named} leaves a phase without a step; phases are in the order of the run, so choose a "
                    f"step after {shorten(before, 20)}{last}"
                )
            if following.masking == phase.masking:
                raise ConfigError(
                    f'sdp.masking.{index + 1}: masking "{following.masking}" is that of the phase before it; join the '
                    "two phases"
                )
            ends.append(end)
        return cls(tuple(phase.masking for phase in setting), tuple(ends))

    def at(self, step: int) -> Masking:
        """Return the masking of a step. Steps are numbered from 1."""
        return self.maskings[sum(step > end for end in self.ends)]

    @property
    def starts(self) -> tuple[int, ...]:
        """The first step of each phase."""
        return (1, *(end + 1 for end in self.ends))

    def __str__(self) -> str:
        last = len(self.ends)
        return ", then ".join(
            f"{masking} to step {self.ends[index]}" if index < last else masking
            for index, masking in enumerate(self.maskings)
        )


class CopiesSection(Section):
    """``sdp.copies``: how the frozen copies of backward masking are stored and refreshed."""

    dtype: Literal["compute", "int8", "nf4"] = "compute"
    refresh_every: PositiveInt = 1

    @property
    def are_exact(self) -> bool:
        """Whether copies always equal the holders' weights in the precision of the computation.

        Copies are not exact if they are quantised, or if ``refresh_every`` is above 1.
        """
        return self.dtype == "compute" and self.refresh_every == 1


Problems = list[tuple[bool, str]]  # whether a configuration has the problem, and the remedy


def problems_with_copies(config: Any) -> Problems:
    """List the settings that a configuration cannot combine with copies that are not exact.

    Each entry is a pair: whether the configuration has the setting, and the error message.
    """
    sdp, copies = config.sdp, config.sdp.copies
    if copies.are_exact:
        return []
    key = "dtype" if copies.dtype != "compute" else "refresh_every"
    where, remedy = f"sdp.copies.{key}: {json.dumps(getattr(copies, key))}", "to false, or remove sdp.copies"
    return [
        ("backward" not in sdp.maskings,
            f'{where} has no meaning with sdp.masking "forward", which keeps no copies; remove sdp.copies'),
        (sdp.sync is not None and copies.refresh_every > 1,
            f"sdp.copies.refresh_every: {copies.refresh_every} contradicts sdp.sync, which refreshes the copies of a "
            "unit when it is averaged; use 1"),
        (config.training.compile,
            f"{where} is not available together with training.compile; set training.compile {remedy}"),
        (config.torch_autocast.enabled,
            f"{where} is not available together with torch_autocast; set torch_autocast.enabled {remedy}"),
    ]  # fmt: skip


Steps = Annotated[int, Field(gt=0, le=2**24)]


class OuterSGDParams(Section):
    """Parameters of the outer SGD of local steps, with torch's names.

    Without the section ``params``, DiLoCo's values apply (arXiv 2311.08105): ``lr`` 0.7,
    ``momentum`` 0.9 and ``nesterov`` true. If ``params`` is given, a missing key has the default of
    this class: there is no momentum unless ``params`` sets it.
    """

    lr: NonNegative = 0.7
    momentum: Beta = 0.0
    nesterov: bool = False

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs momentum above 0; raise momentum, or set nesterov to false")
        return self


DILOCO = OuterSGDParams(lr=0.7, momentum=0.9, nesterov=True)


class OuterSGD(Section):
    """The outer optimizer of local steps: SGD on the weights after the last average (the anchors).

    With the rate 1 and without momentum, the anchor becomes the mean of the holders' weights.
    """

    type: Literal["SGD"] = "SGD"
    params: OuterSGDParams = DILOCO


class ServiceSection(Section):
    """``sdp.sync.service``: a service averages weights, so that groups may come and go."""

    quorum: Annotated[float, Field(gt=0, le=1)] = 0.5
    grace_seconds: Annotated[float, Field(ge=0)] = 30.0
    heartbeat_seconds: Annotated[float, Field(gt=0)] = 5.0
    wait_seconds: Annotated[float, Field(gt=0)] = 600.0
    min_groups: PositiveInt = 1
    restarts: NonNegativeInt = 3


class SyncSection(Section):
    """``sdp.sync``: groups train on their own, and average their weights every ``every`` steps."""

    every: Steps
    start_after: NonNegativeInt = 0
    outer_optimizer: OuterSGD = OuterSGD()
    single_holder: Literal["outer", "skip"] = "outer"
    fragments: Steps = 1
    overlap: NonNegativeInt = 0
    compression: Literal["none", "bf16", "int8"] = "none"
    offload: Literal["none", "cpu"] = "none"
    service: ServiceSection | None = None

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


def problems_with_sync(config: Any) -> Problems:
    """List the settings that a configuration cannot combine with local steps.

    Each entry is a pair: whether the configuration has the setting, and the error message.
    """
    sdp, sync, training = config.sdp, config.sdp.sync, config.training
    if sync is None:
        return []
    half = "fp16.enabled" if config.fp16.enabled else "torch_autocast.enabled"
    problems = [
        (sdp.engine == "deepspeed",
            'sdp.sync: local steps are not available with sdp.engine "deepspeed"; use sdp.engine "fsdp2", or remove '
            "sdp.sync"),
        (config.scales_loss, f"{half}: float16 is not available together with sdp.sync; use bf16"),
        (training.on_spike != "none",
            f'training.on_spike: "{training.on_spike}" is not available together with sdp.sync, because it needs an '
            'average in every step; use "none"'),
        (sdp.lr_scale != "none",
            f"sdp.lr_scale: {json.dumps(sdp.lr_scale)} has no meaning with sdp.sync, where no step averages over "
            'holders; use "none"'),
    ]  # fmt: skip
    if sync.service is None:
        return problems
    served = {
        "sdp.sync.start_after": (sync.start_after > 0, "groups cannot average in every step; remove it"),
        "sdp.groups": (sdp.groups < 2, "there is no group to average with; set it to 2 or more"),
        "sdp.sync.service.min_groups": (
            sync.service.min_groups > sdp.groups, f"there are sdp.groups = {sdp.groups} groups; lower this key"
        ),
        "sdp.paths.on_short": (
            sdp.paths is not None and sdp.paths.on_short == "end", 'the service assigns data to groups; use "repeat"'
        ),
        "training.steps": (training.steps is None, "the service counts steps; give the length of the run"),
        "training.save_every": (training.save_every > 0, "the service saves after every round; remove it"),
    }  # fmt: skip
    return problems + [(applies, f"{key}: with sdp.sync.service {why}") for key, (applies, why) in served.items()]


class PathsSection(Section):
    """``sdp.paths``: several models that share some units. Group g trains path g mod ``count``.

    The configuration describes the model of one path.
    """

    count: RankCount
    own: list[str] = Field(default_factory=list)
    router: PathText | None = None
    on_short: Literal["repeat", "end"] = "repeat"


def problems_with_paths(config: Any) -> Problems:
    """List the settings that a configuration cannot combine with several paths.

    Each entry is a pair: whether the configuration has the setting, and the error message.
    """
    sdp = config.sdp
    if sdp.paths is None:
        return []
    fields = type(sdp).model_fields
    # Compare with the defaults, because a run's own configuration file sets every key.
    given = {
        key: value
        for key in ("capacity", "profile", "placement", "protect", "branch_scale")
        if (value := getattr(sdp, key)) != fields[key].get_default(call_default_factory=True)
    }
    return [
        (sdp.granularity != "block",
            'sdp.granularity: paths (sdp.paths) have blocks of their own, not neurons; use "block"'),
        (sdp.maskings != ("forward",),
            "sdp.masking: a group runs no unit of another path (sdp.paths), so there is nothing to copy; use "
            '"forward"'),
        *((True, f"sdp.{key}: {json.dumps(value)} has no meaning with sdp.paths, because sdp.paths.count and "
            "sdp.paths.own say which group holds which unit; remove it") for key, value in given.items()),
        (sdp.groups % sdp.paths.count > 0,
            f"sdp.groups: {sdp.groups} is not a multiple of sdp.paths.count {sdp.paths.count}, and every path is "
            "trained by equally many groups; choose a multiple"),
    ]  # fmt: skip
