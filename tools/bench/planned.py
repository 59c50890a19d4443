"""Plans for the methods of ``sdp bench CONFIG``, to print next to the measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...engine.config.schema import Config
from ...engine.errors import ConfigError
from ...engine.tracing.operators import device_here
from ..plan.alternatives import with_buckets
from ..plan.forecast import forecast
from ..plan.machine import Machine
from ..plan.result import Forecast, RankForecast
from .methods import DDP, SMALLER, is_diloco, is_sdp, is_streaming, variant

_IN_BUCKETS = {DDP, "ddp-recompute", "ddp-bf16-gradients", SMALLER}
_SENT = {"ddp-bf16-gradients": 0.5}  # fraction of the bytes that DDP sends


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


def _sending(rank: RankForecast, factor: float) -> RankForecast:
    """Return ``rank`` with its bytes multiplied by ``factor``."""
    return replace(rank, collectives=tuple(replace(one, nbytes=round(one.nbytes * factor)) for one in rank.collectives))


def plan_methods(names: Sequence[str], config: Config, world: int) -> dict[str, Plan]:
    """Plan the methods, and DDP in any case.

    The smaller dense model is the deepest one that DDP fits into the peak of the first SDP method.
    """
    planner = _Planner(world)
    plans: dict[str, Plan] = {}
    for name in dict.fromkeys([DDP, *sorted(names, key=lambda name: name == SMALLER)]):
        layers = None
        if name == SMALLER:
            peaks = [plan.peak for method, plan in plans.items() if is_sdp(method) and plan.peak is not None]
            layers = planner.layers_within(peaks[0] if peaks else planner.forecast(config).worst.trace.peak, config)
        plans[name] = planner.plan(name, variant(name, config, world, layers))
    return plans


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
        plan, factor = self.forecast(config), _SENT.get(name, 1.0)
        if name in _IN_BUCKETS:
            plan = with_buckets(plan)
        if factor != 1.0:
            groups = [
                replace(group, ranks=tuple(_sending(rank, factor) for rank in group.ranks)) for group in plan.groups
            ]
            plan = replace(plan, groups=tuple(groups))
        mode = config.activation_checkpointing.model_copy(update={"mode": "none"})
        model = self.forecast(config.model_copy(update={"activation_checkpointing": mode}))
        flops = sum(group.trace.flops * len(group.groups) for group in model.groups) / sum(
            len(group.groups) for group in model.groups
        )
        by_hand = is_diloco(name) and config.sdp.sync is not None and not is_streaming(config.sdp.sync)
        known = not name.startswith("zero") and factor == 1.0 and not by_hand
        return Plan(
            config=config,
            peak=plan.worst.trace.peak if known else None,
            sent=max(sum(rank.sent(plan.machine).values()) for rank in plan.ranks),
            flops=flops,
            forecast=plan,
        )

    def layers_within(self, peak: int, config: Config) -> int:
        """Return the most layers with which DDP stays within ``peak`` bytes.

        Raises :class:`ConfigError` if a single layer needs more.
        """
        fits, too_many = 0, int(config.model["num_hidden_layers"]) + 1
        while too_many - fits > 1:
            layers = (fits + too_many) // 2
            if with_buckets(self.forecast(variant(SMALLER, config, self._world, layers))).worst.trace.peak <= peak:
                fits = layers
            else:
                too_many = layers
        if fits == 0:
            raise ConfigError(
                f"{SMALLER}: no model of this width fits into the {peak:,} bytes that SDP needs; leave it out of "
                "--methods"
            )
        return fits
