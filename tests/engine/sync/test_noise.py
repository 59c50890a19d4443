"""Gradient noise: against the formula, against many batches, and over the steps of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError
from sdp.tests.support import models
from sdp.tests.support.cases import Case, engine_of, one_step

BLOCKS = Case(4, 1, masking="backward", accumulation=2)
NEURONS = Case(4, 1, masking="backward", model="even-llama", neurons=2)
RANKS_INSIDE = Case(2, 2, masking="backward")
STILL: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "scheduler": None}


def reference(case: Case, interval: int = 1, **sections: Any) -> Any:
    return engine_of(case, "reference", training={"noise_scale_interval": interval}, **sections)


def rows(case: Case, step: int, micro: int, rank: int) -> dict[str, torch.Tensor]:
    """The rows of one rank. All ranks have as many labels, so that their batches have one
    distribution.
    """
    if case.model == "mlp":
        return models.micro_batch(case.model, step, micro, rank)
    generator = torch.Generator().manual_seed(1_000_000 * rank + 1_000 * step + micro)
    tokens = torch.randint(models.VOCABULARY, (2, models.TOKENS), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def gradient(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The dense gradient of the loss of ``batch``."""
    model.zero_grad()
    out = model(**batch)
    (out if isinstance(out, torch.Tensor) else out["loss"]).backward()
    return {name: p.grad.double().clone() for name, p in model.named_parameters()}


