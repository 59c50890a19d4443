"""What the ranks of an elastic run read and when they vote, noted while they train."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from sdp.engine.batch.sampler import ResumableBatchSampler
from sdp.engine.elastic.session import Session
from sdp.tools.train.loop.training_run import TrainingRun

from .moments import Stop, stop_at

_NOTED = 100  # positions of the order of samples, more than a test reads


def note_and_stop(folder: Path, stops: Sequence[Stop]) -> None:
    """Let this process, and those that it forks, note what they do in ``folder``, and stop where
    they shall.
    """
    note_samples(folder)
    stop_at(stops)


def note_samples(folder: Path) -> None:
    """Let the ranks here note the rows of each step, and the step after which each vote comes."""
    make_step, vote = TrainingRun.step, Session.vote
    runs: list[TrainingRun] = []  # of this rank

    def step(run: TrainingRun, batches: Iterator[Any], **more: Any) -> None:
        runs[:] = [run]
        note_order(folder, run.engine.loader)
        number = run.engine.global_steps + 1
        make_step(run, _noted(batches, partial(_write, folder, "rows", number)), **more)

    def votes(session: Session, *args: Any, **more: Any) -> Any:
        result = vote(session, *args, **more)
        _write(folder, "vote", runs[0].engine.global_steps if runs else 0, None)
        return result

    TrainingRun.step = step  # type: ignore[method-assign]
    Session.vote = votes  # type: ignore[method-assign]


def note_order(folder: Path, loader: Any) -> None:
    """Write the rows in the order in which one rank alone would read them, once."""
    path = folder / "order.json"
    if not path.exists():
        known = loader.sampler
        alone = ResumableBatchSampler(known.num_samples, 1, 0, 1, known.seed, shuffle=known.shuffle)
        indices = [index for (index,) in islice(alone, min(_NOTED, known.num_samples))]
        rows = [name_of(loader.dataset[index]) for index in indices]
        hidden = folder / f"order of {os.getpid()}"
        hidden.write_text(json.dumps(rows))
        hidden.rename(path)


def name_of(sample: Any) -> str:
    """Return a name of a sample by its content."""
    return _name(_tokens(sample))


def _name(row: Any) -> str:
    return " ".join(map(str, row.tolist()))


def _tokens(batch: Any) -> Any:
    return batch["input_ids"] if isinstance(batch, dict) else batch[0]


def _noted(batches: Iterator[Any], write: Callable[[list[str]], None]) -> Iterator[Any]:
    for batch in batches:
        write([_name(row) for row in _tokens(batch)])
        yield batch


def _write(folder: Path, kind: str, step: int, rows: list[str] | None) -> None:
    group, rank = os.environ["SDP_ELASTIC_GROUP"], os.environ["RANK"]
    with (folder / f"noted by group {group}, rank {rank}").open("a") as file:
        file.write(json.dumps([kind, step, rows]) + "\n")


class Noted:
    """What the ranks of a run have noted in ``folder``."""

    def __init__(self, folder: Path):
        self._folder = folder
        order = json.loads((folder / "order.json").read_text())
        self._positions = {name: position for position, name in enumerate(order)}
        assert len(self._positions) == len(order), "two samples are equal, so a test cannot tell them apart"

    def _lines(self, group: int) -> list[tuple[str, int, list[str] | None]]:
        paths = sorted(self._folder.glob(f"noted by group {group}, rank *"))
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]

    def read(self, group: int) -> list[tuple[int, list[int]]]:
        """Return the steps that a group has made or tried, in order, with the positions of the
        samples that it read.
        """
        lines = self._lines(group)
        return [(step, [self._positions[row] for row in rows]) for kind, step, rows in lines if kind == "rows" and rows]

    def votes(self, group: int) -> list[int]:
        """Return after which step each committed vote of a group came."""
        return [step for kind, step, _ in self._lines(group) if kind == "vote"]
