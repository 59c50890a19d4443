"""Runs that are stopped and lose a rank and a host end as if undisturbed, under every launcher.

See tests/support/clusters/faults.py.
"""

from concurrent.futures import Future

import pytest
from sdp.tests.support.clusters.faults import LAUNCHERS, SLOW, Life, meet_the_rest
from sdp.tests.support.clusters.hosts import Hosts, needs

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    "torn", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LAUNCHERS]
)
def test_a_run_that_is_torn_again_and_again_ends_as_if_undisturbed(lives: dict[str, Future[str]], torn: str) -> None:
    needs(torn)
    said = lives[torn].result()
    if torn == "Open MPI":
        assert "mpirun.openmpi still waits for a host 30 s after the job's end: killed" in said


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_else_ends_a_run_under_every_launcher(hosts: Hosts, launcher: str) -> None:
    needs(launcher)
    place = list(LAUNCHERS).index(launcher)
    meet_the_rest(Life(hosts, f"rest-{place}", LAUNCHERS[launcher], "efghi"[place], 29700 + place))
