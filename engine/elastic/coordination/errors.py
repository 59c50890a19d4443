"""What may become of a step or of a group, as the coordinator says."""

from __future__ import annotations

from ...errors import PeerLostError


class StepAbortedError(Exception):
    """The present generation is over. What was under way in it is repeated in the next one."""


class UnansweredError(StepAbortedError):
    """The coordinator was gone before it told this group the decision."""


class CutOffError(PeerLostError):
    """The others go on without this group, which must start again."""


class RunFinishedError(Exception):
    """The others have finished the run."""
