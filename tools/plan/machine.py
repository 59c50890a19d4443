"""The machines a run is planned for: which rank is on which node, and how fast devices and links are."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from ...engine.accounting.traffic_plan import Collective
from ...engine.config.schema import Config
from ...engine.tracing.operators import Device

PEAK_FLOPS, ACHIEVED, INSIDE, BETWEEN = "989TFLOP/s", 0.4, "450GB/s", "50GB/s"


Link = Literal["inside a node", "between nodes"]
LINKS: tuple[Link, Link] = ("inside a node", "between nodes")

_BACKWARD = 2 / 3  # of a step's operations


@dataclass(frozen=True)
class Machine:
    """``slots``: ranks of every node. ``flops``: a device's peak per second; ``achieved``: the part of it that a model reaches.
    ``inside`` and ``between``: bytes a second that one rank sends inside a node and between nodes. ``device``: what it is to torch.
    """

    slots: tuple[int, ...]
    flops: float
    achieved: float
    inside: float
    between: float
    device: Device = "cpu"

    def link(self, ranks: Sequence[int]) -> Link:
        """What a collective among ``ranks``, ascending, is as slow as. A node's ranks follow one another: the first and the last tell."""
        return LINKS[bisect_right(self._ends, ranks[0]) != bisect_right(self._ends, ranks[-1])]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self.slots))

    def seconds(self, nbytes: float, link: Link) -> float:
        return nbytes / (self.inside if link == "inside a node" else self.between)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def evenly(world: int, per_node: int) -> tuple[int, ...]:
    """Nodes of ``per_node`` ranks, the last of what is left."""
    return tuple(min(per_node, world - first) for first in range(0, world, per_node))


def filled(slots: Sequence[int], world: int) -> tuple[int, ...]:
    """Ranks of each of the nodes that ``world`` ranks are on: a node's slots are taken before those of the next. All ``slots`` where there
    are fewer than ``world``.
    """
    before = accumulate(slots, initial=0)
    return tuple(min(slot, world - first) for slot, first in zip(slots, before, strict=False) if first < world)


@dataclass(frozen=True)
class StepTime:
    """Expected seconds of one rank's step. Of its traffic, before any of it is hidden: ``tensor_parallel``, ``inside`` groups (gathers and
    reduce-scatters of weights, and norms' gradients among tensor-parallel ranks), ``between`` groups (averages of gradients) and
    ``refresh`` (weights sent to frozen copies). ``step``: computation and what is not hidden behind it.
    """

    compute: float
    tensor_parallel: float
    inside: float
    between: float
    refresh: float
    step: float


def step_time(flops: float, collectives: Sequence[Collective], machine: Machine, accumulation: int) -> StepTime:
    """Of a rank that computes ``flops`` in a step and takes part in ``collectives``.

    Computation is operations over what a device achieves, a third of it forward and two thirds backward, whatever is recomputed or frozen;
    traffic is bytes over the speed of the link, latencies left out. Tensor-parallel traffic is waited for, and hides nothing. Of all else
    each kind of link carries one thing at a time: refreshes while the first of the step's equal micro-batches is in forward (they start
    after the update before it), averages while the last is in backward, and what is sent inside groups in all of the computation that
    these two leave free. What does not go into its time is exposed, and what the two kinds of link leave exposed adds up.
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


def default_world(config: Config) -> tuple[int, str]:
    """The fewest ranks that the configuration means, and where that is from."""
    groups, tp = config.sdp.groups, config.tensor_parallel.autotp_size
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    if train is not None and micro is not None and config.gradient_accumulation_steps is not None:
        ranks = train // (micro * config.gradient_accumulation_steps)
        if ranks and ranks % groups == 0:  # else what is wrong is said of the fewest ranks
            return ranks * tp, "from the batch sizes"
    return groups * tp, "sdp.groups × tensor_parallel.autotp_size"
