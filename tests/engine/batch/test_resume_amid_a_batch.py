"""A checkpoint is loaded between the micro-batches of a step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.engine.errors import CheckpointError
from sdp.tests.support import models
from sdp.tests.support.cases import Case, engine_of, one_step
from sdp.tests.support.deepspeed_runs import needs_deepspeed
from sdp.tests.support.ranks import RankPool

CASE = Case(2, 1, accumulation=2, optimizer="adamw", placement="cyclic")


def _step(engine: Any, case: Case, step: int) -> tuple[float | None, float | None, dict[str, torch.Tensor]]:
    """Loss and norm of a step, and the weights after it."""
    one_step(engine, case, step, data_rank=dist.get_rank())
    engine.step()
    return engine.get_loss(), engine.get_global_grad_norm(), engine.full_state_dict() or {}


def _micro_batch(engine: Any, case: Case, micro: int) -> None:
    engine.backward(engine(models.micro_batch(case.model, 1, micro, dist.get_rank())))
    engine.step()


def _loaded(case: Case, engine: str, folder: str) -> tuple[Any, Any]:
    """The step after a resume at the beginning, and amid the micro-batches of a step."""
    first = engine_of(case, engine)
    _step(first, case, 0)
    first.save_checkpoint(folder)
    expected = _step(first, case, 1)
    other = engine_of(case, engine)
    _step(other, case, 0)
    _micro_batch(other, case, 0)
    other.load_checkpoint(folder)
    return expected, _step(other, case, 1)


def _refused(case: Case, engine: str, folder: str) -> tuple[str, Any, Any]:
    """The refusal, a first step without it, and a first step around it."""
    foreign = engine_of(replace(case, optimizer="momentum"), engine)
    _step(foreign, case, 0)
    foreign.save_checkpoint(folder)
    expected = _step(engine_of(case, engine), case, 1)
    other = engine_of(case, engine)
    _micro_batch(other, case, 0)
    try:
        other.load_checkpoint(folder)
    except CheckpointError as error:
        _micro_batch(other, case, 1)
        return str(error), expected, (other.get_loss(), other.get_global_grad_norm(), other.full_state_dict() or {})
    return "", expected, None


def _assert_same(first: Any, second: Any) -> None:
    assert first[:2] == second[:2]
    assert first[2].keys() == second[2].keys()
    assert all(torch.equal(value, second[2][name]) for name, value in first[2].items())


@pytest.mark.parametrize(
    ("engine", "groups", "stage"),
    [
        ("fsdp2", 2, 0),
        ("fsdp2", 1, 3),
        *(pytest.param("deepspeed", groups, stage, marks=needs_deepspeed) for groups, stage in ((1, 3), (2, 1))),
    ],
)
def test_what_was_accumulated_goes_with_a_load_and_stays_if_it_is_refused(
    ranks: RankPool, tmp_path: Path, engine: str, groups: int, stage: int
) -> None:
    case = replace(CASE, groups=groups, fsdp=2 // groups, stage=stage)
    for expected, found in ranks.run(_loaded, case, engine, str(tmp_path / "loaded"), world=2):
        _assert_same(expected, found)
    for message, expected, found in ranks.run(_refused, case, engine, str(tmp_path / "refused"), world=2):
        assert "has no 'optimizer/" in message
        _assert_same(expected, found)
