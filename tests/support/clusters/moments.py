"""Ranks of elastic runs that stop at a named moment, so that a test can take something away then.

A rank that has reached its moment says so in a file and waits, until it is killed or may go on. So
a loss comes at exactly this moment, however fast the machine is.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sdp.engine.checkpoint.load as load_module
import sdp.engine.checkpoint.save as save_module
import sdp.engine.elastic.bringing_back as returning_module
from sdp.engine.backends.deepspeed.backend import DeepSpeedBackend
from sdp.engine.backends.deepspeed.local_steps import DeepSpeedLocalSteps
from sdp.engine.backends.fsdp2.backend import FSDP2Backend
from sdp.engine.backends.local_steps import ShardedLocalSteps
from sdp.engine.elastic.coordination.errors import StepAbortedError
from sdp.engine.elastic.coordination.membership import Membership
from sdp.engine.elastic.coordination.messages import Channel
from sdp.engine.elastic.process_groups import AbortableGroup
from sdp.engine.elastic.session import Session
from sdp.tools.train.loop.checkpointer import Checkpointer
from sdp.tools.train.loop.training_run import TrainingRun
from sdp.tools.train.observers.monitors import Monitors

REDUCTION, BEFORE_VOTE, UPDATE = "a reduction", "before the vote", "the update"
EVALUATION, SAVE, RETURN = "an evaluation", "a save", "the return of another group"
ITS_RETURN = "its own return"  # a group is lost while it gets its state
MOMENTS = (REDUCTION, BEFORE_VOTE, UPDATE, EVALUATION, SAVE, RETURN)
LOAD, LOADED = "the load of a checkpoint", "a checkpoint is loaded"  # before step 1
BEFORE_STEP = "before a step"  # where the others wait for a group that returns
OUTER_STEP = "after the outer step"  # of a round: all have voted, and frozen copies get the new weights
EVALUATED, IN_FILE = "an evaluation is told to the files", "a step is in metrics.jsonl, and in no curve yet"
_PAUSE_SECONDS = 0.01


@dataclass(frozen=True)
class Stop:
    """Where some ranks stop.

    Attributes:
        moment: one of the names above.
        groups: the groups that stop.
        rank: the rank that stops in each of them.
        step: the step in which they stop, or after which. It has no meaning for a return.
        folder: where they say that they have come, and where they are told to go on.
    """

    moment: str
    groups: tuple[int, ...]
    rank: int
    step: int
    folder: Path

    def arrived(self) -> dict[int, int]:
        """Return the process ids of the ranks that have come, by group."""
        found = {group: self._file(group) for group in self.groups}
        return {group: int(path.read_text()) for group, path in found.items() if path.exists()}

    def go_on(self) -> None:
        """Let them go on."""
        self._file("go").touch()

    def _file(self, name: object) -> Path:
        return self.folder / f"{self.moment}: {name}"

    def reach(self, step: int) -> None:
        """Stop this process if it is one that stops here, in step ``step``, for the first time."""
        group, rank = int(os.environ["SDP_ELASTIC_GROUP"]), int(os.environ["RANK"])
        path = self._file(group)
        if group not in self.groups or rank != self.rank or step != self.step or path.exists():
            return
        hidden = path.with_suffix(".new")
        hidden.write_text(str(os.getpid()))
        hidden.rename(path)
        while not self._file("go").exists():
            time.sleep(_PAUSE_SECONDS)


class Steps:
    """The step in which this rank is, or which it has committed last."""

    present = 0
    reductions = 0  # in its backward pass


def stop_at(stops: Sequence[Stop]) -> None:
    """Let this process, and those that it forks, stop where they shall."""

    def begin(run: Any, *_: Any) -> None:
        Steps.present, Steps.reductions = run.engine.global_steps + 1, 0

    for stop in stops:
        _STOPPERS[stop.moment](lambda *_, stop=stop: stop.reach(Steps.present), stop)
    _before(TrainingRun, "step", begin)  # it comes first


def die_in_first_meeting(group: int, path: Path) -> None:
    """Let the first rank of ``group`` that meets the others here write the file ``path``, and be
    killed. It lives on if the file exists.
    """

    def die(*_: Any) -> None:
        if int(os.environ["SDP_ELASTIC_GROUP"]) == group and not path.exists():
            path.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    _before(Session, "_connect", die)


def lose_another_in_load(stop: Stop) -> None:
    """Let groups stop when they have loaded a checkpoint, and then find that another one was lost
    before all had.
    """

    def find_a_loss() -> None:
        was_here = bool(stop.arrived())
        stop.reach(stop.step)
        if stop.arrived() and not was_here and int(os.environ["SDP_ELASTIC_GROUP"]) in stop.groups:
            raise StepAbortedError("a group is lost")

    _after(Checkpointer, "resume", find_a_loss)


def die_before_the_start_is_written(path: Path) -> None:
    """Let the first rank that would write the start of the run's files here write the file
    ``path``, and be killed. The others live on.
    """

    def die(*_: Any) -> None:
        if not path.exists():
            path.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    _before(TrainingRun, "write_start", die)


def note_newcomers(path: Path, ranks: int) -> None:
    """Let the coordinator here write a file when a group of so many ``ranks`` wants to return."""
    hear, here = Membership.hear, set[object]()

    def hears(self: Membership, peer: Any, message: Any) -> None:
        hear(self, peer, message)
        if self.generation is not None and message.get("fresh") and message["slot"] not in self.living:
            here.add(message["inside"])
            if len(here) == ranks:
                path.touch()

    Membership.hear = hears  # type: ignore[method-assign]


def die_in_decision(path: Path, number: int) -> None:
    """Let the coordinator here be killed instead of sending decision ``number``, and write a file.

    If the file exists, it lives on.
    """
    count = [0]

    def look(_: Any, message: Any) -> None:
        count[0] += message["type"] == "decision"
        if count[0] == number and not path.exists():
            path.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    _before(Channel, "seal", look)


def _stop_in_a_reduction(reach: Callable[..., None], stop: Stop) -> None:
    """Stop before the second reduction of gradients, which the others wait for."""
    del stop

    def count(*_: Any) -> None:
        Steps.reductions += 1
        if Steps.reductions == 2:
            reach()

    _before(AbortableGroup, "allreduce", count)


def _stop_in_a_return(reach: Callable[..., None], stop: Stop) -> None:
    """Stop where the state is sent, in whichever step."""
    del reach
    for name in ("exchange", "exchange_between_rounds"):
        _before(returning_module, name, lambda *_: stop.reach(stop.step))


def _stop_in_an_update(reach: Callable[..., None], stop: Stop) -> None:
    """Stop when the gradients are there. With local steps, they are those of the group."""
    del stop
    _before_backends("update", reach)
    _before(ShardedLocalSteps, "step", reach)


def _stop_after_an_outer_step(reach: Callable[..., None], stop: Stop) -> None:
    del stop
    for steps in (ShardedLocalSteps, DeepSpeedLocalSteps):
        _before(steps, "_send_anchors", reach)


_STOPPERS: dict[str, Callable[[Callable[..., None], Stop], None]] = {
    BEFORE_STEP: lambda reach, _: _before(TrainingRun, "step", reach),
    REDUCTION: _stop_in_a_reduction,
    BEFORE_VOTE: lambda reach, _: _before(Session, "vote", reach),
    UPDATE: _stop_in_an_update,
    OUTER_STEP: _stop_after_an_outer_step,
    EVALUATION: lambda reach, _: _before_backends("evaluate", reach),  # between its parts
    SAVE: lambda reach, _: _before(save_module, "hash_files", reach),  # its tensors are written
    RETURN: _stop_in_a_return,
    ITS_RETURN: _stop_in_a_return,
    LOADED: lambda reach, _: _after(Checkpointer, "resume", reach),
    LOAD: lambda reach, _: _before(load_module, "check", reach),  # nothing is loaded yet
    EVALUATED: lambda reach, _: _before(TrainingRun, "tell_evaluation", reach),
    IN_FILE: lambda reach, _: _before(Monitors, "on_step", reach),
}


def _before_backends(name: str, action: Callable[..., None]) -> None:
    for backend in (FSDP2Backend, DeepSpeedBackend):
        _before(backend, name, action)


def _before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Let ``action`` be called before a function, with the same positional arguments."""
    function = getattr(owner, name)

    def both(*args: Any, **keywords: Any) -> Any:
        action(*args)
        return function(*args, **keywords)

    setattr(owner, name, both)


def _after(owner: Any, name: str, action: Callable[[], None]) -> None:
    """Let ``action`` be called after a function."""
    function = getattr(owner, name)

    def both(*args: Any, **keywords: Any) -> Any:
        result = function(*args, **keywords)
        action()
        return result

    setattr(owner, name, both)
