"""The report says how many groups of an elastic run were alive, and which ones were lost."""

import os
from itertools import pairwise
from pathlib import Path

import pytest
from sdp.engine.elastic.coordination.records import Arrival, Loss
from sdp.launcher.notes import GROUPS_LOG, say_and_note
from sdp.tests.support.fabricated_runs import make_run
from sdp.tools.report.groups import describe_groups, describe_losses, read_losses
from sdp.tools.report.render import as_json, render, render_markdown


def lines(*groups: int) -> list[dict]:
    changes = [sum(a != b for a, b in pairwise(groups[: step + 1])) for step in range(len(groups))]
    return [{"step": step + 1, "groups": n, "generation": 1 + changes[step]} for step, n in enumerate(groups)]


def note(run: Path, *texts: str) -> None:
    (run / "logs").mkdir(exist_ok=True)
    for text in texts:
        say_and_note(run / "logs" / GROUPS_LOG, text)


def lost(group: int, step: int, seconds: float, cause: str = "its connection was closed") -> str:
    """Return what the coordinator says."""
    return Loss(group, "host-a", cause, 0.0, step).report("0, 2", seconds)


def joined(step: int, *groups: int) -> str:
    return Arrival([f"group {group} on host-b" for group in groups], step, 7, 0.0).report("0, 1, 2, 3", 0.5)


def test_the_groups_that_were_alive_are_described() -> None:
    assert describe_groups(lines(4, 4, 4)) == "4, at least 4, 0 changes, generation 1"
    assert describe_groups(lines(4, 3, 3, 4)) == "4, at least 3, 2 changes, generation 3"
    assert describe_groups(lines(4, 2)) == "2, at least 2, 1 change, generation 2"
    assert describe_groups(lines(4, 3, 4) + lines(4, 4)) == "4, at least 3, 3 changes, generation 1", "it was resumed"
    assert describe_groups([{"step": 1}]) is None


def test_only_an_elastic_run_has_the_row(tmp_path: Path) -> None:
    text = render([make_run(tmp_path / "half", holders=2)])
    assert "groups alive" not in text and "was lost" not in text


def test_losses_have_group_host_cause_seconds_and_the_return(tmp_path: Path) -> None:
    run = make_run(tmp_path / "half", holders=2)
    note(tmp_path / "half", lost(1, 1200, 0.125), "something else", lost(3, 1201, 5.5, "no heartbeat for 5 s (x)"))
    note(
        tmp_path / "half",
        joined(1210, 1, 3),
        lost(1, 1300, 0.2),
        "group 0 was lost, because it did not come back to the coordinator in time; x",
    )
    found = read_losses(tmp_path / "half")
    assert [(loss.group, loss.host, loss.step, loss.seconds, loss.back_after_step) for loss in found] == [
        (1, "host-a", 1200, 0.12, 1210),
        (3, "host-a", 1201, 5.5, 1210),
        (1, "host-a", 1300, 0.2, None),
        (0, None, None, None, None),
    ]
    for text in (render([run]), render_markdown([run])):
        assert "4 losses of a group; until the others went on: median 0.20 s, longest 5.50 s:" in text
        assert "group 3 on host-a was lost after step 1,201 (no heartbeat for 5 s (x)); the others went on" in text
        assert "group 0 was lost (it did not come back to the coordinator in time)\n" in text
    assert "half: 4 losses" in render([run, make_run(tmp_path / "full", holders=4)])
    assert as_json([run])["runs"][0]["losses"][1]["cause"] == "no heartbeat for 5 s (x)"  # type: ignore[index]


def test_a_loss_that_ends_the_run_is_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "half", holders=2)
    note(tmp_path / "half", f"{Loss(2, 'host-a', 'it died', 0.0, 9).what()}; no step was committed after that")
    count, shown = describe_losses(read_losses(tmp_path / "half"))
    assert count == "1 loss of a group:"
    assert shown.endswith("group 2 on host-a was lost after step 9 (it died); no step was committed after that")


def test_many_losses_are_counted_and_the_newest_are_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "half", holders=2)
    note(tmp_path / "half", *(lost(1, step, 0.1) for step in range(8)))
    first, *shown = describe_losses(read_losses(tmp_path / "half"))
    assert first == "8 losses of a group; until the others went on: median 0.10 s, longest 0.10 s; the newest 5:"
    assert [f"step {step} " in line for step, line in zip(range(3, 8), shown, strict=True)] == [True] * 5


@pytest.mark.parametrize("kind", ["a directory", "a pipe", "bytes", "terminal"])
def test_a_damaged_log_does_no_harm(tmp_path: Path, kind: str) -> None:
    run = make_run(tmp_path / "half", holders=2)
    (tmp_path / "half" / "logs").mkdir(exist_ok=True)
    log = tmp_path / "half" / "logs" / GROUPS_LOG
    if kind == "a directory":
        log.mkdir()
    elif kind == "a pipe":
        os.mkfifo(log)
    elif kind == "bytes":
        log.write_bytes(b"\xff\xfe" * 1000 + b"\n" * 1000)
    else:
        log.write_text(
            "2026-01-01 00:00:00 group 1 on h was lost after step 1 (\x1b[2J); groups 0 went on after 0.10 s\n"
        )
    assert "\x1b" not in render([run])
    assert len(read_losses(tmp_path / "half")) == (kind == "terminal")
