"""Checkpoints between two averages of local steps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.engine.checkpoint.state import SavedState
from sdp.engine.errors import CheckpointError
from sdp.tests.support.cases import Case, data_rank_of, engine_of, one_step
from sdp.tests.support.checkpoints import moments_of
from sdp.tests.support.ranks import RankPool

OVERLAP = '{"every": 4, "fragments": 2, "overlap": 1, "compression": "int8"}'
CASES = [
    Case(2, 2, stage=3, steps=6, optimizer="adamw", model="llama-tied-meta", sync='{"every": 3}'),
    Case(4, 1, steps=8, optimizer="momentum", placement="balanced", sync=OVERLAP),
    Case(2, 1, neurons=2, tp=2, stage=1, steps=6, optimizer="adamw", model="wide-llama-tied-meta", masking="backward",
         sync='{"every": 4, "fragments": 2, "outer_optimizer": {"type": "SGD", "params": {"momentum": 0.5}}}'),
    Case(2, 2, stage=0, steps=6, optimizer="adamw", model="resnet-meta", sync='{"every": 3, "offload": "cpu"}'),
    Case(2, 1, steps=8, optimizer="adamw", sync='{"every": 2, "start_after": 4}'),
]  # fmt: skip


def _train(engine: Any, case: Case, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        losses.append(one_step(engine, case, step, data_rank=data_rank_of(case)))
        engine.step()
    return losses


def _everything(engine: Any) -> dict[str, torch.Tensor]:
    """Return clones of all that this process would save."""
    tensors = SavedState(engine.groups).tensors()
    parts = {key: getattr(value, "locals", [value]) for key, value in tensors.items()}
    return {f"{key} {i}": part.detach().clone() for key, of in parts.items() for i, part in enumerate(of)}


def _resumed_equals_undisturbed(case: Case, folder: str, saved_after: list[int]) -> list[str]:
    """Return the keys of tensors that differ after a resume, and check the losses.

    One run saves after each number of steps in ``saved_after``, and goes on from each of them.
    """
    undisturbed, losses = engine_of(case), []
    for step in range(case.steps):
        if step in saved_after:
            undisturbed.save_checkpoint(folder, tag=f"after-{step}")
        losses += _train(undisturbed, case, step, step + 1)
    theirs, differing = _everything(undisturbed), []
    for steps in saved_after:
        resumed = engine_of(case)
        resumed.load_checkpoint(folder, tag=f"after-{steps}")
        assert _train(resumed, case, steps, case.steps) == losses[steps:]
        ours = _everything(resumed)
        assert ours.keys() == theirs.keys()
        assert resumed.local_training.outer_steps == undisturbed.local_training.outer_steps
        differing += [f"after {steps} steps: {key}" for key in ours if not torch.equal(ours[key], theirs[key])]
    return differing


@pytest.mark.parametrize(
    "case",
    [pytest.param(CASES[0], marks=pytest.mark.slow), *CASES[1:4], pytest.param(CASES[4], marks=pytest.mark.slow)],
    ids=str,
)
def test_a_resume_goes_on_bit_for_bit(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    for differing in ranks.run(_resumed_equals_undisturbed, case, str(tmp_path), [2, 3], world=case.world):
        assert differing == []


def _saved_while_the_module_has_the_anchors(case: Case, folder: str) -> list[str]:
    """Save in a round, as usual and as in ``engine.recalibrated``. Returns what differs."""
    engine = engine_of(case)
    _train(engine, case, 0, 5)
    before = _everything(engine)
    with engine.groups.local.anchored():
        engine.save_checkpoint(folder)
        inside = _everything(engine)
    assert before.keys() == inside.keys()
    return [key for key in before if not torch.equal(before[key], inside[key])]


def test_a_save_amid_anchors_is_the_same(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(2, 1, optimizer="adamw", sync='{"every": 3}')
    for differing in ranks.run(_saved_while_the_module_has_the_anchors, case, str(tmp_path), world=case.world):
        assert differing == []


def _save_midway(case: Case, folder: str) -> tuple[Any, Any]:
    """Train two steps, save, and return the full weights and this rank's moments."""
    engine = engine_of(case)
    _train(engine, case, 0, 2)
    engine.save_checkpoint(folder)
    return engine.full_state_dict(), moments_of(engine)


def _load(case: Case, folder: str) -> tuple[Any, Any]:
    engine = engine_of(case)
    engine.load_checkpoint(folder)
    return engine.full_state_dict(), moments_of(engine)


