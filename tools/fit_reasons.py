"""What ``--fit`` tried, and why it chose what it chose: outcomes into sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..engine.config.schema import Config
from .fit_batch import Step
from .forecast import Forecast
from .shared.quantities import decimal


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
    of = "the only layout" if len(fitting) == 1 else "the one with the shortest step, with no more recomputation than it needs,"
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
    more = f"sends {decimal(sent)} a rank, not {decimal(best.cost[1])}" if sent > best.cost[1] else f"needs {decimal(need)}"
    return f"a step takes as long with {cheapest.choice.settings}, but {more}"


def closest_of(trials: Sequence[Trial]) -> Trial:
    """Of trials that do not fit the one that misses by the least, by its peak where one was traced; the first, if all were refused."""
    misses = [trial for trial in trials if trial.need is not None]
    return min(misses, key=lambda trial: (trial.state_only, trial.need or 0)) if misses else trials[0]
