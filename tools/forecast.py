"""What a run will need, compute and send, before anything is started: its layout on the meta device, its ranks' steps traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data.image_sets import facts_of_set
from ..data.tokenizers import DEFAULT_VOCAB_SIZE
from ..engine.batch_size import BatchSize
from ..engine.config import Config, SDPSection
from ..engine.errors import ConfigError, SDPError
from ..engine.initialize import mesh_of
from ..engine.layout import Layout
from ..engine.ledger import ACTIVATIONS, COMMUNICATION, GRADIENTS, KINDS
from ..engine.place import warnings_of
from ..engine.trace import StepTrace, trace_step
from ..engine.traffic import sent_bytes
from ..engine.traffic_plan import Collective, plan_collectives
from ..models.registry import MODELS, build_model
from .corpus import open_prepared, path_of
from .machine import LINKS, Link, Machine, StepTime, step_time

MOST_TRACES = 8  # groups that differ in what they run, of which the largest are traced
_FOLDER_IMAGE_SIZE = 224


@dataclass(frozen=True)
class GroupForecast:
    """The first rank of a group, and of all ``groups`` that run as many units of the same kinds."""

    groups: tuple[int, ...]
    trace: StepTrace
    collectives: tuple[Collective, ...]
    time: StepTime
    communicators: int

    def sent(self, machine: Machine, neighbours: tuple[int, ...]) -> dict[Link, float]:
        """Bytes that the rank sends in a step, by class of link."""
        total = dict.fromkeys(LINKS, 0.0)
        for one in self.collectives:
            total[machine.link(one.ranks)] += one.sent
        for (kind, ranks), nbytes in self.trace.tensor_parallel.items():
            total[machine.link(neighbours)] += sent_bytes(kind, nbytes, ranks)
        return total


@dataclass(frozen=True)
class Forecast:
    """One way to train the model. ``groups``: those of the placement that differ, the one with the highest peak first."""

    name: str
    config: Config
    layout: Layout
    batch: BatchSize
    machine: Machine
    groups: tuple[GroupForecast, ...]

    @property
    def worst(self) -> GroupForecast:
        return self.groups[0]

    @property
    def seconds(self) -> float:
        """Of a step: its slowest rank's."""
        return max(group.time.step for group in self.groups)

    @property
    def samples_per_second(self) -> float:
        return self.batch.train / self.seconds

    def neighbours(self, group: GroupForecast) -> tuple[int, ...]:
        at = self.layout.mesh.coordinates(group.trace.rank)
        return tuple(self.layout.mesh.grid[at.sdp, at.fsdp].tolist())

    def to_json(self) -> dict[str, Any]:
        mesh, placement = self.layout.mesh, self.layout.placement
        return {
            "mesh": {"sdp": mesh.sdp, "fsdp": mesh.fsdp, "tp": mesh.tp},
            "zero_stage": self.config.zero_optimization.stage,
            "batch": asdict(self.batch),
            "tokens_per_sample": self.config.data.tokens_per_sample,
            "step_seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
            "placement": placement.guarantees() if placement.units else None,
            "warnings": warnings_of(self.config.sdp, placement) if placement.units and mesh.sdp > 1 else [],
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
            "communicators": group.communicators,
            "sent": group.sent(self.machine, self.neighbours(group)),
            "collectives": [collective_json(self, group, one) for one in all_collectives(self, group)],
            "seconds": asdict(group.time),
        }


def all_collectives(forecast: Forecast, group: GroupForecast) -> list[Collective]:
    """What the placement says, and what tensor-parallel ranks send of activations."""
    neighbours = forecast.neighbours(group)
    return [
        *group.collectives,
        *(Collective("tensor parallel", kind, neighbours, nbytes) for (kind, _), nbytes in group.trace.tensor_parallel.items()),
    ]


def collective_json(forecast: Forecast, group: GroupForecast, one: Collective) -> dict[str, Any]:
    return {
        "scope": one.scope,
        "kind": one.kind,
        "ranks": len(one.ranks),
        "link": forecast.machine.link(one.ranks),
        "buffer_bytes": one.nbytes,
        "sent_bytes": one.sent,
    }


def forecast(name: str, config: Config, machine: Machine, world: int) -> Forecast:
    """Plan ``config`` on ``world`` ranks. Raises an :class:`SDPError` for what a run under it would end with."""
    if config.sdp.engine != "fsdp2":
        why = "runs all groups in one process" if config.sdp.in_one_process else "has buffers of DeepSpeed's own"
        equal = " --set sdp.group_sizes=null" if config.sdp.group_sizes else ""
        raise ConfigError(f'sdp.engine: "{config.sdp.engine}" {why}, which is not planned; add --set sdp.engine=fsdp2{equal}')
    mesh = mesh_of(config, world)
    build, batch = model_and_batch(config)
    layout = Layout.of(build(), config, mesh)
    size = BatchSize.resolve(config, mesh)
    alike: dict[Any, list[int]] = {}
    for group in range(mesh.sdp):
        alike.setdefault(_runs(layout, group), []).append(group)
    # Those with the most parameters first: if not all are traced, the others need less.
    kinds = sorted(alike.values(), key=lambda groups: -sum(info.numel for info in layout.held(groups[0])))
    planned = [_group(config, layout, size, machine, build, batch, tuple(groups)) for groups in kinds[:MOST_TRACES]]
    return Forecast(name, config, layout, size, machine, tuple(sorted(planned, key=lambda group: -group.trace.peak)))


