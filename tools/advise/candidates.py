"""The ways to train a configuration's model that ``sdp advise`` compares, each with its plan."""

from __future__ import annotations

from ...engine.config.schema import Config
from ...engine.config.sync import SyncSection
from ...engine.errors import SDPError
from ..plan.alternatives import alternatives
from ..plan.forecast import forecast
from ..plan.machine import Machine
from ..plan.result import Forecast
from .candidate import Candidate, Method, mean_capacity, with_sdp
from .dense_models import DILOCO, LARGEST, SMALLER, SmallerModels

CAPACITY = 0.5  # of SDP, if the configuration is dense
EVERY = 32  # steps of a round, if the configuration has no local steps

_ORDER = (
    "DDP", "FSDP (ZeRO-3)", "HSDP", *LARGEST, SMALLER, DILOCO, *(f"{name}, {DILOCO}" for name in (*LARGEST, SMALLER)),
    "SDP, forward, then backward", "SDP, backward", "SDP, forward", "SDP, backward, local steps",
    "SDP, forward, local steps",
)  # fmt: skip


def with_groups(config: Config, machine: Machine, world: int) -> tuple[Config, list[str]]:
    """Return ``config`` with SDP groups and an engine that can be planned, and a sentence for what
    was chosen here.

    A dense configuration gets one group for each node. On a single node it gets one for each rank,
    or for each set of ranks that tensor parallelism needs.
    """
    sdp, notes = config.sdp, []
    if sdp.engine != "fsdp2":
        equal = " and groups of equal size" if sdp.group_sizes else ""
        notes.append(f'sdp.engine "{sdp.engine}" is not planned. All ways are planned for "fsdp2"{equal}.')
        sdp = sdp.model_copy(update={"engine": "fsdp2", "group_sizes": None})
    if sdp.groups == 1 or mean_capacity(config) == 1.0:
        nodes = len(machine.slots)
        of_ranks = max(1, world // config.tensor_parallel.autotp_size)
        groups = sdp.groups if sdp.groups > 1 else (nodes if nodes > 1 and world % nodes == 0 else of_ranks)
        if groups > 1:
            notes.append(
                f"The configuration is dense. SDP is planned with sdp.groups {groups}, sdp.capacity {CAPACITY:g} and "
                'sdp.lr_scale "auto".'
            )
        sdp = sdp.model_copy(update={"groups": groups, "capacity": CAPACITY, "lr_scale": "auto"})
    return config.model_copy(update={"sdp": sdp}), notes


def candidates(
    config: Config, machine: Machine, world: int, memory: float | None = None
) -> tuple[list[Candidate], list[str]]:
    """Plan all ways to train the model of ``config``, which has SDP groups.

    Args:
        config: the run.
        machine: where it runs.
        world: number of ranks.
        memory: bytes of a device. None if memory does not matter.

    Returns:
        The candidates, simple ones first, and a line for each that cannot be planned. The schedule
        of maskings changes to backward masking after half of the steps.
    """
    sync, groups = config.sdp.sync, config.sdp.groups
    if sync is None or sync.every == 1:
        sync = SyncSection(every=EVERY)
    planned, notes = alternatives(with_sdp(config, sync=sync), machine, world)
    found = [
        Candidate(plan.name, "dense", sync.every if plan.name == DILOCO else 1, groups, 1.0, ((1.0, plan),))
        for plan in planned
    ]
    plans: dict[tuple[str, bool], Forecast] = {}  # by masking, and whether steps are local
    failed: dict[str, list[str]] = {}  # by reason, the ways that it refuses
    ways = [("forward", False), ("backward", False), ("forward", True), ("backward", True)] if groups > 1 else []
    if not ways:
        notes.append("SDP and DiLoCo need at least two groups")
    for masking, local in ways:
        name = f"SDP, {masking}, local steps" if local else f"SDP, {masking}"
        try:
            settings = with_sdp(config, masking=masking, sync=sync if local else None)
            plans[masking, local] = forecast(name, settings, machine, world)
        except SDPError as error:
            failed.setdefault(str(error), []).append(name)

    def add(name: str, method: Method, every: int, *phases: Forecast | None) -> None:
        known = tuple((1 / len(phases), plan) for plan in phases if plan is not None)
        if len(known) == len(phases):
            found.append(Candidate(name, method, every, groups, mean_capacity(config), known))

    forward, backward = plans.get(("forward", False)), plans.get(("backward", False))
    add("SDP, forward", "forward", 1, forward)
    add("SDP, backward", "backward", 1, backward)
    add("SDP, forward, then backward", "forward, then backward", 1, forward, backward)
    add("SDP, forward, local steps", "forward", sync.every, plans.get(("forward", True)))
    add("SDP, backward, local steps", "backward", sync.every, plans.get(("backward", True)))
    notes += [f"{'; '.join(names)}: {reason}" for reason, names in failed.items()]
    smaller = SmallerModels(config, machine, world, sync, memory)
    found += smaller.planned(found)
    found.sort(key=lambda one: _ORDER.index(one.name))
    return found, [*notes, *smaller.notes, *_layouts(config, found, machine)]


def _layouts(config: Config, found: list[Candidate], machine: Machine) -> list[str]:
    """How the ways are spread over the ranks, in sentences."""
    notes = [f"The {one.name} model runs as {one.layout}" for one in found if one.layout]
    if any(one.is_sdp or one.every > 1 or one.name in LARGEST for one in found):
        groups, stage, nodes = config.sdp.groups, config.zero_optimization.stage, len(machine.slots)
        own = f"sdp.groups {groups}, zero_optimization.stage {stage}"
        hint = ""
        if 1 < nodes < sum(machine.slots) and (groups, stage) != (nodes, 3):
            hint = f". Compare --set sdp.groups={nodes} zero_optimization.stage=3: one sharded group per node"
        notes.append(f"DiLoCo, the largest dense model and SDP have the layout of the configuration: {own}{hint}")
    return notes
