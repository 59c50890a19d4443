"""The groups of an elastic run: how many were alive, who was lost and why, and who came back."""

from __future__ import annotations

import re
import stat
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...engine.errors import shorten
from ...launcher.notes import GROUPS_LOG

SHOWN = 5  # of the newest losses
_MOST_BYTES = 1 << 24  # that are read of the log, from its end

# The texts of Loss, of Arrival and of a new coordinator, in engine/elastic/coordination.
_TIME = r"(?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) "
_NUMBER = r"\d{1,15}"
_LOST = re.compile(
    rf"{_TIME}group (?P<group>{_NUMBER}) on (?P<host>\S+) was lost after step (?P<step>{_NUMBER}) \((?P<cause>.*)\); "
    rf"(?:groups .* went on after (?P<seconds>{_NUMBER}\.\d\d) s|no step was committed after that)"
)
_LOST_ALONE = re.compile(rf"{_TIME}group (?P<group>{_NUMBER}) was lost, because (?P<cause>it did not [^;]*);.*")
_JOINED = re.compile(rf"{_TIME}(?P<groups>.*) joined after step (?P<step>{_NUMBER}), .*")


@dataclass(frozen=True)
class GroupLoss:
    """A loss of a group.

    Attributes:
        at: the date and the time of the coordinator's host, when the others went on, or
            the run ended.
        group: the number of the group.
        host: the host that it ran on, None if nobody knows.
        step: the last step that was committed before, None if nobody knows.
        cause: why the group was lost.
        seconds: from the loss to the next committed step of the others, None if nobody knows or
            there was none.
        back_after_step: the step after which the group joined again. None if it did not, or if the
            run began again with it.
    """

    at: str
    group: int
    host: str | None
    step: int | None
    cause: str
    seconds: float | None
    back_after_step: int | None = None

    def text(self) -> str:
        """Return one line without control characters."""
        where = f" on {shorten(self.host)}" if self.host is not None else ""
        when = f" after step {self.step:,}" if self.step is not None else ""
        end = "; no step was committed after that" if self.step is not None else ""
        others = f"; the others went on after {self.seconds:.2f} s" if self.seconds is not None else end
        back = f"; it was back after step {self.back_after_step:,}" if self.back_after_step is not None else ""
        return f"{self.at}  group {self.group}{where} was lost{when} ({shorten(self.cause)}){others}{back}"


def describe_groups(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Say how many groups were alive at the end and at the least, how often that changed, and the
    number of the last generation.

    None if the run was not elastic. ``lines`` are those of metrics.jsonl.
    """
    alive = [line["groups"] for line in lines if isinstance(line.get("groups"), int)]
    if not alive:
        return None
    generations = [line.get("generation") for line in lines if "groups" in line]
    changes = sum(before != after for before, after in pairwise(generations))
    last = f", generation {generations[-1]}" if isinstance(generations[-1], int) else ""
    return f"{alive[-1]}, at least {min(alive)}, {changes} change{'s' * (changes != 1)}{last}"


def read_losses(dump_dir: Path) -> tuple[GroupLoss, ...]:
    """Return the losses that the run's log of groups tells, in order. Empty if there is no log."""
    found: list[GroupLoss] = []
    for line in _text(dump_dir / "logs" / GROUPS_LOG).split("\n"):
        if (lost := _LOST.fullmatch(line)) is not None:
            step, seconds = int(lost["step"]), float(lost["seconds"]) if lost["seconds"] is not None else None
            found.append(GroupLoss(lost["at"], int(lost["group"]), lost["host"], step, lost["cause"], seconds))
        elif (lost := _LOST_ALONE.fullmatch(line)) is not None:
            found.append(GroupLoss(lost["at"], int(lost["group"]), None, None, lost["cause"], None))
        elif (joined := _JOINED.fullmatch(line)) is not None:
            for group in re.findall(rf"group ({_NUMBER}) on ", joined["groups"]):
                _note_return(found, int(group), int(joined["step"]))
    return tuple(found)


def describe_losses(losses: Sequence[GroupLoss]) -> list[str]:
    """Return lines that tell how many groups were lost, and the newest losses."""
    if not losses:
        return []
    seconds = [loss.seconds for loss in losses if loss.seconds is not None]
    took = (
        f"; until the others went on: median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s"
        if seconds
        else ""
    )
    newest = f"; the newest {SHOWN}:" if len(losses) > SHOWN else ":"
    plural = "es" * (len(losses) != 1)
    return [f"{len(losses):,} loss{plural} of a group{took}{newest}", *(f"  {loss.text()}" for loss in losses[-SHOWN:])]


def _note_return(losses: list[GroupLoss], group: int, step: int) -> None:
    for index in range(len(losses) - 1, -1, -1):
        if losses[index].group == group:
            if losses[index].back_after_step is None:
                losses[index] = replace(losses[index], back_after_step=step)
            return


def _text(path: Path) -> str:
    try:
        size = path.stat()
        if not stat.S_ISREG(size.st_mode):
            return ""
        with path.open("rb") as file:
            file.seek(max(0, size.st_size - _MOST_BYTES))
            return file.read(_MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
