"""Runs that are stopped, find no room, lose a rank and a host, under every launcher, end as if undisturbed; see tests/lives.py."""

from concurrent.futures import Future

import pytest
from hosts import needs
from lives import LAUNCHERS

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_that_is_torn_again_and_again_ends_as_if_undisturbed(lives: dict[str, Future[str]], launcher: str) -> None:
    needs(launcher)
    said = lives[launcher].result()
    if launcher == "Open MPI":
        assert "mpirun.openmpi still waits for a host 30 s after the job's end: killed" in said
