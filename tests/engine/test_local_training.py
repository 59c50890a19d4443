"""A local step does not wait for what other groups send in the same step."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from sdp.engine.errors import NonFiniteError
from sdp.tests.support import models
from sdp.tests.support.cases import Case, data_rank_of, engine_of, one_step
from sdp.tests.support.ranks import RankPool

PATIENCE = timedelta(seconds=60)


def _first_group_runs_ahead(case: Case, said: Path) -> tuple[int, float, float]:
    """Let group 1 step only after group 0 has made as many steps more as a message may take.

    Returns the steps made, and the loss and the norm of the last one.
    """
    engine, rank = engine_of(case), data_rank_of(case)
    lag, store = engine.local_training.lag, dist.FileStore(str(said), 2)
    for step in range(case.steps):
        one_step(engine, case, step, data_rank=rank)
        if rank == 1:
            store.wait([f"group 0 made step {min(step + lag, case.steps) - 1}"], PATIENCE)
        engine.step()
        if step >= lag:
            engine.skipped_until(step + 1 - lag)  # as when the line of this step is finished
        if rank == 0:
            store.set(f"group 0 made step {step}", "")
    return engine.global_steps, engine.get_loss() or 0.0, engine.get_global_grad_norm() or 0.0


@pytest.mark.parametrize("overlap", [0, 2])
def test_a_group_runs_ahead_of_the_others(ranks: RankPool, tmp_path: Path, overlap: int) -> None:
    """If a step waited for the other group's loss, both groups would wait for each other."""
    case = Case(2, 1, steps=4, sync=f'{{"every": 8, "overlap": {overlap}}}')
    ahead, behind = ranks.run(_first_group_runs_ahead, case, tmp_path / "said", world=2)
    assert ahead == behind, "every rank reads the mean over all"
    assert ahead[0] == case.steps


def _skips_until_the_end(case: Case) -> tuple[str, int, int]:
    """Train with NaN gradients in group 1: the error, steps made, and skips."""
    engine, rank = engine_of(case), data_rank_of(case)
    try:
        for step in range(case.steps):
            loss = engine(models.micro_batch(case.model, step, 0, rank))
            engine.backward(loss * (float("nan") if rank == 1 else 1.0))
            engine.step()
    except NonFiniteError as error:
        return str(error), engine.global_steps, engine.skipped_steps
    return "", engine.global_steps, engine.skipped_steps


def test_all_ranks_end_after_the_same_step(ranks: RankPool) -> None:
    """The eleventh skip in a row is one too many. Its message arrives one step later."""
    case = Case(2, 1, steps=15, sync='{"every": 32}')
    first, second = ranks.run(_skips_until_the_end, case, world=2)
    assert first == second
    message, steps, skipped = first
    assert "at step 11, for the 11. time in a row" in message
    assert steps == skipped == 12


@pytest.mark.usefixtures("one_rank")
def test_a_load_says_how_many_steps_are_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run without local steps cannot go on in the middle of a round."""
    case = Case(1, 1, sync='{"every": 4}')
    engine = engine_of(case)
    for step in range(3):
        one_step(engine, case, step, data_rank=0)
        engine.step()
    engine.save_checkpoint(tmp_path)
    engine_of(case).load_checkpoint(tmp_path)
    assert "are lost" not in caplog.text
    engine_of(replace(case, sync="")).load_checkpoint(tmp_path)
    assert "under another layout or other settings of sdp.sync" in caplog.text
    assert "; 3 local steps are lost" in caplog.text
