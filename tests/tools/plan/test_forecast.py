"""What a plan says of time and traffic is of every rank, wherever it and those that it talks to
are.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.data.tokenizers import BytesTokenizer
from sdp.engine.accounting.memory_probe import peak_tensor_bytes
from sdp.engine.config.load import load_config
from sdp.engine.distributed.fake_world import fake_world
from sdp.engine.errors import ConfigError
from sdp.engine.initialize import initialize
from sdp.engine.subnetwork.execution import checkpoint_activations
from sdp.engine.tracing.messages import Messages
from sdp.engine.tracing.step import StepTrace, trace_step
from sdp.models.registry import build_model
from sdp.tests.support.ranks import RankPool
from sdp.tools.cli import main
from sdp.tools.plan.forecast import MOST_TRACES, Forecast, forecast
from sdp.tools.plan.machine import Machine
from sdp.tools.plan.ways import distributed_data_parallel
from sdp.tools.runs.model_inputs import model_and_batch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

LLAMA = {
    "name": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "sdp": {"groups": 2, "capacity": 0.5},
    "zero_optimization": {"stage": 3},
    "model": LLAMA,
    "data": {"sequence_length": 16},
}
HOLDERS = {f"model.layers.{layer}": holders for layer, holders in enumerate(([0], [0, 1, 2, 3], [1, 2], [3]))}
SLOW = 1e6  # bytes a second between nodes: what crosses them decides


def planned(slots: tuple[int, ...], traces: int = MOST_TRACES, **changed: Any) -> Forecast:
    machine = Machine(slots, 1e12, 1.0, 1e9, SLOW)
    return forecast("", load_config(CONFIG | changed), machine, sum(slots), traces=traces)


def test_plans_for_mirror_images_of_nodes_are_equal() -> None:
    """Of two groups of four ranks one lies across both nodes, the first or the second; everyone
    waits for it.
    """
    first, second = planned((2, 6)), planned((6, 2))
    assert first.slowest.rank == 0
    assert second.slowest.rank == 6
    assert first.slowest.time == second.slowest.time
    assert first.sent_at_most == second.sent_at_most
    across = [one for one in second.slowest.collectives if one.scope == "inside groups"]
    assert {one.ranks for one in across} == {(4, 5, 6, 7)}
    assert second.seconds > sum(one.sent for one in across) / SLOW
    assert second.groups[0].trace.rank == 0  # on one node with all of its group


@pytest.mark.parametrize(
    ("fsdp", "tp", "stage", "masking"),
    [
        (2, 2, 3, "backward"),
        (3, 1, 0, "backward"),
        (3, 1, 3, "forward"),
        *(
            pytest.param(*row, masking, marks=pytest.mark.slow)
            for masking, rows in (
                ("forward", [(1, 1, 3), (3, 1, 0), (1, 2, 3), (2, 2, 3)]),
                ("backward", [(1, 1, 3), (3, 1, 3), (1, 2, 3)]),
            )
            for row in rows
        ),
    ],
)
def test_communicators_are_those_that_the_engine_makes(fsdp: int, tp: int, stage: int, masking: str) -> None:
    """A planned rank is in as many process groups as a rank of the engine.

    A group of one rank alone does not count.
    """
    changed = {
        "sdp": {"groups": 4, "placement": HOLDERS, "masking": masking},
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": tp},
    }
    plan, config = planned((4 * fsdp * tp,), **changed), load_config(CONFIG | changed)
    for planned_rank in {rank.rank: rank for rank in plan.ranks}.values():
        with fake_world(planned_rank.rank, 4 * fsdp * tp):
            initialize(model=build_model(config.model), config=config)
            made = [group for group in dist.distributed_c10d._world.pg_map if dist.get_world_size(group) > 1]
            assert planned_rank.communicators == len(made)


def test_no_rank_is_forgotten() -> None:
    """Shards that do not divide, units of one, two and four holders: the figures are those of all
    ranks, gone through one by one.
    """
    section = {"groups": 4, "placement": HOLDERS, "masking": "backward"}
    plan = planned((5, 7), sdp=section, model=LLAMA | {"vocab_size": 65})
    sent = {"inside a node": 0.0, "between nodes": 0.0}
    for rank in range(12):
        of_rank = dict.fromkeys(sent, 0.0)
        traced = next(group.trace for group in plan.groups if rank // 3 in group.groups)
        for one in Messages(plan.layout, plan.config).of_step(rank, traced.rank, traced.collectives):
            of_rank[plan.machine.link(one.ranks)] += one.sent
        sent = {link: max(most, of_rank[link]) for link, most in sent.items()}
    assert plan.sent_at_most == sent
    assert plan.seconds == max(rank.time.step for rank in plan.ranks)


def test_tensor_parallel_ranks_on_two_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tp = {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 0}}
    together, torn = planned((2, 2), **tp), planned((3, 1), **tp)
    assert together.slowest.time.tensor_parallel == pytest.approx(torn.slowest.time.tensor_parallel * SLOW / 1e9)
    assert torn.slowest.rank == 3  # of the two the one whose gradients cross as well
    assert not [warning for warning in together.warnings if "cross" in warning]
    crossing = "tensor parallelism of 2 ranks crosses the network: ranks 2 to 3 are on node 0 and node 1"
    assert torn.warnings[-1].startswith(crossing)
    path = tmp_path / "torn.json"
    path.write_text(json.dumps(CONFIG | tp))
    assert main(["plan", str(path), "--world", "4", "--gpus-per-node", "3"]) == 0
    printed = capsys.readouterr().out
    assert f"warning: {crossing}" in printed
    assert "sent by rank 3, the slowest, in a step" in printed
    assert "tensor parallel: all-gather of 2 ranks, between nodes" in printed


@pytest.mark.parametrize(
    ("layers", "sdp"),
    [
        pytest.param(8, {"groups": 2, "masking": "backward",
            "placement": {f"model.layers.{i}": [int(i >= 4)] for i in range(8)}}, marks=pytest.mark.slow),
        pytest.param(12, {"groups": 4, "masking": "backward", "capacity": 0.4}, marks=pytest.mark.slow),
        (2, {"groups": 4, "granularity": "neuron", "neuron_groups": 4, "placement": "random", "profile": "uniform",
            "seed": 7}),
    ],
    ids=["early-and-late-blocks", "depth", "slices-of-one-layer"],
)  # fmt: skip
def test_peaks_are_each_groups_own(layers: int, sdp: dict[str, Any]) -> None:
    """Groups that run as much may need more or less memory, by the blocks in which it is."""
    model = LLAMA | {"num_hidden_layers": layers, "intermediate_size": 512}
    changed: dict[str, Any] = {"sdp": {"capacity": 0.5} | sdp, "model": model, "zero_optimization": {"stage": 0}}
    plan = planned((sdp["groups"],), **changed, activation_checkpointing={"mode": "full"})
    build, batch = model_and_batch(plan.config)
    of_groups = {group: alike.trace.peak for alike in plan.groups for group in alike.groups}
    assert of_groups == {
        group: trace_step(build, plan.config, plan.layout, batch, group,
            whole=True).peak for group in range(sdp["groups"])
    }  # fmt: skip
    assert len(set(of_groups.values())) > 1
    assert not plan.untraced


@pytest.mark.parametrize(
    ("held", "first"),
    [([[0], [0], [1], [1]], 1), ([[1], [1], [1], [0, 1]], 1)],
    ids=["in another order", "other units"],
)
def test_groups_that_are_not_traced_are_named(held: list[list[int]], first: int) -> None:
    placement = {f"model.layers.{layer}": holders for layer, holders in enumerate(held)}
    plan = planned((2,), 1, sdp={"groups": 2, "masking": "backward", "placement": placement})
    assert [group.groups for group in plan.groups] == [(first, 1 - first)]  # the late one, or the larger one
    assert plan.untraced == (1 - first,)
    assert plan.to_json()["groups_not_traced"] == [1 - first]
    assert {rank.rank for rank in plan.groups[0].ranks} <= {0, 1}


# -- DDP in half precision -------------------------------------------------------------------------

WIDER = LLAMA | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
ONE = Machine((1,), 1.0, 1.0, 1.0, 1.0)


def half(mode: str = "none", accumulation: int = 2) -> dict[str, Any]:
    return CONFIG | {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "activation_checkpointing": {"mode": mode},
        "sdp": {"groups": 1},
        "zero_optimization": {"stage": 0},
        "model": WIDER,
        "data": {"sequence_length": 64},
    }


def ddp_peak(mode: str, accumulation: int) -> int:
    """Of live tensors in the step that torch's documentation shows: float32 weights, forward under
    autocast, gradients in buckets.
    """
    model = build_model(WIDER).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    checkpoint_activations(model, [f"model.layers.{layer}" for layer in range(3)], mode)  # type: ignore[arg-type]
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    buckets: list[torch.Tensor] = []

    def noting(state, bucket):  # without annotations, which DDP would compare with classes
        if bucket.index() == 0:  # the first step's are replaced
            buckets.clear()
        buckets.append(bucket.buffer())
        return allreduce_hook(state, bucket)

    parallel.register_comm_hook(None, noting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.zeros(4, 64, dtype=torch.int64)

    def step() -> None:
        for number in range(1, accumulation + 1):
            with nullcontext() if number == accumulation else parallel.no_sync():
                with torch.autocast("cpu", torch.bfloat16):
                    loss = parallel(tokens, tokens)
                (loss / accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    return peak_tensor_bytes(step, model, optimizer, torch.device("cpu"), kept=buckets)


@cache
def ddp(mode: str, accumulation: int) -> StepTrace:
    return distributed_data_parallel(load_config(half(mode, accumulation)), ONE, 1).worst.trace


@pytest.mark.parametrize(("mode", "accumulation"), [("none", 1), ("none", 2), ("full", 2)])
def test_ddp_in_half_precision_needs_what_torchs_needs(ranks: RankPool, mode: str, accumulation: int) -> None:
    assert ddp(mode, accumulation).peak == pytest.approx(ranks.run(ddp_peak, mode, accumulation, world=1)[0], rel=0.001)


def test_gradients_of_ddp_are_not_taken_for_activations() -> None:
    """With accumulation in bfloat16 they were, and hid what recomputation saves; nor has DDP
    FSDP2's gathered copies.
    """
    once, twice, recomputed = ddp("none", 1), ddp("none", 2), ddp("full", 2)
    assert recomputed.peak < 0.8 * twice.peak
    assert recomputed.communication == twice.communication == once.state.gradients  # beside the buckets
    assert once.communication == 0
    assert twice.activations == pytest.approx(once.activations, rel=0.001)


def test_tensor_parallel_ranks_send_half_precision_under_autocast() -> None:
    """What is gathered is cast first: before linear layers, which would cast it."""
    tp = {"tensor_parallel": {"autotp_size": 2}}
    machine = Machine((2,), 1.0, 1.0, 1.0, 1.0)
    config = load_config(half() | tp)
    autocast, same = (
        {one.kind: one.nbytes for one in plan.worst.trace.collectives if one.scope == "tensor parallel"}
        for plan in (distributed_data_parallel(config, machine, 2), forecast("", config, machine, 2))
    )
    assert autocast.keys() == same.keys()
    for kind, nbytes in same.items():
        assert nbytes <= autocast[kind] < 1.1 * nbytes  # the embeddings of float32 rows


def test_bytes_have_their_own_vocabulary_before_data_is_there() -> None:
    model = {key: value for key, value in LLAMA.items() if key != "vocab_size"}
    config = load_config(CONFIG | {"model": model, "data": {"sequence_length": 16, "tokenizer": "bytes"}})
    build, _ = model_and_batch(config)
    with torch.device("meta"):
        assert build().config.vocab_size == BytesTokenizer.vocab_size  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        ({"type": "Wormup"}, 'scheduler.type: unknown schedule "Wormup", did you mean WarmupLR?'),
        (
            {"type": "WarmupLR", "params": {"warmup_steps": 3}},
            "scheduler.params.warmup_steps: unknown key, did you mean",
        ),
    ],
)
def test_a_plan_refuses_a_schedule_that_a_run_refuses(scheduler: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        planned((2,), scheduler=scheduler)
    assert str(refused.value).startswith(message)
