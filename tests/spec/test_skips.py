"""A step whose gradient is no number, in whichever group, is skipped by all groups together."""

from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.engine.errors import NonFiniteError
from sdp.tests.support import models
from sdp.tests.support.cases import Case, engine_of, oracle_of, rate_of
from sdp.tests.support.ranks import RankPool

STEPS = 4


def _train(
    case: Case, bad: dict[int, float], max_skips: int, engine_name: str = "fsdp2", spikes: dict[str, Any] | None = None
) -> dict[str, Any]:
    engine = engine_of(case, engine_name, training={"max_skips": max_skips, **(spikes or {})})
    seen: dict[str, Any] = {"norms": [], "rates": [], "skipped": [], "error": ""}
    for step in range(STEPS):
        rank = dist.get_rank()
        loss = engine(models.micro_batch(case.model, step, 0, rank))
        loss = loss * (bad.get(step, 1.0) if rank == 1 else 1.0)
        engine.backward(loss)
        before = {name: p.detach().clone() for name, p in engine.parameters_here.items()}
        try:
            engine.step()
        except NonFiniteError as error:
            seen["error"] = str(error)
            break
        if engine.was_step_skipped:
            assert all(torch.equal(before[name], p.detach()) for name, p in engine.parameters_here.items())
        seen["norms"].append(engine.get_global_grad_norm())
        seen["rates"].append(engine.get_lr()[0])
        seen["skipped"].append(engine.skipped_steps)
    engine.check_holders()
    return seen | {"after": engine.full_state_dict()}


def expected_weights(case: Case, skipped: Collection[int]) -> dict[str, torch.Tensor]:
    """The oracle's weights. A skipped step leaves the schedule where it is."""
    oracle, done = oracle_of(case), 0
    for step in range(STEPS):
        batches = [models.micro_batch(case.model, step, 0, rank) for rank in range(case.data_ranks)]
        oracle.step([batches], rate_of(case, done), skip=step in skipped)
        done += step not in skipped
    return oracle.state_dict()


@pytest.mark.parametrize(
    ("case", "value", "engine_name"),
    [
        (Case(2, 1, optimizer="adamw"), float("inf"), "fsdp2"),
        (Case(2, 2, stage=3, optimizer="momentum", clip=True), float("nan"), "fsdp2"),
        (Case(2, 2, stage=3, optimizer="adamw"), float("nan"), "deepspeed"),
    ],
    ids=str,
)
def test_one_bad_group_makes_all_skip(ranks: RankPool, case: Case, value: float, engine_name: str) -> None:
    bad = {1: value, 2: value}
    answers = ranks.run(_train, case, bad, 2, engine_name, world=case.world)
    for answer in answers:
        assert answer["skipped"] == [0, 1, 2, 2]
        assert answer["error"] == ""
        assert answer["rates"][0] == answer["rates"][1] == answer["rates"][2] != answer["rates"][3]
    for name, weights in expected_weights(case, bad).items():
        torch.testing.assert_close(answers[0]["after"][name], weights, rtol=1e-5, atol=1e-6)


def test_more_in_a_row_than_allowed_ends_the_run_everywhere(ranks: RankPool) -> None:
    bad = {1: float("nan"), 2: float("nan")}
    for answer in ranks.run(_train, Case(2, 1), bad, 1, world=2):
        assert answer["skipped"] == [0, 1]
        assert (
            "step 3, for the 2. time in a row (training.max_skips 1); the weights are those after step 1"
            in answer["error"]
        )


@pytest.mark.parametrize(
    ("case", "engine_name"),
    [
        (Case(2, 2, stage=3, optimizer="momentum", clip=True), "fsdp2"),
        (Case(2, 1, stage=2, optimizer="adamw"), "deepspeed"),
    ],
    ids=str,
)
def test_a_spike_of_one_group_makes_all_skip(ranks: RankPool, case: Case, engine_name: str) -> None:
    bad, spikes = {2: 1e6}, {"on_spike": "skip", "spike_window": 2, "spike_sigma": 1000}
    answers = ranks.run(_train, case, bad, 0, engine_name, spikes, world=case.world)
    for answer in answers:
        assert answer["skipped"] == [0, 0, 1, 1]
        assert answer["error"] == ""
        assert answer["rates"][1] == answer["rates"][2] != answer["rates"][3]
    for name, weights in expected_weights(case, bad).items():
        torch.testing.assert_close(answers[0]["after"][name], weights, rtol=1e-5, atol=1e-6)
