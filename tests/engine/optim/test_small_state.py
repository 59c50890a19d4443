"""Moments that take fewer bytes (``optimizer.params.state_dtype``)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.engine.config.load import load_config
from sdp.engine.distributed.collectives import cut_like, local_tensor
from sdp.engine.errors import CheckpointError, ConfigError
from sdp.engine.optim.optimizers import build_optimizer, check_optimizer
from sdp.engine.optim.small_state import BLOCK, SCALES, Codes
from sdp.tests.support.case_tables import TO_BACKWARD
from sdp.tests.support.cases import Case, data_rank_of, engine_of, one_step, whole
from sdp.tests.support.checkpoints import assert_equal_runs, resumed
from sdp.tests.support.ranks import RankPool
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

CPU = torch.device("cpu")
KINDS = ("int8", "bfloat16")


def _levels(signed: bool) -> list[float]:
    """Dynamic quantisation: decade −i has the middles of 2^(6−i) (signed) or 2^(7−i) intervals."""
    levels = {0.0, 1.0}
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (6 - decade) * (1 if signed else 2) + 1, dtype=torch.float64)
        middles = ((edges[1:] + edges[:-1]) / 2 * 10.0**-decade).tolist()
        levels |= set(middles) | ({-level for level in middles} if signed else set())
    return sorted(levels)


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("shape", [(3, 2 * BLOCK + 7), (2, 5), (4, 3, 3, 3), (1, 1), (0, 5)])
def test_codes_are_the_nearest_levels(key: str, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)) ** 3
    values = values if key == "exp_avg" else values.abs()
    values[:1] = 0
    levels = torch.tensor(_levels(key == "exp_avg"))
    assert len(levels) == 256
    codes, scales = Codes(key, CPU).encode(values)
    decoded = Codes(key, CPU).decode(codes, scales)
    for row, found, row_scales in zip(values.flatten(1), decoded.flatten(1), scales, strict=True):
        for block, column in enumerate(range(0, row.numel(), BLOCK)):
            part, largest = row[column : column + BLOCK], row[column : column + BLOCK].abs().max()
            assert row_scales[block] == largest
            exact = (part[:, None] - largest * levels).abs().amin(1)
            torch.testing.assert_close((part - found[column : column + BLOCK]).abs(), exact, rtol=1e-4, atol=1e-7)


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _rounded(key: str, value: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "bfloat16":
        return value.bfloat16().float() if key == "exp_avg" else value
    if value.dim() < 2:
        return value
    return Codes(key, CPU).decode(*Codes(key, CPU).encode(value))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "DTensor"])
def test_steps_are_adams_on_rounded_moments(kind: str, sharded: bool, decoupled: bool, one_rank: None) -> None:
    """torch's optimizer steps, and its moments are rounded after each step."""
    params = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    model, expected = _network(), _network()
    if sharded:
        fully_shard(model)
    settings = params | {"state_dtype": kind, "adam_w_mode": decoupled}
    optimizer, line = build_optimizer("Adam", settings, model.parameters(), CPU)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(expected.parameters(), **params)
    assert f"moments in {kind}" in line
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        batch = torch.randn(6, 5, generator=generator)
        for network, stepping in ((model, optimizer), (expected, reference)):
            stepping.zero_grad()
            network(batch).square().sum().backward()
            stepping.step()
        for state in reference.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = _rounded(key, state[key], kind)
    for found, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found.full_tensor() if isinstance(found, DTensor) else found, other)


def test_losses_stay_near_those_of_float32() -> None:
    """300 steps on a function of 16 numbers. docs/specification_steps.md has the figures."""

    def losses(state_dtype: str, seed: int) -> float:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))
        teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).requires_grad_(False)
        settings = {"lr": 1e-3, "betas": (0.9, 0.99), "state_dtype": state_dtype}
        optimizer, last = build_optimizer("AdamW", settings, model.parameters(), CPU)[0], []
        for _ in range(300):
            batch = torch.randn(64, 16)
            optimizer.zero_grad()
            loss = (model(batch) - teacher(batch)).square().mean()
            loss.backward()
            optimizer.step()
            last.append(loss.item())
        return sum(last[-50:]) / 50

    exact, int8, bfloat16 = (sum(losses(state, seed) for seed in range(2)) for state in ("float32", *KINDS))
    assert abs(int8 / exact - 1) < 0.02
    assert abs(bfloat16 / exact - 1) < 0.01


