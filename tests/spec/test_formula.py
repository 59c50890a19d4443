"""The oracle and FSDP2 equal the formula written out by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.tests.support import models
from sdp.tests.support.case_tables import FACTORS
from sdp.tests.support.cases import CLIP, RELATIVE, Case, engine_of, full_gradients, masking_of, native, oracle
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


@pytest.mark.parametrize(
    ("stage", "masking"), [(0, "forward"), (2, "forward"), (3, "forward"), (0, "backward"), (3, "backward")]
)
def test_gradients_at_the_boundary_are_g_u(ranks: RankPool, stage: int, masking: Any) -> None:
    """Under backward masking that is the dense model's gradient over the holders' batches: an
    unbiased estimate.
    """
    case = Case(2, 2, stage=stage, accumulation=3, steps=1, masking=masking)
    expected = by_hand(case)[2][0]
    seen: set[str] = set()
    for rank, result in enumerate(native(ranks, case)):
        assert result.gradients is not None
        for name, gradient in result.gradients.items():
            largest = expected[name].abs().max().item()
            torch.testing.assert_close(
                gradient.cpu(),
                expected[name],
                rtol=0,
                atol=1e-6 * largest,
                msg=lambda text, at=(rank, name): f"{at}: {text}",
            )
        held = {f"layers.{index}" for index, holders in HOLDERS.items() if rank // 2 in holders}
        assert {name.rsplit(".", 2)[0] for name in result.gradients if name.startswith("layers")} == held
        seen |= set(result.gradients)
    assert seen == set(expected)


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


def _zeroed_in_vain(stage: int) -> dict[str, torch.Tensor]:
    """Return the gradients of a step in whose middle a script calls ``zero_grad``."""

    case = Case(2, 2, stage=stage, accumulation=2)
    engine = engine_of(case)
    for micro in range(2):
        engine.backward(engine(models.micro_batch("mlp", 0, micro, dist.get_rank())))
        if micro == 0:
            engine.step()
            engine.zero_grad()
    return full_gradients(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_grad_between_micro_batches_drops_nothing(ranks: RankPool, stage: int) -> None:
    """As in DeepSpeed, where scripts call it after every step()."""
    both = by_hand(Case(2, 2, accumulation=2, steps=1))[2][0]
    for gradients in ranks.run(_zeroed_in_vain, stage, world=4):
        for name, gradient in gradients.items():
            atol = RELATIVE * both[name].abs().max().item()
            torch.testing.assert_close(gradient.cpu(), both[name], rtol=0, atol=atol)
