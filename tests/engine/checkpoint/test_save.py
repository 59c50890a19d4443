"""Saving a checkpoint: in the background, without room, tags, old ones, values not finite."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.engine.checkpoint.storage.files import read_state
from sdp.engine.errors import CheckpointError, NonFiniteError
from sdp.tests.support.cases import Case, data_rank_of, engine_of, one_step
from sdp.tests.support.checkpoints import (
    ALONE,
    SOURCE,
    TENSOR_SOURCES,
    assert_loaded,
    load_case,
    merge_moments,
    moments_of,
)
from sdp.tests.support.ranks import RankPool


def test_the_newest_are_kept_and_the_one_just_written_always(small: Path) -> None:
    engine = engine_of(ALONE)
    for tag in ("step-5", "step-7", "best"):
        engine.save_checkpoint(small, tag, keep=3)
    engine.save_checkpoint(small, "step-3", keep=2)
    assert sorted(path.name for path in small.glob("[a-z]*")) == ["best", "latest.json", "step-3", "step-7"]


def test_multiples_are_kept_besides_the_newest(small: Path) -> None:
    engine = engine_of(ALONE)
    for step in range(1, 8):
        engine.save_checkpoint(small, f"step-{step}", keep=2, keep_every=3)
    assert sorted(path.name for path in small.glob("step-*")) == ["step-3", "step-5", "step-6", "step-7"]


def _save_in_the_background(case: Case, folder: str) -> Any:
    """Train on while step 2 is written; return the weights and moments of step 2."""
    engine = engine_of(case)
    for step in range(4 if case.tp == 1 else 3):
        one_step(engine, case, step, data_rank=data_rank_of(case))
        engine.step()
        if step == 1:
            engine.save_checkpoint(folder, background=True)
            weights, moments = engine.full_state_dict(), moments_of(engine)
    engine.wait_for_checkpoint()
    return weights, moments


@pytest.mark.parametrize("case", [SOURCE, TENSOR_SOURCES[0]], ids=str)
def test_a_background_save_holds_the_step_at_which_it_began(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    answers = ranks.run(_save_in_the_background, case, str(tmp_path), world=4)
    assert_loaded(ranks.run(load_case, case, str(tmp_path), world=4), answers[0][0], merge_moments(answers))


def _save_without_room(case: Case, folder: str) -> tuple[str, str]:
    """Errors of a save, and of one in the background, under a limit of file sizes."""
    engine = engine_of(case)
    one_step(engine, case, 0, data_rank=dist.get_rank())
    engine.step()
    engine.save_checkpoint(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    errors = []
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        for background in (False, True):
            try:
                engine.save_checkpoint(folder, "step-2", background=background)
                engine.wait_for_checkpoint()
            except CheckpointError as error:
                errors.append(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return errors[0], errors[1]


def test_a_save_without_room_leaves_the_one_before(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(_save_without_room, Case(2, 1, optimizer="adamw"), str(tmp_path), world=2)
    for errors in answers:
        assert errors == answers[0]
        assert all("cannot write the checkpoint" in error for error in errors)
        assert all("File too large" in error and "unexpected pos" not in error for error in errors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "step-1"]
    assert read_state(tmp_path / "step-1")["global_steps"] == 1


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
