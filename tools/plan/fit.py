"""Finds the smallest layout of a run that fits a device's memory (``sdp plan --fit``).

The layout has as few ranks per group as possible. Of the layouts with this number of ranks, it has
the shortest planned step.

- What stays: groups, capacity, masking and the samples of a step. They decide what is learned.
- What changes: the degrees of sharding and of tensor parallelism, the ZeRO stage, recomputation,
  and how the samples of a step are split into micro-batches.

To save time, no step is planned for a layout whose state alone does not fit. The search tries the
configured degree of tensor parallelism, and 1, 2, 4 and 8. For the ranks per group, it tries powers
of two, powers of two times the configured degree, and the largest possible number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...engine.accounting.memory import predict_state_bytes
from ...engine.accounting.quantities import format_bytes, format_seconds
from ...engine.batch.size import BatchSize
from ...engine.config.load import load_config
from ...engine.config.schema import Config
from ...engine.distributed.mesh import mesh_of, split_tensor_group
from ...engine.errors import ConfigError, SDPError
from ...engine.optim.optimizers import make_optimizer
from ...engine.placement.layout import Layout
from ..runs.model_inputs import model_and_batch
from ..train.failures import remedies
from .forecast import Forecast, forecast, require_planned
from .machine import Machine

MOST_RANKS = 1024  # of a group
_DEGREES = (1, 2, 4, 8)  # of tensor parallelism, in addition to the configured one
_MODES = ("none", "selective", "full")  # from the fastest to the one that needs the least memory
_STAGES = (1, 2, 3)  # in the same order


@dataclass(frozen=True)
class Choice:
    """The settings of a layout. If no micro-batch was found for the layout, ``micro`` is 0."""

    ranks: int  # of each group
    tp: int
    stage: int
    mode: str
    micro: int = 0
    accumulation: int = 0

    def __str__(self) -> str:
        return (
            f"{self.ranks} rank{'s' * (self.ranks > 1)} per group (fsdp {self.ranks // self.tp} × tp {self.tp}), "
            f"ZeRO stage {self.stage}, activation checkpointing {self.mode}"
        )

    def applied(self, config: Config) -> Config:
        """Return ``config`` with the settings of this layout. The samples of a step stay."""
        return load_config(config.resolved(), self.overrides)

    @property
    def overrides(self) -> list[str]:
        """The settings of this layout as values of ``--set``."""
        return [
            f"train_micro_batch_size_per_gpu={self.micro}",
            f"gradient_accumulation_steps={self.accumulation}",
            f"zero_optimization.stage={self.stage}",
            f"tensor_parallel.autotp_size={self.tp}",
            f"activation_checkpointing.mode={self.mode}",
        ]


@dataclass(frozen=True)
class Trial:
    """A layout that the search has tried, and whether it fits.

    Attributes:
        choice: The settings of the layout.
        why: The result in words: why the layout fits or not, or why the engine refuses it.
        need: The bytes that the layout needs. None if the engine refuses it.
        plan: The plan of the layout, if it fits.
        state_only: Whether ``need`` is the state alone, without a traced step.
    """

    choice: Choice
    why: str
    need: int | None = None
    plan: Forecast | None = None
    state_only: bool = False

    def __str__(self) -> str:
        return f"{self.choice}: {self.why}"

    @property
    def cost(self) -> tuple[float, float, float]:
        """The cost by which layouts that fit are compared: seconds of a step, bytes sent, memory.

        Bytes count only if the seconds are equal, and memory only if the bytes are also equal.
        """
        assert self.plan is not None and self.need is not None
        return self.plan.seconds, sum(self.plan.sent_at_most.values()), self.need


@dataclass(frozen=True)
class Fit:
    """The layout that a search chose, and how it was found.

    Attributes:
        choice: The settings of the chosen layout.
        plan: The plan of the chosen layout.
        trials: All layouts that were tried, in order.
        reasons: Lines for the user: what was chosen, and how the micro-batch changes.
    """

    choice: Choice
    plan: Forecast
    trials: tuple[Trial, ...]
    reasons: tuple[str, ...]


def find_fit(config: Config, memory: float, machine_of: Callable[[int], Machine], world: int, *, bounded: bool) -> Fit:
    """Find the smallest layout of a run that fits devices of ``memory`` bytes.

    Args:
        config: The configuration of the run.
        memory: The bytes of a device.
        machine_of: Returns the machine for a number of ranks.
        world: The configured number of ranks. Without ``train_batch_size``, it determines the
            samples of a step.
        bounded: Whether to use at most ``world`` ranks.

    Raises:
        ConfigError: No layout fits, or there are fewer ranks than groups.
    """
    require_planned(config)
    groups, stated_tp = config.sdp.groups, config.tensor_parallel.autotp_size
    limit = world // groups if bounded else MOST_RANKS
    if limit < 1:
        raise ConfigError(
            f"--fit: {world} ranks are fewer than sdp.groups {groups}, each of which needs one; lower sdp.groups"
        )
    if (config.train_batch_size or 0) % groups:
        raise ConfigError(
            f"--fit: train_batch_size {config.train_batch_size:,} is not a multiple of sdp.groups {groups}, so no "
            "number of ranks can divide it equally; change one of them"
        )
    samples, micro = stated_step(config, world)
    search = _Search(config, memory, machine_of, samples, micro)
    powers = [1 << power for power in range(limit.bit_length())]
    counts = {count for power in powers for count in (power, power * stated_tp) if count <= limit}
    counts |= {limit} if bounded else set()
    for ranks in sorted(counts):
        degrees = [tp for tp in sorted({*_DEGREES, stated_tp}) if ranks % tp == 0]
        fitting = [trial for tp in degrees for trial in search.fitting(ranks, tp)]
        if fitting:
            best = min(fitting, key=lambda trial: trial.cost)
            assert best.plan is not None
            return Fit(best.choice, best.plan, tuple(search.trials), tuple(_reasons(best, search)))
    closest = closest_of(search.trials)
    said = ""
    if closest.need is not None:
        less = "; ".join(remedies(closest.choice.applied(config)))
        said = f"; closest: {closest}; what would need less memory: {less}"
    refused = list({(trial.choice.tp, trial.why): str(trial) for trial in search.trials if trial.need is None}.values())
    also = f"; refused: {'; '.join(refused[:3])}" if refused else ""
    what = f"no layout of up to {max(counts)} ranks per group fits {format_bytes(memory)}"
    raise ConfigError(f"--fit: {what}{said}{also}")


def _reasons(best: Trial, search: _Search) -> Iterator[str]:
    choice = best.choice
    yield (
        f"chosen: {choice}: of the layouts with the fewest ranks that fit, the one with the shortest step "
        f"({format_seconds(best.cost[0])} by the plan)"
    )
    if choice.micro != search.micro:
        model = model_and_batch(search.config)[0]()
        norm = any(isinstance(module, _BatchNorm) for module in model.modules())
        yield (
            f"micro-batch {choice.micro} instead of {search.micro}, so that a step keeps its {search.samples:,} samples"
            + ("; batch norm computes statistics of micro-batches, so they change" if norm else "")
        )


@dataclass
class _Search:
    """Tries layouts, and remembers the results."""

    config: Config
    memory: float
    machine_of: Callable[[int], Machine]
    samples: int
    micro: int
    trials: list[Trial] = field(default_factory=list)

    def fitting(self, ranks: int, tp: int) -> Iterator[Trial]:
        """Yield the settings with these degrees that fit and could be the fastest.

        The search starts with the settings that need the least memory. As long as a layout fits, it
        lowers first recomputation, then the stage, because both make a step faster and need more
        memory.
        """
        stages = (0,) if ranks == tp else _STAGES  # one rank has nothing to shard
        modes: list[Trial] = []
        for mode in reversed(_MODES):
            trial = self._try(Choice(ranks, tp, stages[-1], mode))
            if trial.plan is None:
                break
            modes.append(trial)
            yield trial
        below = len(stages) - 1
        for found in reversed(modes):
            for index in range(below):
                trial = self._try(replace(found.choice, stage=stages[index]))
                if trial.plan is not None:
                    yield trial
                    below = index
                    break

    def _try(self, choice: Choice) -> Trial:
        trial = self._trial(choice)
        self.trials.append(trial)
        return trial

    def _trial(self, choice: Choice) -> Trial:
        tp, world = choice.tp, self.config.sdp.groups * choice.ranks
        machine = self.machine_of(world)
        try:
            micro, accumulation = own_share(self.samples, self.micro, world // tp)
            if split_tensor_group(machine.hosts, tp) is not None:
                raise ConfigError("tensor-parallel ranks would be on two nodes")
            choice = replace(choice, micro=micro, accumulation=accumulation)
            config = choice.applied(self.config)
            state = _most_state(config, world)
            if state > self.memory:
                return Trial(choice, f"does not fit: the state alone is {self._excess(state)}", state, state_only=True)
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


def closest_of(trials: Sequence[Trial]) -> Trial:
    """Return the layout that misses the memory by the least, preferably one with a traced step.

    If the engine refused all layouts, the first layout is returned.
    """
    misses = [trial for trial in trials if trial.need is not None]
    return min(misses, key=lambda trial: (trial.state_only, trial.need or 0)) if misses else trials[0]


def stated_step(config: Config, world: int) -> tuple[int, int]:
    """Return the samples of a step and the micro-batch that ``config`` gives for ``world`` ranks.

    If the run cannot use all ranks, the result is for the largest number that it can use: all
    groups have equally many ranks, and all ranks have equally many samples. Raises ConfigError.
    """
    if config.train_batch_size is not None and config.train_micro_batch_size_per_gpu is not None:
        return config.train_batch_size, config.train_micro_batch_size_per_gpu  # for any number of ranks
    grid = config.sdp.groups * config.tensor_parallel.autotp_size
    most = max(1, world // grid)
    if config.train_batch_size is not None:
        shared = config.sdp.groups * (config.gradient_accumulation_steps or 1)
        # If no number of ranks divides the samples, one rank per group leads to the clearest error.
        most = next((count for count in range(most, 0, -1) if config.train_batch_size % (shared * count) == 0), 1)
    size = BatchSize.resolve(config, mesh_of(config, most * grid))
    return size.train, size.micro


def own_share(samples: int, micro: int, data_ranks: int) -> tuple[int, int]:
    """Return the micro-batch, at most ``micro``, and the number of micro-batches of each data rank.

    Raises :class:`ConfigError` if the samples of a step cannot be divided equally.
    """
    per_rank, rest = divmod(samples, data_ranks)
    if rest or per_rank < 1:
        raise ConfigError(f"the {samples:,} samples of a step cannot be divided equally among {data_ranks} data ranks")
    small = [number for number in range(1, math.isqrt(per_rank) + 1) if per_rank % number == 0]
    micro = max(size for number in small for size in (number, per_rank // number) if size <= micro)
    return micro, per_rank // micro


def _most_state(config: Config, world: int) -> int:
    """Bytes of state of the rank that has the most, without a trace."""
    mesh = mesh_of(config, world)
    layout = Layout.of(model_and_batch(config)[0](), config, mesh)
    placeholder = [{"params": [nn.Parameter(torch.zeros(1))]}]
    optimizer, _ = make_optimizer(config.optimizer, None, placeholder, torch.device("cpu"), grouped=True)
    return max(predict_state_bytes(layout, mesh.rank(group), optimizer, config).total for group in range(mesh.sdp))