def of_unit(engine: Any, unit: str, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """The part of a full gradient that belongs to a unit, as one vector."""
    for each in engine.layout.units:
        if each.name == unit:
            parts = [
                gradients[part.parameter]
                if part.dim is None
                else gradients[part.parameter].narrow(
                    part.dim, part.ranges[0][0], part.ranges[0][1] - part.ranges[0][0]
                )
                for part in each.slices
            ]
            return torch.cat([part.reshape(-1) for part in parts])
    inside = {part.parameter for each in engine.layout.units for part in each.slices}
    return torch.cat([value.reshape(-1) for name, value in gradients.items() if name not in inside])


def step_of(engine: Any, case: Case, step: int) -> list[list[dict[str, torch.Tensor]]]:
    """Take a step. Return the full gradients of each rank's micro-batches before the update."""
    model = models.build(case.model)
    model.load_state_dict({name: p.detach() for name, p in engine.module.state_dict().items()})
    ranks = range(case.data_ranks)
    for micro in range(case.accumulation):
        parts = [rows(case, step, micro, rank) for rank in ranks]
        engine.backward(engine({key: torch.cat([part[key] for part in parts]) for key in parts[0]}))
        engine.step()
    return [[gradient(model, rows(case, step, micro, rank)) for micro in range(case.accumulation)] for rank in ranks]


@pytest.mark.parametrize("case", [BLOCKS, NEURONS, RANKS_INSIDE], ids=str)
def test_it_equals_the_formula_on_the_gradients_of_holders(case: Case) -> None:
    """McCandlish et al.: tr Σ of a group's batch is k (mean‖g_w‖² − ‖ḡ‖²) / (k − 1)."""
    engine = reference(case)
    counts = set()
    for step in range(2):
        of_ranks = step_of(engine, case, step)
        found = engine.noise.metrics()["noise"]
        placement = dict(zip(engine.layout.placement.units, engine.layout.placement.holders, strict=True))
        placement["shared"] = engine.layout.everyone
        assert {unit for unit, of in placement.items() if len(of) > 1 or case.accumulation > 1} == set(found)
        for unit in found:
            holders = placement[unit]
            # (ranks, micro-batches, elements), and then (groups, micro-batches, elements)
            own = torch.stack([torch.stack([of_unit(engine, unit, g) for g in of_rank]) for of_rank in of_ranks])
            own = own.unflatten(0, (case.groups, case.fsdp)).mean(1)[list(holders)]
            # What is compared: holders, or the micro-batches of the only one.
            own, samples = (own.mean(1), 2 * case.accumulation * case.fsdp) if len(holders) > 1 else (own[0], 2)
            k = len(own)
            counts.add(len(holders))
            squares = own.square().sum(1).mean().item()
            mean = own.mean(0).square().sum().item()
            assert found[unit]["trace"] == pytest.approx(samples * k * (squares - mean) / (k - 1), rel=1e-4), unit
            room = 1e-5 * squares
            assert found[unit]["squared_norm"] == pytest.approx((k * mean - squares) / (k - 1), rel=1e-4, abs=room)
            assert found[unit]["holders"] == len(holders)
    assert counts == {BLOCKS: {1, 2, 3, 4}, NEURONS: {2, 3, 4}, RANKS_INSIDE: {2}}[case]


def test_gradients_are_divided_by_the_root_of_adams_moments() -> None:
    case = Case(4, 1, masking="backward", optimizer="adamw")
    engine = reference(case)
    step_of(engine, case, 0)
    assert "preconditioned_trace" not in engine.noise.metrics()["noise"]["layers.1"], "there are no moments yet"
    moments = {
        name: engine.optimizer.state[p]["exp_avg_sq"].double().clone() for name, p in engine.parameters_here.items()
    }
    of_ranks = step_of(engine, case, 1)
    for unit, k in (("layers.1", 2), ("layers.2", 3), ("shared", 4)):
        holders = dict(zip(engine.layout.placement.units, engine.layout.placement.holders, strict=True)).get(unit)
        scale = of_unit(engine, unit, moments).sqrt() + 1e-2  # the case's epsilon
        own = [of_unit(engine, unit, of_ranks[w][0]) / scale for w in holders or range(4)]
        squares = torch.stack([g.square().sum() for g in own]).mean().item()
        mean = torch.stack(own).mean(0).square().sum().item()
        found = engine.noise.metrics()["noise"][unit]
        assert found["preconditioned_trace"] == pytest.approx(2 * k * (squares - mean) / (k - 1), rel=1e-4)
        room = 1e-5 * squares
        assert found["preconditioned_squared_norm"] == pytest.approx((k * mean - squares) / (k - 1), rel=1e-4, abs=room)


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        pytest.param(BLOCKS, 300, marks=pytest.mark.slow),
        (NEURONS, 100),
        pytest.param(RANKS_INSIDE, 300, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_its_mean_is_that_of_many_batches(case: Case, steps: int) -> None:
    """The covariance and the mean of the gradients of many batches, at weights that stand still."""
    engine = reference(case, **STILL)
    sums: dict[str, list[list[float]]] = {}
    draws: dict[str, list[torch.Tensor]] = {}
    for step in range(steps):
        of_ranks = step_of(engine, case, step)
        for unit, noise in engine.noise.metrics()["noise"].items():
            sums.setdefault(unit, []).append([noise["trace"], noise["squared_norm"]])
            draws.setdefault(unit, []).extend(of_unit(engine, unit, g) for of_rank in of_ranks for g in of_rank)
    assert {engine.noise.metrics()["noise"][unit]["holders"] for unit in sums} >= (
        {2, 3, 4} if case.groups > 2 else {2}
    )
    for unit, values in sums.items():
        trace, squared_norm = torch.tensor(values, dtype=torch.float64).mean(0).tolist()
        gradients = torch.stack(draws[unit])
        samples = 2  # of a micro-batch
        direct = gradients.var(dim=0).sum().item() * samples
        signal = gradients.mean(0).square().sum().item() - direct / samples / len(gradients)
        assert trace == pytest.approx(direct, rel=0.12), unit
        assert squared_norm == pytest.approx(signal, abs=0.1 * (signal + direct / samples / 4)), unit


def test_the_loss_scale_does_not_change_it() -> None:
    case = Case(4, 1)
    usual, scaled = reference(case), reference(case, fp16={"enabled": True, "loss_scale": 512})
    for engine in (usual, scaled):
        one_step(engine, case, 0, data_rank=None)
        engine.step()
    for unit, noise in usual.noise.metrics()["noise"].items():
        assert scaled.noise.metrics()["noise"][unit]["trace"] == pytest.approx(noise["trace"], rel=0.02), unit


def test_a_step_is_measured_at_the_interval_only() -> None:
    case = Case(4, 1)
    engine = reference(case, interval=3)
    measured = []
    for step in range(7):
        one_step(engine, Case(4, 1), step, data_rank=None)
        engine.step()
        measured.append(bool(engine.noise.metrics()))
    assert measured == [False, False, True, False, False, True, False]


def test_both_parts_are_averaged_before_they_are_divided() -> None:
    case = Case(4, 1)
    engine = reference(case)
    traces, norms, noise = [], [], {}
    for step in range(3):
        one_step(engine, case, step, data_rank=None)
        engine.step()
        noise = engine.noise.metrics()["noise"]
        traces.append(noise["layers.1"]["trace"])
        norms.append(noise["layers.1"]["squared_norm"])
    weights = [0.95**2, 0.95, 1.0]
    expected = sum(w * t for w, t in zip(weights, traces, strict=True)) / sum(
        w * n for w, n in zip(weights, norms, strict=True)
    )
    assert noise["layers.1"]["noise_scale"] == pytest.approx(expected)
    assert engine.noise.metrics()["noise_scale"] > 0


def test_gradients_that_are_dropped_are_not_measured() -> None:
    case = Case(4, 1)
    one, other = reference(case), reference(case)
    one_step(one, case, 5, data_rank=None)
    one.zero_grad()
    for engine in (one, other):
        one_step(engine, case, 0, data_rank=None)
        engine.step()
    assert one.noise.metrics() == other.noise.metrics()


def test_a_resumed_run_keeps_the_running_means(tmp_path: Path) -> None:
    case = Case(4, 1, optimizer="adamw")
    whole, first, second = reference(case), reference(case), reference(case)

    def run(engine: Any, steps: range) -> None:
        for step in steps:
            one_step(engine, case, step, data_rank=None)
            engine.step()

    run(whole, range(4))
    run(first, range(2))
    first.save_checkpoint(tmp_path)
    second.load_checkpoint(tmp_path)
    assert second.noise.metrics() == {}
    run(second, range(2, 4))
    assert second.noise.metrics() == whole.noise.metrics()
    assert engine_of(case, "reference").load_checkpoint(tmp_path)[0] is not None  # nothing is measured there


@pytest.mark.parametrize(("interval", "is_said"), [(5, False), (6, True)])
def test_an_interval_that_no_step_reaches_is_said(
    interval: int, caplog: pytest.LogCaptureFixture, *, is_said: bool
) -> None:
    engine_of(Case(4, 1), "reference", training={"noise_scale_interval": interval, "steps": 5})
    said = f"training.noise_scale_interval {interval} has no effect: the run ends with step 5"
    assert (said in caplog.text) == is_said


def test_nothing_is_measured_by_default() -> None:
    engine = engine_of(Case(4, 1), "reference")
    one_step(engine, Case(4, 1), 0, data_rank=None)
    engine.step()
    assert engine.backend.noise is None
    assert engine.noise.metrics() == {}


@pytest.mark.parametrize(
    ("sdp", "more", "message"),
    [
        ({"groups": 2, "sync": {"every": 4}}, {}, "sdp.sync"),
        ({"groups": 1}, {}, "sdp.groups"),
        (
            {"groups": 2, "engine": "reference"},
            {"activation_checkpointing": {"mode": "full"}},
            "activation_checkpointing",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(sdp: dict[str, Any], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^training\.noise_scale_interval: ") as error:
        load_config({"train_batch_size": 4, "sdp": sdp, "training": {"noise_scale_interval": 5}, **more})
    assert message in str(error.value)
    assert "\n" not in str(error.value)
