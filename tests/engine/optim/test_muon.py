"""Muon: torch's steps, equal under every layout, and one gather per matrix."""

from typing import Any

import pytest
import torch
from sdp.engine.config.load import load_config
from sdp.engine.distributed.collectives import Traffic
from sdp.engine.errors import ConfigError
from sdp.engine.optim.muon import Matrix, Muon, is_matrix
from sdp.engine.optim.optimizer_state import materialise_state
from sdp.engine.optim.optimizers import build_optimizer, check_optimizer
from sdp.tests.support import models
from sdp.tests.support.cases import Case, Result, assert_same_run, engine_of, run_oracle, train
from torch import nn

CPU = torch.device("cpu")
# Each iteration multiplies small singular values by 3.4, and round-off with them.
SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-2, "ns_dtype": "float32", "ns_steps": 2}
SECTION = {"type": "Muon", "params": SETTINGS}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def steps(model: nn.Module, *optimizers: torch.optim.Optimizer, count: int = 4) -> nn.Module:
    torch.manual_seed(1)
    for _ in range(count):
        model(torch.randn(8, 6)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_equal_those_of_torch(rule: str, nesterov: bool) -> None:
    mine, theirs = network(), network()
    params = {"lr": 0.02, "weight_decay": 0.1, "adam_lr": 0.01, "adjust_lr_fn": rule, "nesterov": nesterov}
    steps(mine, build_optimizer("Muon", params, mine.parameters(), CPU)[0])
    matrices, rest = ([p for p in theirs.parameters() if (p.ndim == 2) is wanted] for wanted in (True, False))
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn=rule, nesterov=nesterov)
    steps(theirs, muon, torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1))
    for own, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_moments_in_bfloat16_stay_close_and_take_half_the_memory() -> None:
    wide, narrow = network(), network()
    first, second = (
        build_optimizer("Muon", SETTINGS | {"state_dtype": dtype}, model.parameters(), CPU)[0]
        for dtype, model in (("float32", wide), ("bfloat16", narrow))
    )
    for own, other in zip(steps(narrow, second).parameters(), steps(wide, first).parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=2e-3)
        state = second.state[own]
        assert {state[key].dtype for key in state if key in ("momentum_buffer", "exp_avg")} == {torch.bfloat16}
    assert isinstance(second, Muon)
    assert second.state_bytes(10, is_matrix=True) == 20
    assert second.state_bytes(10, is_matrix=False) == 60


def test_the_second_moment_decays_also_with_moments_in_bfloat16() -> None:
    """In bfloat16 it would not: 0.999 of a number rounds to the number itself."""
    assert torch.tensor(1.0, dtype=torch.bfloat16) * 0.999 == 1.0
    bias = nn.Parameter(torch.zeros(3))
    optimizer = build_optimizer("Muon", {"state_dtype": "bfloat16", "betas": [0.9, 0.999]}, [bias], CPU)[0]
    for gradient in (100.0, *[1.0] * 500):
        bias.grad = torch.full((3,), gradient)
        optimizer.step()
    expected = 0.999**500 * 0.001 * 100.0**2 + 1 - 0.999**500
    torch.testing.assert_close(optimizer.state[bias]["exp_avg_sq"], torch.full((3,), expected), rtol=1e-4, atol=0)


def test_a_state_that_is_made_early_changes_nothing() -> None:
    model = network()
    optimizer, line = build_optimizer("muon", SETTINGS, model.parameters(), CPU)
    materialise_state(optimizer)
    for before, after in zip(network().parameters(), model.parameters(), strict=True):
        assert torch.equal(before, after)
    assert line.startswith("Muon: SDP's own, for sharded matrices")


CASES = [
    Case(2, 2, stage=3, clip=True),
    Case(2, 2, stage=1, accumulation=2, masking="backward"),
    Case(2, 1, stage=0, neurons=2, model="llama"),
    Case(2, 1, stage=0, tp=2, model="even-llama"),
    Case(2, 1, stage=0, tp=2, model="wide-llama-tied-meta", neurons=2, placement="random"),
]
LOCAL_STEPS = [
    Case(2, 2, stage=3, steps=5, sync='{"every": 2}', model="llama", clip=True),
    Case(4, 1, stage=0, steps=5, sync='{"every": 4, "fragments": 2, "overlap": 1}', placement="cyclic", model="llama"),
    Case(2, 1, stage=0, steps=5, sync='{"every": 2}', neurons=2, model="llama"),
    Case(2, 1, stage=0, steps=5, sync='{"every": 2, "start_after": 2}', tp=2, model="even-llama"),
]


