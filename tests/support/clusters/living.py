"""Groups of ranks that each have a world of their own, and meet through a coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.backends.deepspeed.base import Gathered
from sdp.engine.distributed import world
from sdp.engine.distributed.world import World
from sdp.engine.elastic.abort import WaitLimits
from sdp.engine.elastic.coordination.addresses import serve_meeting_store
from sdp.engine.elastic.coordination.assembly import Identity
from sdp.engine.elastic.coordination.coordinator import Coordinator
from sdp.engine.elastic.coordination.errors import StepAbortedError
from sdp.engine.elastic.coordination.member import CoordinatorClient
from sdp.engine.elastic.coordination.records import STEP
from sdp.engine.elastic.inside import share_inside
from sdp.engine.elastic.session import Session
from sdp.engine.placement.units import Slice, Unit, find_neuron_units, find_units
from torch.distributed import PrefixStore, TCPStore

from .. import models
from ..cases import RELATIVE, Case, one_step, whole
from ..ranks import RankPool

TOKEN = b"a shared secret"
GROUPS = 3
HOLDERS = [[0, 1, 2], [0, 1], [1, 2], [0, 2]]  # of the units, in turn: each survives one loss
ALONE = [[0, 1, 2], [1], [1, 2], [0, 2]]  # the second unit survives no loss of group 1


@dataclass
class Seen:
    """What a rank has after a step."""

    living: list[int]
    norm: float
    counted: dict[str, int]
    planned: dict[str, int]
    weights: dict[str, torch.Tensor]
    copies: dict[str, torch.Tensor]  # this rank's parts
    held: dict[str, torch.Tensor]  # this rank's parts


class DiedError(Exception):
    """The group is lost here."""


def holders_among(case: Case, living: Sequence[int]) -> dict[str, list[int]]:
    """Return the holders of each unit, numbered among the groups ``living``.

    With the placement "full", each group holds everything. With "alone", one holds a unit alone.
    """
    names = [unit.name for unit in units_of(case)]
    holders = {"full": [[*range(GROUPS)]], "alone": ALONE}.get(case.placement, HOLDERS)
    return {
        name: [living.index(group) for group in holders[index % len(holders)] if group in living]
        for index, name in enumerate(names)
    }


def engine_among(case: Case, living: Sequence[int], engine: str, steps: int) -> Any:
    """Make the engine of a run that has only the groups ``living``."""
    config = replace(case, groups=len(living), placement="full").config(engine)
    del config["sdp"]["capacity"]
    config["sdp"]["placement"] = holders_among(case, living)
    config["training"] = {"steps": steps}
    return sdp.initialize(model=models.build(case.model), config=config)[0]


class Loader:
    """Stands for the data, whose position a session shares."""

    def __init__(self) -> None:
        self.sampler = SimpleNamespace(data_rank=0, data_ranks=1)
        self.position = 0

    def fetch_ahead(self) -> None:
        """There is nothing to fetch."""

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Place:
    """Where a rank of the pool is: its group, and its rank inside the group."""

    def __init__(self, case: Case, rank: int):
        self.ranks = case.fsdp * case.tp
        self.slot, self.inside = divmod(rank, self.ranks)


def begin(
    case: Case, place: Place, port: int, life: str, steps: int, checkpoints: Path = Path(), kind: str = "fsdp2"
) -> tuple[Any, Session, CoordinatorClient, Any]:
    """Build this rank's engine of a ``kind``, and find the coordinator.

    Returns:
        The engine, the session, the connection, and the store that must be kept.
    """
    world.enter(World(place.slot * place.ranks + place.inside, place.ranks * GROUPS))
    engine = engine_among(case, range(GROUPS), kind, steps)
    engine.loader = Loader()
    store, address = serve_meeting_store("127.0.0.1") if place.inside == 0 else (None, "")
    life = share_inside(f"{life} {place.slot}")
    who = Identity(place.slot, place.inside, place.ranks, life, "here", share_inside(address))
    client = CoordinatorClient(("127.0.0.1", port), TOKEN, who, heartbeat_seconds=60, wait_seconds=60)
    session = Session(client, engine, WaitLimits(60.0, lambda _: False, 60.0), checkpoints, 60.0)
    engine.before_update = lambda: session.vote(None)
    return engine, session, client, store


@contextmanager
def world_of_group(case: Case, store_port: int) -> Iterator[tuple[Place, TCPStore]]:
    """A context in which this rank of the pool has only its group. Yields a store of all ranks."""
    place = Place(case, dist.get_rank())
    dist.barrier()  # otherwise a rank that still connects would fail
    dist.destroy_process_group()
    shared = TCPStore("127.0.0.1", store_port, is_master=False)
    store = PrefixStore(f"group-{place.slot}", shared)
    dist.init_process_group("gloo", store=store, rank=place.inside, world_size=place.ranks)
    try:
        yield place, shared
    finally:
        world.enter(None)


def run_groups(ranks: RankPool, case: Case, run: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what ``run(case, port of the coordinator, port of a store, *args)`` returns, by
    rank.
    """
    coordinator = Coordinator(GROUPS, case.fsdp * case.tp, TOKEN, lambda _: None, heartbeat_seconds=60, wait_seconds=60)
    coordinator.start()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        return ranks.run(run, case, coordinator.port, store.port, *args, world=case.world)
    finally:
        coordinator.stop()


