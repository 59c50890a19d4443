"""The ways to train a configuration's model that ``sdp advise`` compares, each with its plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ...engine.config.masking import MaskingPhase, MaskingSchedule
from ...engine.config.schema import Config
from ...engine.config.sync import SyncSection
from ...engine.errors import SDPError
from ..plan.alternatives import alternatives, dense_config, largest_dense, smaller_dense
from ..plan.forecast import forecast
from ..plan.machine import Machine
from ..plan.result import Forecast

Method = Literal["dense", "smaller dense", "forward", "backward", "forward, then backward"]

CAPACITY = 0.5  # of SDP, if the configuration is dense
EVERY = 32  # steps of a round, if the configuration has no local steps
SWITCH = 0.5  # part of the run after which a schedule of maskings goes backward


@dataclass(frozen=True)
class Candidate:
    """One way to train the model.

    Attributes:
        name: what users call it.
        method: what is trained, for which losses were measured.
        every: steps between two averages. 1 averages gradients in every step.
        groups: the number of SDP groups that the configuration has.
        capacity: the part of the model that a group holds.
        plans: the phases of the run, each with its part of the steps.
    """

    name: str
    method: Method
    every: int
    groups: int
    capacity: float
    plans: tuple[tuple[float, Forecast], ...]

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs the most memory, in the phase that needs the most."""
        return max(plan.worst.trace.peak for _, plan in self.plans)

    @property
    def seconds(self) -> float:
        """Expected seconds of a step, as the mean over the run."""
        return sum(share * plan.seconds for share, plan in self.plans)

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.plans[0][1].batch.train

    @property
    def parameters(self) -> int:
        """Parameters of the model that is trained."""
        return self.plans[0][1].parameters


def with_groups(config: Config, machine: Machine, world: int) -> tuple[Config, str | None]:
    """Return ``config`` with SDP groups, and a sentence if they were chosen here.

    A dense configuration gets one group for each node, or one for each rank of a single node.
    """
    sdp = config.sdp
    if sdp.groups > 1 and sdp.capacity != 1.0:
        return config, None
    nodes = len(machine.slots)
    groups = sdp.groups if sdp.groups > 1 else (nodes if nodes > 1 and world % nodes == 0 else world)
    chosen = sdp.model_copy(update={"groups": groups, "capacity": CAPACITY})
    note = f"The configuration is dense. SDP is planned with sdp.groups {groups} and sdp.capacity {CAPACITY:g}."
    return config.model_copy(update={"sdp": chosen}), note


def candidates(config: Config, machine: Machine, world: int) -> tuple[list[Candidate], list[str]]:
    """Plan all ways to train the model of ``config``, which has SDP groups.

    Returns:
        The candidates, simple ones first, and a line for each that cannot be planned.
    """
    sync, groups = config.sdp.sync or SyncSection(every=EVERY), config.sdp.groups
    planned, notes = alternatives(_with(config, sync=sync), machine, world)
    found = [
        Candidate(plan.name, "dense", sync.every if plan.name == "DiLoCo" else 1, groups, 1.0, ((1.0, plan),))
        for plan in planned
    ]
    others: list[tuple[str, Method, Callable[[], Config]]] = [
        ("SDP, forward", "forward", lambda: _with(config, masking="forward")),
        ("SDP, backward", "backward", lambda: _with(config, masking="backward")),
        ("SDP, forward, then backward", "forward, then backward", lambda: _with(config, masking=_schedule())),
        ("SDP, forward, local steps", "forward", lambda: _with(config, masking="forward", sync=sync)),
        ("SDP, backward, local steps", "backward", lambda: _with(config, masking="backward", sync=sync)),
    ]
    for name, method, make in others:
        try:
            settings = make()
            every = 1 if settings.sdp.sync is None else sync.every
            plans = _phases(name, settings, machine, world)
            found.append(Candidate(name, method, every, groups, _mean_capacity(config), plans))
        except SDPError as error:
            notes.append(f"{name}: {error}")
    smaller, more = _smaller(config, found, machine, world, sync)
    by_name = sorted([*found, *smaller], key=lambda one: _ORDER.index(one.name))
    return by_name, [*notes, *more]


_SMALLER, _SMALLER_LOCAL = "smaller dense", "smaller dense, DiLoCo"
_ORDER = (
    "DDP", "FSDP (ZeRO-3)", "HSDP", _SMALLER, "DiLoCo", _SMALLER_LOCAL, "SDP, forward, then backward",
    "SDP, backward", "SDP, forward", "SDP, backward, local steps", "SDP, forward, local steps",
)  # fmt: skip


def _with(config: Config, **sdp: object) -> Config:
    """Return ``config`` with these keys of ``sdp``, and without what local steps refuse."""
    keys = {"sync": None, **sdp}
    if keys["sync"] is not None:
        keys["lr_scale"] = "none"
    return config.model_copy(update={"sdp": config.sdp.model_copy(update=keys)})


def _schedule() -> list[MaskingPhase]:
    return [MaskingPhase(masking="forward", until=SWITCH), MaskingPhase(masking="backward")]


def _phases(name: str, config: Config, machine: Machine, world: int) -> tuple[tuple[float, Forecast], ...]:
    """Plan every phase of ``config``, with its part of the steps."""
    steps = config.training.steps or 1_000_000  # only the fractions matter
    schedule = MaskingSchedule.of(config.sdp.masking, steps)
    ends = itertools.pairwise([0, *schedule.ends, steps])
    return tuple(
        ((end - start) / steps, forecast(name, config, machine, world, masking=masking))
        for masking, (start, end) in zip(schedule.maskings, ends, strict=True)
    )


def _mean_capacity(config: Config) -> float:
    capacity = config.sdp.capacity
    return sum(capacity) / len(capacity) if isinstance(capacity, list) else capacity


def _smaller(
    config: Config, found: list[Candidate], machine: Machine, world: int, sync: SyncSection
) -> tuple[list[Candidate], list[str]]:
    """Plan the largest dense model that has no more parameters than an SDP group."""
    held = next((one.plans[0][1].layout for one in found if one.method == "forward"), None)
    if held is None:
        return [], [f"{_SMALLER}: SDP cannot be planned, so there is no group to compare with"]
    most = max(sum(info.numel for info in held.held(group)) for group in range(held.mesh.sdp))
    small = smaller_dense(config, most)
    if small is None:
        return [], [f"{_SMALLER}: no size of this model is known that has at most {most:,} parameters"]
    replicas = dense_config(small, config.sdp.groups, config.zero_optimization.stage)
    planned = []
    for name, settings in ((_SMALLER, replicas), (_SMALLER_LOCAL, _with(replicas, sync=sync))):
        plan = replace(forecast(name, settings, machine, world), name=name)
        every = sync.every if name == _SMALLER_LOCAL else 1
        groups, capacity = config.sdp.groups, _mean_capacity(config)
        planned.append(Candidate(name, "smaller dense", every, groups, capacity, ((1.0, plan),)))
    return planned, []


def largest_that_fits(config: Config, machine: Machine, world: int, memory: float) -> Forecast | None:
    """Return the plan of the largest dense model, like that of ``config``, whose peak is at most
    ``memory`` bytes. None if there is none.
    """

    def planned(sized: Config) -> Forecast:
        replicas = dense_config(sized, config.sdp.groups, config.zero_optimization.stage)
        return forecast(_SMALLER, replicas, machine, world)

    found = largest_dense(config, lambda sized: planned(sized).worst.trace.peak, memory)
    return None if found is None else planned(found)
