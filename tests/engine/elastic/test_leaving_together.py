"""The ranks of a group leave an action together when a group is lost, whoever notices first."""

from __future__ import annotations

import threading

import pytest
from sdp.engine.elastic.coordination.errors import StepAbortedError
from sdp.engine.elastic.coordination.records import STEP
from sdp.tests.support import models
from sdp.tests.support.cases import Case
from sdp.tests.support.clusters.living import begin, run_groups, world_of_group
from sdp.tests.support.ranks import RankPool


def _notices_in_a_calibration(case: Case, port: int, store_port: int) -> str:
    """One rank of group 0 hears of a loss in the pass that measures batch norms, and all others a
    second later.
    """
    with world_of_group(case, store_port) as (place, _):
        engine, session, client, store = begin(case, place, port, "first", 1)
        session.meet(STEP)
        if (place.slot, place.inside) == (0, 0):
            engine.module.register_forward_pre_hook(lambda *_: client.abort.set())
        if (place.slot, place.inside) == (2, 0):
            threading.Timer(1.0, client.give_up, ["a group is lost"]).start()
        batches = [models.micro_batch(case.model, 0, 0, place.slot)]
        try:
            with session.entered(engine.recalibrated(batches)):
                return "went on"
        except StepAbortedError:
            return "left"
        finally:
            del store


@pytest.mark.timeout(120)
def test_a_calibration_before_a_save_is_left_together(ranks: RankPool) -> None:
    """The other rank of group 0 is inside a collective of the group when the first one hears."""
    case = Case(3, 2, 3, model="resnet-meta")
    assert run_groups(ranks, case, _notices_in_a_calibration) == ["left"] * case.world
