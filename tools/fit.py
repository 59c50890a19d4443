"""The smallest layout of a run that fits a device's memory: as few ranks per group as will do (1, 2, 4 …), and of theirs the settings that
cost least.

Groups, capacity, masking and the batch of a step stay as they are: they decide what is learned. A layout is tried by its state first,
which is known at once, then by tracing its step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..engine.config import Config
from ..engine.errors import ConfigError, SDPError
from ..engine.initialize import mesh_of
from ..engine.layout import Layout
from ..engine.memory import predict_state_bytes
from ..engine.optim import make_optimizer
from .forecast import Forecast, forecast, model_and_batch
from .machine import Machine
from .out_of_memory import remedies

MOST_RANKS = 1024  # of a group
_MODES = ("none", "selective", "full")


@dataclass(frozen=True)
class Choice:
    """Settings of one layout."""

    ranks: int  # of a group
    tp: int
    stage: int
    mode: str

    def __str__(self) -> str:
        return f"{self.ranks} ranks a group (tp {self.tp}), ZeRO stage {self.stage}, activation checkpointing {self.mode}"

    def applied(self, config: Config) -> Config:
        """The configuration with these settings; the samples of a step stay where they are stated."""
        keep_batch = config.train_batch_size is not None and config.train_micro_batch_size_per_gpu is not None
        return config.model_copy(
            update={
                "zero_optimization": config.zero_optimization.model_copy(update={"stage": self.stage}),
                "tensor_parallel": config.tensor_parallel.model_copy(update={"autotp_size": self.tp}),
                "activation_checkpointing": config.activation_checkpointing.model_copy(update={"mode": self.mode}),
                **({"gradient_accumulation_steps": None} if keep_batch else {}),
            }
        )

    def as_settings(self) -> str:
        """What to add to the command line of ``sdp train``."""
        keys = {"zero_optimization.stage": self.stage, "tensor_parallel.autotp_size": self.tp, "activation_checkpointing.mode": self.mode}
        return " ".join(["--set", *(f"{key}={value}" for key, value in keys.items())])


def find_fit(
    config: Config, memory: float, machine_of: Callable[[int], Machine], per_node: int, most: int | None
) -> tuple[Choice, Forecast, list[str]]:
    """The choice, its plan and the reasons: what was tried and what it would need.

    ``most``: ranks of the world that there are. Raises :class:`ConfigError` where nothing fits, or there are fewer of them than groups.
    """
    reasons: list[str] = []
    search = _Search(config, memory, machine_of, reasons)
    groups = config.sdp.groups
    limit = (most or groups * MOST_RANKS) // groups
    if limit < 1:
        raise ConfigError(f"--fit: {most} ranks are fewer than sdp.groups {groups}, each of which needs one; lower sdp.groups")
    ranks = 1
    while ranks <= limit:
        for tp in _degrees(config, ranks, per_node):
            found = search.cheapest(ranks, tp)
            if found is not None:
                return *found, reasons
        ranks *= 2
    tried = "; ".join(reasons[-3:])
    raise ConfigError(
        f"--fit: no layout of up to {ranks // 2} ranks a group fits {memory / 1e9:.2f} GB ({tried}); what would need less: "
        f"{'; '.join(remedies(config))}"
    )


def _degrees(config: Config, ranks: int, per_node: int) -> Iterator[int]:
    """Tensor-parallel degrees to try, the configuration's first where it can be; its ranks stay inside a node."""
    stated = config.tensor_parallel.autotp_size
    degrees = [tp for tp in (1, 2, 4, 8) if tp <= per_node and ranks % tp == 0 and tp >= min(stated, ranks)]
    return iter(sorted(degrees, key=lambda tp: (tp != stated, tp)))


@dataclass
class _Search:
    config: Config
    memory: float
    machine_of: Callable[[int], Machine]
    reasons: list[str]

    def cheapest(self, ranks: int, tp: int) -> tuple[Choice, Forecast] | None:
        """Of the settings with so many ranks those that cost the least time and fit; none is tried where the thriftiest does not fit."""
        modes = _MODES[_MODES.index(self.config.activation_checkpointing.mode) :]
        if self.config.sdp.granularity == "neuron" and tp > 1:
            return None
        stated = self.config.zero_optimization.stage
        stages = [0] if ranks == tp else sorted({max(stated, 1), 3})
        choices = [Choice(ranks, tp, stage, mode) for mode in modes for stage in stages]
        thriftiest = self._tried(choices[-1])
        if thriftiest is None:
            return None
        for choice in choices[:-1]:
            plan = self._tried(choice)
            if plan is not None:
                return choice, plan
        return choices[-1], thriftiest

    def _tried(self, choice: Choice) -> Forecast | None:
        config, world = choice.applied(self.config), self.config.sdp.groups * choice.ranks
        try:
            state = _most_state(config, world)
            if state > self.memory:
                self.reasons.append(f"{choice}: the state alone is {state / 1e9:.2f} GB")
                return None
            plan = forecast("this layout", config, self.machine_of(world), world)
        except SDPError as error:
            self.reasons.append(f"{choice}: {error}")
            return None
        peak = plan.worst.trace.peak
        fits = peak <= self.memory
        self.reasons.append(f"{choice}: peak {peak / 1e9:.2f} GB, {'fits' if fits else 'does not fit'}")
        return plan if fits else None


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
