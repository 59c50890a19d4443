"""Checkpoints between two averages of local steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.tests.support.cases import Case, data_rank_of, engine_of, one_step
from sdp.tests.support.ranks import RankPool

OVERLAP = '{"every": 4, "fragments": 2, "overlap": 1, "compression": "int8"}'
CASES = [
    Case(2, 2, stage=3, optimizer="adamw", model="llama-tied-meta", sync='{"every": 3}'),
    Case(4, 1, optimizer="momentum", placement="balanced", sync=OVERLAP),
    Case(2, 1, neurons=2, tp=2, stage=1, optimizer="adamw", model="wide-llama-tied-meta", masking="backward",
         sync='{"every": 4, "fragments": 2, "outer_optimizer": {"type": "AdamW"}}'),
    Case(2, 2, stage=0, optimizer="adamw", model="resnet-meta", sync='{"every": 3, "offload": "cpu"}'),
    Case(2, 1, optimizer="adamw", sync='{"every": 2, "start_after": 4}'),
]  # fmt: skip
LAST = 8


def _train(engine: Any, case: Case, first: int, last: int, *, reference: bool = False) -> list[float]:
    losses = []
    for step in range(first, last):
        losses.append(one_step(engine, case, step, data_rank=None if reference else data_rank_of(case)))
        engine.step()
    return losses


def _everything(engine: Any) -> dict[str, torch.Tensor]:
    """Return clones of all that this process would save."""
    tensors = engine.backend.state_to_save().tensors()
    parts = {key: getattr(value, "locals", [value]) for key, value in tensors.items()}
    return {f"{key} {i}": part.detach().clone() for key, of in parts.items() for i, part in enumerate(of)}


def _resumed_equals_undisturbed(case: Case, folder: str, saved_after: int, kind: str) -> list[str]:
    """Return the keys of tensors that differ after a resume, and check the losses."""
    reference = kind == "reference"
    undisturbed = engine_of(case, kind)
    _train(undisturbed, case, 0, saved_after, reference=reference)
    undisturbed.save_checkpoint(folder)
    losses = _train(undisturbed, case, saved_after, LAST, reference=reference)
    resumed = engine_of(case, kind)
    resumed.load_checkpoint(folder)
    assert _train(resumed, case, saved_after, LAST, reference=reference) == losses
    ours, theirs = _everything(resumed), _everything(undisturbed)
    assert ours.keys() == theirs.keys()
    assert resumed.local_training.outer_steps == undisturbed.local_training.outer_steps
    return [key for key in ours if not torch.equal(ours[key], theirs[key])]


@pytest.mark.parametrize("saved_after", [2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_resume_goes_on_bit_for_bit(ranks: RankPool, tmp_path: Path, case: Case, saved_after: int) -> None:
    for differing in ranks.run(
        _resumed_equals_undisturbed, case, str(tmp_path), saved_after, "fsdp2", world=case.world
    ):
        assert differing == []


@pytest.mark.parametrize(
    "case", [CASES[1], Case(2, 1, neurons=2, optimizer="adamw", model="even-llama", sync='{"every": 3}')], ids=str
)
def test_a_resume_of_the_reference_goes_on_bit_for_bit(tmp_path: Path, case: Case) -> None:
    assert _resumed_equals_undisturbed(case, str(tmp_path), 4, "reference") == []


def _save_midway(case: Case, folder: str) -> tuple[Any, Any]:
    """Train two steps, save, and return the full weights and the moments of this rank's group."""
    engine = engine_of(case)
    _train(engine, case, 0, 2)
    engine.save_checkpoint(folder)
    return engine.full_state_dict(), None


def _load(case: Case, folder: str) -> tuple[Any, Any]:
    engine = engine_of(case)
    engine.load_checkpoint(folder)
    return engine.full_state_dict(), {
        f"{name}/{key}": (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, parameter in engine.parameters_here.items()
        for key, value in engine.optimizer.state[parameter].items()
    }


@pytest.mark.parametrize(
    "target",
    [
        Case(1, 2, stage=2, optimizer="adamw", placement="full"),
        Case(2, 1, optimizer="adamw", sync='{"every": 3}'),
        Case(4, 1, optimizer="adamw", placement="cyclic", sync='{"every": 2, "fragments": 2}'),
    ],
    ids=str,
)
def test_another_layout_starts_from_the_anchors_with_mean_moments(
    ranks: RankPool, tmp_path: Path, target: Case
) -> None:
    source = Case(2, 2, stage=3, optimizer="adamw", sync='{"every": 3}')
    before = ranks.run(_save_midway, source, str(tmp_path), world=source.world)[0][0]
    answers = ranks.run(_load, target, str(tmp_path), world=target.world)
    assert all(torch.equal(answers[0][0][name], weight) for name, weight in before.items())
    expected = ranks.run(_moments_of_groups, source, str(tmp_path), world=source.world)
    holders: dict[str, list[torch.Tensor]] = {}
    for group in (0, 1):
        for name, value in expected[2 * group].items():
            holders.setdefault(name, []).append(value)
    assert {len(of) for of in holders.values()} == {1, 2}
    seen = set()
    for _, moments in answers:
        for name, value in moments.items():
            seen.add(name)
            mean = torch.stack(holders[name]).mean(0)
            torch.testing.assert_close(value, mean, rtol=1e-6, atol=1e-9, msg=name)
    assert seen == set(holders)


def _moments_of_groups(case: Case, folder: str) -> dict[str, torch.Tensor]:
    engine = engine_of(case)
    engine.load_checkpoint(folder)
    return {
        f"{name}/{key}": (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, parameter in engine.parameters_here.items()
        for key, value in engine.optimizer.state[parameter].items()
    }


def test_a_run_without_local_steps_becomes_one_with_them(ranks: RankPool, tmp_path: Path) -> None:
    """The anchors are the weights, and moments go on."""
    source, target = (Case(2, 1, optimizer="adamw", sync=sync) for sync in ("", '{"every": 3}'))
    before = ranks.run(_save_midway, source, str(tmp_path), world=2)[0][0]
    answers = ranks.run(_load, target, str(tmp_path), world=2)
    assert all(torch.equal(answers[0][0][name], weight) for name, weight in before.items())
    assert all(value.abs().sum() > 0 for name, value in answers[0][1].items() if name.endswith("exp_avg_sq"))


def test_the_position_in_the_round_is_in_the_state(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(2, 1, sync='{"every": 4, "fragments": 2, "overlap": 1}')
    ranks.run(_save_midway, case, str(tmp_path), world=2)
    state = json.loads((tmp_path / "step-2" / "state.json").read_text())
    assert state["sync"] == {"outer_steps": 0, "steps_alone": 2, "travelling": 1, "fragments": 2}
