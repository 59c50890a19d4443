"""Times contestants in turns, step by step, and compares them round by round.

A busy or throttled machine slows all contestants, so ratios are right even where seconds are not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Contestant:
    """A training step to time.

    Attributes:
        name: Its name in the report.
        parameters: The number of elements that it trains.
        step: Makes one whole optimizer step on a batch.
    """

    name: str
    parameters: int
    step: Callable[[Batch], None]


@dataclass(frozen=True)
class Timing:
    """The timing of one contestant.

    ``seconds`` has the seconds of each step. ``ratios`` has for each round these seconds divided by
    the first contestant's.
    """

    name: str
    parameters: int
    seconds: list[float]
    ratios: list[float]
    median_seconds: float
    median_ratio: float


def race(
    contestants: Sequence[Contestant], batches: Iterable[Batch], warmup: int, device: torch.device
) -> list[Timing]:
    """Time every contestant on every batch. In every other round, their order is reversed.

    Args:
        contestants: What is timed.
        batches: A batch for each round.
        warmup: The number of first rounds that are not timed.
        device: Where the steps run.
    """
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for turn, batch in enumerate(batches):
        for contestant in contestants if turn % 2 == 0 else reversed(contestants):
            taken = _seconds(contestant.step, batch, device)
            if turn >= warmup:
                seconds[contestant.name].append(taken)
    base = seconds[contestants[0].name]
    return [_timing(contestant, seconds[contestant.name], base) for contestant in contestants]


def _seconds(step: Callable[[Batch], None], batch: Batch, device: torch.device) -> float:
    start = time.perf_counter()
    step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _timing(contestant: Contestant, seconds: list[float], base: list[float]) -> Timing:
    ratios = [mine / first for mine, first in zip(seconds, base, strict=True)]
    medians = statistics.median(seconds), statistics.median(ratios)
    return Timing(contestant.name, contestant.parameters, seconds, ratios, *medians)
