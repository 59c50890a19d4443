"""What a run will need, compute and send, before anything is started: its layout on the meta device, its ranks' steps traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from ...engine.accounting.traffic_plan import Collective, CollectivePlan
from ...engine.batch.size import BatchSize
from ...engine.config.schema import Config
from ...engine.distributed.mesh import Coordinates, Mesh, mesh_of
from ...engine.errors import ConfigError
from ...engine.module_paths import parents
from ...engine.placement.layout import Layout
from ...engine.placement.policies import warnings_of
from ...engine.tracing.ledger import KINDS
from ...engine.tracing.repetition import sequence
from ...engine.tracing.step import StepTrace, trace_step
from ..runs.model_inputs import model_and_batch
from .machine import LINKS, Link, Machine, StepTime, step_time

MOST_TRACES = 8  # groups that differ in what they run, of which the largest are traced


@dataclass(frozen=True)
class RankForecast:
    """What one rank sends in a step, of activations too, and how long it takes. ``communicators``: that it takes part in."""

    rank: int
    collectives: tuple[Collective, ...]
    time: StepTime
    communicators: int

    def sent(self, machine: Machine) -> dict[Link, float]:
        """Bytes in a step, by class of link."""
        total = dict.fromkeys(LINKS, 0.0)
        for one in self.collectives:
            total[machine.link(one.ranks)] += one.sent
        return total

    def to_json(self, machine: Machine) -> dict[str, Any]:
        return {
            "communicators": self.communicators,
            "sent": self.sent(machine),
            "collectives": [collective_json(machine, one) for one in self.collectives],
            "seconds": asdict(self.time),
        }


@dataclass(frozen=True)
class GroupForecast:
    """All ``groups`` that run the same, block after block. ``trace``: of the first rank of the first, whose memory is theirs all.
    ``ranks``: of all their ranks, one of those that send the same over the same kinds of links, the traced one first.
    """

    groups: tuple[int, ...]
    trace: StepTrace
    ranks: tuple[RankForecast, ...]

    @property
    def slowest(self) -> RankForecast:
        return max(self.ranks, key=lambda rank: rank.time.step)


@dataclass(frozen=True)
class Forecast:
    """One way to train the model. ``groups``: those of the placement that differ, the one with the highest peak first. ``reordered``:
    groups of these that run as much as a traced one in another order, which was not traced. ``untraced``: groups of further kinds, of which
    nothing is known here.
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
    def worst(self) -> GroupForecast:
        """Of memory."""
        return self.groups[0]

    @property
    def ranks(self) -> list[RankForecast]:
        """One of all that send the same over the same kinds of links and run the same."""
        return [rank for group in self.groups for rank in group.ranks]

    @property
    def slowest(self) -> RankForecast:
        """The rank for which all others wait: of equal ones the first."""
        return max(self.ranks, key=lambda rank: (rank.time.step, -rank.rank))

    @property
    def seconds(self) -> float:
        """Of a step: its slowest rank's."""
        return self.slowest.time.step

    @property
    def samples_per_second(self) -> float:
        return self.batch.train / self.seconds

    @property
    def sent_at_most(self) -> dict[Link, float]:
        """Bytes in a step over either kind of link, of the rank that sends most over it."""
        everyones = [rank.sent(self.machine) for rank in self.ranks]
        return {link: max(sent[link] for sent in everyones) for link in LINKS}

    @property
    def warnings(self) -> list[str]:
        """What of this layout the user may not have meant."""
        mesh, placement = self.layout.mesh, self.layout.placement
        placed = warnings_of(self.config.sdp, placement) if placement.units and mesh.sdp > 1 else []
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


def collective_json(machine: Machine, one: Collective) -> dict[str, Any]:
    return {
        "scope": one.scope,
        "kind": one.kind,
        "ranks": len(one.ranks),
        "link": machine.link(one.ranks),
        "buffer_bytes": one.nbytes,
        "sent_bytes": one.sent,
    }


def _torn_neighbours(mesh: Mesh, machine: Machine) -> list[str]:
    """What to say where tensor-parallel ranks, which exchange activations in every block, are on several nodes."""
    if mesh.tp == 1:
        return []
    everyone = mesh.all_neighbours()
    torn = [ranks for ranks in everyone if machine.link(ranks) == "between nodes"]
    if not torn:
        return []
    return [
        f"{len(torn)} of {len(everyone)} tensor-parallel groups cross nodes, the first that of ranks {torn[0][0]} to {torn[0][-1]}: "
        "activations are sent between nodes in every block; choose a tensor_parallel.autotp_size that divides the ranks of every node, "
        f"now {mesh.tp}"
    ]


def require_planned(config: Config) -> None:
    """Raise :class:`ConfigError` for an engine that is not planned."""
    if config.sdp.engine != "fsdp2":
        why = "runs all groups in one process" if config.sdp.in_one_process else "has buffers of DeepSpeed's own"
        equal = " --set sdp.group_sizes=null" if config.sdp.group_sizes else ""
        raise ConfigError(
            f'sdp.engine: "{config.sdp.engine}" {why}, which is not planned; add --set sdp.engine=fsdp2{equal}'
        )


