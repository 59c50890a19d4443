"""A save refuses weights that are NaN or infinite, and keeps the good checkpoint."""

from pathlib import Path

import pytest
import torch
from sdp.engine.errors import NonFiniteError
from sdp.tests.support.cases import Case, data_rank_of, engine_of, one_step
from sdp.tests.support.checkpoints import ALONE, SOURCE
from sdp.tests.support.ranks import RankPool


def _save_destroyed(case: Case, folder: str, engine_name: str) -> list[str]:
    """Save a good step, then one that its learning rate destroys; return the refusals."""
    engine = engine_of(case, engine_name)
    data_rank = data_rank_of(case)
    one_step(engine, case, 0, data_rank=data_rank)
    engine.step()
    engine.save_checkpoint(folder, keep=1)
    for group in engine.optimizer.param_groups:
        group["lr"] = float("inf")
    one_step(engine, case, 1, data_rank=data_rank)
    engine.step()
    assert engine.skipped_steps == 0
    refusals = []
    for background in (False, True):
        try:
            engine.save_checkpoint(folder, keep=1, background=background)
            engine.wait_for_checkpoint()
        except NonFiniteError as error:
            refusals.append(str(error))
    return refusals


@pytest.mark.parametrize("engine_name", ["fsdp2", "deepspeed"])
def test_destroyed_weights_do_not_push_out_a_good_checkpoint(ranks: RankPool, tmp_path: Path, engine_name: str) -> None:
    case = SOURCE if engine_name == "fsdp2" else Case(2, 2, stage=2, optimizer="adamw")
    folder = str(tmp_path)
    answers = ranks.run(_save_destroyed, case, folder, engine_name, world=4)
    assert all(len(answer) == 2 for answer in answers)
    refusal = answers[0][0]
    assert {text for answer in answers for text in answer} == {refusal}
    assert "NaN or infinite" in refusal and f"the newest good checkpoint: {tmp_path / 'step-1'}" in refusal
    assert "\n" not in refusal
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "step-1"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_single_value_is_found(tmp_path: Path, value: float) -> None:
    engine = engine_of(ALONE)
    with torch.no_grad():
        list(engine.parameters_here.values())[-1].view(-1)[-1] = value
    with pytest.raises(NonFiniteError, match="none was written"):
        engine.save_checkpoint(tmp_path)


def test_large_finite_weights_are_saved(tmp_path: Path) -> None:
    engine = engine_of(ALONE)
    with torch.no_grad():
        next(iter(engine.parameters_here.values())).fill_(3e38)  # their sum overflows
    engine.save_checkpoint(tmp_path)
