"""The ways to train a configuration's model that ``sdp advise`` compares, each with its plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from ...engine.config.masking import Masking
from ...engine.config.schema import Config
from ...engine.config.sync import SyncSection
from ...engine.errors import SDPError
from ..plan.alternatives import alternatives
from ..plan.forecast import forecast
from ..plan.machine import Machine
from ..plan.result import Forecast
from .candidate import Candidate, Method, mean_capacity, with_sdp
from .dense_models import DENSE, DILOCO, SmallerModels

CAPACITY = 0.5  # of SDP, if the configuration is dense
EVERY = 32  # steps of a round, if the configuration has no local steps
MASKINGS: tuple[Masking, ...] = ("forward", "backward")  # in the order of the schedule

_ORDER = (
    "DDP", "FSDP (ZeRO-3)", "HSDP", *DENSE, DILOCO, *(f"{name}, {DILOCO}" for name in DENSE),
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
        notes.append(f'sdp.engine "{sdp.engine}" is not planned. All ways are planned for "fsdp2".')
        sdp = sdp.model_copy(update={"engine": "fsdp2"})
    if sdp.groups == 1 or mean_capacity(config) == 1.0:
        nodes = len(machine.slots)
        of_ranks = max(1, world // config.tensor_parallel.autotp_size)
        groups = sdp.groups if sdp.groups > 1 else (nodes if nodes > 1 and world % nodes == 0 else of_ranks)
        if groups > 1:
            notes.append(
                f'The configuration is dense. SDP is planned with sdp.capacity {CAPACITY:g} and sdp.lr_scale "auto".'
            )
        sdp = sdp.model_copy(update={"groups": groups, "capacity": CAPACITY, "lr_scale": "auto"})
    return config.model_copy(update={"sdp": sdp}), notes


def candidates(
    config: Config,
    machine: Machine,
    world: int,
    memory: float | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> tuple[list[Candidate], list[str]]:
    """Plan all ways to train the model of ``config``, which has SDP groups.

    Args:
        config: the run.
        machine: where it runs.
        world: number of ranks.
        memory: bytes of a device. None if memory does not matter.
        report: is called with what will be planned next, because a large model takes minutes.

    Returns:
        The candidates, simple ones first, and a line for each that cannot be planned. The schedule
        of maskings changes to backward masking after half of the steps.
    """
    sync, groups = config.sdp.sync, config.sdp.groups
    if sync is None or sync.every == 1:
        sync = SyncSection(every=EVERY)
    report("the dense model")
    planned, notes = alternatives(with_sdp(config, sync=sync), machine, world)
    found = [
        Candidate(plan.name, "dense", sync.every if plan.name == DILOCO else 1, groups, 1.0, ((1.0, plan),))
        for plan in planned
    ]
    failed: dict[str, list[str]] = {}  # by reason, the ways that it refuses
    phases: list[Forecast] = []  # of the schedule
    if groups == 1:
        notes.append("SDP and DiLoCo need at least two groups")

    def add(name: str, method: Method, every: int, *plans: Forecast) -> None:
        parts = tuple((1 / len(plans), plan) for plan in plans)
        found.append(Candidate(name, method, every, groups, mean_capacity(config), parts))

    for masking, local in itertools.product(MASKINGS if groups > 1 else (), (None, sync)):
        name = f"SDP, {masking}" if local is None else f"SDP, {masking}, local steps"
        report(name)
        try:
            plan = forecast(name, with_sdp(config, masking=masking, sync=local), machine, world)
        except SDPError as error:
            failed.setdefault(str(error), []).append(name)
            continue
        add(name, masking, 1 if local is None else sync.every, plan)
        phases += [plan] if local is None else []
    if len(phases) == len(MASKINGS):
        add("SDP, forward, then backward", "forward, then backward", 1, *phases)
    notes += [f"{'; '.join(names)}: {reason}" for reason, names in failed.items()]
    report("smaller dense models")
    smaller = SmallerModels(config, machine, world, sync, memory)
    found += smaller.planned(found)
    found.sort(key=lambda one: _ORDER.index(one.name))
    return found, [*notes, *smaller.notes, *_layouts(config, found)]


def candidates_in_the_better_layout(
    config: Config,
    machine: Machine,
    world: int,
    memory: float | None,
    report: Callable[[str], None] = lambda _: None,
) -> tuple[Config, list[Candidate], list[str]]:
    """Like :func:`candidates`, in the layout of ``config`` or with one sharded group for each node.

    The better layout is the one in which more maskings of SDP fit, and if they are as many, the one
    with the fastest step of SDP. Local steps do not count. DiLoCo and the largest dense model have
    the same layout. The smaller dense model has the fastest layout that fits.

    Returns:
        The configuration with the layout of the candidates, and what :func:`candidates` returns.
    """
    found, notes = candidates(config, machine, world, memory, report)
    other = one_group_per_node(config, machine)
    if other is None or not any(one.is_sdp for one in found):
        return config, found, notes
    report("the same with one sharded group per node")
    again, more = candidates(other, machine, world, memory, report)
    own, per_node = (_rank(ways, memory) for ways in (found, again))
    keys = f"--set sdp.groups={other.sdp.groups} zero_optimization.stage={other.zero_optimization.stage}"
    alternative = f"one sharded group per node ({keys})"
    if per_node > own:
        why = _why_worse(own, per_node)
        return other, again, [f"SDP {why} in the layout {_layout(config)}. So {alternative} is planned", *more]
    why = _why_worse(per_node, own) if any(one.is_sdp for one in again) else "cannot be planned"
    return config, found, [*notes, f"With {alternative}, SDP {why}"]


def _rank(found: Sequence[Candidate], memory: float | None) -> tuple[int, float]:
    """How many ways of SDP fit that average in every step, and how fast the fastest step is."""
    ways = [one for one in found if one.is_sdp and one.every == 1 and (memory is None or one.peak <= memory)]
    return len(ways), -min((one.seconds for one in ways), default=math.inf)


def _why_worse(worse: tuple[int, float], better: tuple[int, float]) -> str:
    """Say in which respect a layout with the first rank is worse than one with the second."""
    if not worse[0]:
        return "does not fit"
    return "is slower" if worse[0] == better[0] else "fits with fewer maskings"


def one_group_per_node(config: Config, machine: Machine) -> Config | None:
    """Return ``config`` with one group for each node, sharded over the node's devices.

    None if that is its layout, if it is not possible, or if groups have settings of their own.
    """
    sdp, nodes, devices = config.sdp, len(machine.slots), machine.slots[0]
    own_settings = not (
        isinstance(sdp.capacity, float) and isinstance(sdp.placement, str) and isinstance(sdp.profile, str)
    )
    tensor_parallel = config.tensor_parallel.autotp_size
    is_possible = nodes > 1 and machine.slots == (devices,) * nodes and devices % tensor_parallel == 0
    if own_settings or not is_possible or devices == tensor_parallel:
        return None
    if (sdp.groups, config.zero_optimization.stage) == (nodes, 3):
        return None
    zero = config.zero_optimization.model_copy(update={"stage": 3})
    return config.model_copy(update={"sdp": sdp.model_copy(update={"groups": nodes}), "zero_optimization": zero})


def _layout(config: Config) -> str:
    return f"sdp.groups {config.sdp.groups}, zero_optimization.stage {config.zero_optimization.stage}"


def _layouts(config: Config, found: list[Candidate]) -> list[str]:
    """How the ways are spread over the ranks, in sentences."""
    notes = [f"The {one.name} model runs as {one.layout}" for one in found if one.layout]
    if any(one.is_sdp or one.every > 1 or (one.method == "smaller dense" and not one.layout) for one in found):
        notes.append(f"DiLoCo, the largest dense model and SDP are planned with {_layout(config)}")
    return notes
