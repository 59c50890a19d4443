"""What ``--fit`` tried, and why it chose what it chose: outcomes into sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...engine.batch.size import BatchSize
from ...engine.config.schema import Config
from ...engine.distributed.mesh import mesh_of
from ...engine.errors import ConfigError
from ..shared.quantities import format_bytes
from .forecast import Forecast


@dataclass(frozen=True)
class Step:
    """``samples`` of all ranks together; ``micro``: of one in a forward pass, as it is stated. ``accumulation``: what is stated instead."""

    samples: int
    micro: int
    accumulation: int | None = None


@dataclass(frozen=True)
class Choice:
    """Settings of one layout. ``micro``, ``accumulation``: of its samples; 0 where they cannot be shared."""

    ranks: int  # of a group
    tp: int
    stage: int
    mode: str
    micro: int
    accumulation: int

    @property
    def fsdp(self) -> int:
        return self.ranks // self.tp

    def __str__(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks > 1)} a group ({self.degrees}), {self.settings}"

    @property
    def degrees(self) -> str:
        return f"fsdp {self.fsdp} × tp {self.tp}"

    @property
    def settings(self) -> str:
        return f"ZeRO stage {self.stage}, activation checkpointing {self.mode}"

    def applied(self, config: Config) -> Config:
        """The configuration with these settings; they say as many samples a step as it does."""
        return config.model_copy(
            update={
                "train_micro_batch_size_per_gpu": self.micro,
                "gradient_accumulation_steps": self.accumulation,
                "zero_optimization": config.zero_optimization.model_copy(update={"stage": self.stage}),
                "tensor_parallel": config.tensor_parallel.model_copy(update={"autotp_size": self.tp}),
                "activation_checkpointing": config.activation_checkpointing.model_copy(update={"mode": self.mode}),
            }
        )

    def overrides(self) -> dict[str, int | str]:
        """The same for ``--set``."""
        return {
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization.stage": self.stage,
            "tensor_parallel.autotp_size": self.tp,
            "activation_checkpointing.mode": self.mode,
        }


@dataclass(frozen=True)
class Trial:
    """A layout that was tried, and ``why`` it is or is not possible. ``need``: its bytes, of its state alone where ``state_only``; None
    where it was refused, ``of_the_degrees`` where any settings with them would be. ``plan``: where it fits.
    """

    choice: Choice
    why: str
    need: int | None = None
    plan: Forecast | None = None
    state_only: bool = False
    of_the_degrees: bool = False

    def __str__(self) -> str:
        return f"{self.choice}: {self.why}"

    @property
    def cost(self) -> tuple[float, float, float]:
        """Of one that fits: seconds of a step; of equal ones, whose traffic is hidden, bytes that a rank sends at most; then memory."""
        assert self.plan is not None and self.need is not None
        return self.plan.seconds, sum(self.plan.sent_at_most.values()), self.need

    @property
    def shortest(self) -> float:
        """Seconds of a step of one that fits, were all traffic hidden that can be; at no ZeRO stage it takes less."""
        assert self.plan is not None
        return max(rank.time.compute + rank.time.tensor_parallel for rank in self.plan.ranks)


def reasons_of(best: Trial, trials: Sequence[Trial], step: Step, model: nn.Module) -> Iterator[str]:
    """A line for every kind of other choice: fewer ranks, other degrees, cheaper settings; and what became of the micro-batch."""
    assert best.plan is not None
    choice = best.choice
    same = [trial for trial in trials if trial.choice.ranks == choice.ranks]
    fitting = [trial for trial in same if trial.plan is not None]
    of = (
        "the only layout"
        if len(fitting) == 1
        else "the one with the shortest step, with no more recomputation than it needs,"
    )
    yield f"chosen: {choice}: {of} of so many ranks that fits ({best.plan.seconds:.4g} s by the plan)"
    fewer = [trial for trial in trials if trial.choice.ranks < choice.ranks]
    if fewer:
        yield f"fewer ranks a group do not do: {closest_of(fewer)}"
    for tp in sorted({trial.choice.tp for trial in same} - {choice.tp}):
        others = [trial for trial in same if trial.choice.tp == tp]
        yield f"not fsdp {choice.ranks // tp} × tp {tp}: {_best_of(others, best)}"
    for trial in same:
        if trial.choice.tp == choice.tp and trial.plan is None:
            yield f"not {trial.choice.settings} with it: {trial.why}"
    if choice.micro != step.micro:
        norm = any(isinstance(module, _BatchNorm) for module in model.modules())
        yield (
            f"micro-batch {choice.micro} in place of {step.micro}, so that a step keeps its {step.samples:,} samples"
            + ("; batch norm's statistics are of micro-batches, and change with them" if norm else "")
        )


def _best_of(others: Sequence[Trial], best: Trial) -> str:
    """Of settings with other degrees the cheapest that fits, or what keeps all of them from it."""
    fitting = [trial for trial in others if trial.plan is not None]
    if not fitting:
        closest = closest_of(others)
        return f"{closest.choice.settings}: {closest.why}"
    cheapest = min(fitting, key=lambda trial: trial.cost)
    seconds, sent, need = cheapest.cost
    if seconds > best.cost[0]:
        return f"a step takes {seconds:.4g} s with {cheapest.choice.settings}"
    more = (
        f"sends {format_bytes(sent)} a rank, not {format_bytes(best.cost[1])}"
        if sent > best.cost[1]
        else f"needs {format_bytes(need)}"
    )
    return f"a step takes as long with {cheapest.choice.settings}, but {more}"


def closest_of(trials: Sequence[Trial]) -> Trial:
    """Of trials that do not fit the one that misses by the least, by its peak where one was traced; the first, if all were refused."""
    misses = [trial for trial in trials if trial.need is not None]
    return min(misses, key=lambda trial: (trial.state_only, trial.need or 0)) if misses else trials[0]


def stated_step(config: Config, world: int) -> Step:
    """What ``config`` says of ``world`` ranks; those that do not fill the grid are left out, and where it says nothing of micro-batches,
    those that cannot share its samples equally. Raises :class:`ConfigError`.
    """
    if config.train_batch_size is not None and config.train_micro_batch_size_per_gpu is not None:
        return Step(config.train_batch_size, config.train_micro_batch_size_per_gpu)  # of any number of ranks
    of_grid = config.sdp.groups * config.tensor_parallel.autotp_size
    most = max(1, world // of_grid)
    if config.train_batch_size is not None:
        shared = config.sdp.groups * (config.gradient_accumulation_steps or 1)
        # Where no number of ranks does, one a group says what is wrong.
        most = next((count for count in range(most, 0, -1) if config.train_batch_size % (shared * count) == 0), 1)
    size = BatchSize.resolve(config, mesh_of(config, most * of_grid))
    instead = config.train_micro_batch_size_per_gpu is None
    return Step(size.train, size.micro, config.gradient_accumulation_steps if instead else None)


def own_share(step: Step, data_ranks: int) -> tuple[int, int]:
    """Micro-batch and accumulation of each of ``data_ranks``: the stated accumulation, if that divides its samples, else the stated
    micro-batch, or the next smaller one that divides them.

    Raises :class:`ConfigError` where the samples cannot be shared equally.
    """
    each, rest = divmod(step.samples, data_ranks)
    if rest or each < 1:
        raise ConfigError(
            f"the {step.samples:,} samples of a step cannot be shared equally among {data_ranks} data ranks"
        )
    if step.accumulation is not None and each % step.accumulation == 0:
        return each // step.accumulation, step.accumulation
    micro = next(size for size in range(min(step.micro, each), 0, -1) if each % size == 0)
    return micro, each // micro