def forecast(
    name: str, config: Config, machine: Machine, world: int, *, autocast: torch.dtype | None = None
) -> Forecast:
    """Plan ``config`` on ``world`` ranks; ``autocast``: with forward passes under torch's, of this precision. Raises an :class:`SDPError`
    for what a run under it would end with.
    """
    require_planned(config)
    mesh = mesh_of(config, world)
    build, batch = model_and_batch(config)
    model = build()
    layout = Layout.of(model, config, mesh)
    size = BatchSize.resolve(config, mesh)
    alike: dict[Any, list[int]] = {}
    for group in range(mesh.sdp):
        alike.setdefault((_runs(layout, group), sequence(model, layout, group)), []).append(group)
    kinds = _most_telling(layout, list(alike.values()))
    stage, compute = config.zero_optimization.stage, config.compute_bytes
    plan = CollectivePlan(layout, stage=stage, accumulation=size.accumulation, compute_bytes=compute)
    trace = partial(trace_step, build, config, layout, batch, autocast=autocast, device=machine.device)
    traced = {tuple(groups): trace(groups[0]) for groups in kinds[:MOST_TRACES]}
    with_them: dict[tuple[int, ...], list[int]] = {groups: [] for groups in traced}
    reordered, untraced = [], []
    for group in sorted(group for groups in kinds[MOST_TRACES:] for group in groups):
        as_much = [groups for groups in traced if _runs(layout, groups[0]) == _runs(layout, group)]
        (reordered if as_much else untraced).append(group)
        if as_much:
            with_them[max(as_much, key=lambda groups: traced[groups].peak)].append(group)
    planned = []
    for first, step in traced.items():
        groups = (*first, *with_them[first])
        planned.append(GroupForecast(groups, step, tuple(_ranks(step, layout, size, machine, plan, groups))))
    planned.sort(key=lambda group: -group.trace.peak)
    return Forecast(name, config, layout, size, machine, tuple(planned), tuple(untraced), tuple(reordered))


def _most_telling(layout: Layout, kinds: list[list[int]]) -> list[list[int]]:
    """``kinds`` of groups in the order in which they are traced, if not all are: in turn that with the most parameters, with the most in
    one block, and with the most in late blocks, whose gradients are there while activations of the early ones still are.
    """
    position = {name: index for index, name in enumerate(layout.blocks)}

    def scores(groups: list[int]) -> tuple[int, int, int]:
        of_block: Counter[str] = Counter()
        for info in layout.held(groups[0]):
            of_block[next((name for name in parents(info.canonical) if name in position), "")] += info.numel
        within = {name: numel for name, numel in of_block.items() if name}
        late = sum(position[name] * numel for name, numel in within.items())
        return of_block.total(), max(within.values(), default=0), late

    known = [scores(groups) for groups in kinds]

    def ranked(which: int) -> list[int]:
        return sorted(range(len(kinds)), key=lambda index: (known[index][which], known[index]), reverse=True)

    rankings = (ranked(which) for which in range(3))
    return [kinds[index] for index in dict.fromkeys(index for turn in zip(*rankings, strict=True) for index in turn)]


def _runs(layout: Layout, group: int) -> Any:
    """What decides a group's state and time: how many units of each kind it holds, and how many it casts and sends."""
    units = Counter(
        (tuple(info.part for info in members), group in members[0].holders) for members in layout.members.values()
    )
    return frozenset(units.items()), sum(refresh.source == group for refresh in layout.refreshes)


def _ranks(
    trace: StepTrace, layout: Layout, size: BatchSize, machine: Machine, plan: CollectivePlan, groups: Sequence[int]
) -> Iterator[RankForecast]:
    """Who sends how much over which links follows from the placement and the nodes, for every rank; what it computes is as traced."""
    known: set[Any] = set()
    for group in groups:
        for rank in layout.mesh.ranks_of(group):
            at = layout.mesh.coordinates(rank)
            neighbours = layout.mesh.neighbours(at.sdp, at.fsdp)
            activations = [
                Collective("tensor parallel", kind, neighbours, nbytes)
                for (kind, _), nbytes in trace.tensor_parallel.items()
            ]
            collectives = (*plan.of(rank), *activations)
            alike = tuple(
                sorted(
                    (one.scope, one.kind, len(one.ranks), one.nbytes, machine.link(one.ranks)) for one in collectives
                )
            )
            if alike not in known:
                known.add(alike)
                time = step_time(trace.flops, collectives, machine, size.accumulation)
                yield RankForecast(rank, collectives, time, _communicators(layout, at, collectives))


def _communicators(layout: Layout, at: Coordinates, collectives: Sequence[Collective]) -> int:
    """Process groups that a rank is in: also those in which it only receives."""
    refreshed = {(refresh.source, refresh.members) for refresh in layout.refreshes if at.sdp in refresh.members}
    together = {one.ranks for one in collectives if one.kind != "broadcast"}
    together |= {layout.mesh.neighbours(at.sdp, at.fsdp)} if layout.mesh.tp > 1 else set()
    return len(together) + len(refreshed)
