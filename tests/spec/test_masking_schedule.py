"""A schedule of maskings: FSDP2 equals the reference in every phase, and a resume equals the
undisturbed run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.accounting.memory_probe import peak_tensor_bytes
from sdp.tests.support import models
from sdp.tests.support.case_tables import FACTORS, TENSOR_FACTORS, pairwise_cover
from sdp.tests.support.cases import (
    Case,
    Result,
    assert_same_run,
    data_rank_of,
    engine_of,
    native,
    one_step,
    reference,
    train,
)
from sdp.tests.support.ranks import RankPool
from torch import nn

STEPS = 4
TO_BACKWARD = '[{"until": 2, "masking": "forward"}, {"masking": "backward"}]'
TO_FORWARD = '[{"until": 2, "masking": "backward"}, {"masking": "forward"}]'
THERE_AND_BACK = '[{"until": 1, "masking": "forward"}, {"until": 3, "masking": "backward"}, {"masking": "forward"}]'
OF_SCHEDULES: dict[str, Any] = {
    "masking": [TO_BACKWARD, TO_FORWARD],
    "placement": ["mixed", "profile"],
    "meta": [True],
    "steps": [STEPS],
}
COVER = pairwise_cover(FACTORS | OF_SCHEDULES | {"layout": [(2, 1), (2, 2), (4, 1)], "kind": ["mlp", "llama-tied"]})
TENSOR_COVER = pairwise_cover(
    TENSOR_FACTORS
    | OF_SCHEDULES
    | {"layout": [(2, 1, 2)], "kind": ["wide-llama-tied"], "placement": ["mixed"], "clip": [True]}
)
MORE = [
    Case(2, 2, 2, optimizer="adamw", model="resnet-meta", masking=TO_BACKWARD, steps=STEPS, clip=True),
    Case(2, 1, 1, model="even-llama", masking=THERE_AND_BACK, steps=STEPS, branch_scale="train", neurons=2),
    Case(2, 2, 3, model="llama-tied", masking=THERE_AND_BACK, steps=STEPS, branch_scale="train"),
    Case(2, 1, 0, model="even-llama", masking=TO_BACKWARD, steps=STEPS, lr_scale="0.5", optimizer="adamw"),
    Case(2, 2, 3, 3, model="llama-meta", masking=TO_BACKWARD, steps=STEPS, checkpointing="full"),
]


def test_the_cover_has_every_stage_under_every_schedule() -> None:
    assert {(case.stage, case.masking) for case in COVER} == {
        (stage, masking) for stage in range(4) for masking in OF_SCHEDULES["masking"]
    }
    assert {(case.neurons > 0, case.optimizer) for case in COVER} == {
        (cut, optimizer) for cut in (False, True) for optimizer in ("sgd", "adamw")
    }
    assert len(COVER) + len(TENSOR_COVER) < 35


@pytest.mark.parametrize("case", COVER + TENSOR_COVER + MORE, ids=lambda case: f"{case}-{case.masking[11:24]}")
def test_native_equals_reference(ranks: RankPool, case: Case) -> None:
    """Also bytes of state, and bytes sent in each step: those of the phase, and of the switch."""
    ours, theirs = native(ranks, case), reference(replace(case, checkpointing="none"))
    if case.model.startswith("resnet"):  # statistics follow the rules of the phases, and their tests
        ours, theirs = ([_weights(result, case) for result in ours], _weights(theirs, case))
    assert_same_run(ours, theirs, case)
    for rank, result in enumerate(ours):
        assert result.measured == result.predicted, f"rank {rank}"
        for step, (counted, planned) in enumerate(zip(result.traffic, result.planned_steps, strict=True)):
            counted = {kind: sent for kind, sent in counted.items() if not kind.startswith("tensor parallel")}
            assert counted == planned, f"rank {rank} in step {step + 1}"


def _weights(result: Result, case: Case) -> Result:
    names = dict(models.build(case.model).named_parameters())
    states = {key: state and {name: state[name] for name in names} for key, state in
              {"before": result.before, "after": result.after}.items()}  # fmt: skip
    return replace(result, **states)


@pytest.mark.parametrize(("neurons", "model"), [(0, "llama-tied"), (3, "llama-tied")])
def test_every_step_is_that_of_its_masking(neurons: int, model: str) -> None:
    """In the reference: until the switch the schedule is forward masking, and after it backward
    masking from the same weights and optimizer state.
    """
    case = Case(2, 1, model=model, optimizer="adamw", neurons=neurons, steps=STEPS)
    scheduled = reference(replace(case, masking=TO_BACKWARD))
    forward, backward = reference(case), reference(replace(case, masking="backward"))
    assert scheduled.losses[:2] == forward.losses[:2]
    assert scheduled.norms[:2] == forward.norms[:2]
    assert scheduled.losses[2] != forward.losses[2]
    assert scheduled.losses[2] != backward.losses[2]


# -- a schedule with one phase, or before its switch, is the constant masking ----------------------


@pytest.mark.parametrize("masking", ["forward", "backward"])
def test_one_phase_is_the_constant_masking(ranks: RankPool, masking: str) -> None:
    case = Case(2, 2, 3, 2, clip=True, optimizer="adamw", model="llama-tied-meta", masking=masking)
    plain, alone = native(ranks, case), native(ranks, replace(case, masking=f'[{{"masking": "{masking}"}}]'))
    other = "backward" if masking == "forward" else "forward"
    schedule = f'[{{"until": 9, "masking": "{masking}"}}, {{"masking": "{other}"}}]'
    before = native(ranks, replace(case, masking=schedule))
    for expected, *others in zip(plain, alone, before, strict=True):
        for found in others:
            assert found.losses == expected.losses
            assert found.norms == expected.norms
            assert found.traffic == expected.traffic
            assert found.planned == expected.planned
            assert found.measured == expected.measured
            assert (found.after is None) == (expected.after is None)
            for name, weight in (expected.after or {}).items():
                assert found.after is not None
                assert torch.equal(found.after[name], weight), name


def _peaks(case: Case) -> list[int]:
    """Peak bytes of live tensors in each step after the first one."""
    engine, peaks = engine_of(case), []

    def step(index: int) -> None:
        one_step(engine, case, index, data_rank=data_rank_of(case))
        engine.step()

    step(0)
    for index in range(1, STEPS):
        kept = engine.frozen_here.values()
        peaks.append(
            peak_tensor_bytes(
                lambda index=index: step(index), engine.module, engine.optimizer, engine.device, kept=kept
            )
        )
    return peaks


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, model="wide-llama"),
        Case(2, 1, model="wide-llama", neurons=2, placement="cyclic"),
        Case(2, 2, 3, model="wide-llama", bf16=True),
    ],
    ids=str,
)
def test_copies_that_sleep_take_no_memory(ranks: RankPool, case: Case) -> None:
    schedule = THERE_AND_BACK.replace('"until": 1', '"until": 2')
    scheduled, forward, backward = (
        ranks.run(_peaks, replace(case, masking=masking), world=case.world)
        for masking in (schedule, "forward", "backward")
    )
    for rank in range(case.world):
        assert scheduled[rank][0] <= forward[rank][0] + _size_of_copies(case, rank)  # step 2 ends with the switch
        assert scheduled[rank][1] == pytest.approx(backward[rank][1], rel=0.02)
        assert scheduled[rank][2] == pytest.approx(forward[rank][2], rel=0.02)
        assert forward[rank][2] < 0.96 * backward[rank][2]


def _size_of_copies(case: Case, rank: int) -> int:
    """Bytes of the frozen copies of a rank, if they were float32 and whole."""
    layout = engine_of(replace(case, masking="backward"), "reference").layout
    group = layout.mesh.coordinates(rank).sdp
    costs = enumerate(layout.placement.costs)
    return 4 * sum(cost for unit, cost in costs if not layout.placement.holds(group, unit))


# -- resume ----------------------------------------------------------------------------------------


class Dropped(nn.Module):
    """A block with dropout, and statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.linear = nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.linear(self.norm(x)))


class DroppedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dropped() for _ in range(5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x[:, :3] - y).square().mean()


def _engine(case: Case, name: str) -> Any:
    if case.model != "dropped":
        return engine_of(case, name)
    torch.manual_seed(0)
    placement = {f"layers.{index}": holders for index, holders in enumerate([[0], [0, 1], [1], [0, 1], [1]])}
    config = replace(case, model="mlp").config(name)
    return sdp.initialize(model=DroppedModel(), config=config | {"sdp": config["sdp"] | {"placement": placement}})[0]


def _steps(engine: Any, case: Case, steps: range) -> list[float]:
    """Losses of some steps, and of an evaluation after each. Steps are numbered from 0."""
    losses, data = [], replace(case, model="mlp") if case.model == "dropped" else case
    for step in steps:
        rank = data_rank_of(case) if dist.is_initialized() else None
        losses.append(one_step(engine, data, step, data_rank=rank))
        engine.step()
        held_out = (
            models.micro_batch(data.model, 90, 0, rank)
            if rank is not None
            else models.rows_of_all(data.model, 90, 0, case.data_ranks)
        )
        losses.append(engine.evaluate([held_out]))
    return losses


def resumed(case: Case, folder: str, name: str = "fsdp2") -> tuple[list[Any], list[Any]]:
    """What an undisturbed run gives, and what engines give that start from its checkpoints."""
    engine, expected, found = _engine(case, name), [], []
    losses: list[float] = []
    for step in range(STEPS):
        engine.save_checkpoint(folder, tag=f"before-{step + 1}")
        losses += _steps(engine, case, range(step, step + 1))
    end = engine.full_state_dict()
    for start in range(STEPS):  # in both phases, and at the switch
        other = _engine(case, name)
        if start % 2:  # it was in the last phase before
            _steps(other, case, range(STEPS - 1))
        other.load_checkpoint(folder, tag=f"before-{start + 1}")
        expected.append((losses[2 * start :], end))
        found.append((_steps(other, case, range(start, STEPS)), other.full_state_dict()))
    return expected, found


