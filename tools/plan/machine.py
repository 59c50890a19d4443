"""The machines that a run is planned for: their nodes, and the speeds of devices and links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

from ...engine.config.method import SyncSection
from ...engine.config.schema import Config
from ...engine.distributed.collectives import Collective
from ...engine.tracing.operators import Device

PEAK_FLOPS, ACHIEVED, INSIDE, BETWEEN = "989TFLOP/s", 0.4, "450GB/s", "50GB/s"

Link = Literal["inside a node", "between nodes"]
LINKS: tuple[Link, Link] = ("inside a node", "between nodes")

_BACKWARD = 2 / 3  # the backward pass's part of a step's operations


@dataclass(frozen=True)
class Machine:
    """Nodes of devices that a run is planned for, with the speeds of devices and links.

    Attributes:
        slots: The number of ranks on each node.
        flops: The peak rate of a device, in operations per second.
        achieved: The fraction of the peak rate that a model reaches.
        inside: Bytes per second that one rank sends inside a node.
        between: Bytes per second that one rank sends between nodes.
        device: The device type whose operators are traced.
    """

    slots: tuple[int, ...]
    flops: float
    achieved: float
    inside: float
    between: float
    device: Device = "cpu"

    def link(self, ranks: Sequence[int]) -> Link:
        """Return the slowest kind of link in a collective among ``ranks``, which are ascending.

        The first and the last rank decide, because the ranks of a node are consecutive.
        """
        return LINKS[self.hosts[ranks[0]] != self.hosts[ranks[-1]]]

    def seconds(self, nbytes: float, link: Link) -> float:
        """Seconds that one rank takes to send ``nbytes``."""
        return nbytes / (self.inside if link == "inside a node" else self.between)

    @cached_property
    def hosts(self) -> list[str]:
        """The name of each rank's node."""
        return [f"node {node}" for node, slots in enumerate(self.slots) for _ in range(slots)]


def fill_nodes(slots: Sequence[int], world: int) -> tuple[int, ...]:
    """Return how many ranks each node has if ``world`` ranks fill one node after the other.

    ``slots`` has the largest number of ranks of each node. Nodes without ranks are left out.
    """
    before = accumulate(slots, initial=0)
    return tuple(min(slot, world - first) for slot, first in zip(slots, before, strict=False) if first < world)


@dataclass(frozen=True)
class StepTime:
    """The expected seconds of one rank's step, and of its computation and traffic.

    ``step`` leaves out traffic that overlaps with computation. All other fields count it.

    Attributes:
        compute: Computation.
        tensor_parallel: Collectives among tensor-parallel ranks, which never overlap.
        inside: Traffic inside groups: gathers and reduce-scatters of weights, and the gradients of
            norms among tensor-parallel ranks.
        between: Averages of gradients between groups.
        refresh: Weights sent to frozen copies.
        step: The whole step: computation, and traffic that does not overlap with it.
        outer: With local steps, averages of weights between groups and refreshed copies, per step.
    """

    compute: float
    tensor_parallel: float
    inside: float
    between: float
    refresh: float
    step: float
    outer: float = 0.0


def step_time(flops: float, collectives: Sequence[Collective], machine: Machine, accumulation: int) -> StepTime:
    """Estimate the step of a rank that computes ``flops`` and takes part in ``collectives``.

    Computation takes the number of operations divided by the achieved rate. A third of it is
    forward, and two thirds are backward, also with recomputation or frozen copies. Traffic takes
    its bytes divided by the speed of the link, without latencies.

    Tensor-parallel traffic does not overlap with anything. Other traffic overlaps with computation,
    one transfer at a time on each kind of link:

    - Refreshes run during the forward pass of the first micro-batch, after the update before it.
    - Averages between groups run during the backward pass of the last micro-batch.
    - Traffic inside groups runs during the rest of the computation.

    Traffic that takes longer than this computation makes the step longer. The additional seconds of
    both kinds of link are summed.
    """
    compute = flops / (machine.flops * machine.achieved)
    first, last = (1 - _BACKWARD) * compute / accumulation, _BACKWARD * compute / accumulation
    seconds: Counter[tuple[Link, str]] = Counter()
    for one in collectives:
        link, part = machine.link(one.ranks), "refresh" if one.kind == "broadcast" else one.scope
        seconds[link, part] += machine.seconds(one.sent, link)  # type: ignore[assignment]

    def total(part: str) -> float:
        return sum(seconds[link, part] for link in LINKS)

    step = compute + total("tensor parallel")
    for link in LINKS:
        refresh, between, inside = (seconds[link, part] for part in ("refresh", "between groups", "inside groups"))
        free = compute - min(refresh, first) - min(between, last)
        step += max(0.0, refresh - first) + max(0.0, between - last) + max(0.0, inside - free)
    return StepTime(
        compute, total("tensor parallel"), total("inside groups"), total("between groups"), total("refresh"), step
    )


def with_outer_steps(
    time: StepTime, collectives: Sequence[Collective], sync: SyncSection, machine: Machine, service: float = 0.0
) -> StepTime:
    """Add the averages of weights after a round of local steps to ``time``, the mean step.

    Without ``sync.overlap``, no average overlaps with computation. Otherwise an average overlaps
    with the next ``overlap`` steps, and makes the round longer only if it takes longer than these.

    ``service`` is the number of bytes that the host of ``sdp serve`` receives and sends in a round.
    """
    seconds = sum(machine.seconds(one.sent, machine.link(one.ranks)) for one in collectives)
    seconds += service / machine.between
    exposed = sync.fragments * max(0.0, seconds / sync.fragments - sync.overlap * time.step)
    return replace(time, outer=seconds / sync.every, step=time.step + exposed / sync.every)


def default_world(config: Config) -> tuple[int, str]:
    """Return the number of ranks that the configuration implies, and the settings that imply it."""
    groups, tp = config.sdp.groups, config.tensor_parallel.autotp_size
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    if train is not None and micro is not None and config.gradient_accumulation_steps is not None:
        ranks = train // (micro * config.gradient_accumulation_steps)
        if ranks and ranks % groups == 0:  # otherwise no number fits, and the error names the fewest ranks
            return ranks * tp, "from the batch sizes"
    return groups * tp, "sdp.groups × tensor_parallel.autotp_size"