def _runs(layout: Layout, group: int) -> Any:
    """What decides a group's memory and time: how many units of each kind it holds, and which it refreshes."""
    units = Counter((tuple(info.part for info in members), group in members[0].holders) for members in layout.members.values())
    return frozenset(units.items()), sum(refresh.sent_by(group) for refresh in layout.refreshes)


def _group(
    config: Config, layout: Layout, size: BatchSize, machine: Machine, build: Any, batch: Any, groups: tuple[int, ...]
) -> GroupForecast:
    trace = trace_step(build, config, layout, batch, groups[0])
    mesh, at = layout.mesh, layout.mesh.coordinates(trace.rank)
    stage, compute = config.zero_optimization.stage, config.compute_bytes
    collectives = plan_collectives(layout, trace.rank, stage=stage, accumulation=size.accumulation, compute_bytes=compute)
    neighbours = tuple(mesh.grid[at.sdp, at.fsdp].tolist())
    refreshed = {refresh.members for refresh in layout.refreshes if at.sdp in refresh.members}
    together = {one.ranks for one in collectives} | {tuple(mesh.grid[list(members), at.fsdp, at.tp].tolist()) for members in refreshed}
    together |= {neighbours} if mesh.tp > 1 else set()
    time = step_time(trace, collectives, machine, neighbours, size.accumulation)
    return GroupForecast(groups, trace, tuple(collectives), time, len(together))


def alternatives(config: Config, machine: Machine, world: int) -> tuple[list[Forecast], list[str]]:
    """The dense model on the same ranks under DDP, FSDP and HSDP, with the same batch, tensor parallelism and recomputation; and a line
    for each that cannot be planned.
    """
    planned, notes = [], []
    nodes = len(machine.slots)
    dense = {"DDP": (1, 0), "FSDP (ZeRO-3)": (1, 3), "HSDP": (nodes, 3)}
    if nodes == 1:
        notes.append("HSDP: on one node it is FSDP")
        del dense["HSDP"]
    for name, (groups, stage) in dense.items():
        try:
            plan = forecast(name, dense_config(config, groups, stage), machine, world)
            planned.append(with_buckets(plan) if name == "DDP" else plan)
        except SDPError as error:
            notes.append(f"{name}: {error}")
    return planned, notes


def with_buckets(plan: Forecast) -> Forecast:
    """``plan`` with the memory of torch's DDP: gradients are views of buckets that live through the whole step; those of the engine, which
    were traced, come and go. Gradients of micro-batches before the last, which are not sent, are beside the buckets.
    """

    def whole(trace: StepTrace) -> StepTrace:
        state = trace.state
        sent = trace.communication + (state.gradients if plan.batch.accumulation > 1 else 0)
        kept = {"parameters": state.parameters, GRADIENTS: state.gradients, "optimizer": state.optimizer}
        beside = {"buffers": trace.at_peak.get("buffers", 0), COMMUNICATION: sent, ACTIVATIONS: trace.activations}
        return replace(trace, at_peak=kept | beside, communication=sent)

    return replace(plan, groups=tuple(replace(group, trace=whole(group.trace)) for group in plan.groups))


def dense_config(config: Config, groups: int, stage: int) -> Config:
    zero = config.zero_optimization.model_copy(update={"stage": stage})
    return config.model_copy(update={"sdp": SDPSection(groups=groups, units=config.sdp.units), "zero_optimization": zero})


def model_and_batch(config: Config) -> tuple[Callable[[], nn.Module], Callable[[int], dict[str, torch.Tensor]]]:
    """How to build the model, and a micro-batch of so many samples, of zeros. The data is looked at where it is there already."""
    if not config.model:
        raise ConfigError('model: this section is required to plan, for example {"name": "llama", …}')
    facts = _facts(config)
    build = lambda: build_model(config.model, **facts)  # noqa: E731
    if config.data.name is None:
        tokens = config.data.sequence_length

        def of_tokens(samples: int) -> dict[str, torch.Tensor]:
            ids = torch.zeros(samples, tokens, dtype=torch.int64)
            return {"input_ids": ids, "labels": ids.clone()}

        return build, of_tokens
    side = facts["image_size"]

    def of_images(samples: int) -> dict[str, torch.Tensor]:
        return {"images": torch.zeros(samples, 3, side, side), "labels": torch.zeros(samples, dtype=torch.int64)}

    return build, of_images


def _facts(config: Config) -> dict[str, int]:
    """What the model must fit: of the data where it is at hand, else as the configuration says."""
    data, model = config.data, config.model
    if data.name in ("digits", "cifar10", "cifar100"):
        return facts_of_set(data.name)
    path = path_of(config, Path())
    if data.path is not None and path.is_dir():
        return open_prepared(config, path).facts
    if data.name is None:
        entry = MODELS.get(str(model.get("name")))
        if entry is not None and entry.reads != "tokens":
            raise ConfigError(f'data.name: {model["name"]} reads {entry.reads}; name them, for example "digits"')
        return {"vocab_size": data.vocab_size or model.get("vocab_size") or DEFAULT_VOCAB_SIZE}
    if "num_classes" not in model:
        raise ConfigError(f"model.num_classes: {path} is not there to count the classes of; add it to plan")
    return {"num_classes": model["num_classes"], "image_size": data.image_size or _FOLDER_IMAGE_SIZE}
