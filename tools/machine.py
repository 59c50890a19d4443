"""The machines a run is planned for: which rank is on which node, and how fast devices and links are."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Literal

from ..engine.config import Config
from ..engine.traffic import Scope
from ..engine.traffic_plan import Collective

Link = Literal["inside a node", "between nodes"]
LINKS: tuple[Link, Link] = ("inside a node", "between nodes")

_BACKWARD = 2 / 3  # of a step's operations


@dataclass(frozen=True)
class Machine:
    """``slots``: ranks of every node. ``flops``: a device's peak per second; ``achieved``: the part of it that a model reaches.
    ``inside`` and ``between``: bytes a second that one rank sends inside a node and between nodes.
    """

    slots: tuple[int, ...]
    flops: float
    achieved: float
    inside: float
    between: float

    def link(self, ranks: Sequence[int]) -> Link:
        """What a collective among ``ranks`` is as slow as. A node's ranks follow one another: the first and the last tell."""
        ends = list(accumulate(self.slots))
        return LINKS[bisect_right(ends, min(ranks)) != bisect_right(ends, max(ranks))]

    def seconds(self, nbytes: float, link: Link) -> float:
        return nbytes / (self.inside if link == "inside a node" else self.between)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def evenly(world: int, per_node: int) -> tuple[int, ...]:
    """Nodes of ``per_node`` ranks, the last of what is left."""
    return tuple(min(per_node, world - first) for first in range(0, world, per_node))


@dataclass(frozen=True)
class StepTime:
    """Expected seconds of one rank's step. ``tensor_parallel``: never hidden. ``inside`` (gathers and reduce-scatters of weights): hidden
    by computation. ``between`` (averages of gradients): hidden by the last micro-batch's backward pass. ``step`` has what is not hidden.
    """

    compute: float
    tensor_parallel: float
    inside: float
    between: float
    step: float


def step_time(flops: float, collectives: Sequence[Collective], machine: Machine, accumulation: int) -> StepTime:
    """Of a rank that computes ``flops`` and takes part in ``collectives``: bytes over the speed of the link, latencies left out;
    operations over what a device achieves.
    """
    compute = flops / (machine.flops * machine.achieved)
    seconds: Counter[Scope] = Counter()
    for one in collectives:
        seconds[one.scope] += machine.seconds(one.sent, machine.link(one.ranks))  # type: ignore[assignment]
    tensor, inside, between = seconds["tensor parallel"], seconds["inside groups"], seconds["between groups"]
    step = compute + tensor + max(0.0, inside - compute) + max(0.0, between - _BACKWARD * compute / accumulation)
    return StepTime(compute, tensor, inside, between, step)


def default_world(config: Config) -> tuple[int, str]:
    """The fewest ranks that the configuration means, and where that is from."""
    groups, tp = config.sdp.groups, config.tensor_parallel.autotp_size
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    if train is not None and micro is not None and config.gradient_accumulation_steps is not None:
        ranks = train // (micro * config.gradient_accumulation_steps)
        return max(1, ranks) * tp, "from the batch sizes"
    return groups * tp, "sdp.groups × tensor_parallel.autotp_size"
