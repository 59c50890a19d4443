"""Predicts the memory, operations and messages of a run before it starts.

The model is built on the meta device, and steps are traced on fake tensors, so nothing is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from ...engine.batch.size import BatchSize
from ...engine.config.method import Masking
from ...engine.config.named_params import check_named_params
from ...engine.config.schema import Config
from ...engine.distributed.collectives import Collective
from ...engine.distributed.mesh import Coordinates, mesh_of, split_tensor_group
from ...engine.errors import ConfigError
from ...engine.module_paths import parents
from ...engine.optim.schedules import describe_rates
from ...engine.placement.layout import Layout
from ...engine.placement.policies import warnings_of
from ...engine.tracing.ledger import KINDS
from ...engine.tracing.messages import Messages
from ...engine.tracing.repetition import describe_blocks
from ...engine.tracing.step import StepTrace, trace_step
from ..runs.model_inputs import model_and_batch
from .machine import LINKS, Link, Machine, StepTime, step_time, with_outer_steps

MOST_TRACES = 8  # of groups that run different units
MOST_TOKENS = 2**26  # in a forward pass of a rank; an image counts its pixels


@dataclass(frozen=True)
class RankForecast:
    """What one rank sends in a step, and how long its step takes.

    ``communicators`` is the number of process groups that the rank is in. With local steps,
    ``averages`` are the collectives between groups in a round of ``every`` steps.
    """

    rank: int
    collectives: tuple[Collective, ...]
    time: StepTime
    communicators: int
    averages: tuple[Collective, ...] = ()
    every: int = 1

    def sent(self, machine: Machine) -> dict[Link, float]:
        """Return the mean bytes that the rank sends in a step over each kind of link."""
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
            "averages_of_a_round": [_collective_json(machine, one) for one in self.averages],
            "every": self.every,
        }


@dataclass(frozen=True)
class GroupForecast:
    """Groups that run the same blocks in the same order, so one traced step describes all of them.

    Attributes:
        groups: The numbers of the groups.
        trace: The step of the first rank of the first group.
        ranks: The forecasts of ranks in these groups, the traced rank first. Several ranks that
            send the same over the same kinds of links have one forecast.
    """

    groups: tuple[int, ...]
    trace: StepTrace
    ranks: tuple[RankForecast, ...]


@dataclass(frozen=True)
class Forecast:
    """The plan of a run: its memory, operations, messages and time.

    Attributes:
        name: The heading of the plan's column in a table.
        config: The configuration that was planned.
        layout: Which group holds which unit.
        batch: The samples of a step.
        machine: The machine that the run is planned for.
        groups: One entry per set of groups that run the same blocks. The highest peak is first.
        untraced: Groups with other blocks whose step was not traced. They are counted like the
            first entry of ``groups``.
    """

    name: str
    config: Config
    layout: Layout
    batch: BatchSize
    machine: Machine
    groups: tuple[GroupForecast, ...]
    untraced: tuple[int, ...] = ()

    @property
    def parameters(self) -> int:
        """The number of parameters of the full model, or of one path if there are several paths."""
        return sum(info.numel for info in self.layout.parameters_at(0).values())

    @property
    def worst(self) -> GroupForecast:
        """The group that needs the most memory."""
        return self.groups[0]

    @property
    def ranks(self) -> list[RankForecast]:
        """The forecasts of ranks in all groups. Ranks that send the same have one forecast."""
        return [rank for group in self.groups for rank in group.ranks]

    @property
    def slowest(self) -> RankForecast:
        """The rank with the longest step, for which all other ranks wait."""
        return max(self.ranks, key=lambda one: (one.time.step, -one.rank))

    @property
    def seconds(self) -> float:
        """The seconds of a step on the slowest rank, for which all other ranks wait."""
        return self.slowest.time.step

    @property
    def samples_per_second(self) -> float:
        return self.batch.train / self.seconds

    @property
    def sent_at_most(self) -> dict[Link, float]:
        """For each kind of link, the most bytes that a rank sends over it in a step."""
        everyones = [rank.sent(self.machine) for rank in self.ranks]
        return {link: max(sent[link] for sent in everyones) for link in LINKS}

    @property
    def service(self) -> dict[str, float] | None:
        """The traffic of the service's host in a round with all groups. None without a service.

        "receives" and "sends" are bytes, and "seconds" is the time to transfer both. "groups" is
        the smallest number of groups with which this time exceeds the computation of a round.
        """
        sync, groups = self.config.sdp.sync, self.layout.mesh.sdp
        if sync is None or sync.service is None:
            return None
        received, sent = Messages(self.layout, self.config).of_service()
        seconds, compute = (received + sent) / self.machine.between, sync.every * self.slowest.time.compute
        return {"receives": received, "sends": sent, "seconds": seconds, "groups": int(compute / seconds * groups) + 1}

    @property
    def rates(self) -> str | None:
        """The range of the factors of ``sdp.lr_scale`` as text. None if rates are not scaled."""
        optimizer = self.config.optimizer
        return describe_rates(self.config.sdp.lr_scale, optimizer.type if optimizer else None, self.layout.placement)

    @property
    def warnings(self) -> list[str]:
        """Lines about properties of the layout that the user may not have intended."""
        mesh, placement = self.layout.mesh, self.layout.placement
        placed = []
        if placement.units and mesh.sdp > 1:
            placed = warnings_of(self.config.sdp, placement) + self.layout.warnings()
        torn = split_tensor_group(self.machine.hosts, mesh.tp)
        return placed if torn is None else [*placed, torn]

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
            "service": self.service,
            "placement": placement.guarantees() if placement.units else None,
            "warnings": self.warnings,
            "groups_not_traced": list(self.untraced),
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


def require_planned(config: Config) -> None:
    """Raise :class:`ConfigError` if the planner does not know the configured engine."""
    if config.sdp.engine != "fsdp2":
        raise ConfigError(
            f'sdp.engine: "{config.sdp.engine}" has DeepSpeed\'s own buffers, which are not planned; '
            "add --set sdp.engine=fsdp2"
        )


def forecast(
    name: str,
    config: Config,
    machine: Machine,
    world: int,
    *,
    autocast: torch.dtype | None = None,
    masking: Masking | None = None,
    traces: int = MOST_TRACES,
) -> Forecast:
    """Plan a run.

    Args:
        name: The heading of the plan's column in a table.
        config: The configuration of the run.
        machine: The machine that the run is planned for.
        world: The number of ranks.
        autocast: If given, the forward pass runs under ``torch.autocast`` in this precision.
        masking: Which masking of a masking schedule to plan. If None, the one that needs the most
            memory.
        traces: The largest number of steps to trace. Groups that run the same blocks share a trace.

    Raises:
        SDPError: The error with which the run itself would end.
    """
    require_planned(config)
    check_named_params(config.optimizer, config.scheduler)
    mesh = mesh_of(config, world)
    size = BatchSize.resolve(config, mesh)
    _require_possible_batch(config, size)
    if masking is None:
        masking = "backward" if "backward" in config.sdp.maskings else "forward"
    phase = config.model_copy(update={"sdp": config.sdp.model_copy(update={"masking": masking})})
    build, batch = model_and_batch(config)
    try:
        model = build()
        layout = Layout.of(model, config, mesh).in_phase(masking)
        alike: dict[Any, list[int]] = {}
        for group in range(mesh.sdp):
            run = tuple(block for block in describe_blocks(model, layout, group).values() if block[0])
            alike.setdefault((_runs(layout, group), run), []).append(group)
        kinds = _largest_first(layout, list(alike.values()))
        trace = partial(trace_step, build, phase, layout, batch, autocast=autocast, device=machine.device)
        traced = {tuple(groups): trace(groups[0]) for groups in kinds[:traces]}
    except RuntimeError as error:
        if "overflow" not in str(error).lower():
            raise
        raise ConfigError(
            f"the model and micro-batch {size.micro:,} are too large: a tensor has more than 2^63 bytes; lower the "
            "sizes"
        ) from None
    untraced = tuple(sorted(group for groups in kinds[traces:] for group in groups))
    planned, messages = [], Messages(layout, phase)
    for groups, step in sorted(traced.items(), key=lambda pair: -pair[1].peak):
        members = groups if planned else (*groups, *untraced)
        ranks = _ranks(step, config, layout, size, machine, messages, members)
        planned.append(GroupForecast(members, step, tuple(ranks)))
    return Forecast(name, config, layout, size, machine, tuple(planned), untraced)


def _require_possible_batch(config: Config, size: BatchSize) -> None:
    """Refuse micro-batches that are larger than any device could hold."""
    side = config.data.image_size or 1
    tokens = size.micro * (config.data.sequence_length if config.data.name is None else side * side)
    if tokens > MOST_TOKENS:
        kind = "tokens" if config.data.name is None else "pixels"
        raise ConfigError(
            f"micro-batch {size.micro:,} has {tokens:,} {kind}, and the planner takes at most {MOST_TOKENS:,}; "
            "lower train_micro_batch_size_per_gpu"
        )


def _largest_first(layout: Layout, kinds: list[list[int]]) -> list[list[int]]:
    """Order ``kinds`` of groups by their parameters, for a plan that cannot trace all of them.

    Of equally large kinds, the first has its parameters in later blocks, because the gradients of
    late blocks exist while activations of early blocks do.
    """
    position = {name: index for index, name in enumerate(layout.blocks)}

    def size(groups: list[int]) -> tuple[int, int]:
        held, late = 0, 0
        for info in layout.held(groups[0]):
            held += info.numel
            late += info.numel * next((position[name] for name in parents(info.path) if name in position), 0)
        return held, late

    return sorted(kinds, key=size, reverse=True)


def _runs(layout: Layout, group: int) -> Any:
    """Count the units of each kind that a group holds, and those that it casts and sends."""
    units = Counter(
        (tuple(info.tp_shape for info in members), group in members[0].holders) for members in layout.members.values()
    )
    return frozenset(units.items()), sum(refresh.source == group for refresh in layout.refreshes)


def _ranks(
    trace: StepTrace,
    config: Config,
    layout: Layout,
    size: BatchSize,
    machine: Machine,
    messages: Messages,
    groups: Sequence[int],
) -> Iterator[RankForecast]:
    """Plan the ranks of ``groups``, without repeating those that send the same.

    The placement and the nodes determine what a rank sends. Its computation is that of ``trace``.
    """
    known: set[Any] = set()
    sync = config.sdp.sync
    for group in groups:
        for rank in layout.mesh.ranks_of(group):
            collectives = tuple(messages.of_step(rank, trace.rank, trace.collectives))
            averages = tuple(messages.of_round(rank))
            alike = tuple(
                sorted(
                    (one.scope, one.kind, len(one.ranks), one.nbytes, machine.link(one.ranks))
                    for one in (*collectives, *averages)
                )
            )
            if alike not in known:
                known.add(alike)
                time = step_time(trace.flops, collectives, machine, size.accumulation)
                if sync is not None:
                    served = sum(messages.of_service()) if sync.service is not None else 0
                    time = with_outer_steps(time, averages, sync, machine, served)
                every = sync.every if sync is not None else 1
                communicators = _communicators(layout, layout.mesh.coordinates(rank), (*collectives, *averages))
                yield RankForecast(rank, collectives, time, communicators, averages, every)


def _communicators(layout: Layout, at: Coordinates, collectives: Sequence[Collective]) -> int:
    """Count the process groups that a rank is in, including those in which it only receives."""
    refreshed = {(refresh.source, refresh.members) for refresh in layout.refreshes if at.sdp in refresh.members}
    together = {one.ranks for one in collectives if one.kind != "broadcast"}
    together |= {layout.mesh.neighbours(at.sdp, at.fsdp)} if layout.mesh.tp > 1 else set()
    return len(together) + len(refreshed)
