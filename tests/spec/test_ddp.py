"""Against torch's DistributedDataParallel and FSDP2's own hybrid sharding."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.tests.support import models
from sdp.tests.support.cases import CLIP, ROWS, STEPS, Case, native, rate_of
from sdp.tests.support.ranks import RankPool
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

RELATIVE = 1e-5


def _optimizer(case: Case, parameters: Any) -> torch.optim.Optimizer:
    params = case.config()["optimizer"]["params"]
    return torch.optim.SGD(parameters, **params) if case.optimizer == "sgd" else torch.optim.AdamW(parameters, **params)


def _ddp(case: Case) -> tuple[dict[str, torch.Tensor], list[float], int]:
    """Weights, gradient norms and the bytes of DDP's gradient buckets in the first step."""
    model = DistributedDataParallel(models.build(case.model))
    bucket_bytes = 0

    def count(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        nonlocal bucket_bytes
        bucket_bytes += bucket.buffer().nbytes
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())

    model.register_comm_hook(None, count)
    optimizer, norms = _optimizer(case, model.parameters()), []
    for step in range(case.steps):
        optimizer.param_groups[0]["lr"] = rate_of(case, step)
        batches = [models.micro_batch(case.model, step, micro, dist.get_rank()) for micro in range(case.accumulation)]
        for micro, batch in enumerate(batches):
            model.require_backward_grad_sync = micro == case.accumulation - 1
            (model(**batch) / case.accumulation).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP if case.clip else float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
    return models.cpu_state(model.module), norms, bucket_bytes // STEPS


@functools.cache
def ddp(ranks: RankPool, case: Case) -> tuple[dict[str, torch.Tensor], list[float], int]:
    return ranks.run(_ddp, case, world=4)[0]


CASES = [
    pytest.param(Case(4, 1, 0, 1, clip=True, optimizer="adamw", placement="full"), marks=pytest.mark.slow),
    Case(4, 1, 0, 3, clip=True, optimizer="sgd", placement="full", model="llama"),
    Case(2, 2, 3, 1, clip=False, optimizer="sgd", placement="full"),
    *(Case(1, 4, stage, 3, clip=True, optimizer="adamw", placement="full") for stage in (0, 3)),
    Case(1, 4, 2, 1, clip=False, optimizer="sgd", placement="full", model="llama-tied"),
    pytest.param(
        Case(1, 4, 1, 1, clip=False, optimizer="sgd", placement="full", model="llama-tied"), marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_capacity_1_equals_ddp(ranks: RankPool, case: Case) -> None:
    weights, norms, _ = ddp(ranks, Case(4, 1, 0, case.accumulation, case.clip, case.optimizer, "full", case.model))
    ours = native(ranks, case)[0]
    assert ours.after is not None and ours.before is not None
    assert ours.norms == pytest.approx(norms, rel=RELATIVE)
    assert list(ours.after) == list(weights)
    for name, weight in weights.items():
        update = (weight - ours.before[name]).abs().max().item()
        tolerance = (
            RELATIVE * update + STEPS * 2.0**-23 * weight.abs().max().item()
        )  # one rounding of the weight a step
        torch.testing.assert_close(
            ours.after[name], weight, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("model", ["mlp", "llama-tied"])
def test_capacity_1_sends_what_ddp_sends(ranks: RankPool, model: str) -> None:
    case = Case(4, 1, placement="full", model=model, accumulation=3)
    bucket_bytes = ddp(ranks, case)[2]
    ours = native(ranks, case)[0]
    assert ours.traffic[0]["between groups/all_reduce"] == round(2 * bucket_bytes * 3 / 4)


# -- FSDP2's own hybrid sharding, a replicate mesh for every holder set ----------------------------

HOLDERS = {0: (0,), 1: (0, 1), 2: (0, 1), 3: (1,)}


def _hybrid(case: Case) -> dict[str, torch.Tensor]:
    """A group's part after training with FSDP2 alone on meshes (holders, shards)."""
    rank = dist.get_rank()
    group, grid = rank // 2, torch.arange(4).view(2, 2)
    meshes = {
        held: DeviceMesh("cpu", grid[list(held)], mesh_dim_names=("holders", "shards")) for held in ((0,), (0, 1), (1,))
    }
    model = models.build(case.model)
    absent = {index for index, holders in HOLDERS.items() if group not in holders}
    model.layers = torch.nn.ModuleList(
        torch.nn.Identity() if i in absent else layer for i, layer in enumerate(model.layers)
    )  # type: ignore[union-attr,arg-type]
    for index, layer in enumerate(model.layers):  # type: ignore[arg-type]
        if index not in absent:
            fully_shard(layer, mesh=meshes[HOLDERS[index]])
    fully_shard(model, mesh=meshes[(0, 1)])
    optimizer = _optimizer(case, model.parameters())
    for step in range(case.steps):
        optimizer.param_groups[0]["lr"] = rate_of(case, step)
        model(**models.micro_batch(case.model, step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
def test_mixed_holders_equal_hybrid_sharding(ranks: RankPool, optimizer: Any) -> None:
    case = Case(2, 2, 3, 1, optimizer=optimizer)
    assert ROWS * case.world == case.config()["train_batch_size"]
    ours = native(ranks, case)[0]
    assert ours.after is not None and ours.before is not None
    seen = set()
    for weights in ranks.run(_hybrid, case, world=4):
        for name, weight in weights.items():
            tolerance = (
                RELATIVE * (weight - ours.before[name]).abs().max().item()
                + STEPS * 2.0**-23 * weight.abs().max().item()
            )
            torch.testing.assert_close(
                ours.after[name], weight, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )
            seen.add(name)
    assert seen == set(ours.after)
