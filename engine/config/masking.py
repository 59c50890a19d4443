"""``sdp.masking`` as a schedule: one masking after another, in phases of the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ..errors import ConfigError, shorten
from .section import PositiveInt, Section

Masking = Literal["forward", "backward"]


def _refuse_whole_run(value: Any) -> Any:
    """Refuse 1.0, which is the whole run as a fraction and the first step as a number."""
    if isinstance(value, float) and value == 1.0:
        raise ValueError("1.0 would be the whole run; give a fraction below 1, or 1 for the first step")
    return value


class MaskingPhase(Section):
    """One phase of a masking schedule.

    ``until``: the last step of the phase, or a fraction of ``training.steps``. The last phase ends
    with the run, and has no ``until``.
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
    """Which masking a step has.

    Attributes:
        maskings: The masking of each phase, in order. Neighbours differ.
        ends: The last step of each phase but the last one, in ascending order.
    """

    maskings: tuple[Masking, ...]
    ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, setting: Masking | Sequence[MaskingPhase], steps: int | None) -> MaskingSchedule:
        """Resolve ``sdp.masking``.

        Args:
            setting: The value of the key.
            steps: ``training.steps``, of which ``until`` may be a fraction. None if it is not set.

        Raises:
            ConfigError: The phases are not possible. The message names the phase by its index.
        """
        if isinstance(setting, str):
            return cls((setting,))
        ends = tuple(_end_of(index, phase, len(setting), steps) for index, phase in enumerate(setting))
        for index in range(1, len(setting)):
            if setting[index].masking == setting[index - 1].masking:
                raise ConfigError(
                    f'sdp.masking.{index}: masking "{setting[index].masking}" is that of the phase before it; join '
                    "the two"
                )
        for index in range(1, len(ends) - 1):
            if ends[index] <= ends[index - 1]:
                raise ConfigError(
                    f"sdp.masking.{index}.until: step {shorten(ends[index], 20)} does not come after step "
                    f"{shorten(ends[index - 1], 20)}, where the phase before it ends; phases are in the order of "
                    "the run"
                )
        return cls(tuple(phase.masking for phase in setting), ends[:-1])

    def at(self, step: int) -> Masking:
        """Return the masking of a step. Steps are numbered from 1."""
        return self.maskings[sum(step > end for end in self.ends)]

    def switches_after(self, step: int) -> bool:
        """Return whether the masking changes between ``step`` and the next one."""
        return step in self.ends

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


def _end_of(index: int, phase: MaskingPhase, count: int, steps: int | None) -> int:
    """Return the last step of a phase, 0 for the last phase."""
    where, until = f"sdp.masking.{index}.until", phase.until
    if index == count - 1:
        if until is not None:
            raise ConfigError(
                f"{where}: {shorten(json.dumps(until), 20)} ends the last phase, after which no masking is given; "
                "remove it, or add a phase"
            )
        return 0
    if until is None:
        raise ConfigError(
            f"{where}: this key is required, because another phase follows; give its last step, or a fraction of "
            "training.steps"
        )
    if isinstance(until, float):
        if steps is None:
            raise ConfigError(
                f"{where}: {until:g} is a fraction of training.steps, which is not set; give the number of a step, or "
                "set training.steps"
            )
        fraction, until = until, round(until * steps)
        if not 0 < until < steps:
            raise ConfigError(
                f"{where}: {fraction:g} of training.steps {shorten(steps, 20)} is step {shorten(until, 20)}, which "
                "leaves a phase without a step; choose another fraction"
            )
    if steps is not None and until >= steps:
        raise ConfigError(
            f"{where}: step {shorten(until, 20)} is not before the last step, training.steps {shorten(steps, 20)}, so "
            "the next phase would never begin; choose an earlier step"
        )
    return until
