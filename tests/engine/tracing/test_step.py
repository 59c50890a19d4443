"""A step traced on fake tensors, against the same step of real ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sdp
import torch
from sdp.engine.accounting.memory_probe import peak_tensor_bytes
from sdp.engine.config.load import load_config
from sdp.engine.distributed.collectives import Collective, Traffic
from sdp.engine.distributed.mesh import mesh_of
from sdp.engine.errors import LaunchError
from sdp.engine.placement.layout import Layout
from sdp.engine.tracing.messages import Messages
from sdp.engine.tracing.repetition import settings_of
from sdp.engine.tracing.step import StepTrace, trace_step
from sdp.models.registry import build_model
from sdp.tests.support.ranks import RankPool
from torch import nn

LLAMA = {
    "name": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4,
    "num_attention_heads": 4,
}  # fmt: skip
RESNET = {"name": "resnet18", "stem": "cifar", "width": 8, "num_classes": 10, "image_size": 16}
SEQUENCE = 64


def config_of(
    groups: int = 2, *, stage: int = 0, accumulation: int = 1, tp: int = 1, checkpointing: str = "none",
    bf16: bool = False,
    model: dict[str, Any] = LLAMA, optimizer: str = "AdamW", **sdp_section: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "tensor_parallel": {"autotp_size": tp},
        "activation_checkpointing": {"mode": checkpointing},
        "sdp": {"groups": groups, "capacity": 0.5 if groups > 1 else 1.0, **sdp_section},
        "model": model,
        "data": {"name": "digits"} if model["name"] == "resnet18" else {"sequence_length": SEQUENCE},
    }


def batch_of(model: dict[str, Any], samples: int) -> dict[str, torch.Tensor]:
    if model["name"] == "resnet18":
        side = model["image_size"]
        return {"images": torch.rand(samples, 3, side, side), "labels": torch.zeros(samples, dtype=torch.int64)}
    tokens = torch.zeros(samples, SEQUENCE, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}


def measured(config: dict[str, Any]) -> tuple[int, dict[str, int], dict[str, int], int]:
    """On a rank: peak of the second step, state, bytes sent in it, and the rank's group."""
    engine, optimizer, *_ = sdp.initialize(model=build_model(config["model"]), config=config)

    def step() -> None:
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(batch_of(config["model"], config["train_micro_batch_size_per_gpu"])))
            engine.step()

    step()
    engine.traffic.reset()
    peak = peak_tensor_bytes(step, engine.module, optimizer, engine.device)
    group = engine.layout.mesh.coordinates(engine.global_rank).sdp
    return peak, engine.measured_state_bytes().to_json(), engine.traffic.by_kind(), group


def traced(config: dict[str, Any], world: int, group: int = 0, *, whole: bool = False) -> StepTrace:
    settings = load_config(config)
    build = partial(build_model, config["model"])
    layout = Layout.of(build(), settings, mesh_of(settings, world))
    return trace_step(build, settings, layout, partial(batch_of, config["model"]), group, whole=whole)


def messages_of(config: dict[str, Any], world: int) -> Messages:
    settings = load_config(config)
    return Messages(Layout.of(build_model(config["model"]), settings, mesh_of(settings, world)), settings)


def by_kind(collectives: Iterable[Collective]) -> dict[str, int]:
    traffic = Traffic()
    for one in collectives:
        traffic.record(one.scope, one.kind, one.nbytes, one.ranks)
    return traffic.by_kind()


CASES = {
    "sdp-only": (2, config_of()),
    "unequal-groups": (2, config_of(placement="balanced", capacity=[0.75, 0.5])),
    "zero1-accumulated": (4, config_of(stage=1, accumulation=2)),
    "zero2-accumulated": (3, config_of(1, stage=2, accumulation=4, model=LLAMA | {"vocab_size": 65})),
    "zero3-bf16": (4, config_of(stage=3, accumulation=2, bf16=True)),
    "zero3-backward-bf16": (4, config_of(stage=3, masking="backward", bf16=True)),
    "int8-copies": (4, config_of(stage=3, masking="backward", bf16=True, copies={"dtype": "int8"})),
    "nf4-copies": (2, config_of(masking="backward", checkpointing="full", copies={"dtype": "nf4"},
                                granularity="neuron", neuron_groups=2)),
    "recomputed": (2, config_of(checkpointing="full", accumulation=2)),
    "selective": (2, config_of(checkpointing="selective", masking="backward")),
    "tensor-parallel": (4, config_of(tp=2, checkpointing="selective", accumulation=3)),
    "neurons": (2, config_of(granularity="neuron", neuron_groups=4)),
    "tensor-parallel-neurons": (4, config_of(tp=2, granularity="neuron", neuron_groups=2)),
    "dense-zero3": (2, config_of(1, stage=3)),
    "images": (2, config_of(model=RESNET)),
    "mostly-state": (2, config_of(1, stage=2, bf16=True, model=RESNET | {"width": 48})),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param("llama_134m", marks=pytest.mark.slow), "llama_8b_hybrid"])
