"""Measures one optimizer step on one rank: seconds of its parts, peak memory, bytes sent."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ...engine.accounting.clock import clock
from ...engine.accounting.memory import PeakMemory
from ...engine.engine import SDPEngine
from ...launcher.heartbeat import Heartbeat

PARTS = ("data", "forward", "backward", "optimizer")


@dataclass
class StepFacts:
    """The measurements of one rank in one step.

    ``seconds`` has the seconds of each part, by its key in metrics.jsonl.
    """

    loss: float
    learning_rate: float
    peak_memory_bytes: int
    comm: dict[str, int]
    seconds: dict[str, float] = field(default_factory=dict)


class StepMeter:
    """Measures a step from :meth:`begin` to :meth:`end`, and reports its parts to the heartbeat."""

    def __init__(self, engine: SDPEngine, beat: Heartbeat):
        config = engine.config
        self._engine, self._beat = engine, beat
        self._memory = PeakMemory(engine.device)
        # On CUDA the seconds of a part can only be measured by waiting for the device.
        # wall_clock_breakdown asks for that.
        self.times_parts = engine.device.type != "cuda" or config.wall_clock_breakdown
        self._clock = clock(engine.device, waits=config.wall_clock_breakdown)
        self._is_first = True
        self._seconds: dict[str, float] = {}
        self._learning_rate = self._exposed = self._started = 0.0
        sync = config.sdp.sync
        # With local steps, steps of a round send different things.
        self._sent: deque[tuple[int, dict[str, int]]] = deque(maxlen=1 if sync is None else sync.every)

    def begin(self) -> None:
        """Start to measure a step."""
        engine = self._engine
        self._memory.reset()
        engine.traffic.reset()
        self._learning_rate = engine.get_lr()[0]
        self._seconds = {f"{part}_seconds": 0.0 for part in PARTS}
        self._exposed = engine.exposed_reduction_seconds
        self._started = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure one of ``PARTS`` of the step. The part has the same name in a profile."""
        training = self._engine.config.training
        # The first step also compiles, allocates and connects.
        seconds = training.start_timeout if self._is_first else training.step_timeout
        self._beat.at(self._engine.global_steps + 1, name, seconds)
        started = self._clock()
        with torch.profiler.record_function(name):
            yield
        self._seconds[f"{name}_seconds"] += self._clock() - started

    def end(self) -> StepFacts:
        """Finish the step and return its measurements."""
        engine = self._engine
        self._is_first = False
        exposed = engine.exposed_reduction_seconds - self._exposed
        seconds = self._seconds | {
            "backward_seconds": self._seconds["backward_seconds"] - exposed,
            "exposed_reduction_seconds": exposed,
        }
        loss = engine.get_loss()
        assert loss is not None
        comm = engine.traffic.by_kind()
        if not engine.local_training.has_finished(engine.global_steps):  # not part of a round
            self._sent.append((engine.global_steps, comm))
        return StepFacts(loss, self._learning_rate, self._memory.read(), comm, seconds)

    def sent_per_step(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the bytes that this rank sent in a step, counted and planned, by kind.

        With local steps both are means over the last round.
        """
        if not self._sent:
            return {}, self._engine.planned_traffic().by_kind()
        planned = [self._engine.planned_traffic(step).by_kind() for step, _ in self._sent]
        return _mean([comm for _, comm in self._sent]), _mean(planned)

    def elapsed(self) -> float:
        """Return the seconds since the step began."""
        return time.perf_counter() - self._started


def _mean(steps: Sequence[dict[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for of_step in steps:
        total.update(of_step)
    return {kind: round(sent / len(steps)) for kind, sent in sorted(total.items())}
