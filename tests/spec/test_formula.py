"""The oracle and FSDP2 equal the formula written out by hand."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.tests.support import models
from sdp.tests.support.case_tables import FACTORS
from sdp.tests.support.cases import CLIP, RELATIVE, Case, engine_of, full_gradients, masking_of, oracle
from sdp.tests.support.ranks import RankPool

HOLDERS = {0: [0], 1: [0, 1], 2: [0, 1], 3: [1]}


def by_hand(case: Case) -> tuple[dict[str, torch.Tensor], list[float], list[dict[str, torch.Tensor]]]:
    """SGD on g_u = the mean over the holders' data ranks, with nothing of the package: weights,
    norms, gradients of every step.

    In steps of backward masking every pass is the dense model's, of whose gradients those of units
    that a group does not hold are dropped.
    """
    model = models.mlp()
    stem, layers, head = model.stem, model.layers, model.head
    norms, gradients = [], []
    rates = [0.1, 0.1, 0.1 + 0.2 / 3, 0.1 + 0.4 / 3]
    for step in range(case.steps):
        masking = masking_of(case, step)
        sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for group, shard, micro in itertools.product(range(2), range(case.fsdp), range(case.accumulation)):
            batch = models.micro_batch("mlp", step, micro, group * case.fsdp + shard)
            hidden = stem(batch["x"])
            for index, layer in enumerate(layers):
                hidden = layer(hidden) if group in HOLDERS[index] or masking == "backward" else hidden
            model.zero_grad()
            (((head(hidden) - batch["y"]) ** 2).mean() / case.accumulation).backward()
            for name, p in model.named_parameters():
                held = not name.startswith("layers") or group in HOLDERS[int(name.split(".")[1])]
                sums[name] += p.grad if p.grad is not None and held else 0
        for name, total in sums.items():
            holders = len(HOLDERS[int(name.split(".")[1])]) if name.startswith("layers") else 2
            total /= holders * case.fsdp
        norms.append(torch.stack([total.double().square().sum() for total in sums.values()]).sum().sqrt().item())
        scale = min(1.0, CLIP / norms[-1]) if case.clip else 1.0
        gradients.append({name: total.clone() for name, total in sums.items()})
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= rates[step] * scale * sums[name]
    return models.cpu_state(model), norms, gradients


@pytest.mark.parametrize("masking", FACTORS["masking"])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("fsdp", "accumulation"), [(1, 1), (2, 3)])
def test_the_oracle_equals_the_formula(fsdp: int, accumulation: int, clip: bool, masking: Any) -> None:
    case = Case(2, fsdp, accumulation=accumulation, clip=clip, masking=masking)
    weights, norms, _ = by_hand(case)
    result = oracle(case)
    assert result.after is not None
    assert result.norms == pytest.approx(norms, rel=RELATIVE)
    for name, weight in weights.items():
        torch.testing.assert_close(result.after[name], weight, rtol=0, atol=RELATIVE * weight.abs().max().item())


def _two_losses(stage: int) -> dict[str, torch.Tensor]:
    """Gradients after two backward passes before one step, each of half the loss."""

    case = Case(2, 2, stage=stage)
    engine = engine_of(case)
    for half in range(2):
        batch = models.micro_batch("mlp", 0, half, dist.get_rank())
        engine.backward(engine(batch["x"], y=batch["y"]) / 2)
    return full_gradients(engine)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_two_backward_passes_before_a_step_add_up(ranks: RankPool, stage: int) -> None:
    expected = by_hand(Case(2, 2, accumulation=2, steps=1))[2][0]
    for gradients in ranks.run(_two_losses, stage, world=4):
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                gradient.cpu(), expected[name], rtol=0, atol=RELATIVE * expected[name].abs().max().item()
            )


# -- accumulation boundaries, ``no_sync``, and the engine's counters -------------------------------


def _counters() -> list[Any]:
    engine = engine_of(Case(2, 1, accumulation=3))
    assert engine.get_global_grad_norm() is None
    seen = []
    for micro in range(6):
        boundary = engine.is_gradient_accumulation_boundary()
        engine.traffic.reset()
        engine.backward(engine(models.micro_batch("mlp", 0, micro, dist.get_rank())))
        engine.step()
        seen.append(
            (
                boundary,
                sum(engine.traffic.by_kind().values()) > 0,
                engine.global_steps,
                engine.micro_steps,
                engine.global_samples,
            )
        )
    facts = (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps())
    return [seen, facts, engine.world_size, engine.global_rank == dist.get_rank()]


def test_only_the_last_micro_batch_sends_and_steps(ranks: RankPool) -> None:
    for seen, facts, world, own_rank in ranks.run(_counters, world=2):
        assert seen == [
            (False, False, 0, 1, 0), (False, False, 0, 2, 0), (True, True, 1, 3, 12),
            (False, False, 1, 4, 12), (False, False, 1, 5, 12), (True, True, 2, 6, 24),
        ]  # fmt: skip
        assert facts == (12, 2, 3)
        assert (world, own_rank) == (2, True)


def _no_sync(stage: int) -> tuple[list[str], dict[str, torch.Tensor], int]:
    engine = engine_of(Case(2, 2, stage))
    messages = []
    engine.traffic.reset()
    with engine.no_sync():
        engine.backward(engine(models.micro_batch("mlp", 0, 0, dist.get_rank())) / 2)
        try:
            engine.step()
        except RuntimeError as error:
            messages.append(str(error))
    between = engine.traffic.by_kind().get("between groups/all_reduce", 0)
    try:
        engine.step()
    except RuntimeError as error:
        messages.append(str(error))
    engine.backward(engine(models.micro_batch("mlp", 0, 1, dist.get_rank())) / 2)
    return messages, full_gradients(engine), between


@pytest.mark.parametrize("stage", range(4))
def test_no_sync_accumulates_without_sending(ranks: RankPool, stage: int) -> None:
    expected = oracle(Case(2, 2, accumulation=2, steps=1)).gradients
    assert expected is not None
    for messages, gradients, between in ranks.run(_no_sync, stage, world=4):
        assert "inside no_sync()" in messages[0]
        assert "needs a backward() before it, outside no_sync()" in messages[1]
        assert between == 0
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-5 * expected[name].abs().max().item())