def test_messages_of_int8_copies_are_small(name: str) -> None:
    """At most 0.30 of those in float32, and 0.55 of those in bfloat16."""
    config = json.loads((Path(__file__).parents[3] / "configs" / f"{name}.json").read_text())
    world = config["sdp"]["groups"] * config.get("tensor_parallel", {}).get("autotp_size", 1)
    section = {**config["sdp"], "masking": "backward", "lr_scale": "none"}

    def refreshes(bf16: bool, copies: str) -> int:
        found = messages_of(config | {"bf16": {"enabled": bf16}, "sdp": section | {"copies": {"dtype": copies}}}, world)
        ranks = range(0, world, world // config["sdp"]["groups"])
        return sum(one.nbytes for rank in ranks for one in found.of_step(rank, rank, ()) if one.kind == "broadcast")

    int8 = refreshes(True, "int8")
    assert 0 < int8 <= 0.30 * refreshes(False, "compute")
    assert int8 <= 0.55 * refreshes(True, "compute")


# Others have what these have: states, sharding, precision, granularity and recomputation.
SLOW = {
    "sdp-only", "zero3-bf16", "zero2-accumulated", "tensor-parallel", "neurons", "dense-zero3", "mostly-state",
    "zero3-backward-bf16", "recomputed",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
)
def test_a_traced_step_is_a_real_ranks(ranks: RankPool, name: str) -> None:
    world, config = CASES[name]
    found, messages = ranks.run(measured, config, world=world), messages_of(config, world)
    for group in range(config["sdp"]["groups"]):
        first = next(rank for rank, result in enumerate(found) if result[3] == group)
        peak, state, _, _ = found[first]
        plan = traced(config, world, group)
        assert plan.rank == first
        assert plan.state.to_json() == state
        assert plan.peak == pytest.approx(peak, rel=0.01)
        assert max(result[0] for result in found if result[3] == group) <= 1.01 * plan.peak
        for rank, (_, _, counted, own) in enumerate(found):
            if own == group:
                assert by_kind(messages.of_step(rank, first, plan.collectives)) == counted, f"rank {rank}"


_two, _three = (partial(config_of, model=LLAMA | {"num_hidden_layers": layers}) for layers in (2, 3))
LOCAL = {
    "int8": (4, _two(4, placement="cyclic", sync={"every": 2, "fragments": 2, "compression": "int8"})),
    "sharded": (4, _two(stage=2, masking="backward", sync={"every": 2, "overlap": 1, "compression": "bf16"})),
    "replicas": (4, _two(granularity="neuron", neuron_groups=4, accumulation=2, sync={"every": 2})),
    "paths": (4, _three(4, capacity=1.0, sync={"every": 2}, paths={"count": 2, "own": ["model.layers.1"]})),
    "muon": (4, _two(stage=1, accumulation=2, optimizer="Muon", sync={"every": 2})),
}


def sent_in_a_round(config: dict[str, Any]) -> dict[str, int]:
    """On a rank: the bytes sent in the second round, without those for control."""
    engine, *_ = sdp.initialize(model=build_model(config["model"]), config=config)
    for _ in range(2):
        engine.traffic.reset()
        for _ in range(config["sdp"]["sync"]["every"] * engine.gradient_accumulation_steps()):
            engine.backward(engine(batch_of(config["model"], config["train_micro_batch_size_per_gpu"])))
            engine.step()
    return {kind: sent for kind, sent in engine.traffic.by_kind().items() if not kind.startswith("control")}


@pytest.mark.parametrize("name", LOCAL)
def test_a_round_of_local_steps_sends_what_was_traced(ranks: RankPool, name: str) -> None:
    world, config = LOCAL[name]
    messages, groups = messages_of(config, world), config["sdp"]["groups"]
    plans = [traced(config, world, group) for group in range(groups)]
    for rank, counted in enumerate(ranks.run(sent_in_a_round, config, world=world)):
        plan = plans[rank * groups // world]
        of_step = messages.of_step(rank, plan.rank, plan.collectives)
        inner = [one for one in of_step for _ in range(config["sdp"]["sync"]["every"])]
        found = by_kind([one for one in (*inner, *messages.of_round(rank)) if one.scope != "control"])
        assert found == counted, f"rank {rank}"


@pytest.mark.slow
def test_a_peak_of_a_gigabyte(ranks: RankPool) -> None:
    model = LLAMA | {
        "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
        "num_attention_heads": 8,
    }  # fmt: skip
    config = config_of(model=model, masking="backward") | {"train_micro_batch_size_per_gpu": 40}
    peak, state, *_ = ranks.run(measured, config, world=2, timeout=600)[0]
    plan = traced(config, 2)
    assert peak > 1e9
    assert plan.state.to_json() == state
    assert plan.peak == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        (
            10,
            {"groups": 1, "stage": 3, "bf16": True, "accumulation": 2, "model": {"hidden_size": 512}},
        ),  # the peak is amid the last blocks
        (20, {"masking": "backward"}),  # blocks of two kinds take turns
        pytest.param(
            40,
            {"groups": 4, "masking": "backward", "stage": 3, "placement": "cyclic", "profile": "uniform"},
            marks=pytest.mark.slow,
        ),  # in a pattern of four
        pytest.param(
            60,
            {"masking": "backward", "placement": {f"model.layers.{i}": [int(20 <= i < 40)] for i in range(60)}},
            marks=pytest.mark.slow,
        ),  # on both sides of another
        (10, {"granularity": "neuron", "neuron_groups": 2, "tp": 2}),
    ],
)
def test_what_is_left_out_of_a_deep_model_is_exactly_what_one_more_block_adds(
    layers: int, options: dict[str, Any]
) -> None:
    model = LLAMA | {"num_hidden_layers": layers} | options.get("model", {})
    config = config_of(**{**options, "model": model})
    part, all_of_it = traced(config, 4), traced(config, 4, whole=True)
    assert part.traced_blocks < part.blocks == all_of_it.traced_blocks
    assert part.at_peak == all_of_it.at_peak
    assert (part.activations, part.communication, part.flops) == (
        all_of_it.activations,
        all_of_it.communication,
        all_of_it.flops,
    )
    assert part.combined == all_of_it.combined
    assert sorted(part.collectives) == sorted(all_of_it.collectives)