def reference_among(case: Case, living: Sequence[list[int]]) -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
    """Yield norm and weights of the full model after each step, of which ``living`` has the groups.

    Each change of groups is a new run that goes on with the state of the one before. Rates by
    holders stay those of all groups.
    """
    case, steps = replace(case, stage=0, tp=1), len(living)
    engine, before = _reference(case, living[0], steps), living[0]
    for step, now in enumerate(living):
        if now != before:
            engine, before = _continued(engine, case, now, steps), now
        one_step(engine, replace(case, groups=len(now)), step, data_rank=None)
        engine.step()
        yield engine.get_global_grad_norm(), {name: p.detach().clone() for name, p in engine.parameters_here.items()}


def _reference(case: Case, living: Sequence[int], steps: int) -> Any:
    engine = engine_among(replace(case, lr_scale="none"), living, "reference", steps)
    if case.lr_scale != "none":
        holders = holders_among(case, range(GROUPS))
        scale = engine_among(case, range(GROUPS), "reference", steps).backend.rate_scale
        engine.backend.scale_rates(SimpleNamespace(of=lambda unit, _: scale.of(unit, holders.get(unit, ()))))
    return engine


def _continued(before: Any, case: Case, living: Sequence[int], steps: int) -> Any:
    engine = _reference(case, living, steps)
    for name, parameter in engine.parameters_here.items():
        parameter.data.copy_(before.parameters_here[name])
    engine.optimizer.load_state_dict(before.optimizer.state_dict())
    engine.lr_scheduler.load_state_dict(before.lr_scheduler.state_dict())
    engine.global_steps, engine.micro_steps = before.global_steps, before.micro_steps
    engine.backend.use_masking(engine.config.masking_schedule.at(engine.global_steps + 1))
    return engine


def part_of(parameter: Any) -> torch.Tensor:
    """Return a copy of this rank's part of a parameter."""
    if hasattr(parameter, "ds_tensor"):  # of DeepSpeed's ZeRO 3, which may end with padding
        part = parameter.ds_tensor.detach()
        return part[: max(0, parameter.ds_numel - dist.get_rank() * part.numel())].clone()
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach().clone()


def whole_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Return this rank's weights, gathered inside the group. Collective there."""
    if engine.config.sdp.engine == "deepspeed":  # its partitions are float32, and the model's weights need not be
        gathered = Gathered(engine.backend).parameters
        return {name: gathered[name].detach().clone() for name in gathered}
    return {name: whole(engine, name, parameter).clone() for name, parameter in engine.parameters_here.items()}


def look(engine: Any, session: Session, step: int) -> Seen:
    """Return what this rank has. Collective in its group."""
    assert session.assembly is not None
    counted = {kind: sent for kind, sent in engine.traffic.by_kind().items() if not kind.startswith("tensor")}
    planned = engine.planned_traffic(step + 1).by_kind()
    frozen: dict[str, Any] | None = None
    while frozen is None:
        try:
            frozen = session.protect(lambda: engine.frozen_here, defers=True)  # waits until they are refreshed
        except StepAbortedError:
            session.meet(STEP)
    return Seen(
        session.assembly.slots,
        engine.get_global_grad_norm(),
        counted,
        planned,
        whole_weights(engine),
        {name: part_of(p) for name, p in frozen.items()},
        {name: part_of(p) for name, p in engine.parameters_here.items()},
    )


def compare(
    case: Case,
    everyones: dict[int, Seen],
    norm: float,
    weights: dict[str, torch.Tensor],
    where: str,
    *,
    is_steady: bool = False,
) -> None:
    """Compare ranks with the norm and the weights of the reference, and with each other.

    Holders and frozen copies are equal bit for bit. If ``is_steady``, because the next step has the
    same groups, the planned bytes were sent.
    """
    per_group = case.fsdp * case.tp
    held: dict[tuple[int, str], torch.Tensor] = {}
    for rank, seen in everyones.items():
        assert seen.norm == pytest.approx(norm, rel=RELATIVE), f"{where}, rank {rank}"
        compare_weights(case, seen.weights, weights, f"{where}, rank {rank}")
        for name, part in seen.held.items():
            key = rank % per_group, name
            assert torch.equal(held.setdefault(key, part), part), f"{where}: holders of {name} differ"
        if is_steady:
            assert seen.counted == seen.planned, f"{where}, rank {rank}"
    for rank, seen in everyones.items():
        for name, copied in seen.copies.items():
            master = held[rank % per_group, name]  # float32, of which a copy may be bfloat16
            assert torch.equal(master.to(copied.dtype), copied), f"{where}, rank {rank}: copy of {name}"


def compare_weights(case: Case, found: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], where: str) -> None:
    """Compare weights, or slices of weights, with the whole weights of the reference."""
    slices = {f"{part.parameter}:{part.index}": part for unit in units_of(case) for part in unit.slices}
    for name, weight in found.items():
        full = weights[name.partition(":")[0]]
        right = cut(full, slices[name]) if name in slices else full
        torch.testing.assert_close(
            weight, right, rtol=0, atol=2 * RELATIVE * full.abs().max().item(), msg=f"{where}, {name}"
        )


def units_of(case: Case) -> list[Unit]:
    """Return the units of the case's model."""
    model = models.build(case.model)
    if case.neurons:
        return find_neuron_units(model, case.neurons)
    return find_units(model, "auto", models.unit_names(case.model))


def cut(tensor: torch.Tensor, part: Slice) -> torch.Tensor:
    """Return a part of a whole parameter."""
    if part.dim is None:
        return tensor
    return torch.cat([tensor.narrow(part.dim, start, end - start) for start, end in part.ranges], part.dim)