def assert_equal_runs(answers: list[tuple[list[Any], list[Any]]]) -> None:
    """Compare losses and weights bit by bit."""
    for expected, found in answers:
        for (losses, weights), (others, other_weights) in zip(expected, found, strict=True):
            assert others == losses
            assert (weights is None) == (other_weights is None)
            for name, weight in (weights or {}).items():
                assert torch.equal(other_weights[name], weight), name


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 2, 3, optimizer="adamw", model="llama-tied-meta", masking=TO_BACKWARD),
        Case(2, 1, 0, 2, optimizer="adamw", model="even-llama", neurons=2, masking=TO_BACKWARD),
        Case(2, 1, 0, optimizer="momentum", model="dropped", masking=TO_BACKWARD),
        Case(2, 2, 1, optimizer="adamw", model="dropped", masking=TO_FORWARD),
    ],
    ids=str,
)
def test_a_resume_equals_the_undisturbed_run(ranks: RankPool, case: Case, tmp_path: Path) -> None:
    assert_equal_runs(ranks.run(resumed, case, str(tmp_path), world=case.world))


def test_a_resume_of_the_reference_equals_the_undisturbed_run(tmp_path: Path) -> None:
    case = Case(2, 1, optimizer="adamw", model="dropped", masking=TO_BACKWARD)
    assert_equal_runs([resumed(case, str(tmp_path), "reference")])


def _exchanged(case: Case, folder: str) -> tuple[list[float], list[float], list[float]]:
    """Losses of steps 3 and 4: of the schedule, of the schedule from a checkpoint of forward
    masking, and of backward masking from a checkpoint of the schedule.
    """
    scheduled, forward = engine_of(case), engine_of(replace(case, masking="forward"))
    for engine, tag in ((scheduled, "scheduled"), (forward, "forward")):
        _steps(engine, case, range(2))
        engine.save_checkpoint(folder, tag=tag)
    from_forward, backward = engine_of(case), engine_of(replace(case, masking="backward"))
    from_forward.load_checkpoint(folder, tag="forward")
    backward.load_checkpoint(folder, tag="scheduled")
    return tuple(_steps(engine, case, range(2, STEPS)) for engine in (scheduled, from_forward, backward))  # type: ignore[return-value]


def test_checkpoints_of_schedules_and_of_constant_maskings_are_the_same(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(2, 2, 3, optimizer="adamw", model="llama-tied-meta", masking=TO_BACKWARD)
    for scheduled, from_forward, backward in ranks.run(_exchanged, case, str(tmp_path), world=case.world):
        assert from_forward == scheduled
        assert backward == scheduled


# -- the full model --------------------------------------------------------------------------------


def _evaluated(case: Case) -> tuple[list[float], list[float]]:
    """The loss of the full model after each step, by ``evaluate`` and by a copy of the full model."""
    engine, losses, copies = engine_of(case), [], []
    rank = data_rank_of(case)
    held_out = models.micro_batch(case.model, 90, 0, 0)
    for step in range(STEPS):
        one_step(engine, case, step, data_rank=rank)
        engine.step()
        losses.append(engine.evaluate([held_out]))
        with engine.full_model() as model, torch.no_grad():
            copies.append(model(**held_out).item() if isinstance(held_out, dict) else model(*held_out).item())
    return losses, copies


@pytest.mark.parametrize(("model", "neurons"), [("mlp", 0), ("even-llama", 2)])
def test_scales_of_branches_apply_in_forward_phases_only(ranks: RankPool, model: str, neurons: int) -> None:
    case = Case(2, 1, model=model, neurons=neurons, masking=TO_BACKWARD, branch_scale="eval")
    plain = replace(case, branch_scale="none")
    scaled, unscaled = (ranks.run(_evaluated, each, world=2) for each in (case, plain))
    for (losses, copies), (others, _) in zip(scaled, unscaled, strict=True):
        assert losses == pytest.approx(copies, rel=1e-5)
        assert losses[0] != pytest.approx(others[0], rel=1e-5)  # in a forward phase
        assert losses[1:] == pytest.approx(others[1:], rel=1e-6)  # step 2 ends with the switch


def test_training_ends_equally_with_all_engines() -> None:
    """The reference is deterministic under a schedule."""
    case = Case(2, 1, model="llama-tied-meta", masking=THERE_AND_BACK, steps=STEPS)
    first, second = train(case, "reference"), train(case, "reference")
    assert first.losses == second.losses