def test_another_layout_starts_from_the_anchors_with_mean_moments(ranks: RankPool, tmp_path: Path) -> None:
    target = Case(4, 1, optimizer="adamw", placement="cyclic", sync='{"every": 2, "fragments": 2}')
    source = Case(2, 2, stage=3, optimizer="adamw", sync='{"every": 3}')
    saved = ranks.run(_save_midway, source, str(tmp_path), world=source.world)
    answers = ranks.run(_load, target, str(tmp_path), world=target.world)
    assert all(torch.equal(answers[0][0][name], weight) for name, weight in saved[0][0].items())
    holders: dict[str, list[torch.Tensor]] = {}
    for group in (0, 1):
        for name, value in saved[2 * group][1].items():
            holders.setdefault(name, []).append(value)
    assert {len(of) for of in holders.values()} == {1, 2}
    seen = set()
    for _, moments in answers:
        for name, value in moments.items():
            seen.add(name)
            mean = torch.stack(holders[name]).mean(0)
            torch.testing.assert_close(value, mean, rtol=1e-6, atol=1e-9, msg=name)
    assert seen == set(holders)


def test_a_run_without_local_steps_becomes_one_with_them(ranks: RankPool, tmp_path: Path) -> None:
    """The anchors are the weights, and moments go on."""
    source, target = (Case(2, 1, optimizer="adamw", sync=sync) for sync in ("", '{"every": 3}'))
    before, _ = ranks.run(_save_midway, source, str(tmp_path), world=2)[0]
    answers = ranks.run(_load, target, str(tmp_path), world=2)
    assert all(torch.equal(answers[0][0][name], weight) for name, weight in before.items())
    assert all(value.abs().sum() > 0 for name, value in answers[0][1].items() if name.endswith("exp_avg_sq"))


def _finished_twice(case: Case, folder: str) -> tuple[bool, bool]:
    """Whether a resumed run averages again at once, and whether that changes the model."""
    engine = engine_of(case)
    _train(engine, case, 0, 5)
    engine.finish_round()
    engine.save_checkpoint(folder)
    resumed = engine_of(case)
    resumed.load_checkpoint(folder)
    averaged = resumed.finish_round()
    ours, theirs = resumed.full_state_dict(), engine.full_state_dict()
    return averaged, any(not torch.equal(ours[name], weight) for name, weight in (theirs or {}).items())


def test_a_finished_run_that_resumes_has_nothing_to_average(ranks: RankPool, tmp_path: Path) -> None:
    """An outer step without a change would move the anchors by their momentum."""
    case = Case(2, 1, optimizer="adamw", sync='{"every": 4, "fragments": 2}')
    assert ranks.run(_finished_twice, case, str(tmp_path), world=2) == [(False, False)] * 2
    assert json.loads((tmp_path / "step-5" / "state.json").read_text())["sync"]["steps_alone"] == 0


def _refused(case: Case, folder: str, tag: str) -> tuple[list[str], list[str]]:
    """Return the errors of loads after three steps, and the keys of what they changed."""
    errors, changed = [], []
    for start_after in (0, 1, 4):
        engine = engine_of(replace(case, sync=f'{{"every": 2, "start_after": {start_after}}}'))
        _train(engine, case, 0, 3)
        before = _everything(engine)
        with pytest.raises(CheckpointError) as error:
            engine.load_checkpoint(folder, tag)
        errors.append(str(error.value))
        after = _everything(engine)
        differing = [key for key in before if key in after and not torch.equal(after[key], before[key])]
        changed += [f"start_after {start_after}: {key}" for key in (*differing, *(before.keys() ^ after.keys()))]
    return errors, changed


@pytest.mark.parametrize("what", ["damaged", "other model"])
def test_a_refusal_changes_nothing_in_a_round(ranks: RankPool, tmp_path: Path, what: str) -> None:
    """The checkpoint is of step 2, so groups would begin or end to step on their own."""
    case = Case(2, 1, optimizer="adamw", placement="cyclic", sync='{"every": 2}')
    ranks.run(_save_midway, replace(case, model="mlp-of-3" if what == "other model" else "mlp"), str(tmp_path), world=2)
    if what == "damaged":
        file = next((tmp_path / "step-2").glob("*.distcp"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    for errors, changed in ranks.run(_refused, case, str(tmp_path), "step-2", world=2):
        assert all(("damaged" if what == "damaged" else "has no 'model/layers.3.") in error for error in errors)
        assert changed == []
