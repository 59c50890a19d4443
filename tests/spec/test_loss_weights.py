"""Losses weigh what they count: g_u = Σ n·∂ℓ / Σ n over the micro-batches of a unit's holders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sdp.engine.errors import ConfigError, DataError
from sdp.tests.support import models
from sdp.tests.support.cases import Case, data_rank_of, engine_of, masking_of, oracle_of, rate_of
from sdp.tests.support.ranks import RankPool

TABLE = [
    Case(2, 1, 0, 2, model="llama-tied"),
    Case(2, 2, 3, 2, model="llama-meta", clip=True),
    Case(2, 2, 1, 3, model="llama", masking="backward", optimizer="adamw"),
    Case(4, 1, model="llama", placement="cyclic", optimizer="momentum"),
    Case(2, 1, 0, 2, neurons=2, model="even-llama", clip=True),
    Case(2, 2, 3, neurons=2, model="even-llama-tied-meta", masking="backward"),
    Case(2, 1, 0, 2, tp=2, model="even-llama", clip=True),
    Case(2, 2, 0, 2, model="llama", sync='{"every": 2}', steps=4, clip=True),
    Case(2, 1, 0, 2, model="llama", sync='{"every": 3, "start_after": 2}', steps=5, masking="backward"),
]
SLOW = [
    Case(2, 2, 2, 2, model="llama", optimizer="adamw"),
    Case(2, 2, 3, 2, tp=2, neurons=2, model="wide-llama-tied-meta"),
    Case(2, 2, 3, neurons=2, model="even-llama", sync='{"every": 2}', steps=4),
]
Run = tuple[list[float], list[float], dict[str, torch.Tensor] | None]


def given(step: int, micro: int, rank: int) -> float:
    """Weights that a script gives. Some are 0."""
    return (3.0, 1.0, 0.0, 5.5, 2.0)[(2 * step + 3 * micro + rank) % 5]


def counted(case: Case, step: int, micro: int, rank: int) -> float:
    labels = models.micro_batch(case.model, step, micro, rank)["labels"]
    return float((labels[:, 1:] != -100).sum())


def _run(case: Case, by_labels: bool, name: str = "fsdp2") -> Run:
    sections = {"training": {"loss_weighting": "tokens"}} if by_labels else {}
    engine = engine_of(case, name, **sections)
    rank = data_rank_of(case)
    losses, norms = [], []
    for step in range(case.steps):
        for micro in range(case.accumulation):
            loss = engine(models.micro_batch(case.model, step, micro, rank))
            engine.backward(loss, weight=None if by_labels else given(step, micro, rank))
            engine.step()
        losses.append(engine.get_loss())
        norms.append(engine.get_global_grad_norm())
    engine.check_holders()
    return losses, norms, engine.full_state_dict()


def assert_as_the_oracle(case: Case, runs: list[Run], *, by_labels: bool) -> None:
    oracle = oracle_of(replace(case, stage=0, tp=1))
    differs = 0.0
    for step in range(case.steps):
        micros, ranks = range(case.accumulation), range(case.data_ranks)
        batches = [[models.micro_batch(case.model, step, micro, rank) for rank in ranks] for micro in micros]
        weights = [
            [counted(case, step, micro, rank) if by_labels else given(step, micro, rank) for rank in ranks]
            for micro in micros
        ]
        differs = max(differs, *(max(row) - min(row) for row in weights))
        done = oracle.step(batches, rate_of(case, step), weights=weights, masking=masking_of(case, step))
        for losses, norms, *_ in runs:
            assert losses[step] == pytest.approx(done.loss, rel=1e-5)
            assert norms[step] == pytest.approx(done.norm, rel=1e-5)
    assert differs, "all weights are equal"
    assert runs[0][2] is not None
    for name, expected in oracle.state_dict().items():
        atol = 1e-5 * expected.abs().max().item()
        torch.testing.assert_close(runs[0][2][name], expected, rtol=0, atol=atol, msg=lambda t, n=name: f"{n}: {t}")


ROWS = [(case, bool(number % 2)) for number, case in enumerate(TABLE)]
OTHERS = [(case, not by_labels) for case, by_labels in ROWS] + [(case, by) for case in SLOW for by in (False, True)]


@pytest.mark.parametrize(
    ("case", "by_labels"), [*ROWS, *(pytest.param(*row, marks=pytest.mark.slow) for row in OTHERS)], ids=str
)
def test_ranks_equal_the_oracle(ranks: RankPool, case: Case, by_labels: bool) -> None:
    runs = ranks.run(_run, case, by_labels, world=case.world)
    assert_as_the_oracle(case, runs, by_labels=by_labels)


@pytest.mark.parametrize(
    ("case", "by_labels"), [*OTHERS[1:3], *(pytest.param(*row, marks=pytest.mark.slow) for row in ROWS[1:3])], ids=str
)
def test_deepspeed_equals_the_oracle(ranks: RankPool, case: Case, by_labels: bool) -> None:
    pytest.importorskip("deepspeed")
    runs = ranks.run(_run, case, by_labels, "deepspeed", world=case.world)
    assert_as_the_oracle(case, runs, by_labels=by_labels)


@pytest.mark.parametrize("case", [Case(1, 2, 3, 2, model="llama"), Case(2, 1, 0, 2, model="llama", placement="full")])
def test_the_full_model_equals_one_batch_of_all_rows_in_plain_torch(ranks: RankPool, case: Case) -> None:
    """Plain torch takes the mean over all labels of all rows at once."""
    model = models.build(case.model)
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for step in range(case.steps):
        parts = [models.rows_of_all(case.model, step, micro, 2) for micro in range(2)]
        rows = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        logits, targets = model(rows["input_ids"])[:, :-1], rows["labels"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate_of(case, step) * parameter.grad
    losses, _, state, *_ = ranks.run(_run, case, True, world=2)[0]
    assert losses[-1] == pytest.approx(loss.item(), rel=1e-5)
    assert state is not None
    for name, expected in model.state_dict().items():
        assert (expected - before[name]).abs().max() > 1e-4
        torch.testing.assert_close(state[name], expected, rtol=0, atol=1e-6)


# -- the unit of weights, and what cannot be honoured ----------------------------------------------


def _one_step(factor: float, weights: list[float]) -> dict[str, torch.Tensor] | None:
    engine = engine_of(Case(2, 1, 0, 2))
    for step in range(2):
        for micro, weight in enumerate(weights):
            loss = engine(models.micro_batch("mlp", step, micro, dist.get_rank()))
            engine.backward(loss, weight=factor * (weight + dist.get_rank()))
            engine.step()
    return engine.full_state_dict()


def test_only_the_ratio_of_weights_counts_to_the_last_bit(ranks: RankPool) -> None:
    first = ranks.run(_one_step, 1.0, [1.0, 2.0], world=2)[0]
    for factor in (2.0**-20, 2.0**40):
        other = ranks.run(_one_step, factor, [1.0, 2.0], world=2)[0]
        assert all(torch.equal(value, other[name]) for name, value in first.items())


def _mixed(first: float | None) -> dict[str, torch.Tensor] | None:
    engine = engine_of(Case(2, 1, 0, 2))
    for micro, weight in enumerate((first, 3.0 + dist.get_rank())):
        engine.backward(engine(models.micro_batch("mlp", 0, micro, dist.get_rank())), weight=weight)
        engine.step()
    return engine.full_state_dict()


def test_no_weight_is_a_weight_of_one(ranks: RankPool) -> None:
    expected, ours = (ranks.run(_mixed, first, world=2)[0] for first in (1.0, None))
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6)


def _second_pass() -> None:
    """Two passes at the boundary add up, as two micro-batches of one step do."""
    states = []
    for accumulation in (1, 2):
        engine = engine_of(Case(2, 1, 0, accumulation))
        for micro in range(2):
            weight = 1.0 + micro + dist.get_rank()
            engine.backward(engine(models.micro_batch("mlp", 0, micro, dist.get_rank())), weight=weight)
            if accumulation > 1:
                engine.step()
        if accumulation == 1:
            engine.step()
        states.append(engine.full_state_dict())
    for name, value in (states[0] or {}).items():
        torch.testing.assert_close(value, states[1][name], rtol=0, atol=1e-6)


def test_a_second_pass_before_the_step_adds_to_the_first(ranks: RankPool) -> None:
    ranks.run(_second_pass, world=2)


def _refused() -> list[str]:
    case, messages = Case(1, 1), []

    def refuse(weight: Any, error: type[Exception] = ConfigError, **sections: Any) -> None:
        engine = engine_of(case, **sections)
        with pytest.raises(error) as raised:
            engine.backward(engine(models.micro_batch("mlp", 0, 0, 0)), weight=weight)
        messages.append(str(raised.value))

    refuse(-1.0)
    refuse(float("nan"))
    refuse([1.0, 2.0])
    refuse(torch.tensor([1.0, 2.0]))
    refuse(2.0, training={"loss_weighting": "ranks"})
    refuse(0.0, DataError)
    return messages


def test_weights_that_cannot_be_honoured_are_one_line(ranks: RankPool) -> None:
    (messages,) = ranks.run(_refused, world=1)
    expected = [
        "not negative", "not negative", *["weight has 2 numbers"] * 2, "contradicts", "no micro-batch of this step",
    ]  # fmt: skip
    for message, part in zip(messages, expected, strict=True):
        assert part in message
        assert "\n" not in message
