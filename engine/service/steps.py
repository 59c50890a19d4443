"""Local steps of a group whose weights are averaged by the service."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from ..config.method import SyncSection
from ..distributed.agreement import gather_json
from ..distributed.collectives import local_tensor
from ..errors import ServiceError
from ..placement.tensor_info import Shard, TensorInfo
from ..stores.store import GroupStore, RankContext, frozen_copies
from ..sync.outer import Average, Compression, OuterFacts, OuterSteps, fragments_of, quantise, restore, swap
from .anchors import Slice
from .data_order import ranges
from .rounds import Schedule
from .wire import Part

if TYPE_CHECKING:
    from .client import Client  # imports aiohttp


class Membership:
    """The connection of one rank of a group to the service of a run.

    Through this object, a group joins, gets its data, and delivers changes of its weights. All
    ranks of the group make the same calls. The service and all groups must have equal ``settings``.
    """

    def __init__(self, client: Client, sync: SyncSection, steps: int, settings: dict[str, Any], rank: int):
        assert sync.service is not None
        self.client, self._settings, self._rank = client, settings, rank
        self.leave = client.leave  # any rank may call it; later calls do nothing
        self.schedule = Schedule(sync, steps)
        self.slot, self._ranks = -1, 1  # the group's number in the placement
        self.closed = 0  # the average whose anchors the group has
        self.lost = False  # what the ranks last agreed on; a heartbeat changes only the client's own flag
        self.is_renewed = False  # the group has joined again, so its data order starts over
        self.start: dict[str, Any] = {}  # "micro_batches" of a step, "width" (of one), "data_ranks", "data" (a hash)
        self._read = 0  # samples of the steps so far
        if rank == 0:
            client.beat_every(sync.service.heartbeat_seconds)

    def agree(self, value: Any = None) -> Any:
        """Return the ``value`` (JSON) of rank 0, and set :attr:`lost`. Collective in the group."""
        answers = gather_json([value, self.client.is_lost])
        self.lost = self.client.is_lost = any(is_lost for _, is_lost in answers)
        return answers[0][0]

    def _ask(self, action: str, **values: Any) -> dict[str, Any]:
        """Let rank 0 send a request. Returns its answer, or {} if the group is :attr:`lost`."""
        return self.agree(self.client.request(action, **values) if self._rank == 0 else {})

    def join(self) -> None:
        """Make the group a member of the run, in its earlier slot. Collective in the group."""
        before = self.slot if self.slot >= 0 else None
        if self._rank == 0:
            self.slot = self.client.join(before, self._settings)
            if before not in (None, self.slot):
                raise ServiceError(f"place {before} of the run has another group now; start this group again")
        answers = gather_json([self.slot, self.client.session])
        self._ranks, (self.slot, self.client.session) = len(answers), answers[0]
        self.client.is_lost = False

    def enter(self) -> None:
        """Begin to take part in rounds, with new data. Collective in the group.

        A group that is :attr:`lost` first joins again. If the service starts again meanwhile, the
        group is lost afterwards.
        """
        if self.lost:
            self.join()
            self.is_renewed = True
        answer = self._ask("begin", **self.start)
        self.closed, self._width = answer.get("closed", 0), answer.get("width", self.start["width"])
        self._share, self._leased = list[int](), 0  # its samples, and the number of shares
        self._first = self._read  # how many samples it read before these
        self._delivered = [self._read] * self.schedule.fragments  # ``_read`` at the last delivery of each fragment
        self._losses, self._since = 0.0, time.monotonic()

    def ranges(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield where the group's samples from ``start`` on are: (first position, length)."""
        start -= self._first
        while len(self._share) * self._width < start + count:
            self.lease()
        yield from ranges(self._share, self._width, start, count)

    def lease(self) -> None:
        """Get one more share of the data from the service, once the run has started.

        A lost group gets arbitrary samples. It joins again after its step, which does not count.
        """
        while (share := self.client.request("lease", number=self._leased).get("share", [0])) is None:
            time.sleep(0.1)
        self._share, self._leased = self._share + share, self._leased + 1

    def note_step(self, loss: float) -> None:
        """Count the samples and the loss of a step, for the next delivery."""
        batch = self.start["micro_batches"] * self.start["width"]
        self._read += batch
        self._losses += loss * batch if math.isfinite(loss) else 0.0

    def claim(self, step: int) -> bool:
        """Return whether this group evaluates the full model after ``step``. Collective."""
        return self._ask("claim", step=step).get("mine", False)

    def report(self, line: Mapping[str, Any]) -> bool:
        """Send a line of evaluations.jsonl. Returns whether it counts: not if the group is lost."""
        self._ask("evaluation", line=dict(line))
        return not self.lost

    def whole_units(self, infos: Sequence[TensorInfo], context: RankContext) -> dict[str, torch.Tensor]:
        """Fetch the service's weights of ``infos``, by name. Tensor-parallel ranks get parts."""
        found = {info.name: torch.zeros(info.tp_shape) for info in infos}
        shard = Shard(tp=context.at.tp)
        places = (Slice(info.canonical, info.offset(shard), tuple(info.tp_shape)) for info in infos)
        self.client.fetch(zip(places, found.values(), strict=True))
        return {name: tensor.to(context.device, context.compute_dtype) for name, tensor in found.items()}

    @contextmanager
    def lent(self, store: GroupStore, path: int) -> Iterator[None]:
        """A context with the service's weights of a path in the model. Collective in the group."""
        others, names = store.layout.parameters_at(path), store.layout.parameters
        lent = {name: info for name in store.stepped if (info := others[names[name].path]).name != name}
        weight = lambda name: local_tensor(store.stepped[name].tensor.detach())  # noqa: E731 (FSDP2 may move shards)
        store.reshard()
        values = {name: torch.empty(weight(name).shape) for name in lent}
        places = (_slice(store, name, value)._replace(name=lent[name].canonical) for name, value in values.items())
        self.client.fetch(zip(places, values.values(), strict=True))
        swap(values, weight)
        try:
            yield
        finally:
            store.reshard()
            swap(values, weight)

    def deliver(self, fragment: int, changes: Sequence[Part]) -> Future[None]:
        """Start to send this rank's changes of weights. The future is done when all are sent."""
        is_late = self.client.status["closed"] > self.closed
        now, samples, new = time.monotonic(), self._read - self._delivered[fragment], self._read - max(self._delivered)
        request = {
            "session": self.client.session, "average": self.closed + 1, "rank": self._rank, "ranks": self._ranks,
            "facts": [samples, new, self._losses / max(1, new), now - self._since],
        }  # fmt: skip
        self._delivered[fragment], self._losses, self._since = self._read, 0.0, now
        return self.client.start(self.client.deliver(request, [] if is_late else changes))

    def await_close(self, sending: Future[None]) -> bool:
        """Wait until ``sending`` is done and the next average has ended. Collective in the group.

        Sets :attr:`closed` to the number of the newest average that has ended. Returns whether this
        average contains the group's changes: not if the group was late, or is :attr:`lost`.
        """
        average, status = self.closed + 1, {"closed": self.closed, "accepted": 0}
        sending.result()
        while self._rank == 0 and not self.client.is_lost and status["closed"] < average:
            status |= self.client.request("heartbeat", average=average)
        status = self.agree(status)
        self.closed = status["closed"]
        return not self.lost and status["accepted"] >= average == self.closed


