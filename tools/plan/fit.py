"""Finds the smallest layout of a run that fits a device's memory.

The search takes as few ranks per group as possible. Among their settings it takes those with the
shortest planned step.

- What stays: groups, capacity, masking and the samples of a step. They decide what is learned.
- What changes: the degrees of sharding and of tensor parallelism, the ZeRO stage, recomputation,
  and how the samples of a step are split into micro-batches.

A layout is first judged by its state, whose size is known at once, then by tracing its step.
Degrees of tensor parallelism are 1, 2, 4, 8 and the configured one. Numbers of ranks that cannot
share the samples of a step equally are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...engine.accounting.memory import predict_state_bytes
from ...engine.accounting.quantities import format_bytes, format_seconds
from ...engine.config.schema import Config
from ...engine.distributed.mesh import mesh_of
from ...engine.errors import ConfigError, SDPError
from ...engine.optim.optimizers import make_optimizer
from ...engine.placement.layout import Layout
from ..runs.model_inputs import model_and_batch
from ..shared.remedies import remedies
from .forecast import forecast, require_planned
from .machine import Machine
from .result import Forecast
from .trials import Choice, Step, Trial, closest_of, own_share, reasons_of, stated_step

MOST_RANKS = 1024  # of a group
_DEGREES = (1, 2, 4, 8)  # of tensor parallelism, in addition to the configured one
_MODES = ("none", "selective", "full")  # from the fastest to the one that needs the least memory
_STAGES = (1, 2, 3)  # in the same order


@dataclass(frozen=True)
class Fit:
    """The result of a search.

    Attributes:
        choice: The settings that were chosen.
        plan: Their plan.
        trials: Everything that was tried, in order.
        reasons: Why this choice and no other, a line for each reason.
    """

    choice: Choice
    plan: Forecast
    trials: tuple[Trial, ...]
    reasons: tuple[str, ...]


def find_fit(config: Config, memory: float, machine_of: Callable[[int], Machine], world: int, *, bounded: bool) -> Fit:
    """Find the layout for devices of ``memory`` bytes.

    Args:
        config: The run.
        memory: Bytes of a device.
        machine_of: The machine of so many ranks.
        world: Ranks of the run as configured. They say how many samples a step has if
            ``train_batch_size`` does not.
        bounded: Use no more than ``world`` ranks.

    Raises:
        ConfigError: Nothing fits, or there are fewer ranks than groups.
    """
    require_planned(config)
    groups = config.sdp.groups
    limit = world // groups if bounded else MOST_RANKS
    if limit < 1:
        raise ConfigError(
            f"--fit: {world} ranks are fewer than sdp.groups {groups}, each of which needs one; lower sdp.groups"
        )
    if (config.train_batch_size or 0) % groups:
        raise ConfigError(
            f"--fit: train_batch_size {config.train_batch_size:,} is not a multiple of sdp.groups {groups}, so no "
            "number of ranks shares it equally; change one of them"
        )
    step = stated_step(config, world)
    model = model_and_batch(config)[0]()
    search = _Search(config, memory, machine_of, step)
    tried = 0
    for ranks in range(1, limit + 1):
        degrees = [tp for tp in sorted({*_DEGREES, config.tensor_parallel.autotp_size}) if ranks % tp == 0]
        if all(step.samples % (groups * ranks // tp) for tp in degrees):
            continue
        tried = ranks
        if search.too_few(ranks):
            continue
        fitting = [trial for tp in degrees for trial in search.fitting(ranks, tp)]
        if fitting:
            best = min(fitting, key=lambda trial: trial.cost)
            assert best.plan is not None
            return Fit(
                best.choice, best.plan, tuple(search.trials), tuple(reasons_of(best, search.trials, step, model))
            )
    assert tried  # one rank per group always shares a multiple of the groups equally
    raise ConfigError(_nothing(config, memory, tried, search.trials))


def _nothing(config: Config, memory: float, ranks: int, trials: list[Trial]) -> str:
    """Explain that nothing fits up to ``ranks`` ranks per group."""
    closest = closest_of(trials)
    less = "; ".join(remedies(closest.choice.applied(config)))
    said = "" if closest.need is None else f"; closest: {closest}; what would need less memory: {less}"
    refused = list({(trial.choice.tp, trial.why): str(trial) for trial in trials if trial.need is None}.values())
    also = f"; refused: {'; '.join(refused[:3])}" if refused else ""
    return f"--fit: no layout of up to {ranks} ranks a group fits {format_bytes(memory)}{said}{also}"


@dataclass
class _Search:
    """Tries layouts, and remembers what came of them."""

    config: Config
    memory: float
    machine_of: Callable[[int], Machine]
    step: Step
    trials: list[Trial] = field(default_factory=list)

    def fitting(self, ranks: int, tp: int) -> Iterator[Trial]:
        """Yield the settings with these degrees that fit and could be the fastest.

        Less recomputation and a lower stage never take longer and never need less memory. (The plan
        may say otherwise, because it also hides traffic behind recomputation; that is ignored.) The
        search starts from the settings that need the least memory. It lowers recomputation as long
        as the result fits, then the stage. Settings that could not beat the fastest even with all
        traffic hidden are skipped.
        """
        stages = (0,) if ranks == tp else _STAGES  # one rank has nothing to shard
        modes: list[Trial] = []
        for mode in reversed(_MODES):
            trial = self._tried(ranks, tp, stages[-1], mode)
            if trial.plan is not None:
                modes.append(trial)
                yield trial
            elif trial.need is not None or trial.of_the_degrees:
                break
        below = len(stages) - 1
        for found in reversed(modes):
            if below == 0 or found.shortest > self._fastest():
                break
            for index in range(below):
                trial = self._tried(ranks, tp, stages[index], found.choice.mode)
                if trial.plan is not None:
                    yield trial
                    below = index
                    break

    def too_few(self, ranks: int) -> bool:
        """Whether a group's state is more than twice the memory of ``ranks`` ranks.

        The state is that of the trial with one rank. The factor of two allows for layouts that
        shard other parts. Powers of two are always tried, since they tell how much memory is
        missing.
        """
        states = [
            trial.need
            for trial in self.trials
            if trial.choice.ranks == 1 and trial.state_only and trial.need is not None
        ]
        return bool(ranks & (ranks - 1)) and min(states, default=0) > 2 * ranks * self.memory

    def _fastest(self) -> float:
        return min((trial.plan.seconds for trial in self.trials if trial.plan is not None), default=math.inf)

    def _tried(self, ranks: int, tp: int, stage: int, mode: str) -> Trial:
        trial = self._trial(ranks, tp, stage, mode)
        self.trials.append(trial)
        return trial

    def _trial(self, ranks: int, tp: int, stage: int, mode: str) -> Trial:
        groups = self.config.sdp.groups
        world = groups * ranks
        machine = self.machine_of(world)
        choice = Choice(ranks, tp, stage, mode, 0, 0)
        try:
            micro, accumulation = own_share(self.step, world // tp)
            if any(machine.link(range(first, first + tp)) == "between nodes" for first in range(0, world, tp)):
                raise ConfigError("tensor-parallel ranks would be on two nodes")
            choice = Choice(ranks, tp, stage, mode, micro, accumulation)
            config = choice.applied(self.config)
            state = _most_state(config, world)
        except SDPError as error:
            return Trial(choice, str(error), of_the_degrees=True)
        if state > self.memory:
            return Trial(choice, f"does not fit: the state alone is {self._excess(state)}", state, state_only=True)
        try:
            plan = forecast("this layout", config, machine, world)
        except SDPError as error:
            return Trial(choice, str(error))
        peak = plan.worst.trace.peak
        if peak > self.memory:
            return Trial(choice, f"does not fit: the peak is {self._excess(peak)}", peak)
        return Trial(
            choice, f"fits: the peak is {format_bytes(peak)}, a step takes {format_seconds(plan.seconds)}", peak, plan
        )

    def _excess(self, need: float) -> str:
        return f"{format_bytes(need)}, {format_bytes(need - self.memory)} too much"


def _most_state(config: Config, world: int) -> int:
    """Bytes of state of the rank that has the most, computed without a trace."""
    mesh = mesh_of(config, world)
    layout = Layout.of(model_and_batch(config)[0](), config, mesh)
    placeholder = [{"params": [nn.Parameter(torch.zeros(1))]}]
    optimizer, _ = make_optimizer(config.optimizer, None, placeholder, torch.device("cpu"), grouped=True)
    options: dict[str, Any] = {
        "shards": mesh.shards(config.zero_optimization.stage),
        "compute_bytes": config.compute_bytes,
        "sync": config.sdp.sync,
    }
    return max(predict_state_bytes(layout, mesh.rank(group), optimizer, **options).total for group in range(mesh.sdp))
