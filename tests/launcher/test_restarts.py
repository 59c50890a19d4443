"""When a lost group is started again, and when it is not."""

from __future__ import annotations

from sdp.launcher.restarts import RestartBudget


def test_a_group_waits_longer_each_time_until_its_restarts_are_used_up() -> None:
    budget = RestartBudget(3, window=60.0)
    assert [budget.take(now) for now in (100.0, 101.0, 103.0)] == [0.5, 1.0, 2.0]
    assert budget.take(159.0) is None and budget.used == 3
    assert budget.take(160.5) == 2.0, "the first one is no longer in the window"
    assert budget.take(300.0) == 0.5
    assert RestartBudget(0, window=60.0).take(0.0) is None


def test_no_wait_is_longer_than_eight_seconds() -> None:
    budget = RestartBudget(9, window=3600.0)
    assert [budget.take(float(now)) for now in range(9)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0]
