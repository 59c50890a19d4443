"""The wait for a group that holds units that no living group holds."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sdp.engine.elastic.bringing_back import GIVE_UP, HolderWait
from sdp.engine.elastic.coordination.assembly import Assembly, Member
from sdp.engine.elastic.coordination.records import STEP
from sdp.engine.elastic.living import lost_units
from sdp.tests.support.cases import Case, engine_of

LAYOUT = engine_of(Case(4, 1), "reference").layout  # group 3 alone holds the fourth unit
ALIVE = [0, 1, 2]


class Client:
    """Stands for the connection, and keeps what was said."""

    def __init__(self) -> None:
        self.identity = SimpleNamespace(slot=0, inside=0)
        self.said: list[str] = []
        self.tell = self.said.append


def assembly(*expected: int) -> Assembly:
    members = tuple(Member(slot, fresh=False, host="here", store="") for slot in ALIVE)
    return Assembly(2, "name", members, 99, 5, 0, False, expected)


def wait(folder: Path, seconds: float, *, stops: bool = False) -> tuple[HolderWait, Any]:
    client: Any = Client()
    (folder / "step-4").mkdir()
    return HolderWait(client, LAYOUT, folder, seconds, lambda: stops), client


def test_the_others_wait_until_the_time_is_over(tmp_path: Path) -> None:
    waits, client = wait(tmp_path, 0.7)
    lost, began = lost_units(LAYOUT, ALIVE), time.monotonic()
    assert waits.phase(5) == 5
    while waits.reason is None:
        assert waits.phase(5) in (5, STEP)
        waits.look(lost, assembly(3))
    assert waits.reason == "none came within 0.7 s"
    assert waits.phase(5) == GIVE_UP
    assert time.monotonic() - began >= 0.7
    (said,) = client.said
    assert re.fullmatch(r"no living group holds .* \(1 of \d units\); the others wait 0\.7 s for one at most", said)
    waits.end()
    assert waits.phase(5) == 5


@pytest.mark.parametrize(
    ("expected", "stops", "has_checkpoint", "why"),
    [
        ((), False, True, "no group that holds it will return"),
        ((3,), True, True, "a signal ended the wait"),
        ((3,), False, False, "there is no checkpoint"),
    ],
)
def test_they_do_not_wait_in_vain(
    tmp_path: Path, expected: tuple[int, ...], why: str, *, stops: bool, has_checkpoint: bool
) -> None:
    waits, client = wait(tmp_path, 60.0, stops=stops)
    if not has_checkpoint:
        (tmp_path / "step-4").rmdir()
    waits.look(lost_units(LAYOUT, ALIVE), assembly(*expected))
    assert why in str(waits.reason)
    assert waits.phase(5) == GIVE_UP
    assert not client.said
