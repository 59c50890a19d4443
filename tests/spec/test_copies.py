"""Frozen copies that are quantised, or refreshed every few steps (``sdp.copies``)."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.config.load import load_config
from sdp.engine.distributed.collectives import stored_tensor
from sdp.engine.errors import ConfigError, NonFiniteError
from sdp.engine.subnetwork.copies import dequantise, quantise
from sdp.tests.support import models
from sdp.tests.support.case_tables import TO_BACKWARD
from sdp.tests.support.cases import (
    RELATIVE,
    Case,
    data_rank_of,
    engine_of,
    mean_loss,
    one_step,
    oracle_of,
    rate_of,
    said,
)
from sdp.tests.support.checkpoints import assert_equal_runs, resumed
from sdp.tests.support.oracle import quantised, values_of
from sdp.tests.support.ranks import RankPool
from torch.distributed.tensor import DTensor

INT8, NF4, OLD = '{"dtype": "int8"}', '{"dtype": "nf4"}', '{"refresh_every": 2}'
BOTH = '{"dtype": "nf4", "refresh_every": 2}'
BACKWARD: dict[str, Any] = {"masking": "backward"}
CASES = [
    (Case(2, 1, model="llama-meta", copies=INT8, **BACKWARD), "fsdp2"),
    (Case(2, 2, 3, model="llama-tied-meta", copies=NF4, bf16=True, checkpointing="full", **BACKWARD), "fsdp2"),
    (Case(2, 1, 3, model="even-llama-meta", copies=INT8, tp=2, **BACKWARD), "fsdp2"),
    (Case(2, 2, 2, 2, model="even-llama-meta", copies=INT8, neurons=2, placement="cyclic", **BACKWARD), "fsdp2"),
    (Case(2, 2, 1, model="resnet-meta", copies=BOTH, **BACKWARD), "fsdp2"),
    (Case(4, 1, 0, copies=OLD, placement="profile", **BACKWARD), "fsdp2"),
    (Case(4, 1, 1, model="llama-tied-meta", copies=INT8, placement="contiguous", **BACKWARD), "fsdp2"),
    (Case(2, 2, 1, 2, copies=INT8, **BACKWARD), "deepspeed"),
    (Case(2, 2, 2, model="llama", copies=INT8, bf16=True, **BACKWARD), "deepspeed"),
    (Case(2, 2, 3, neurons=2, model="even-llama", copies=INT8, clip=True, **BACKWARD), "deepspeed"),
    (Case(2, 2, 3, model="llama-meta", copies=NF4, **BACKWARD), "deepspeed"),
]
CASES = [(case if case.copies in (OLD, BOTH) else replace(case, steps=2), engine) for case, engine in CASES]


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("shape", [(3, 64), (2, 130), (4, 3, 3, 3), (1, 1), (2, 7), (0, 5)])
def test_numbers_are_those_of_the_formula(kind: Any, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3
    weight[:1] = 0
    q, s = quantise(weight, kind)
    numbers, scales = quantised(weight, kind)
    assert torch.equal(s.view(torch.float16), scales)
    tail = weight.shape[1:].numel()
    if kind == "int8":
        assert torch.equal(q.flatten(1).int(), numbers)
    else:
        assert torch.equal(torch.stack([q >> 4, q & 15], 2).flatten(1)[:, :tail].int(), numbers)
    for dtype in (torch.float32, torch.bfloat16):
        found = dequantise(q, s, weight.shape[1:], kind, dtype)
        assert torch.equal(found, values_of(numbers, scales, kind).view(shape).to(dtype))


def test_halves_are_rounded_to_even_and_ties_take_the_lower_level() -> None:
    q, _ = quantise(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]), "int8")
    assert q.tolist() == [[127, 0, 2, 2, 0, -2]]
    middle = 0.07958029955625534 / 2  # of the levels 7 and 8
    q, _ = quantise(torch.tensor([[1.0, middle, middle * (1 + 2**-23)]]), "nf4")
    assert q.tolist() == [[15 << 4 | 7, 8 << 4 | 7]]


# -- one step at a time ----------------------------------------------------------------------------

Moment = dict[str, Any]


def _moments(case: Case, engine_name: str) -> list[Moment]:
    """Before each step, and after the last: the full model, and the copies of this rank. After each
    step: loss and norm. An evaluation after the first step changes nothing in those that follow.
    """
    engine, moments = engine_of(case, engine_name), []
    for step in range(case.steps + 1):
        copies = {name: _whole(engine, p) for name, p in engine.frozen_here.items()}
        moment: Moment = {"full": engine.full_state_dict(), "copies": copies}
        moments.append(moment)
        if step == case.steps:
            break
        moment["loss"] = one_step(engine, case, step, data_rank=data_rank_of(case))
        engine.step()
        moment["norm"] = engine.get_global_grad_norm()
        if step == 0:
            moment["evaluated"] = engine.evaluate([models.micro_batch(case.model, 90, 0, data_rank_of(case))])
        moment["state"] = engine.measured_state_bytes().to_json(), engine.predicted_state_bytes().to_json()
    return moments


def _whole(engine: Any, parameter: torch.Tensor) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        return parameter.detach().full_tensor()
    part = stored_tensor(parameter).detach()
    if part is parameter or not hasattr(parameter, "ds_shape"):
        return parameter.detach().clone()
    group = engine.store.context.communicators.fsdp
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts)[: parameter.ds_shape.numel()].view(parameter.ds_shape)


@pytest.mark.parametrize(("case", "engine"), CASES, ids=str)
def test_a_step_equals_the_oracles(ranks: RankPool, case: Case, engine: str) -> None:
    answers = ranks.run(_moments, case, engine, world=case.world)
    groups, tolerance = oracle_of(case), 2e-2 if case.bf16 else RELATIVE
    every = groups.copies["refresh_every"]
    for step in range(case.steps):
        before, after = (answers[0][at]["full"] for at in (step, step + 1))
        for piece in groups.pieces.values():  # from equal weights
            value = groups.value(piece)
            value.copy_(piece.of(before[piece.canonical]))
            for group in groups.groups:
                if group.index in piece.holders and piece.name in group.weights:
                    group.weights[piece.name].data.copy_(value)
        if step % every == 0:
            groups.refresh_copies(groups.pieces.values())
        _compare_copies(case, groups, [answer[step]["copies"] for answer in answers])
        batches = [
            [models.micro_batch(case.model, step, micro, rank) for rank in range(case.data_ranks)]
            for micro in range(case.accumulation)
        ]
        done = groups.step(batches, rate_of(case, step))
        losses = [answer[step]["loss"] for answer in answers]
        assert sum(losses) / len(losses) == pytest.approx(done.loss, rel=tolerance)
        assert answers[0][step]["norm"] == pytest.approx(done.norm, rel=tolerance)
        for name in dict.fromkeys(piece.canonical for piece in groups.trained.values()):
            largest = (after[name] - before[name]).abs().max().item()
            difference = (after[name] - groups.full[name]).abs().max().item()
            assert difference <= 10 * tolerance * largest + 1e-6 * before[name].abs().max().item(), name
        for answer in answers:
            measured, predicted = answer[step]["state"]
            assert measured == predicted
        if step == 0:
            held_out = [models.micro_batch(case.model, 90, 0, rank) for rank in range(case.data_ranks)]
            assert answers[0][step]["evaluated"] == pytest.approx(mean_loss(groups, held_out), rel=10 * tolerance)


def _compare_copies(case: Case, groups: Any, found: list[dict[str, torch.Tensor]]) -> None:
    """Compare the copies of all ranks bit for bit."""
    kind, compared = groups.copies["dtype"], 0
    for rank, copies in enumerate(found):
        group, tp = groups.groups[rank // (case.fsdp * case.tp)], rank % case.tp
        for name, piece in groups.pieces.items():
            if group.index in piece.holders:
                continue
            value = groups.value(piece)
            info = groups.layout.parameters[name]
            part = value if not case.tp > 1 or info.tp_dim is None else value.chunk(case.tp, info.tp_dim)[tp]
            if kind == "compute" or value.dim() < 2:
                if groups.copies["refresh_every"] == 1:
                    assert torch.equal(copies[name].cpu(), part.to(groups.dtype)), name
                continue
            compared += 1
            if groups.steps % groups.copies["refresh_every"]:
                continue
            numbers, scales = quantised(part, kind)
            q, s = copies[f"{name}:q"], copies[f"{name}:s"]
            assert torch.equal(s.view(torch.float16), scales), f"{name} on rank {rank}"
            if kind == "nf4":
                q = torch.stack([q >> 4, q & 15], 2).view(len(q), -1)[:, : numbers.shape[1]]
            assert torch.equal(q.reshape(numbers.shape).int(), numbers), f"{name} on rank {rank}"
    assert compared or kind == "compute"


# -- local steps, resumes, and weights without a scale ---------------------------------------------

LOCAL = Case(2, 2, 3, model="mlp-meta", sync='{"every": 2, "fragments": 2}', copies=INT8, steps=4, **BACKWARD)


def test_copies_of_a_fragment_are_those_of_its_anchors(ranks: RankPool) -> None:
    answers = ranks.run(_moments, LOCAL, "fsdp2", world=LOCAL.world)
    groups = oracle_of(LOCAL)
    for step in range(1, LOCAL.steps + 1):
        for piece in groups.pieces.values():  # the full model is the anchors
            groups.value(piece).copy_(piece.of(answers[0][step]["full"][piece.canonical]))
        _compare_copies(LOCAL, groups, [answer[step]["copies"] for answer in answers])


@pytest.mark.parametrize("kind", [INT8, NF4])
def test_a_round_of_local_steps_equals_the_oracles(ranks: RankPool, kind: str) -> None:
    case = replace(LOCAL, sync='{"every": 2}', steps=2, copies=kind)
    answers = ranks.run(_moments, case, "fsdp2", world=case.world)
    groups = oracle_of(case)
    for step in range(case.steps):
        batches = [[models.micro_batch(case.model, step, 0, rank) for rank in range(case.data_ranks)]]
        done = groups.step(batches, rate_of(case, step))
        losses = [answer[step]["loss"] for answer in answers]
        assert sum(losses) / len(losses) == pytest.approx(done.loss, rel=RELATIVE)
    before, after = (answers[0][step]["full"] for step in (0, case.steps))
    for name in dict.fromkeys(piece.canonical for piece in groups.trained.values()):
        change, expected = after[name] - before[name], groups.full[name] - before[name]
        assert (change - expected).abs().max() <= 10 * RELATIVE * change.abs().max(), name


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        (Case(2, 1, optimizer="adamw", copies=OLD, **BACKWARD), "fsdp2"),
        (Case(2, 1, 0, optimizer="adamw", model="even-llama", neurons=2, masking=TO_BACKWARD, copies=NF4), "fsdp2"),
        (Case(2, 2, 3, optimizer="adamw", model="mlp-meta", copies=NF4, sync='{"every": 3}', **BACKWARD), "fsdp2"),
        (Case(2, 2, 3, optimizer="adamw", model="mlp-meta", copies=INT8, **BACKWARD), "deepspeed"),
    ],
    ids=str,
)
def test_a_resume_equals_the_undisturbed_run(ranks: RankPool, case: Case, engine: str, tmp_path: Path) -> None:
    every = 1 if case.masking == TO_BACKWARD else 2  # at a refresh, as between two it differs, and amid a round
    assert_equal_runs(ranks.run(resumed, case, str(tmp_path), engine, every, world=case.world))


def _resumed_between(case: Case, folder: str) -> list[str]:
    engine = engine_of(case)
    one_step(engine, case, 0, data_rank=data_rank_of(case))
    engine.step()
    engine.save_checkpoint(folder)
    with said() as lines:
        engine.load_checkpoint(folder)
    return lines


def test_a_resume_between_two_refreshes_says_that_it_differs(ranks: RankPool, tmp_path: Path) -> None:
    first, other = ranks.run(_resumed_between, Case(2, 1, copies=OLD, **BACKWARD), str(tmp_path), world=2)
    assert any("sdp.copies.refresh_every: after this load, copies have the weights of step 1" in line for line in first)
    assert not any("refresh_every" in line for line in other)


def _too_large(case: Case, at_start: bool) -> str:
    model = models.build(case.model)
    weights = dict(model.named_parameters())
    if at_start:
        weights["layers.3.up.weight"].data[0, 0] = math.inf
    try:
        engine = sdp.initialize(model=model, config=case.config())[0]
        for step in range(3):
            if step == 1 and "layers.3.up.weight" in engine.parameters_here:
                engine.parameters_here["layers.3.up.weight"].data[0, 0] = 1e7
            one_step(engine, case, step, data_rank=data_rank_of(case))
            engine.step()
    except NonFiniteError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("at_start", [True, False])
def test_a_scale_that_is_not_finite_is_an_error_on_all_ranks(ranks: RankPool, at_start: bool) -> None:
    for message in ranks.run(_too_large, Case(2, 1, copies=INT8, **BACKWARD), at_start, world=2):
        assert message.startswith("layers.3.up.weight: a copy in int8 has a scale that is not finite")


def _alive(case: Case) -> tuple[int, int, int]:
    """Bytes of copies in compute precision: the most at a time, those after the forward pass, and
    those of the largest block.
    """
    engine, made, most = engine_of(case), list[weakref.ref[torch.Tensor]](), 0

    def alive() -> int:
        return sum(value.nbytes for ref in made if (value := ref()) is not None)

    def watched(*arguments: Any) -> torch.Tensor:
        nonlocal most
        value = dequantise(*arguments)
        made.append(weakref.ref(value))
        most = max(most, alive())
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sdp.engine.subnetwork.copies.dequantise", watched)
        loss = engine(models.micro_batch(case.model, 0, 0, data_rank_of(case)))
        after_forward = alive()
        engine.backward(loss)
    assert made
    info = engine.layout.parameters
    block = max(
        sum(4 * info[name].numel for name in refresh.names if len(info[name].shape) > 1)
        for refresh in engine.layout.refreshes
    )
    return most, after_forward, block


@pytest.mark.parametrize(("checkpointing", "part"), [("none", 0.5), ("full", 1.0)])
def test_one_block_at_a_time_is_in_compute_precision(ranks: RankPool, checkpointing: Any, part: float) -> None:
    case = Case(2, 1, model="llama-meta", copies=INT8, checkpointing=checkpointing, placement="cyclic", **BACKWARD)
    for most, after_forward, block in ranks.run(_alive, case, world=2):
        assert after_forward == 0
        assert 0 < most <= part * block


def _kept(case: Case) -> list[bool]:
    """Whether autograd keeps something of each block, in order."""
    engine, kept = engine_of(case), []
    for index in range(4):
        block = engine.module.get_submodule(f"model.layers.{index}")
        block.register_forward_hook(lambda _, __, output: kept.append(output.requires_grad))
    engine(models.micro_batch(case.model, 0, 0, data_rank_of(case)))
    return kept


def test_autograd_keeps_nothing_below_the_lowest_held_block(ranks: RankPool) -> None:
    early, late = ranks.run(_kept, Case(2, 1, model="llama-meta", placement="contiguous", **BACKWARD), world=2)
    assert early == [True] * 4
    assert late == [False, False, True, True]


@pytest.mark.parametrize(
    ("section", "others", "message"),
    [
        ({"copies": {"dtype": "int8"}}, {}, 'sdp.copies.dtype: "int8" has no meaning with sdp.masking "forward"'),
        ({"copies": {"refresh_every": 2}}, {}, "sdp.copies.refresh_every: 2 has no meaning"),
        ({"masking": "backward", "copies": {"refresh_every": 2}, "sync": {"every": 4}}, {},
            "sdp.copies.refresh_every: 2 contradicts sdp.sync"),
        ({"masking": "backward", "copies": {"dtype": "nf4"}}, {"training": {"compile": True}},
            'sdp.copies.dtype: "nf4" is not available together with training.compile'),
        ({"masking": "backward", "copies": {"dtype": "fp8"}}, {},
            "sdp.copies.dtype: input should be 'compute', 'int8'"),
    ],
)  # fmt: skip
def test_what_cannot_be_combined_is_one_line(section: Any, others: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"sdp": {"groups": 2, **section}, **others})
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
