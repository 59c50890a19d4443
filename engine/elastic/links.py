"""This rank's process groups with other groups, which are made again in each generation."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from ..backends.sharded import ShardedBackend
from ..config.masking import Masking
from ..distributed import world
from ..distributed.world import World
from ..engine import SDPEngine
from ..placement.layout import Layout
from .abort import Abort, WaitLimits
from .coordination.assembly import Assembly
from .coordination.member import CoordinatorClient
from .living import living_layout, make_communicators
from .process_groups import Meeting


class Links:
    """The process groups of the present generation.

    Args:
        client: the connection to the coordinator.
        engine: the engine, which was built with all groups in mind.
        backend: its backend.
        limits: how long to wait for other groups.

    Attributes:
        abort: whether the present generation is over. None before the first one.
    """

    def __init__(self, client: CoordinatorClient, engine: SDPEngine, backend: ShardedBackend, limits: WaitLimits):
        self._client, self._engine, self._backend, self._limits = client, engine, backend, limits
        client.given_up = limits.given_up
        self._phases: Mapping[Masking, Layout] = backend.phases
        self._meeting: Meeting | None = None
        self.abort: Abort | None = None

    def leave(self) -> None:
        """Leave the process groups of the last generation behind."""
        if self._meeting is not None:
            self._meeting.leave()
            self._meeting = None

    def connect(self, found: Assembly) -> None:
        """Make the process groups of a generation, and let the backend and the data use them.

        Raises:
            StepAbortedError: the generation is over.
        """
        backend, engine = self._backend, self._engine
        phases: dict[Masking, Layout] = {key: living_layout(each, found.slots) for key, each in self._phases.items()}
        mesh = phases[backend.layout.masking].mesh
        rank = mesh.rank(self._index(found)) + self._client.identity.inside
        meeting = self._meet(found, rank, mesh.world_size)
        made = make_communicators(meeting, rank, phases, backend.communicators, replicate_inside=backend.stage == 0)
        backend.reconnect(phases, made)
        engine.follow_layout()
        sampler = engine.loader.sampler
        sampler.data_rank, sampler.data_ranks = mesh.data_rank(rank), mesh.data_ranks

    def connect_world(self, found: Assembly) -> None:
        """Make a process group of all ranks of ``found``, without anything else.

        Raises StepAbortedError.
        """
        who = self._client.identity
        self._meet(found, self._index(found) * who.ranks + who.inside, len(found.slots) * who.ranks)

    def _index(self, found: Assembly) -> int:
        return found.slots.index(self._client.identity.slot)

    def _meet(self, found: Assembly, rank: int, world_size: int) -> Meeting:
        client = self._client
        progress = client.progress
        abort = self.abort = Abort(
            client.abort.is_set, client.give_up, progress.note, progress.look, self._limits.given_up
        )
        store, listen = found.members[0].store, client.identity.listen
        meeting = self._meeting = Meeting(store, found.name, rank, dist.get_rank(), abort, self._limits, listen)
        world.enter(World(rank, world_size, meeting.make_group("world", range(world_size))))
        return meeting
