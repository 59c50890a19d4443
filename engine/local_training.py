"""Drives local steps (``sdp.sync``): which steps groups take on their own, and when their weights
are averaged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .backend import Backend, LocalUpdate, PendingUpdate
from .config.sync import SyncSection
from .optim.skipped_steps import SkippedSteps
from .sync.outer import OuterFacts
from .sync.rounds import Rounds


class LocalTraining:
    """Local steps of a run. Without a section ``sdp.sync``, all methods are no-ops.

    Attributes:
        outer_steps: the outer steps since the start of the run. A round has one for each fragment.
        last: what the outer step after the last step did. None if there was none.
    """

    def __init__(self, backend: Backend, sync: SyncSection | None):
        self._backend, self._sync = backend, sync
        self._rounds = Rounds(sync) if sync is not None else None
        self.outer_steps = 0
        self._averaged_at = -1  # the last step after which finish, or a load, left all groups with the anchors
        self.last: OuterFacts | None = None
        self._pending: deque[tuple[int, PendingUpdate]] = deque()

    @property
    def lag(self) -> int:
        """How many steps the other groups' part of a step's outcome may take to arrive.

        No step waits for a message that was sent in the same step, because over a slow link that
        would cost more than the step. A message may queue behind an average, which has ``overlap``
        steps. So the outcome of a step is needed ``overlap`` + 1 steps later.
        """
        return 0 if self._sync is None else self._sync.overlap + 1

    def add(self, step: int, update: PendingUpdate) -> None:
        """Keep the outcome of ``step`` until the other groups' part has arrived."""
        self._pending.append((step, update))

    def arrived(self, *, except_newest: int = 0) -> Iterator[tuple[int, LocalUpdate]]:
        """Return outcomes in the order of their steps, and forget them.

        All ranks do so after the same step, so that they decide the same.

        Args:
            except_newest: how many of the newest outcomes may still be under way.
        """
        while len(self._pending) > except_newest:
            step, update = self._pending.popleft()
            yield step, update.wait()

    @property
    def pending(self) -> PendingUpdate | None:
        """The outcome of the last step. None if :meth:`arrived` has returned it."""
        return self._pending[-1][1] if self._pending else None

    def newest(self) -> LocalUpdate | None:
        """The outcome of the last step. None if :meth:`arrived` has returned it. May wait."""
        return self.pending.wait() if self.pending is not None else None

    def skipped_steps(self, until: int | None = None) -> int:
        """Count the skipped steps that :meth:`arrived` has not returned, up to step ``until``.

        May wait.
        """
        return sum(update.wait().skipped > 0 for step, update in self._pending if until is None or step <= until)

    @property
    def is_local(self) -> bool:
        """Whether groups take the next step on their own."""
        return self._backend.local is not None

    def follow(self, steps: int) -> None:
        """Prepare for the step after ``steps``. Collective where groups begin to step on their own.

        The weights of all holders must be equal then.
        """
        local = self._rounds is not None and self._rounds.is_local(steps + 1)
        if local and not self.is_local:
            self._backend.begin_local_steps()
        elif self.is_local and not local:
            self._backend.end_local_steps()

    def after_step(self, step: int) -> None:
        """Start and apply the averages that are due after ``step``. Collective."""
        self.last = None
        if self._backend.local is not None and self._rounds is not None:
            starting, arriving = self._rounds.starting(step), self._rounds.arriving(step)
            overlap = self._sync.overlap if self._sync is not None else 0
            if arriving is not None and self._backend.local.travelling is not None:
                self._arrive()
            if starting is not None:
                self._backend.local.start(starting)
                if not overlap:
                    self._arrive()
        self.follow(step)

    def finish(self, step: int) -> bool:
        """Average every fragment that has changed since its last average. Collective.

        Call it after the last step of a run, so that the anchors contain all steps.

        Returns:
            Whether anything was averaged.
        """
        local = self._backend.local
        if local is None or self._rounds is None or step == self._averaged_at:
            return False
        before = self.outer_steps
        if local.travelling is not None:
            self._arrive()
        for fragment in self._rounds.fragments:
            if self._rounds.steps_alone(step, fragment):
                local.start(fragment)
                self._arrive()
        if self.outer_steps > before:
            self._averaged_at = step
        return self.outer_steps > before

    def has_finished(self, step: int) -> bool:
        """Return whether :meth:`finish` averaged something after ``step``."""
        return self._averaged_at == step

    def _steps_alone(self, step: int) -> int:
        """Return how many of the steps up to ``step`` a load from the anchors would drop."""
        if self._rounds is None or step == self._averaged_at:
            return 0
        return max(self._rounds.steps_alone(step, fragment) for fragment in self._rounds.fragments)

    def metrics(self) -> dict[str, Any]:
        """Return what the outer step after the last step did, for metrics.jsonl.

        Empty if there was none.
        """
        if self.last is None:
            return {}
        return {
            "outer_step": self.outer_steps,
            "fragment": self.last.fragment,
            "drift": self.last.drift,
            "outer_grad_norm": self.last.gradient_norm,
        }

    def tensors_on_device(self) -> list[torch.Tensor]:
        """Return anchors, outer state and errors, unless they are offloaded to the host."""
        local = self._backend.local
        if local is None or local.sync.offload == "cpu":
            return []
        common = local.common_part()
        state = [value for of in common.optimizer.state.values() for value in of.values()]
        errors = [error for part in local.groups_here() for error in part.errors.values()]
        return [*common.anchors.values(), *errors, *(value for value in state if isinstance(value, torch.Tensor))]

    def describe(self) -> str:
        """Return the schedule of the averages in one line."""
        sync = self._sync
        if sync is None:
            return "gradients are averaged in every step"
        start = f"after the first {sync.start_after} steps, " if sync.start_after else ""
        parts = f", a fragment of {sync.fragments} every {sync.every // sync.fragments}" if sync.fragments > 1 else ""
        late = f", applied {sync.overlap} step{'s' * (sync.overlap > 1)} later" if sync.overlap else ""
        small = f", sent as {sync.compression}" if sync.compression != "none" else ""
        return f"{start}groups step on their own and average their weights every {sync.every} steps{parts}{late}{small}"

    def state_dict(self, steps: int) -> dict[str, Any] | None:
        """Return the position in the round after ``steps``, for a checkpoint."""
        if self._backend.local is None:
            return None
        return {
            "outer_steps": self.outer_steps,
            "steps_alone": self._steps_alone(steps),
            "travelling": self._backend.local.travelling,
            "fragments": len(self._rounds.fragments) if self._rounds is not None else 1,
        }

    def load_state_dict(self, state: dict[str, Any] | None, steps: int, *, in_round: bool) -> None:
        """Continue to count outer steps.

        Args:
            state: the result of :meth:`state_dict`.
            steps: the steps of the checkpoint.
            in_round: whether groups go on with weights of their own. If not, they have the anchors.
        """
        self.outer_steps = (state or {}).get("outer_steps", 0)
        self._averaged_at, self.last = -1 if in_round else steps, None
        self._pending.clear()
        local = self._backend.local
        under_way = local.travelling if in_round and local is not None else None
        if under_way is not None and self._rounds is not None and under_way != self._rounds.travelling(steps):
            self._arrive()  # with these settings no later step would apply it

    def anchored(self) -> AbstractContextManager[None]:
        """A context in which the backend's module is the full model's part: the anchors."""
        local = self._backend.local
        return nullcontext() if local is None else local.anchored()

    def _arrive(self) -> None:
        assert self._backend.local is not None
        self.last = self._backend.local.arrive()
        self.outer_steps += 1


