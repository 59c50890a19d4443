"""Drives local steps (``sdp.sync``): which steps groups take on their own, and when their weights are averaged."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .backend import Backend
from .config.sync import SyncSection
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
        self._finished_at = -1
        self.last: OuterFacts | None = None

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
        if local is None or self._rounds is None or step == self._finished_at:
            return False
        before = self.outer_steps
        if local.travelling is not None:
            self._arrive()
        for fragment in self._rounds.fragments:
            if self._rounds.steps_alone(step, fragment):
                local.start(fragment)
                self._arrive()
        if self.outer_steps > before:
            self._finished_at = step
        return self.outer_steps > before

    def has_finished(self, step: int) -> bool:
        """Return whether :meth:`finish` averaged something after ``step``."""
        return self._finished_at == step

    def steps_dropped(self, steps: int) -> int:
        """Return how many inner steps a load drops that starts from the anchors of step ``steps``."""
        if self._rounds is None:
            return 0
        return max(self._rounds.steps_alone(steps, fragment) for fragment in self._rounds.fragments)

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
        late = f", applied {sync.overlap} steps later" if sync.overlap else ""
        small = f", sent as {sync.compression}" if sync.compression != "none" else ""
        return f"{start}groups step on their own and average their weights every {sync.every} steps{parts}{late}{small}"

    def state_dict(self, steps: int) -> dict[str, Any] | None:
        """Return the position in the round after ``steps``, for a checkpoint."""
        if self._backend.local is None:
            return None
        return {
            "outer_steps": self.outer_steps,
            "steps_alone": self.steps_dropped(steps),
            "travelling": self._backend.local.travelling,
            "fragments": len(self._rounds.fragments) if self._rounds is not None else 1,
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue to count outer steps."""
        self.outer_steps = (state or {}).get("outer_steps", 0)
        self._finished_at, self.last = -1, None

    def anchored(self) -> AbstractContextManager[None]:
        """A context in which the backend's module is the full model's part: the anchors."""
        local = self._backend.local
        return nullcontext() if local is None else local.anchored()

    def _arrive(self) -> None:
        assert self._backend.local is not None
        self.last = self._backend.local.arrive()
        self.outer_steps += 1
