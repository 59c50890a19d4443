"""Half precision under DeepSpeed: bf16, and fp16, whose loss scale all groups share."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.engine.errors import NonFiniteError
from sdp.tests.support import models
from sdp.tests.support.cases import Case, engine_of, mean_loss, oracle_of, rate_of, said, zero_of
from sdp.tests.support.deepspeed_runs import FP16, float16_here
from sdp.tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
STEPS = 4
BAD = 1  # the step in which one rank's gradient is NaN


@dataclass
class Life:
    """What one rank saw: a value per step; weights on rank 0."""

    states: list[Any] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float | None] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    loss: float = 0.0  # of the full model, at the end


def _sections(case: Case, offload: bool) -> dict[str, Any]:
    zero = {"zero_optimization": {**zero_of(case.stage), "offload_optimizer": {"device": "cpu"}}} if offload else {}
    return zero if case.bf16 else {"fp16": FP16, **zero}


def _steps(engine: Any, case: Case, steps: range, life: Life, rank: int) -> Life:
    for step in steps:
        # Finite, and more than float16 holds once it is scaled; bfloat16 holds it.
        batch, factor = models.micro_batch(case.model, step, 0, rank), float("nan") if case.bf16 else 1e9
        factor = factor if rank == case.world - 1 else 1.0
        engine.backward(engine(batch) * (factor if step == BAD else 1.0))
        engine.step()
        life.states.append(engine.full_state_dict())
        life.norms.append(engine.get_global_grad_norm())
        life.scales.append(engine.get_loss_scale())
        life.skipped.append(engine.skipped_steps)
    life.loss = engine.evaluate([models.micro_batch(case.model, 9, 0, rank)])
    return life


def _life_of_the_oracle(case: Case) -> Life:
    """It skips the same step, and the schedule waits."""
    oracle, done = oracle_of(case), 0
    life = Life([oracle.state_dict()])
    for step in range(STEPS):
        batches = [models.micro_batch(case.model, step, 0, rank) for rank in range(case.data_ranks)]
        life.norms.append(oracle.step([batches], rate_of(case, done), skip=step == BAD).norm)
        life.states.append(oracle.state_dict())
        done += step != BAD
    life.loss = mean_loss(oracle, [models.micro_batch(case.model, 9, 0, rank) for rank in range(case.data_ranks)])
    return life


def _two_lives(case: Case, offload: bool, folder: str) -> tuple[Life, Life]:
    """A whole run, and one that goes on after a skip and a good step."""
    rank = dist.get_rank()
    with float16_here():
        engine = engine_of(case, "deepspeed", **_sections(case, offload))
        life = _steps(engine, case, range(STEPS - 1), Life([engine.full_state_dict()]), rank)
        engine.save_checkpoint(folder)
        _steps(engine, case, range(STEPS - 1, STEPS), life, rank)
        assert engine.measured_state_bytes() == engine.predicted_state_bytes()
        assert engine.skipped_steps == 1
        engine.check_holders()

        engine = engine_of(case, "deepspeed", **_sections(case, offload))
        engine.load_checkpoint(folder)
        again = Life([engine.full_state_dict()], scales=[engine.get_loss_scale()])
        return life, _steps(engine, case, range(STEPS - 1, STEPS), again, rank)


def _assert_near(ours: Life, theirs: Life, epsilon: float) -> None:
    """Compare what each step did to the weights as a whole."""
    for step in range(STEPS):
        deviation = update = 0.0
        for name, before in theirs.states[step].items():
            done = theirs.states[step + 1][name] - before
            here = ours.states[step + 1][name] - ours.states[step][name]
            assert here.dtype == torch.float32
            deviation += (here - done).square().sum().item()
            update += done.square().sum().item()
        assert deviation**0.5 <= epsilon * update**0.5, f"step {step}: {(deviation / max(update, 1e-30)) ** 0.5:.2e}"
        assert (update > 0) == (step != BAD)


@pytest.mark.parametrize(
    ("case", "offload"),
    [
        (Case(2, 2, stage=1, optimizer="adamw", model="llama-tied", masking="backward", bf16=True), False),
        (Case(2, 1, stage=1, optimizer="momentum", model="llama", clip=True), False),
        pytest.param(Case(2, 2, stage=2, optimizer="momentum", model="llama-tied", masking="backward"), False,
            marks=pytest.mark.slow),
        (Case(2, 2, stage=3, optimizer="momentum", model="llama", clip=True), False),
        pytest.param(Case(2, 2, stage=2, optimizer="momentum", model="llama", clip=True), True, marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_all_groups_skip_an_overflow_and_go_on_alike(
    ranks: RankPool, tmp_path: Path, case: Case, offload: bool
) -> None:
    """A resumed run is the same, bit for bit."""
    everyone = ranks.run(_two_lives, case, offload, str(tmp_path), world=case.world)
    theirs = _life_of_the_oracle(case)
    for life, again in everyone:
        assert life.skipped == [0, 1, 1, 1]
        assert life.scales == ([None] * 4 if case.bf16 else [1024, 512, 512, 1024])
        assert [life.scales[2:], life.norms[3:], life.loss] == [again.scales, again.norms, again.loss]
        assert life.norms[0] == pytest.approx(theirs.norms[0], rel=0.02)
        assert life.norms[2:] == pytest.approx(theirs.norms[2:], rel=0.02)
        assert life.loss == pytest.approx(theirs.loss, rel=0.02)
    life, again = everyone[0]
    dtype = torch.bfloat16 if case.bf16 else torch.float16
    assert all(torch.equal(value, value.to(dtype).float()) for value in life.states[0].values()), (
        "a step was taken before the first"
    )
    _assert_near(life, theirs, 2 * torch.finfo(dtype).eps)
    for one, other in zip(life.states[3:], again.states, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def _until_the_end(case: Case) -> tuple[str, list[str]]:
    """Steps of which one rank's gradient is NaN; the error, and the warnings before it."""
    with said(logging.WARNING) as lines, float16_here():
        fp16 = {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 2, "hysteresis": 1}
        engine = engine_of(case, "deepspeed", fp16=fp16, training={"max_skips": 1})
        with pytest.raises(NonFiniteError) as caught:
            for step in range(9):
                loss = engine(models.micro_batch(case.model, step, 0, dist.get_rank()))
                engine.backward(loss * (float("inf") if dist.get_rank() == 0 else 1.0))
                engine.step()
    return str(caught.value), [line for line in lines if "skipped" in line]


def test_skips_count_from_the_lowest_scale_on(ranks: RankPool) -> None:
    for error, warnings in ranks.run(_until_the_end, Case(2, 1, stage=1, model="llama"), world=2):
        assert [line.partition(", ")[2] for line in warnings] == [
            f"the loss scale is now 2 ({count} in a row, training.max_skips 1)" for count in (0, 1)
        ]
        assert "at step 3 and loss scale 2, for the 2. time in a row (training.max_skips 1)" in error
        assert "the weights are those after step 0" in error
