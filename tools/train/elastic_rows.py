"""What the ranks of an elastic run with local steps measured since they agreed last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .loop.meter import row
from .loop.training_run import TrainingRun


@dataclass
class _Row:
    """A step's row, see :func:`~sdp.tools.train.loop.meter.row`. ``most``: of all ranks."""

    own: list[int] = field(default_factory=list)
    most: list[int] = field(default_factory=list)


class Rows:
    """The rows that the ranks have not exchanged yet, one for each step.

    Args:
        run: this rank's run.
    """

    def __init__(self, run: TrainingRun):
        self._run = run
        self._rows: list[_Row] = []
        # Bytes of the newest step up to its end or its vote, and those that came later.
        self._counted, self._late = Counter[str](), Counter[str]()

    def begin(self) -> Callable[[], list[int]]:
        """Begin a step. Returns a function that returns the most of all ranks, when it is known."""
        new = _Row()
        self._rows.append(new)
        return lambda: new.most

    def end(self) -> None:
        """End a step."""
        facts = self._run.last_facts
        assert facts is not None
        self._rows[-1].own = row(0, facts.peak_memory_bytes, Counter(facts.comm) + self._late)
        self._counted, self._late = Counter(facts.comm), Counter()

    def tell(self) -> None:
        """Find the most of all ranks. What was sent since the newest step counts to it. Collective.

        The result is worth something only if the vote is committed.
        """
        if not self._rows:
            return
        sent = Counter(self._run.engine.traffic.by_kind())
        newest = self._rows[-1].own
        total = row(0, newest[1], sent - self._counted)
        rows = [each.own for each in self._rows[:-1]]
        rows.append([newest[0], newest[1], *(old + new for old, new in zip(newest[2:], total[2:], strict=True))])
        flat = self._run.engine.start_max([number for each in rows for number in each])()
        width = len(newest)
        for index, each in enumerate(self._rows):
            each.most = flat[index * width : (index + 1) * width]

    def untold(self) -> list[list[int]]:
        """Return this rank's rows of the steps that it has not told the others."""
        return [each.own for each in self._rows]

    def take(self, told: Sequence[Sequence[Sequence[int]]]) -> None:
        """Note the rows of the ranks that made the same steps. ``told``: rank → step → row."""
        for each, of_ranks in zip(self._rows, zip(*told, strict=True), strict=True):
            each.most = [max(column) for column in zip(*of_ranks, strict=True)]

    def settle(self, signal: int) -> None:
        """Note that the vote is committed. ``signal``: the one for which all groups stop, or 0."""
        for each in self._rows:
            each.most[0] = signal
        if self._rows:
            self._counted = Counter(self._run.engine.traffic.by_kind())
        self._rows = []

    def count_late(self) -> None:
        """Count what was sent after the vote. It is in the row of the next step."""
        self._late = Counter(self._run.engine.traffic.by_kind()) - self._counted
        self._run.meter.recount()
