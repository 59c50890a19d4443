"""With all groups present, a run with a service equals local steps by all-reduce."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.config.load import load_config
from sdp.engine.config.schema import Config
from sdp.engine.construct import first_weights
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.placement.layout import Layout
from sdp.engine.service.anchors import Anchors
from sdp.engine.service.client import Client
from sdp.engine.service.rounds import ServedRun
from sdp.engine.service.server import Server
from sdp.engine.service.steps import Membership
from sdp.engine.tracing.messages import Messages
from sdp.tests.support import models
from sdp.tests.support.cases import Case, engine_of, one_step
from sdp.tests.support.processes import until
from sdp.tests.support.ranks import RankPool
from torch.distributed.distributed_c10d import _get_default_store

TOKEN = b"a token of a test"
PLAIN = '"outer_optimizer": {"type": "SGD", "params": {"lr": 1.0}}'
CASES = [
    Case(2, 1, 0, 2, steps=6, sync='{"every": 3}', optimizer="adamw"),
    Case(4, 1, steps=12, sync='{"every": 6, "fragments": 3, "overlap": 1}', placement="balanced", clip=True,
         optimizer="momentum"),
    Case(2, 2, 3, steps=4, sync='{"every": 2, "compression": "int8"}', model="llama-tied-meta"),
    Case(4, 1, steps=4, sync=f'{{"every": 2, "single_holder": "skip", {PLAIN}}}', placement="random"),
    Case(2, 1, tp=2, neurons=2, stage=1, steps=4, sync='{"every": 2, "compression": "bf16"}', masking="backward",
         model="wide-llama-tied-meta"),
    Case(2, 2, 0, steps=4, sync='{"every": 2, "fragments": 2, "offload": "cpu"}', masking="backward",
         model="llama-meta"),
    Case(4, 1, steps=4, paths="2: 1 3", sync='{"every": 2}', model="llama-tied-meta", optimizer="adamw"),
    Case(2, 2, 3, steps=4, paths="2: 2", sync='{"every": 2, "fragments": 2}', model="llama-meta", optimizer="adamw"),
]  # fmt: skip


def config_of(case: Case) -> Config:
    """Return the configuration of a case with a service that waits for all groups."""
    sync = {**json.loads(case.sync), "service": {"quorum": 1.0, "heartbeat_seconds": 60.0}}
    return load_config(replace(case, sync=json.dumps(sync)).config(training={"steps": case.steps}))


@contextmanager
def served(
    case: Case, port: int = 0, tls: ssl.SSLContext | None = None
) -> Iterator[tuple[ServedRun, str, list[dict[str, Any]]]]:
    """Serve the run of a case in a thread. Gives the run, its address, and the lines of its
    averages.
    """
    config, model = config_of(case), models.build(case.model)
    assert config.sdp.sync is not None
    layout = Layout.of(model, config, Mesh(case.groups))
    anchors = Anchors(layout, config.sdp.sync, first_weights(model, config, layout))
    run = ServedRun(anchors, config.sdp.sync, case.steps, case.groups, 1)
    lines: list[dict[str, Any]] = []
    server, stop = Server(run, TOKEN, {}, lambda kind, line: lines.extend([line] * (kind == "average"))), list[int]()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve("127.0.0.1", port, tls, stop)))
    thread.start()
    until(lambda: server.port > 0, 30)
    try:
        yield run, f"127.0.0.1:{server.port}", lines
    finally:
        stop.append(1)
        thread.join(30)


def _alone(case: Case) -> int:
    """Make this rank's group a world of its own. Returns the group."""
    size = case.fsdp * case.tp
    group, rank = divmod(dist.get_rank(), size)
    store = _get_default_store()
    store.set(f"connected {dist.get_rank()}", b"")
    store.wait([f"connected {other}" for other in range(dist.get_world_size())])  # others may still be connecting to it
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore(f"group {group}", store), rank=rank, world_size=size)
    return group


def _loss(engine: Any, case: Case, ranks: range) -> float:
    """Return the held-out loss over the batches of some ranks. With paths, each has its own."""
    batches = [models.micro_batch(case.model, 99, 0, rank) for rank in ranks]
    return engine.evaluate(batches, paths=[rank % engine.layout.paths for rank in ranks] if case.paths else None)


