"""A plan of one way to train a model: its groups, their traced memory, and what their ranks
send.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ...engine.batch.size import BatchSize
from ...engine.config.schema import Config
from ...engine.distributed.collectives import Collective
from ...engine.distributed.mesh import Mesh
from ...engine.optim.schedules import describe_rates
from ...engine.placement.layout import Layout
from ...engine.placement.policies import warnings_of
from ...engine.tracing.ledger import KINDS
from ...engine.tracing.messages import Messages
from ...engine.tracing.step import StepTrace
from .machine import LINKS, Link, Machine, StepTime


@dataclass(frozen=True)
class RankForecast:
    """The messages of one rank in a step, activations included, and the time of the step.

    ``communicators`` is the number of process groups that the rank is in. With local steps,
    ``averages`` are the collectives between groups of a round of ``every`` steps.
    """

    rank: int
    collectives: tuple[Collective, ...]
    time: StepTime
    communicators: int
    averages: tuple[Collective, ...] = ()
    every: int = 1

    def sent(self, machine: Machine) -> dict[Link, float]:
        """Bytes that the rank sends in a step, by kind of link.

        With local steps, the mean over a round.
        """
        total = dict.fromkeys(LINKS, 0.0)
        for one in self.collectives:
            total[machine.link(one.ranks)] += one.sent
        for one in self.averages:
            total[machine.link(one.ranks)] += one.sent / self.every
        return total

    def to_json(self, machine: Machine) -> dict[str, Any]:
        return {
            "communicators": self.communicators,
            "sent": self.sent(machine),
            "collectives": [_collective_json(machine, one) for one in self.collectives],
            "seconds": asdict(self.time),
            **(
                {"averages_of_a_round": [_collective_json(machine, one) for one in self.averages], "every": self.every}
                if self.every > 1 or self.averages
                else {}
            ),
        }


@dataclass(frozen=True)
class GroupForecast:
    """Groups that run the same blocks in the same order.

    Attributes:
        groups: Their numbers.
        trace: The step of the first rank of the first group. All groups need its memory.
        ranks: The traced rank first. Among ranks that send the same over the same kinds of links,
            only one is listed.
    """

    groups: tuple[int, ...]
    trace: StepTrace
    ranks: tuple[RankForecast, ...]

    @property
    def slowest(self) -> RankForecast:
        return max(self.ranks, key=lambda rank: rank.time.step)


@dataclass(frozen=True)
class Forecast:
    """The plan of one way to train a model.

    Attributes:
        name: The heading of its column.
        config: The configuration that was planned.
        layout: Which rank holds what.
        batch: Samples of a step.
        machine: Where it runs.
        groups: The groups that differ, the one with the highest peak first.
        untraced: Groups that run something else, of which nothing is known here.
        reordered: Groups that run as much as a traced group, in an order that was not traced.
            ``groups`` includes them.
    """

    name: str
    config: Config
    layout: Layout
    batch: BatchSize
    machine: Machine
    groups: tuple[GroupForecast, ...]
    untraced: tuple[int, ...] = ()
    reordered: tuple[int, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of parameters of the full model, or of one path."""
        return sum(info.numel for info in self.layout.parameters_at(0).values())

    @property
    def worst(self) -> GroupForecast:
        """The group that needs the most memory."""
        return self.groups[0]

    @property
    def ranks(self) -> list[RankForecast]:
        """The listed ranks of all groups."""
        return [rank for group in self.groups for rank in group.ranks]

    @property
    def slowest(self) -> RankForecast:
        """The rank that all others wait for. Among equally slow ranks, it is the first."""
        return max(self.ranks, key=lambda one: (one.time.step, -one.rank))

    @property
    def seconds(self) -> float:
        """Seconds of a step, which its slowest rank determines."""
        return self.slowest.time.step

    @property
    def samples_per_second(self) -> float:
        return self.batch.train / self.seconds

    @property
    def sent_at_most(self) -> dict[Link, float]:
        """By kind of link, the bytes of a step of the rank that sends the most over it."""
        everyones = [rank.sent(self.machine) for rank in self.ranks]
        return {link: max(sent[link] for sent in everyones) for link in LINKS}

    @property
    def service(self) -> dict[str, float] | None:
        """What the host of the service does in a round, if all groups live. None without a service.

        "receives" and "sends" are bytes. From the number of "groups" on, the "seconds" are more
        than those of the computation of a round.
        """
        sync, groups = self.config.sdp.sync, self.layout.mesh.sdp
        if sync is None or sync.service is None:
            return None
        received, sent = Messages(self.layout, self.config).of_service()
        seconds, compute = (received + sent) / self.machine.between, sync.every * self.slowest.time.compute
        return {"receives": received, "sends": sent, "seconds": seconds, "groups": int(compute / seconds * groups) + 1}

    @property
    def rates(self) -> str | None:
        """The range of the factors of ``sdp.lr_scale``, as text. None if rates are not scaled."""
        optimizer = self.config.optimizer
        return describe_rates(self.config.sdp.lr_scale, optimizer.type if optimizer else None, self.layout.placement)

    @property
    def warnings(self) -> list[str]:
        """Properties of this layout that the user may not have intended."""
        mesh, placement = self.layout.mesh, self.layout.placement
        placed = []
        if placement.units and mesh.sdp > 1:
            placed = warnings_of(self.config.sdp, placement) + self.layout.warnings()
        return placed + _torn_neighbours(mesh, self.machine)

    def to_json(self) -> dict[str, Any]:
        mesh, placement, slowest = self.layout.mesh, self.layout.placement, self.slowest
        return {
            "mesh": {"sdp": mesh.sdp, "fsdp": mesh.fsdp, "tp": mesh.tp},
            "zero_stage": self.config.zero_optimization.stage,
            "batch": asdict(self.batch),
            "tokens_per_sample": self.config.data.tokens_per_sample,
            "step_seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
            "sent_at_most": self.sent_at_most,
            **({"service": service} if (service := self.service) is not None else {}),
            "placement": placement.guarantees() if placement.units else None,
            "warnings": self.warnings,
            "groups_not_traced": list(self.untraced),
            "groups_in_another_order": list(self.reordered),
            "slowest": {"rank": slowest.rank, **slowest.to_json(self.machine)},
            "ranks": [self._rank_json(group) for group in self.groups],
        }

    def _rank_json(self, group: GroupForecast) -> dict[str, Any]:
        trace = group.trace
        return {
            "rank": trace.rank,
            "groups_alike": list(group.groups),
            **trace.state.to_json(),
            "activations": trace.activations,
            "communication": trace.communication,
            "peak": trace.peak,
            "at_peak": {kind: trace.at_peak.get(kind, 0) for kind in KINDS},
            "flops": trace.flops,
            "blocks": trace.blocks,
            "traced_blocks": trace.traced_blocks,
            **group.ranks[0].to_json(self.machine),
        }


def _collective_json(machine: Machine, one: Collective) -> dict[str, Any]:
    return {
        "scope": one.scope,
        "kind": one.kind,
        "ranks": len(one.ranks),
        "link": machine.link(one.ranks),
        "buffer_bytes": one.nbytes,
        "sent_bytes": one.sent,
    }


def _torn_neighbours(mesh: Mesh, machine: Machine) -> list[str]:
    """Warn of tensor-parallel ranks on several nodes: they exchange activations in every block."""
    if mesh.tp == 1:
        return []
    everyone = mesh.all_neighbours()
    torn = [ranks for ranks in everyone if machine.link(ranks) == "between nodes"]
    if not torn:
        return []
    return [
        f"{len(torn)} of {len(everyone)} tensor-parallel groups cross nodes, for example ranks {torn[0][0]} to "
        f"{torn[0][-1]}: activations are sent between nodes in every block; choose a tensor_parallel.autotp_size "
        f"that divides the ranks of every node (it is {mesh.tp})"
    ]
