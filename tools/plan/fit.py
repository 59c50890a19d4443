"""The smallest layout of a run that fits a device's memory: as few ranks per group as will do, and of theirs the settings whose step takes
the least time by the plan.

Groups, capacity, masking and the samples of a step stay as they are: they decide what is learned. Only the degrees of sharding and of
tensor parallelism, the ZeRO stage, recomputation and the cut of a step's samples into micro-batches change. A layout is tried by its state
first, which is known at once, then by tracing its step. Tensor parallelism is tried of 1, 2, 4, 8 and as stated; numbers of ranks that
cannot share a step's samples equally are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...engine.accounting.memory import predict_state_bytes
from ...engine.config.schema import Config
from ...engine.distributed.mesh import mesh_of
from ...engine.errors import ConfigError, SDPError
from ...engine.optim.optimizers import make_optimizer
from ...engine.placement.layout import Layout
from ..runs.model_inputs import model_and_batch
from ..shared.quantities import format_bytes
from ..shared.remedies import remedies
from .forecast import Forecast, forecast, require_planned
from .machine import Machine
from .trials import Choice, Step, Trial, closest_of, own_share, reasons_of, stated_step

MOST_RANKS = 1024  # of a group
_DEGREES = (1, 2, 4, 8)  # of tensor parallelism, beside the stated one
_MODES = ("none", "selective", "full")  # from the fastest to the one that needs least
_STAGES = (1, 2, 3)  # likewise


@dataclass(frozen=True)
class Fit:
    """``trials``: all that was tried, in order; ``reasons``: why it is this choice and none of them, a line each."""

    choice: Choice
    plan: Forecast
    trials: tuple[Trial, ...]
    reasons: tuple[str, ...]


def find_fit(config: Config, memory: float, machine_of: Callable[[int], Machine], world: int, *, bounded: bool) -> Fit:
    """The choice for devices of ``memory`` bytes.

    ``world``: ranks of the run as it is stated, which say how many samples a step has where ``train_batch_size`` does not; no more of them
    are used where it is ``bounded``. Raises :class:`ConfigError` where nothing fits, or there are fewer ranks than groups, and what
    building the model raises.
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
            f"--fit: train_batch_size {config.train_batch_size:,} is no multiple of sdp.groups {groups}, so that no number of ranks shares "
            "it equally; change one of them"
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
    assert tried  # one rank a group always shares what is a multiple of the groups
    raise ConfigError(_nothing(config, memory, tried, search.trials))


def _nothing(config: Config, memory: float, ranks: int, trials: list[Trial]) -> str:
    """``ranks``: the most a group that were looked at."""
    closest = closest_of(trials)
    less = "; ".join(remedies(closest.choice.applied(config)))
    said = "" if closest.need is None else f"; closest: {closest}; what would need less: {less}"
    refused = list({(trial.choice.tp, trial.why): str(trial) for trial in trials if trial.need is None}.values())
    also = f"; refused: {'; '.join(refused[:3])}" if refused else ""
    return f"--fit: no layout of up to {ranks} ranks a group fits {format_bytes(memory)}{said}{also}"


@dataclass
class _Search:
    config: Config
    memory: float
    machine_of: Callable[[int], Machine]
    step: Step
    trials: list[Trial] = field(default_factory=list)

    def fitting(self, ranks: int, tp: int) -> Iterator[Trial]:
        """Of the settings with these degrees those that fit and could be the fastest.

        Less recomputation and a lower stage never take longer and never need less (where the plan has it otherwise, it is because it hides
        traffic behind recomputation too: that is not counted). So from the thriftiest settings on recomputation is lowered while they
        fit, then the stage; and what cannot beat the fastest so far, were all its traffic hidden, is left.
        """
        stages = (0,) if ranks == tp else _STAGES  # nothing is sharded over one rank
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
        """Whether the state of a group, by the trial of one rank, is more than twice what so many ranks have memory for; twice, since what
        is sharded may be of another kind. Powers of two are tried all the same: they tell how much is missing.
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
            return Trial(choice, f"does not fit: the state alone is {self._beside(state)}", state, state_only=True)
        try:
            plan = forecast("this layout", config, machine, world)
        except SDPError as error:
            return Trial(choice, str(error))
        peak = plan.worst.trace.peak
        if peak > self.memory:
            return Trial(choice, f"does not fit: the peak is {self._beside(peak)}", peak)
        return Trial(choice, f"fits: the peak is {format_bytes(peak)}, a step takes {plan.seconds:.4g} s", peak, plan)

    def _beside(self, need: float) -> str:
        return f"{format_bytes(need)}, {format_bytes(need - self.memory)} too much"


def _most_state(config: Config, world: int) -> int:
    """Bytes of state of the rank that has most, without a trace."""
    mesh = mesh_of(config, world)
    layout = Layout.of(model_and_batch(config)[0](), config, mesh)
    stand_in = [{"params": [nn.Parameter(torch.zeros(1))]}]
    optimizer, _ = make_optimizer(config.optimizer, None, stand_in, torch.device("cpu"), grouped=True)
    options: dict[str, Any] = {
        "shards": mesh.shards(config.zero_optimization.stage),
        "compute_bytes": config.compute_bytes,
    }
    return max(predict_state_bytes(layout, mesh.rank(group), optimizer, **options).total for group in range(mesh.sdp))