def train_with(case: Case, section: dict[str, Any]) -> Any:
    return train(case, optimizer=section)


def run_with_muon(case: Case) -> Result:
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer = build_optimizer("Muon", SETTINGS, groups, CPU)[0]
        assert isinstance(optimizer, Muon)
        in_blocks = (group["params"][0] for group in optimizer.param_groups if "layers." in group["name"])
        optimizer.arrange({weight: Matrix() for weight in in_blocks if weight.ndim == 2}, Traffic())
        return optimizer

    return run_oracle(case, make_optimizer=make)


def state_and_gathers(case: Case) -> tuple[Any, ...]:
    engine = engine_of(case, optimizer=SECTION)
    rank = torch.distributed.get_rank()
    for micro in range(case.accumulation):
        loss = engine(models.micro_batch(case.model, 0, micro, engine.layout.mesh.data_rank(rank)))
        engine.backward(loss)
        engine.step()
    layout = engine.layout
    held = [info for info in layout.held(layout.mesh.coordinates(rank).sdp) if is_matrix(info, layout)]
    state = engine.measured_state_bytes(), engine.predicted_state_bytes()
    assert isinstance(engine.optimizer, Muon)
    return *state, engine.optimizer.gathers, len(held)


@pytest.mark.parametrize("case", [*CASES[:3], pytest.param(CASES[3], marks=pytest.mark.slow), CASES[4]], ids=str)
def test_every_layout_equals_the_oracle(case: Case, ranks: Any) -> None:
    assert_same_run(ranks.run(train_with, case, SECTION, world=case.world), run_with_muon(case), case)


def gathers_between_tensor_ranks(case: Case) -> tuple[int, int, int]:
    """Bytes gathered between tensor-parallel ranks, of all cut matrices, and their number."""
    engine = engine_of(case, optimizer=SECTION)
    rank = torch.distributed.get_rank()
    engine.backward(engine(models.micro_batch(case.model, 0, 0, engine.layout.mesh.data_rank(rank))))
    engine.traffic.reset()
    engine.step()
    gathered = sum(n for key, n in engine.traffic.buffers.items() if key[:2] == ("tensor parallel", "all_gather"))
    layout = engine.layout
    held = layout.held(layout.mesh.coordinates(rank).sdp)
    cut = [info for info in held if is_matrix(info, layout) and info.tp_dim is not None]
    return gathered, sum(info.tp_shape.numel() * case.tp * 4 for info in cut), len(cut)


@pytest.mark.parametrize("stage", [0, 3])
def test_tensor_parallel_ranks_gather_each_matrix_once_a_step(stage: int, ranks: Any) -> None:
    case = Case(1, 1 if stage == 0 else 2, stage=stage, tp=2, model="even-llama", placement="full")
    for gathered, expected, count in ranks.run(gathers_between_tensor_ranks, case, world=case.world):
        assert count == 4 * 7
        assert gathered == expected


@pytest.mark.parametrize("case", LOCAL_STEPS, ids=str)
def test_local_steps_equal_the_oracle(case: Case, ranks: Any) -> None:
    results = ranks.run(train_with, case, SECTION, world=case.world)
    assert_same_run(results, run_with_muon(case), case)
    for result in results:
        assert result.measured == result.predicted


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_each_matrix_is_gathered_once_a_step(case: Case, ranks: Any) -> None:
    for measured, predicted, gathers, matrices in ranks.run(state_and_gathers, case, world=case.world):
        assert measured == predicted
        assert matrices > 0
        assert gathers == (matrices if case.stage else 0)


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"zero_optimization": {"stage": 1}, "sdp": {"engine": "deepspeed"}},
            'not possible with sdp.engine "deepspeed"; use "fsdp2"'),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "with zero_optimization.offload_optimizer; remove the offload"),
    ],
)  # fmt: skip
def test_layouts_without_matrices_on_the_device_are_refused(section: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_optimizer(load_config({"optimizer": SECTION, **section}), None)
