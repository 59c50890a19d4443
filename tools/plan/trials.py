"""The trials of ``--fit``, and the reasons for its choice in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...engine.accounting.quantities import format_bytes, format_seconds
from ...engine.batch.size import BatchSize
from ...engine.config.schema import Config
from ...engine.distributed.mesh import mesh_of
from ...engine.errors import ConfigError
from .result import Forecast


@dataclass(frozen=True)
class Step:
    """The samples of an optimizer step.

    Attributes:
        samples: Samples of all ranks together.
        micro: The micro-batch that the configuration gives or implies.
        accumulation: The number of micro-batches, if the configuration gives that instead.
    """

    samples: int
    micro: int
    accumulation: int | None = None


@dataclass(frozen=True)
class Choice:
    """The settings of one layout.

    ``micro`` and ``accumulation`` are 0 if samples cannot be shared equally.
    """

    ranks: int  # of each group
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
        """Return ``config`` with these settings. The samples of a step stay the same."""
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
        """The same settings as keys and values of ``--set``."""
        return {
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization.stage": self.stage,
            "tensor_parallel.autotp_size": self.tp,
            "activation_checkpointing.mode": self.mode,
        }


@dataclass(frozen=True)
class Trial:
    """A layout that was tried.

    Attributes:
        choice: Its settings.
        why: Why it is possible or not.
        need: Bytes that it needs. None if the engine refuses the layout.
        plan: Its plan, if it fits.
        state_only: ``need`` is the state alone.
        of_the_degrees: Any settings with the same degrees would be refused too.
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
        """How layouts that fit are compared: seconds of a step, then bytes sent, then memory.

        Layouts that hide all their traffic have equal seconds.
        """
        assert self.plan is not None and self.need is not None
        return self.plan.seconds, sum(self.plan.sent_at_most.values()), self.need

    @property
    def shortest(self) -> float:
        """Seconds of a step that hides all the traffic that can be hidden.

        No ZeRO stage makes the step shorter than this.
        """
        assert self.plan is not None
        return max(rank.time.compute + rank.time.tensor_parallel for rank in self.plan.ranks)


def reasons_of(best: Trial, trials: Sequence[Trial], step: Step, model: nn.Module) -> Iterator[str]:
    """Explain the choice: a line for fewer ranks, other degrees, cheaper settings and the
    micro-batch.

    Args:
        best: The trial that was chosen.
        trials: Everything that was tried.
        step: The samples of a step.
        model: The model, which may contain batch norm.
    """
    assert best.plan is not None
    choice = best.choice
    same = [trial for trial in trials if trial.choice.ranks == choice.ranks]
    fitting = [trial for trial in same if trial.plan is not None]
    why = (
        "the only layout with this many ranks that fits"
        if len(fitting) == 1
        else "of the layouts with this many ranks that fit, the one with the shortest step and the least recomputation"
    )
    yield f"chosen: {choice}: {why} ({format_seconds(best.plan.seconds)} by the plan)"
    fewer = [trial for trial in trials if trial.choice.ranks < choice.ranks]
    if fewer:
        yield f"fewer ranks a group do not fit: {closest_of(fewer)}"
    for tp in sorted({trial.choice.tp for trial in same} - {choice.tp}):
        others = [trial for trial in same if trial.choice.tp == tp]
        yield f"not fsdp {choice.ranks // tp} × tp {tp}: {_best_of(others, best)}"
    for trial in same:
        if trial.choice.tp == choice.tp and trial.plan is None:
            yield f"not {trial.choice.settings} with it: {trial.why}"
    if choice.micro != step.micro:
        norm = any(isinstance(module, _BatchNorm) for module in model.modules())
        yield (
            f"micro-batch {choice.micro} instead of {step.micro}, so that a step keeps its {step.samples:,} samples"
            + ("; batch norm takes its statistics from micro-batches, so they change" if norm else "")
        )


def _best_of(others: Sequence[Trial], best: Trial) -> str:
    """Compare the cheapest of ``others`` that fits with ``best``, or say why none fits."""
    fitting = [trial for trial in others if trial.plan is not None]
    if not fitting:
        closest = closest_of(others)
        return f"{closest.choice.settings}: {closest.why}"
    cheapest = min(fitting, key=lambda trial: trial.cost)
    seconds, sent, need = cheapest.cost
    if seconds > best.cost[0]:
        return f"a step takes {format_seconds(seconds)} with {cheapest.choice.settings}"
    more = (
        f"sends {format_bytes(sent)} a rank, not {format_bytes(best.cost[1])}"
        if sent > best.cost[1]
        else f"needs {format_bytes(need)}"
    )
    return f"a step takes as long with {cheapest.choice.settings}, but {more}"


def closest_of(trials: Sequence[Trial]) -> Trial:
    """Return the trial that misses by the least, preferably by a traced peak.

    If the engine refuses all of them, return the first.
    """
    misses = [trial for trial in trials if trial.need is not None]
    return min(misses, key=lambda trial: (trial.state_only, trial.need or 0)) if misses else trials[0]


def stated_step(config: Config, world: int) -> Step:
    """Return the samples of a step that ``config`` gives for ``world`` ranks.

    Ranks that do not fill the grid are left out. If ``config`` gives no micro-batch, so are ranks
    that cannot share its samples equally. Raises :class:`ConfigError`.
    """
    if config.train_batch_size is not None and config.train_micro_batch_size_per_gpu is not None:
        return Step(config.train_batch_size, config.train_micro_batch_size_per_gpu)  # for any number of ranks
    of_grid = config.sdp.groups * config.tensor_parallel.autotp_size
    most = max(1, world // of_grid)
    if config.train_batch_size is not None:
        shared = config.sdp.groups * (config.gradient_accumulation_steps or 1)
        # If no number of ranks divides the samples, one rank per group leads to the clearest error.
        most = next((count for count in range(most, 0, -1) if config.train_batch_size % (shared * count) == 0), 1)
    size = BatchSize.resolve(config, mesh_of(config, most * of_grid))
    instead = config.train_micro_batch_size_per_gpu is None
    return Step(size.train, size.micro, config.gradient_accumulation_steps if instead else None)


def own_share(step: Step, data_ranks: int) -> tuple[int, int]:
    """Return the micro-batch and the accumulation of each of ``data_ranks``.

    The configured accumulation stays if it divides a rank's samples. Otherwise the configured
    micro-batch stays, or becomes the next smaller one that divides them. Raises
    :class:`ConfigError` if the samples cannot be shared equally.
    """
    per_rank, rest = divmod(step.samples, data_ranks)
    if rest or per_rank < 1:
        raise ConfigError(
            f"the {step.samples:,} samples of a step cannot be shared equally among {data_ranks} data ranks"
        )
    if step.accumulation is not None and per_rank % step.accumulation == 0:
        return per_rank // step.accumulation, step.accumulation
    micro = _largest_divisor(per_rank, step.micro)
    return micro, per_rank // micro


def _largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of ``number`` up to ``limit``."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return max(divisor for pair in ((one, number // one) for one in small) for divisor in pair if divisor <= limit)
