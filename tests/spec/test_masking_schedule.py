"""A schedule of maskings: a resume equals the undisturbed run, and a forward phase has no copies.

tests/spec/test_equality.py compares schedules with the oracle.
"""

from __future__ import annotations

import functools
import gc
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sdp.engine.accounting.memory_probe import peak_tensor_bytes
from sdp.engine.distributed.collectives import local_tensor
from sdp.tests.support import models
from sdp.tests.support.case_tables import SCHEDULED_STEPS, THERE_AND_BACK, TO_BACKWARD, TO_FORWARD
from sdp.tests.support.cases import Case, data_rank_of, engine_of, one_step
from sdp.tests.support.checkpoints import assert_equal_runs, losses_of, resumed
from sdp.tests.support.ranks import RankPool
from torch._subclasses.fake_tensor import FakeTensor


def _allocated() -> int:
    """Bytes of all storages of tensors that Python knows."""
    time.sleep(0.1)  # a thread of gloo may keep a message's tensors a little longer than the step
    gc.collect()
    found = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor) and not isinstance(one, FakeTensor))
    locals_ = [local_tensor(one.detach()) for one in found]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in locals_ if not one.is_meta}
    return sum(storages.values())


def _bytes(case: Case) -> tuple[list[int], list[int]]:
    """Peak bytes of live tensors in each step after the first one, and bytes allocated after each
    step.
    """
    before = _allocated()
    engine, peaks, allocated = engine_of(case), [], []

    def step(index: int) -> None:
        one_step(engine, case, index, data_rank=data_rank_of(case))
        engine.step()

    for index in range(SCHEDULED_STEPS):
        if index == 0:
            step(0)
        else:
            kept, run = engine.frozen_here.values(), functools.partial(step, index)
            peaks.append(peak_tensor_bytes(run, engine.module, engine.optimizer, engine.device, kept=kept))
            del kept
        allocated.append(_allocated() - before)
    return peaks, allocated


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(2, 1, model="wide-llama"), marks=pytest.mark.full_table),
        Case(2, 1, model="wide-llama", neurons=2, placement="cyclic"),
        pytest.param(Case(2, 2, 3, model="wide-llama", bf16=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_phase_of_forward_masking_has_no_copies(ranks: RankPool, case: Case) -> None:
    schedule = THERE_AND_BACK.replace('"until": 3', '"until": 4').replace('"until": 1', '"until": 3')
    scheduled, forward, backward = (
        ranks.run(_bytes, replace(case, masking=masking), world=case.world)
        for masking in (schedule, "forward", "backward")
    )
    for rank in range(case.world):
        (peaks, allocated), (fewer, least), (more, most) = scheduled[rank], forward[rank], backward[rank]
        # Step 3 ends with the switch to backward masking, and step 4 with the switch back.
        assert [peaks[0], peaks[2]] == pytest.approx([fewer[0], more[2]], rel=0.02)
        assert fewer[2] < 0.96 * more[2]
        # What earlier tests left in this process may end in the first step.
        assert [allocated[1], allocated[3]] == pytest.approx([least[1], least[3]], rel=0.02)
        assert least[1] < 0.95 * most[1]
        assert 1.05 * least[2] < allocated[2] < 1.02 * most[2]  # the copies exist, but have not run yet


# -- resume ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 2, 3, optimizer="adamw", model="mlp-meta", masking=TO_BACKWARD),
        pytest.param(Case(2, 1, 0, 2, optimizer="adamw", model="even-llama", neurons=2, masking=TO_BACKWARD),
            marks=pytest.mark.slow),
        pytest.param(Case(2, 1, 0, optimizer="momentum", model="dropped", masking=TO_BACKWARD),
            marks=pytest.mark.full_table),
        pytest.param(Case(2, 2, 1, optimizer="adamw", model="dropped", masking=TO_FORWARD), marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_a_resume_equals_the_undisturbed_run(ranks: RankPool, case: Case, tmp_path: Path) -> None:
    assert_equal_runs(ranks.run(resumed, case, str(tmp_path), world=case.world))


def _exchanged(case: Case, folder: str) -> tuple[list[float], list[float], list[float]]:
    """Losses of steps 3 and 4: of the schedule, of the schedule from a checkpoint of forward
    masking, and of backward masking from a checkpoint of the schedule.
    """
    scheduled, forward = engine_of(case), engine_of(replace(case, masking="forward"))
    for engine, tag in ((scheduled, "scheduled"), (forward, "forward")):
        losses_of(engine, case, range(2))
        engine.save_checkpoint(folder, tag=tag)
    from_forward, backward = engine_of(case), engine_of(replace(case, masking="backward"))
    from_forward.load_checkpoint(folder, tag="forward")
    backward.load_checkpoint(folder, tag="scheduled")
    return tuple(losses_of(engine, case, range(2, SCHEDULED_STEPS)) for engine in (scheduled, from_forward, backward))  # type: ignore[return-value]


def test_checkpoints_of_schedules_and_of_constant_maskings_are_the_same(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(2, 2, 3, optimizer="adamw", model="mlp-meta", masking=TO_BACKWARD)
    for scheduled, from_forward, backward in ranks.run(_exchanged, case, str(tmp_path), world=case.world):
        assert from_forward == scheduled
        assert backward == scheduled


# -- the full model --------------------------------------------------------------------------------


def _evaluated(case: Case) -> tuple[list[float], list[float]]:
    """The loss of the full model after each step, by ``evaluate`` and by a copy of the full
    model.
    """
    engine, losses, copies = engine_of(case), [], []
    rank = data_rank_of(case)
    held_out = models.micro_batch(case.model, 90, 0, 0)
    for step in range(SCHEDULED_STEPS):
        one_step(engine, case, step, data_rank=rank)
        engine.step()
        losses.append(engine.evaluate([held_out]))
        with engine.full_model() as model, torch.no_grad():
            copies.append(model(**models.on_device(held_out, engine.device)).item())
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