NEURONS = Case(2, 1, 0, model="wide-llama-tied-meta", neurons=2, optimizer="int8", placement="cyclic")
CASES = [
    (Case(2, 2, 3, optimizer="int8", model="llama"), "fsdp2"),
    (Case(2, 1, 1, tp=2, optimizer="int8", model="even-llama-tied-meta", masking="backward"), "fsdp2"),
    (NEURONS, "fsdp2"),
    (Case(2, 2, 2, optimizer="bfloat16", model="llama"), "fsdp2"),
    (Case(2, 2, 1, optimizer="bfloat16"), "deepspeed"),
    (Case(2, 2, 3, optimizer="bfloat16"), "deepspeed"),
]


def _state(case: Case, name: str) -> tuple[dict[str, int], dict[str, int]]:
    engine = engine_of(case, name)
    one_step(engine, case, 0, data_rank=data_rank_of(case))
    engine.step()
    return engine.measured_state_bytes().to_json(), engine.predicted_state_bytes().to_json()


@pytest.mark.parametrize(("case", "engine"), CASES, ids=str)
def test_bytes_are_those_of_the_plan(ranks: RankPool, case: Case, engine: str) -> None:
    for measured, predicted in ranks.run(_state, case, engine, world=case.world):
        assert measured == predicted
        assert measured["optimizer"] < 2 * measured["gradients"]


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        pytest.param(Case(2, 2, 3, optimizer="int8", model="llama-meta"), "fsdp2", marks=pytest.mark.slow),
        (Case(1, 4, 3, optimizer="int8"), "fsdp2"),  # a shard of the head is empty
        (Case(2, 1, 0, optimizer="int8", model="even-llama", tp=2, masking=TO_BACKWARD), "fsdp2"),
        # Two slices of a matrix in a group.
        (Case(2, 1, 0, optimizer="int8", model="even-llama", neurons=2, sync='{"every": 3}'), "fsdp2"),
        (Case(2, 2, 2, optimizer="bfloat16"), "deepspeed"),
    ],
    ids=str,
)
def test_a_resume_equals_the_undisturbed_run(ranks: RankPool, case: Case, engine: str, tmp_path: Path) -> None:
    every = 3 if case.sync else 2 if case.tp > 1 else 1  # of four steps: at the end of a round, at the switch
    assert_equal_runs(ranks.run(resumed, case, str(tmp_path), engine, every, world=case.world))


def _moments(engine: Any) -> dict[str, torch.Tensor]:
    """Return the moments of what this rank's group holds as numbers, in the full model's shapes."""
    found = {}
    for name, parameter in engine.parameters_here.items():
        state, info = engine.optimizer.state[parameter], engine.layout.parameters[name]
        for key in ("exp_avg", "exp_avg_sq"):
            value = local_tensor(state[key])
            if key + SCALES in state:
                value = Codes(key, CPU).decode(value, state[key + SCALES])
            value = cut_like(value, parameter) if isinstance(parameter, DTensor) else value
            full = torch.full(info.full_shape, torch.nan)
            cut = info.cut
            at = full if cut is None else full.narrow(cut.dim, cut.start, info.shape[cut.dim])
            at.copy_(whole(engine, name, value))
            kept = found.setdefault(f"{info.canonical}/{key}", full)
            kept[kept.isnan()] = full[kept.isnan()]
    return found


def _saved(case: Case, folder: str) -> dict[str, torch.Tensor]:
    engine = engine_of(case)
    for step in range(2):
        one_step(engine, case, step, data_rank=data_rank_of(case))
        engine.step()
    engine.save_checkpoint(folder)
    return _moments(engine)


def _loaded(case: Case, folder: str) -> dict[str, torch.Tensor]:
    engine = engine_of(case)
    engine.load_checkpoint(folder)
    found = _moments(engine)
    one_step(engine, case, 2, data_rank=data_rank_of(case))
    engine.step()
    return found


