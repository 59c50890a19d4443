"""Interleaved timing: contestants take turns step by step, and are compared round by round.

A busy or throttled machine slows both sides of a ratio. So ratios stay valid where seconds do not.
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
    """A function to time.

    Attributes:
        name: Its name in the report.
        parameters: Number of elements that it trains.
        step: Makes one whole optimizer step on a batch.
    """

    name: str
    parameters: int
    step: Callable[[Batch], None]


@dataclass(frozen=True)
class Timing:
    """The timing of one contestant.

    ``seconds`` are those of each step; ``ratios`` are the seconds over those of the first
    contestant, round by round.
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
    """Time every contestant on every batch. Every other round runs in reverse order.

    Args:
        contestants: What is timed.
        batches: A batch for each round.
        warmup: The first rounds, which are not timed.
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