class LastSteps:
    """The loss and norm of the last step, and the number of skipped steps.

    With local steps (``sdp.sync``), the other groups' part of them arrives later. Reading them then
    waits for it.

    Args:
        local: the local steps of the run.
        groups: the number of groups.
        max_skips: the most steps that may be skipped in a row.
    """

    def __init__(self, local: LocalTraining, groups: int, max_skips: int):
        self._local, self._groups = local, groups
        self._loss: float | None = None
        self._norm: float | None = None
        self._skipped = 0
        self._in_a_row = SkippedSteps(max_skips)

    @property
    def loss(self) -> float | None:
        newest = self._local.newest()
        return newest.loss if newest is not None else self._loss

    @property
    def norm(self) -> float | None:
        newest = self._local.newest()
        return newest.norm if newest is not None else self._norm

    @property
    def was_skipped(self) -> bool:
        newest = self._local.newest()
        return newest.skipped > 0 if newest is not None else self._in_a_row.in_a_row > 0

    def skipped_until(self, step: int | None = None) -> int:
        """Count the skipped steps up to ``step``, one of the last steps. None: up to the last
        one.
        """
        return self._skipped + self._local.skipped_steps(step)

    def start_at(self, skipped: int) -> None:
        """Continue with ``skipped`` steps, none of them in a row."""
        self._skipped = skipped
        self._in_a_row.note(False)

    def note(self, loss: float, norm: float, *, skipped: bool, counts: bool, excused: bool) -> None:
        """Take note of a step of all groups.

        Args:
            loss: the mean loss of all ranks.
            norm: the norm of the full model's gradient.
            skipped: whether all groups skipped the step.
            counts: whether a skipped step counts as one in a row.
            excused: whether it does not count towards the limit of skipped steps.
        """
        self._loss, self._norm = loss, norm
        self._skipped += skipped
        self._in_a_row.note(skipped and counts, excused=excused)

    def report_skips(self, step: int, loss_scale: float | None) -> None:
        """Warn if ``step`` was skipped. Raises NonFiniteError after too many in a row."""
        if self._in_a_row.in_a_row:
            self._in_a_row.report(step, self._norm, loss_scale)

    def note_local_steps(self) -> list[tuple[int, LocalUpdate]]:
        """Take note of the local steps whose outcome all ranks know by now, and return them.

        Raises:
            NonFiniteError: A group has skipped too many steps in a row.
        """
        known = list(self._local.arrived(except_newest=self._local.lag))
        for step, update in known:
            self._loss, self._norm = update.loss, update.norm
            self._skipped += update.skipped > 0
            self._in_a_row.note(update.skipped > 0, groups=f"{update.skipped} of {self._groups} groups")
            self.report_skips(step, None)
        return known
