"""Brings groups without state up to date, and waits for a holder of units that no living group
holds. The holder loads them from the newest checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..backends.sharded import ShardedBackend
from ..checkpoint.between_averages import load_anchors
from ..checkpoint.load import find, keys_in, load
from ..checkpoint.state import SavedState
from ..checkpoint.storage.directory import latest
from ..distributed.agreement import gather_json
from ..engine import SDPEngine
from ..errors import CheckpointError, PeerLostError
from ..placement.layout import Layout
from .coordination.assembly import Assembly
from .coordination.member import CoordinatorClient
from .coordination.records import GIVE_UP, STEP
from .living import lost_units
from .returning import exchange, facts_of, prepare, take_facts
from .returning_rounds import LocalFacts, exchange_between_rounds

LOADING = "loading lost units"  # a part, see Progress
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

    Attributes:
        reason: why this rank has given up, or None.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        layout: Layout,
        checkpoints: Path,
        seconds: float,
        stops: Callable[[], bool],
    ):
        self._client, self._layout, self._checkpoints = client, layout, checkpoints
        self._seconds, self._stops = seconds, stops
        self._since: float | None = None
        self.reason: str | None = None

    def phase(self, phase: int) -> int:
        """Return what comes next for this rank, which is ``phase`` if it does not wait."""
        if self._since is None:
            return phase
        return STEP if self.reason is None else GIVE_UP  # a group may join before a step only

    def end(self) -> None:
        """Note that the wait is over, because all units have holders."""
        self._since = self.reason = None

    def what_is_lost(self, lost: Sequence[str]) -> str:
        """Return the beginning of a message about ``lost`` units."""
        return f"no living group holds {lost[0]!r} ({len(lost)} of {len(self._layout.units)} units)"

    def look(self, lost: Sequence[str], found: Assembly) -> None:
        """Wait a moment for a group that holds the units ``lost``, which no group of ``found`` has.

        If none can come, or if the time is over, this gives up, see :attr:`reason`.
        """
        now, is_first = time.monotonic(), self._since is None
        self._since = now if self._since is None else self._since
        self.reason = self._obstacle(found, now - self._since)
        if self.reason is not None:
            return
        who = self._client.identity
        if is_first and (found.writer, 0) == (who.slot, who.inside):
            self._client.tell(f"{self.what_is_lost(lost)}; the others wait {self._seconds:g} s for one at most")
        time.sleep(_WAIT_SECONDS)

    def _obstacle(self, found: Assembly, waited: float) -> str | None:
        """Return why the units cannot be brought back, or None."""
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


def bring_up_to_date(
    engine: SDPEngine, backend: ShardedBackend, fresh: Sequence[int], load: Callable[[ShardedBackend, int], set[str]]
) -> None:
    """Give groups without state that of the others. Collective among the living ranks.

    Args:
        engine: this rank's engine.
        backend: its backend, connected to the living groups.
        fresh: the groups without state, by their numbers in the backend's layout.
        load: loads units of this group that no other group has, see :func:`load_lost_units`.
    """
    is_fresh = backend.at.sdp in fresh
    backend.shard_parameters()
    own = None
    if not is_fresh:
        own = facts_of(engine, backend) | ({"local": LocalFacts.of(backend).to_json()} if backend.local else {})
    everyones = gather_json(own)
    known = {rank: each for rank, each in enumerate(everyones) if each is not None}
    facts, loaded = next(iter(known.values())), set[str]()
    if is_fresh:
        prepare(backend, with_state=any(each["has_state"] for each in known.values()))
        loaded = load(backend, facts["steps"])
    if backend.local is None:
        exchange(backend, fresh)
    else:
        group_of = lambda rank: backend.layout.mesh.coordinates(rank).sdp  # noqa: E731
        states = {group_of(rank): LocalFacts.from_json(each["local"]) for rank, each in known.items()}
        exchange_between_rounds(backend, fresh, states, loaded=loaded)
    if is_fresh:
        rates = {name: rate for each in known.values() for name, rate in each["rates"].items()}
        take_facts(engine, backend, facts, rates)
    gather_json(None)  # nobody begins a step, whose limit may be shorter, before all have their state


def load_lost_units(
    client: CoordinatorClient,
    layout: Layout,
    checkpoints: Path,
    lost: Sequence[str],
    backend: ShardedBackend,
    steps: int,
) -> set[str]:
    """Load the units that this group must bring back, if it must, and tell the user. Not
    collective.

    Args:
        client: the connection to the coordinator.
        layout: the layout with all groups.
        checkpoints: the directory of the run's checkpoints.
        lost: units that no group with state holds.
        backend: the backend.
        steps: the number of steps of the run.

    Returns:
        The units.

    Raises:
        PeerLostError: they cannot be loaded. This is no mistake that would end the other groups.
    """
    who = client.identity
    mine = set(lost) - set(lost_units(layout, [who.slot]))
    if mine:
        names = f"{min(mine)!r} ({len(mine)} units)"
        try:
            with client.progress.during(LOADING):
                age = steps - load_held(backend, checkpoints)
        except CheckpointError as error:
            raise PeerLostError(f"group {who.slot} cannot bring {names} back: {error}") from None
        if who.inside == 0:
            client.tell(f"group {who.slot} brings {names} back from a checkpoint, {age} steps old")
    return mine


def load_held(backend: ShardedBackend, directory: Path) -> int:
    """Fill everything that this rank holds from the newest checkpoint. Not collective.

    With local steps, weights become the anchors, and inner moments the means of their holders.

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
    if backend.local is not None:
        assert isinstance(own, SavedState)
        load_anchors(path, state["files"], backend, own, saved, {}, alone=True)
        return int(state["global_steps"])
    tensors = {key: tensor for key, tensor in own.tensors(to_load=True).items() if key in saved}
    load(path, tensors, state["files"], alone=True)
    own.finish_load()
    return int(state["global_steps"])
