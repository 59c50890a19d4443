"""The wait for a holder of units that no living group holds.

The holder loads them from the newest checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..backends.fsdp2.backend import FSDP2Backend
from ..checkpoint.load import find, keys_in, load
from ..checkpoint.storage.directory import latest
from ..errors import CheckpointError, PeerLostError
from ..placement.layout import Layout
from .coordination.assembly import Assembly
from .coordination.member import CoordinatorClient
from .living import lost_units

_WAIT_SECONDS = 0.5  # between two looks for a holder


class UnitsLostError(PeerLostError):
    """No living group holds some units, so the run cannot go on."""


class HolderWait:
    """The wait for a group that holds units that no living group holds.

    Args:
        client: the connection to the coordinator.
        layout: the layout with all groups.
        checkpoints: the directory of the run's checkpoints.
        seconds: the longest wait.
        stops: returns whether the run is to stop.
        can_wait: whether a holder may take the units from a checkpoint. Not with local steps in
            this version.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        layout: Layout,
        checkpoints: Path,
        seconds: float,
        stops: Callable[[], bool],
        *,
        can_wait: bool = True,
    ):
        self._client, self._layout, self._checkpoints = client, layout, checkpoints
        self._seconds, self._stops, self._can_wait = seconds, stops, can_wait
        self._since: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether this rank waits."""
        return self._since is not None

    def end(self) -> None:
        """Note that the wait is over, because all units have holders."""
        self._since = None

    def look(self, lost: Sequence[str], found: Assembly) -> None:
        """Wait a moment for a group that holds the units ``lost``, which no group of ``found`` has.

        Raises UnitsLostError if none can come, or if the time is over.
        """
        now = time.monotonic()
        since = now if self._since is None else self._since
        units = f"no living group holds {lost[0]!r} ({len(lost)} of {len(self._layout.units)} units)"
        reason = self._obstacle(found, now - since)
        if reason is not None:
            self._client.fail(f"{units}, and {reason}")
            raise UnitsLostError(f"{units}, and {reason}")
        who = self._client.identity
        if self._since is None and (found.writer, 0) == (who.slot, who.inside):
            self._client.tell(f"{units}; the others wait {self._seconds:g} s for one at most")
        self._since = since
        time.sleep(_WAIT_SECONDS)

    def _obstacle(self, found: Assembly, waited: float) -> str | None:
        """Return why the units cannot be brought back, or None."""
        if not self._can_wait:
            return "with local steps (sdp.sync) no group brings it back from a checkpoint in this version"
        if lost_units(self._layout, [*found.slots, *found.expected]):
            return "no group that holds it will return"
        if not _has_checkpoint(self._checkpoints):
            return "there is no checkpoint to bring it back from"
        if self._stops():
            return "a signal ended the wait for one"
        return f"none came within {self._seconds:g} s" if waited > self._seconds else None


def _has_checkpoint(directory: Path) -> bool:
    try:
        return latest(directory) is not None
    except CheckpointError:  # the pointer is damaged
        return False


def load_held(backend: FSDP2Backend, directory: Path) -> int:
    """Fill everything that this rank holds from the newest checkpoint. Not collective.

    Args:
        backend: the backend, with optimizer state if the others have some.
        directory: the run's checkpoints.

    Returns:
        The number of steps of the checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    found = find(directory, None)
    if found is None:
        raise CheckpointError(f"{directory}: has no checkpoint from which lost units could be brought back")
    path, state = found
    saved, own = keys_in(path), backend.state_to_save()
    tensors = {key: tensor for key, tensor in own.tensors(to_load=True).items() if key in saved}
    load(path, tensors, state["files"], alone=True)
    own.finish_load()
    return int(state["global_steps"])
