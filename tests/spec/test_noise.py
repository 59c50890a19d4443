"""Gradient noise: the reference equals a direct computation, and every engine equals the
reference.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from sdp.tests.support.cases import Case, data_rank_of, engine_of, one_step
from sdp.tests.support.ranks import RankPool

MEASURED = {"noise_scale_interval": 2}
STEPS = 4  # before the first measured step, Adam has moments already

Metrics = dict[str, Any]


def measure(case: Case, engine_name: str = "fsdp2") -> list[tuple[Metrics, dict[str, int], dict[str, int]]]:
    """Train, and return for each step its noise and the bytes that it sent, counted and planned."""
    torch.set_num_threads(1)
    engine = engine_of(case, engine_name, training=MEASURED)
    data_rank = None if engine_name == "reference" else data_rank_of(case)
    found = []
    for step in range(STEPS):
        engine.traffic.reset()
        one_step(engine, case, step, data_rank=data_rank)
        engine.step()
        found.append((engine.noise.metrics(), engine.traffic.by_kind(), engine.planned_traffic(step + 1).by_kind()))
    return found


@cache
def reference(case: Case) -> list[Metrics]:
    return [metrics for metrics, _, _ in measure(case, "reference")]


NATIVE = [
    Case(4, 1, optimizer="adamw", clip=True),
    pytest.param(Case(4, 1, accumulation=3, optimizer="adamw"), marks=pytest.mark.slow),
    Case(2, 2, 3, accumulation=2, masking="backward"),
    Case(2, 2, 2, masking='[{"until": 2, "masking": "forward"}, {"masking": "backward"}]'),
    Case(2, 2, 0, accumulation=2),
    pytest.param(Case(2, 2, 1, model="llama-tied-meta", optimizer="adamw", accumulation=2), marks=pytest.mark.slow),
    pytest.param(Case(2, 2, 2, masking="backward", optimizer="momentum"), marks=pytest.mark.slow),
    pytest.param(
        Case(2, 2, 3, neurons=2, model="even-llama-tied-meta", optimizer="adamw", accumulation=2),
        marks=pytest.mark.slow,
    ),
    Case(4, 1, neurons=2, model="even-llama-meta", masking="backward"),
    Case(2, 1, tp=2, model="wide-llama-tied", optimizer="adamw"),
    Case(2, 2, 3, tp=2, neurons=2, model="wide-llama"),
]


@pytest.mark.parametrize("case", NATIVE, ids=str)
def test_native_equals_reference(ranks: RankPool, case: Case) -> None:
    # FSDP2 reduces every micro-batch at stages 2 and 3 only, and tensor-parallel ranks have shares.
    alone = case.tp == 1 and (case.fsdp == 1 or case.stage >= 2)
    assert_equal(ranks.run(measure, case, world=case.world), reference(case_of_reference(case)), alone=alone)


def measure_two_passes(case: Case) -> list[Metrics]:
    """Take two steps with a second backward pass at the boundary in the first one."""
    engine = engine_of(case, training={"noise_scale_interval": 1})
    found = []
    for step in range(2):
        for again in range(2 - step):
            one_step(engine, case, 2 * step + again, data_rank=data_rank_of(case))
        engine.step()
        found.append(engine.noise.metrics())
    return found


def test_a_second_pass_before_the_step_is_not_measured(ranks: RankPool) -> None:
    """It would add own gradients to the means of the first pass."""
    case = Case(2, 1)
    for first, second in ranks.run(measure_two_passes, case, world=2):
        assert first["noise"] == {}
        assert second["noise"]["shared"]["trace"] > 0


DEEPSPEED = [
    Case(2, 2, 0, optimizer="adamw"),
    pytest.param(Case(2, 1, 0, accumulation=2, optimizer="adamw"), marks=pytest.mark.slow),
    Case(2, 2, 1, accumulation=2, optimizer="adamw", clip=True),
    Case(2, 2, 2, masking="backward"),
    pytest.param(Case(2, 2, 3, optimizer="adamw"), marks=pytest.mark.slow),
    Case(2, 2, 3, neurons=2, model="even-llama-tied-meta", accumulation=2),
    pytest.param(Case(2, stage=1, sizes=(3, 1), optimizer="adamw"), marks=pytest.mark.slow),
    pytest.param(Case(2, stage=0, sizes=(3, 1)), marks=pytest.mark.slow),
    Case(2, stage=3, sizes=(1, 2), masking="backward"),
]


@pytest.mark.parametrize("case", DEEPSPEED, ids=str)
def test_deepspeed_equals_reference(ranks: RankPool, case: Case) -> None:
    alone = case.stage == 0 and case.fsdp == 1
    ours = ranks.run(measure, case, "deepspeed", world=case.world)
    assert_equal(ours, reference(case_of_reference(case)), alone=alone)


def case_of_reference(case: Case) -> Case:
    """The reference has no stages and no tensor parallelism."""
    return Case(**{**vars(case), "stage": 0, "tp": 1})


def assert_equal(of_ranks: list[Any], reference: list[Metrics], *, alone: bool) -> None:
    """Compare the noise. Unless ``alone``, units with one holder are not measured."""
    theirs = [
        metrics | {"noise": {u: of for u, of in metrics["noise"].items() if alone or of["holders"] > 1}}
        if metrics
        else {}
        for metrics in reference
    ]
    same_units = [
        len(mine.get("noise", ())) == len(of.get("noise", ())) for mine, of in zip(theirs, reference, strict=True)
    ]
    assert [bool(metrics) for metrics in theirs] == [False, True, False, True]
    for ours in of_ranks:
        for step, (metrics, sent, planned) in enumerate(ours):
            sent = {kind: nbytes for kind, nbytes in sent.items() if not kind.startswith("tensor parallel")}
            assert sent == planned, f"step {step + 1}"
            assert bool(metrics) == bool(theirs[step])
            assert list(metrics.get("noise", {})) == list(theirs[step].get("noise", {}))
            for unit, values in theirs[step].get("noise", {}).items():
                assert list(metrics["noise"][unit]) == list(values), unit
                # The estimates are differences, whose rounding is relative to what is subtracted.
                for kind in ("", "preconditioned_"):
                    trace, norm = (values.get(f"{kind}{key}", 0.0) for key in ("trace", "squared_norm"))
                    room = 1e-5 * (abs(norm) + abs(trace))
                    for key, value in ((f"{kind}trace", trace), (f"{kind}squared_norm", norm)):
                        assert metrics["noise"][unit].get(key, 0.0) == pytest.approx(value, rel=1e-5, abs=room), unit
                assert metrics["noise"][unit]["holders"] == values["holders"]
            if not all(same_units):
                continue
            scales = metrics.get("noise_scale"), theirs[step].get("noise_scale")
            assert scales[0] == (scales[1] and pytest.approx(scales[1], rel=1e-3))
