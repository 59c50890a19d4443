"""The measured losses that advice rests on: how far each way to train is from the dense model.

``evidence.json`` has figures of the studies.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import BaseModel

from ...engine.json_files import read_json_file
from .candidate import Candidate

FILE = Path(__file__).parent / "evidence.json"
WEIGHT_OF_CAPACITY = 4  # against the number of groups and the length of training, in logarithms


class Gap(BaseModel):
    """The held-out loss of one method, less that of the dense model after as many steps.

    Attributes:
        method: what was trained.
        every: steps between two averages.
        groups: number of groups.
        capacity: the part of the model that a group held.
        tokens_per_parameter: how long the training was.
        gap: the mean difference, in nats.
        spread: its sample deviation.
        seeds: number of seeds.
        source: the page with the figures.
    """

    method: str
    every: int
    groups: int
    capacity: float
    tokens_per_parameter: float
    gap: float
    spread: float
    seeds: int
    source: str


class Setting(BaseModel):
    """Where the losses were measured.

    Attributes:
        parameters: of the full model: the smallest and the largest.
        groups: the smallest and the largest number of groups.
        tokens_of_group: tokens of one group in a step.
        tokens_per_parameter: the shortest and the longest training.
    """

    parameters: tuple[int, int]
    groups: tuple[int, int]
    tokens_of_group: int
    tokens_per_parameter: tuple[float, float]


class ManyEpochs(BaseModel):
    """Losses where the data were read many times, on small images.

    Attributes:
        epochs: how often the data were read.
        seeds: number of seeds.
        source: the page with the figures.
        losses: by method, the lowest held-out loss of a run with the method's best regularisation:
            mean and sample deviation.
    """

    epochs: float
    seeds: int
    source: str
    losses: dict[str, tuple[float, float]]


class Evidence(BaseModel):
    """The content of ``evidence.json``.

    Attributes:
        setting: where the losses were measured.
        curves: by method, the loss after training of several lengths: tokens per parameter, which
            rise, and the mean loss.
        curves_source: the page with these losses.
        gaps: the differences from the dense model.
        many_epochs: losses where the data were read many times.
    """

    setting: Setting
    curves: dict[str, list[tuple[float, float]]]
    curves_source: str
    gaps: list[Gap]
    many_epochs: ManyEpochs

    @property
    def lengths(self) -> tuple[float, float]:
        """The shortest and the longest training of the curves, in tokens per parameter."""
        ends = [length for curve in self.curves.values() for length, _ in curve]
        return min(ends), max(ends)

    def change(self, method: str, length: float, steps: float) -> float:
        """How much the loss of ``method`` changes if it makes ``steps`` × the steps, in nats.

        Its measured losses are joined by lines over the logarithm of the steps, and the outer lines
        go on. Where longer training did not lower the loss, more steps change nothing.

        Args:
            method: what is trained.
            length: tokens per parameter of the run.
            steps: how many steps it makes for one of the reference.
        """
        curve = self.curves[method]
        pieces = [
            (start, end, min(0.0, (after - before) / math.log(end / start)))
            for (start, before), (end, after) in itertools.pairwise(curve)
        ]
        first, last = min(length, length * steps), max(length, length * steps)
        total = 0.0
        for number, (start, end, slope) in enumerate(pieces):
            low = first if number == 0 else max(first, start)
            high = last if number == len(pieces) - 1 else min(last, end)
            total += slope * math.log(high / low) if high > low else 0.0
        return total if steps >= 1 else -total

    @classmethod
    def read(cls) -> Evidence:
        """Read the file of this package."""
        return cls.model_validate(read_json_file(FILE))

    def nearest(self, candidate: Candidate, tokens_per_parameter: float | None = None) -> Gap | None:
        """The gap that was measured where training was most like ``candidate``.

        The nearest local steps count first. Then the number of groups, the length of training and
        the capacity count together: twice the groups are as far away as twice the length, and twice
        the capacity as 16 times either.

        Args:
            candidate: the way to train.
            tokens_per_parameter: how long the training is. None if nobody knows.

        Returns:
            None if nothing like the candidate was measured. Every step and local steps are
            different things: one says nothing about the other.
        """
        alike = [
            gap for gap in self.gaps if gap.method == candidate.method and (gap.every == 1) == (candidate.every == 1)
        ]

        def distance(gap: Gap) -> tuple[float, float]:
            capacity = 0.0 if candidate.method == "dense" else math.log(gap.capacity / candidate.capacity)
            length = 0.0 if not tokens_per_parameter else math.log(gap.tokens_per_parameter / tokens_per_parameter)
            rest = math.hypot(math.log(gap.groups / candidate.groups), length, WEIGHT_OF_CAPACITY * capacity)
            return abs(math.log(gap.every / candidate.every)), rest

        return min(alike, key=distance, default=None)


@dataclass(frozen=True)
class Estimate:
    """What a candidate is expected to learn.

    Attributes:
        candidate: the way to train.
        gap: the measured gap that is used, or None.
        steps: how many steps it makes while the reference makes one.
        change: how much these steps change its loss, in nats.
    """

    candidate: Candidate
    gap: Gap | None
    steps: float
    change: float

    @cached_property
    def at_equal_steps(self) -> float | None:
        """The loss less that of the dense model after as many steps."""
        return None if self.gap is None else self.gap.gap

    @cached_property
    def at_equal_time(self) -> float | None:
        """The loss less that of the reference after as many seconds."""
        return None if self.gap is None else self.gap.gap + self.change
