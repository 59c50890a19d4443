"""Plans for the methods of ``sdp bench CONFIG``, to print next to the measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...engine.config.schema import Config
from ...engine.tracing.operators import device_here
from ..plan.alternatives import with_buckets
from ..plan.forecast import forecast
from ..plan.machine import Machine
from ..plan.result import Forecast
from .methods import DDP, variant


@dataclass(frozen=True)
class Plan:
    """The plan of a method.

    Attributes:
        config: The method's configuration.
        peak: Bytes. None if the planner does not know the method's buffers.
        sent: Bytes that a rank sends in a step, at most.
        flops: The model's operations in a step of a rank, without recomputation: the mean over
            ranks.
        forecast: The whole plan.
    """

    config: Config
    peak: int | None
    sent: float
    flops: float
    forecast: Forecast

    @property
    def slowest_over_mean(self) -> float:
        """The operations of the slowest rank over the mean, recomputation included."""
        groups = self.forecast.groups
        ranks = sum(len(group.groups) for group in groups)
        return max(group.trace.flops for group in groups) / (
            sum(group.trace.flops * len(group.groups) for group in groups) / ranks
        )


def plan_methods(names: Sequence[str], config: Config, world: int) -> dict[str, Plan]:
    """Plan the methods, and DDP in any case."""
    planner = _Planner(world)
    return {name: planner.plan(name, variant(name, config, world)) for name in dict.fromkeys([DDP, *names])}


class _Planner:
    """Plans every configuration only once, since several methods share one."""

    def __init__(self, world: int):
        self._world = world
        self._known: dict[str, Forecast] = {}

    def forecast(self, config: Config) -> Forecast:
        key = config.model_dump_json()
        if key not in self._known:
            self._known[key] = forecast(
                "", config, Machine((self._world,), 1.0, 1.0, 1.0, 1.0, device_here()), self._world
            )
        return self._known[key]

    def plan(self, name: str, config: Config) -> Plan:
        plan = self.forecast(config)
        if name == DDP:
            plan = with_buckets(plan)
        mode = config.activation_checkpointing.model_copy(update={"mode": "none"})
        model = self.forecast(config.model_copy(update={"activation_checkpointing": mode}))
        flops = sum(group.trace.flops * len(group.groups) for group in model.groups) / sum(
            len(group.groups) for group in model.groups
        )
        return Plan(
            config=config,
            peak=None if name.startswith("zero") else plan.worst.trace.peak,
            sent=max(sum(rank.sent(plan.machine).values()) for rank in plan.ranks),
            flops=flops,
            forecast=plan,
        )
