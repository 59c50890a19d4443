"""The report says how many groups of an elastic run were alive."""

from itertools import pairwise
from pathlib import Path

from sdp.tests.support.fabricated_runs import make_run
from sdp.tools.report.groups import describe_groups
from sdp.tools.report.render import render


def lines(*groups: int) -> list[dict]:
    changes = [sum(a != b for a, b in pairwise(groups[: step + 1])) for step in range(len(groups))]
    return [{"step": step + 1, "groups": n, "generation": 1 + changes[step]} for step, n in enumerate(groups)]


def test_the_groups_that_were_alive_are_described() -> None:
    assert describe_groups(lines(4, 4, 4)) == "4, at least 4"
    assert describe_groups(lines(4, 3, 3, 4)) == "4, at least 3, 2 changes"
    assert describe_groups(lines(4, 2)) == "2, at least 2, 1 change"
    assert describe_groups([{"step": 1}]) is None


def test_only_an_elastic_run_has_the_row(tmp_path: Path) -> None:
    assert "groups alive" not in render([make_run(tmp_path / "half", holders=2)])