def _member(case: Case, address: str) -> tuple[Any, Membership]:
    """Make this rank's group a member of the run."""
    config, group = config_of(case), _alone(case)
    assert config.sdp.sync is not None
    service = Membership(Client(address, TOKEN, 60.0), config.sdp.sync, case.steps, {}, dist.get_rank())
    service.slot = group
    service.join()
    engine = sdp.initialize(model=models.build(case.model), config=config, service=service)[0]
    ranks = {"width": 2 * case.fsdp, "data_ranks": case.fsdp}
    service.start = {"micro_batches": case.accumulation, **ranks, "data": "data"}
    engine.go_on_after(engine.local_training.enter(), 0, 0)
    return engine, service


def _train_with_a_service(case: Case, address: str) -> tuple[float | None, int]:
    """Train as one group. Returns the held-out loss, if this group evaluated, and the steps."""
    engine, service = _member(case, address)
    group = service.slot
    for _ in range(case.steps // service.schedule.every):  # waits until all groups have begun
        service.lease()
    for step in range(case.steps):
        one_step(engine, case, step, data_rank=group * case.fsdp + dist.get_rank() // case.tp)
        engine.step()
    engine.finish_round()
    loss = None
    if service.claim(case.steps):
        share = case.groups * case.fsdp // case.fsdp
        first = dist.get_rank() // case.tp * share
        loss = _loss(engine, case, range(first, first + share))
        service.report({"step": case.steps, "loss": loss})
    service.leave()
    service.client.close()
    return loss, engine.global_steps


def _fetch_with_an_unknown_rank(case: Case, address: str) -> bool:
    engine, service = _member(case, address)
    if dist.get_rank() == 1:
        service.client.session = "of a service that has ended"
    engine.local_training.local.averages.take({0})
    service.client.close()
    return service.client.is_lost


def _train_by_all_reduce(case: Case) -> tuple[dict[str, torch.Tensor] | None, float]:
    engine = engine_of(case, training={"steps": case.steps})
    data_rank = dist.get_rank() // case.tp
    for step in range(case.steps):
        one_step(engine, case, step, data_rank=data_rank)
        engine.step()
    engine.finish_round()
    return engine.full_state_dict(), _loss(engine, case, range(data_rank, data_rank + 1))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_service_equals_an_all_reduce(ranks: RankPool, case: Case) -> None:
    expected, expected_loss = ranks.run(_train_by_all_reduce, case, world=case.world)[0]
    with served(case) as (run, address, lines):
        before = run.anchors.snapshot()
        answers = ranks.run(_train_with_a_service, case, address, world=case.world)
        found = run.anchors.snapshot()
    for name, weight in found.items():
        assert (weight - before[name]).abs().max() > 1e-4, name
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6, msg=name)
    losses = [loss for loss, _ in answers if loss is not None]
    assert losses == pytest.approx([expected_loss] * (case.fsdp * case.tp), rel=1e-5)
    assert {steps for _, steps in answers} == {case.steps}
    fragments = json.loads(case.sync).get("fragments", 1)
    assert len(lines) == case.steps // json.loads(case.sync)["every"] * fragments + fragments - 1
    assert all(line["groups"] == line["alive"] == case.groups for line in lines)
    layout = Layout.of(models.build(case.model), config_of(case), Mesh(case.groups, case.fsdp, case.tp))
    planned, _ = Messages(layout, config_of(case)).of_service()
    headers = sum(line["bytes"] for line in lines[:fragments]) - planned  # the names and places of tensors
    ranks_that_send = case.tp * (case.fsdp if case.stage else 1) * (1 + ("int8" in case.sync))
    slices = ranks_that_send * sum(info.trainable for group in range(case.groups) for info in layout.held(group))
    assert 80 * slices < headers < 140 * slices
    assert (lines[-1]["step"], lines[-1]["late"], lines[-1]["skipped_tokens"]) == (case.steps, 0, 0)
    assert lines[-1]["samples"] == case.steps * 2 * case.accumulation * case.groups * case.fsdp


def test_all_ranks_of_a_group_know_that_it_is_lost(ranks: RankPool) -> None:
    case = Case(2, 2, 3, steps=4, sync='{"every": 2}')
    with served(case) as (_, address, _):
        assert ranks.run(_fetch_with_an_unknown_rank, case, address, world=4) == [True] * 4