def _slice(store: GroupStore, name: str, tensor: torch.Tensor) -> Slice:
    """Return the place of this rank's part of a parameter in the full model."""
    (piece,) = store.pieces(name, tensor)
    return Slice(piece.info.canonical, tuple(piece.offset), tuple(tensor.shape))


class ServedSteps(OuterSteps):
    """Averages the weights of a rank through the service, which takes the outer steps."""

    def __init__(self, store: GroupStore, sync: SyncSection, *args: Any, **options: Any):
        super().__init__(sync, *args, **options)
        self._store, self.service = store, store.context.service
        self._fragments = fragments_of(store.layout, sync.fragments)
        self._sending, self._facts = Future[None](), OuterFacts(0, 0.0, 0.0)
        self._before: dict[str, torch.Tensor] = {}  # with overlap, the weights when the average started
        self.steps_since_start, self.was_accepted = 0, False

    @torch.no_grad()
    def start(self, fragment: int) -> None:
        """Send this rank's changes of weights in ``fragment``, in the background. Collective."""
        changes, norms = list[Part](), torch.zeros(3, dtype=torch.float64, device=self._device)
        self._before, self.steps_since_start = {}, 0
        for names, holders, _ in self._buckets.get(fragment, ()):
            kind: Compression = self._sync.compression if len(holders) > 1 else "none"
            self._before |= {name: self._weights(name).clone() for name in names if self._sync.overlap}
            moved = self._changes(names)
            norms += self._squared_norms(Average(names, [], None, None, keeps_weights=False), moved)
            for name, change in zip(names, moved, strict=True):
                if not self._counts(name) or not change.numel():
                    continue
                if name in self.errors:  # the rounding errors of the last delivery are sent, too
                    change = change + self.errors[name].to(change.device)
                    self.errors[name].copy_(change - restore(*quantise(change), change.shape))
                changes.append((_slice(self._store, name, change), change.to("cpu", copy=True), kind))
        self._under_way, self._sending = (fragment, []), self.service.deliver(fragment, changes)
        self._sum(norms)
        moved, anchor, _ = norms.sqrt().tolist()
        self._facts = OuterFacts(fragment, moved / anchor if anchor else 0.0, moved)

    @torch.no_grad()
    def arrive(self) -> OuterFacts:
        """Wait for the average under way, and continue from the averaged weights. Collective.

        If the group was late, the service may have averaged more fragments (parts of the model).
        Then the averages of all these fragments replace the group's own weights.
        """
        assert self._under_way is not None, "start() must be called before arrive()"
        self._under_way, started, first = None, self._clock(), self.service.closed + 1
        self.was_accepted = self.service.await_close(self._sending)
        if not self.service.lost:
            closed = {self.service.schedule.fragment(average) for average in range(first, self.service.closed + 1)}
            self.take(closed, self._before if self.was_accepted else {})
        self.exposed_seconds += self._clock() - started
        return self._facts

    @torch.no_grad()
    def take(self, fragments: set[int], before: Mapping[str, torch.Tensor] = MappingProxyType({})) -> bool:
        """Fetch the service's weights (anchors) of ``fragments``, and copy them into the model.

        Collective in the group. Returns False, and changes nothing, if the group is lost. What the
        group has learned since it had the weights ``before`` is added to the fetched weights.
        """
        targets = {name: self._weights(name) for name in self.anchors}
        targets |= {name: local_tensor(copy.detach()) for name, copy in frozen_copies(self._store).items()}
        wanted = {
            name: torch.empty(target.shape)
            for name, target in targets.items()
            if self._fragments[name] in fragments and target.numel()
        }
        self.service.client.fetch((_slice(self._store, name, value), value) for name, value in wanted.items())
        self.service.agree()
        if self.service.lost:  # a service that starts again may have answered only some ranks
            return False
        for name, value in wanted.items():
            target, anchor = targets[name], value.to(targets[name].device)
            target.copy_(anchor + (target - before[name]) if name in before else anchor)
            if name in self.anchors:
                self.anchors[name].copy_(value)
        return True

    def enter(self) -> None:
        """Take part in the run (again), with the service's weights. Collective in the group."""
        self.service.enter()
        while not self.take(set(self._fragments.values())):
            self.service.enter()
        self.reset()
