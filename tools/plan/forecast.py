"""Predicts the memory, operations and messages of a run before it starts.

The layout is made on the meta device, and the steps of its ranks are traced on fake tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ...engine.batch.size import BatchSize
from ...engine.config.method import Masking
from ...engine.config.named_params import check_named_params
from ...engine.config.schema import Config
from ...engine.distributed.collectives import Collective
from ...engine.distributed.mesh import Coordinates, Mesh, mesh_of
from ...engine.errors import ConfigError
from ...engine.module_paths import parents
from ...engine.placement.layout import Layout
from ...engine.tracing.messages import Messages
from ...engine.tracing.repetition import sequence
from ...engine.tracing.step import StepTrace, trace_step
from ..runs.model_inputs import model_and_batch
from .machine import Machine, step_time, with_outer_steps
from .result import Forecast, GroupForecast, RankForecast

MOST_TRACES = 8  # of groups that run different things
MOST_TOKENS = 2**26  # in a forward pass of a rank; an image counts its pixels


def require_planned(config: Config) -> None:
    """Raise :class:`ConfigError` for an engine that cannot be planned."""
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
        name: The heading of its column.
        config: The configuration.
        machine: Where it runs.
        world: Number of ranks.
        autocast: Run the forward pass under ``torch.autocast`` in this precision.
        masking: With a schedule of maskings, the phase to plan. Default: the one that needs the
            most memory.
        traces: At most so many of the groups that run different things are traced.

    Raises:
        SDPError: The run would end with this error.
    """
    require_planned(config)
    check_named_params(config.optimizer, config.scheduler)
    mesh = mesh_of(config, world)
    size = BatchSize.resolve(config, mesh)
    _require_possible_batch(config, size)
    try:
        return _forecast(name, config, machine, mesh, size, autocast, masking or _largest(config), traces)
    except RuntimeError as error:
        if "overflow" not in str(error).lower():
            raise
        raise ConfigError(
            f"the model and micro-batch {size.micro:,} are too large: a tensor has more than 2^63 bytes; lower the "
            "sizes"
        ) from None


def _largest(config: Config) -> Masking:
    """The masking of the phase that needs the most memory."""
    return "backward" if "backward" in config.sdp.maskings else "forward"


def _require_possible_batch(config: Config, size: BatchSize) -> None:
    """Refuse micro-batches that are larger than any device could hold."""
    side = config.data.image_size or 1
    tokens = size.micro * (config.data.sequence_length if config.data.name is None else side * side)
    if tokens > MOST_TOKENS:
        kind = "tokens" if config.data.name is None else "pixels"
        raise ConfigError(
            f"micro-batch {size.micro:,} has {tokens:,} {kind}; a forward pass of at most {MOST_TOKENS:,} is planned: "
            "lower train_micro_batch_size_per_gpu"
        )


def _forecast(
    name: str,
    config: Config,
    machine: Machine,
    mesh: Mesh,
    size: BatchSize,
    autocast: torch.dtype | None,
    masking: Masking,
    traces: int,
) -> Forecast:
    build, batch = model_and_batch(config)
    model = build()
    layout = Layout.of(model, config, mesh).in_phase(masking)
    phase = config.model_copy(update={"sdp": config.sdp.model_copy(update={"masking": masking})})
    alike: dict[Any, list[int]] = {}
    for group in range(mesh.sdp):
        alike.setdefault((_runs(layout, group), sequence(model, layout, group)), []).append(group)
    kinds = _most_different(layout, list(alike.values()))
    trace = partial(trace_step, build, phase, layout, batch, autocast=autocast, device=machine.device)
    traced = {tuple(groups): trace(groups[0]) for groups in kinds[:traces]}
    with_them: dict[tuple[int, ...], list[int]] = {groups: [] for groups in traced}
    reordered, untraced = [], []
    for group in sorted(group for groups in kinds[traces:] for group in groups):
        as_much = [groups for groups in traced if _runs(layout, groups[0]) == _runs(layout, group)]
        (reordered if as_much else untraced).append(group)
        if as_much:
            with_them[max(as_much, key=lambda groups: traced[groups].peak)].append(group)
    planned, messages = [], Messages(layout, phase)
    for first, step in traced.items():
        groups = (*first, *with_them[first])
        ranks = _ranks(step, config, layout, size, machine, messages, groups)
        planned.append(GroupForecast(groups, step, tuple(ranks)))
    planned.sort(key=lambda group: -group.trace.peak)
    return Forecast(name, config, layout, size, machine, tuple(planned), tuple(untraced), tuple(reordered))


def _most_different(layout: Layout, kinds: list[list[int]]) -> list[list[int]]:
    """Order ``kinds`` of groups so that the first ones tell the most, if not all can be traced.

    The order takes in turn the kind with the most parameters, with the most in one block, and with
    the most in late blocks. The gradients of late blocks exist while activations of early blocks
    do.
    """
    position = {name: index for index, name in enumerate(layout.blocks)}

    def scores(groups: list[int]) -> tuple[int, int, int]:
        of_block: Counter[str] = Counter()
        for info in layout.held(groups[0]):
            of_block[next((name for name in parents(info.path) if name in position), "")] += info.numel
        within = {name: numel for name, numel in of_block.items() if name}
        late = sum(position[name] * numel for name, numel in within.items())
        return of_block.total(), max(within.values(), default=0), late

    known = [scores(groups) for groups in kinds]

    def ranked(which: int) -> list[int]:
        return sorted(range(len(kinds)), key=lambda index: (known[index][which], known[index]), reverse=True)

    rankings = (ranked(which) for which in range(3))
    return [kinds[index] for index in dict.fromkeys(index for turn in zip(*rankings, strict=True) for index in turn)]


def _runs(layout: Layout, group: int) -> Any:
    """A hashable description of a group's state and time.

    It counts the units of each kind that the group holds, and those that it casts and sends.
    """
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