def _merged(answers: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    merged: dict[str, torch.Tensor] = {}
    for answer in answers:
        for name, value in answer.items():
            kept = merged.setdefault(name, value.clone())
            kept[kept.isnan()] = value[kept.isnan()]
    return merged


WIDE: dict[str, Any] = {"model": "wide-llama-tied-meta", "optimizer": "int8"}
FLOAT32 = Case(2, 1, 0, model="wide-llama-tied-meta", optimizer="adamw")


@pytest.mark.parametrize(
    ("source", "targets", "tolerance"),
    [
        (Case(2, 2, 3, **WIDE), [Case(2, 1, 1, placement="cyclic", **WIDE), FLOAT32], 0.0),
        (Case(2, 1, 0, tp=2, **WIDE), [Case(1, 2, 3, placement="full", **WIDE)], 0.01),
        (NEURONS, [Case(1, 1, 0, neurons=2, tp=2, placement="full", **WIDE)], 0.01),
        (replace(NEURONS, neurons=4), [NEURONS], 0.01),  # every slice begins where a narrower one began
        (FLOAT32, [NEURONS], 0.01),
        (Case(1, 2, 1, optimizer="int8"), [Case(1, 4, 3, optimizer="int8")], 0.0),  # a shard of the head is empty
        (Case(2, 2, 3, sync='{"every": 4}', **WIDE), [NEURONS], 0.05),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else str(value),
)
def test_any_layout_reads_a_checkpoint(
    ranks: RankPool, source: Case, targets: list[Case], tolerance: float, tmp_path: Path
) -> None:
    before = _merged(ranks.run(_saved, source, str(tmp_path), world=source.world))
    for target in targets:
        after = _merged(ranks.run(_loaded, target, str(tmp_path), world=target.world))
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert value.abs().max() > 0
            if not source.sync:  # means over holders with different weights
                assert ((after[name] - value).abs() <= tolerance * value.abs().amax()).all(), name


def _saved_again(case: Case, folder: str, again: str) -> None:
    engine = engine_of(case, "deepspeed")
    engine.load_checkpoint(folder)
    engine.save_checkpoint(again)


@pytest.mark.parametrize("neurons", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_flat_shard_reads_slices_that_begin_in_the_same_row(ranks: RankPool, neurons: int, tmp_path: Path) -> None:
    """A rank of ZeRO 3 has parts of several slices, with different numbers of rows."""
    pytest.importorskip("deepspeed")
    source = Case(1, 1, 0, optimizer="int8", model="llama", placement="full")
    before = ranks.run(_saved, source, str(tmp_path / "first"), world=1)[0]
    shards = Case(1, 4, 3, optimizer="bfloat16", model="llama", neurons=neurons, placement="full")
    ranks.run(_saved_again, shards, str(tmp_path / "first"), str(tmp_path / "again"), world=4)
    after = ranks.run(_loaded, replace(source, optimizer="adamw"), str(tmp_path / "again"), world=1)[0]
    for name, value in before.items():
        assert ((after[name] - value).abs() <= 0.01 * value.abs().amax()).all(), name


def _refused(case: Case, folder: str) -> str:
    with pytest.raises(CheckpointError) as error:
        engine_of(case).load_checkpoint(folder)
    return str(error.value)


def test_a_checkpoint_of_another_optimizer_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_saved, NEURONS, str(tmp_path), world=2)
    for optimizer in ("momentum", "sgd"):
        case = Case(2, 1, model="wide-llama-tied-meta", optimizer=optimizer)  # type: ignore[arg-type]
        for message in ranks.run(_refused, case, str(tmp_path), world=2):
            assert "another optimizer" in message or "this optimizer does not have" in message
            assert "\n" not in message


def test_deepspeed_refuses_int8_in_one_line() -> None:
    config = Case(2, 1, 1, optimizer="int8").config("deepspeed")
    with pytest.raises(ConfigError, match=r"optimizer.params.state_dtype: \"int8\" has a scale .* use \"bfloat16\""):
        check_optimizer(load_config(config), None)