def test_a_model_without_a_long_pattern_is_traced_completely_once() -> None:
    held = {f"model.layers.{i}": [int(i // 9 % 2)] for i in range(18)}
    model = LLAMA | {"num_hidden_layers": 18}
    config = config_of(masking="backward", placement=held, model=model)
    assert traced(config, 2).traced_blocks == 18


class _Repeated(nn.Module):
    def __init__(self, counts: list[int]):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.counts = {"each": counts}


def test_blocks_that_differ_in_a_list_are_of_two_kinds() -> None:
    assert settings_of(_Repeated([1, 2])) == settings_of(_Repeated([1, 2]))
    assert settings_of(_Repeated([1, 2])) != settings_of(_Repeated([1, 12]))


def test_operations_are_those_of_the_matrix_products() -> None:
    """6 per weight and token, and attention's two products 3.5 times."""
    tokens, layers, width, middle, vocabulary = 4 * SEQUENCE, 4, 64, 160, 512
    weights = layers * (4 * width * width + 3 * width * middle) + vocabulary * width
    attention = layers * 4 * tokens * SEQUENCE * width
    assert traced(config_of(1), 1).flops == 6 * tokens * weights + 3.5 * attention


def test_a_process_with_a_group_of_its_own_cannot_trace(ranks: RankPool) -> None:
    assert ranks.run(refusal, world=1)[0].endswith("but this process has one already; plan without a launcher")


def refusal() -> str:
    with pytest.raises(LaunchError) as error:
        traced(config_of(1), 1)
    return str(error.value)
