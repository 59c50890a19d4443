"""Local steps of a group whose weights are averaged by the service."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..config.method import SyncSection
from ..distributed.agreement import gather_json
from ..distributed.collectives import local_tensor
from ..errors import ServiceError
from ..optim.clip import squared_norm
from ..placement.tensor_info import Shard, TensorInfo
from ..stores.store import GroupStore, RankContext, frozen_copies
from ..sync.outer import Compression, OuterFacts, OuterSteps, rounded
from .anchors import Slice
from .data_order import ranges
from .rounds import Schedule

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
        self.schedule, self._seconds = Schedule(sync, steps), sync.service.heartbeat_seconds
        self.slot, self._ranks = -1, 1  # the group's number in the placement
        self.closed = 0  # the average whose anchors the group has
        self.lost = False  # what the ranks last agreed on; a heartbeat changes only the client's own flag
        self.is_renewed = False  # the group has joined again, so its data order starts over
        # What the group sends to the service at its start: "micro_batches" of a step, "width" (the
        # samples of one), "data_ranks", and what identifies the "data".
        self.start: dict[str, Any] = {}
        self._read = 0  # samples of the steps so far
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._share, self._width, self._leased = list[int](), 0, 0  # its samples, and the number of shares
        self._first = self._read  # how many samples it read before these
        self._samples = [0] * self.schedule.fragments  # since the last delivery of each fragment
        self._new_samples, self._losses, self._since = 0, 0.0, time.monotonic()

    def join(self) -> None:
        """Make the group a member, and begin to send heartbeats. Collective in the group."""
        if self._rank == 0:
            self.slot = self.client.join(self.slot if self.slot >= 0 else None, self._settings)
            self.client.beat_every(self._seconds)
        answers = gather_json([self.slot, self.client.session])
        self._ranks, (self.slot, self.client.session) = len(answers), answers[0]

    def enter(self, *, joins: bool) -> None:
        """Begin to take part in rounds, with new data. Collective in the group.

        If ``joins``, the group first becomes a member again, because it was dropped.
        """
        closed, self.is_renewed = None, joins
        while closed is None:
            if self._rank == 0:
                if joins and self.client.join(self.slot, self._settings) != self.slot:
                    raise ServiceError(
                        f"place {self.slot} of the run was given to another group meanwhile; start this group again"
                    )
                # No answer if the service has started again. Then join once more.
                closed = self.client.request("begin", **self.start).get("closed")
            closed, self.client.session = gather_json([closed, self.client.session])[0]
            joins = True
        self.closed, self.client.is_lost, self.lost = closed, False, False
        self._begin_anew()

    def ranges(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield where ``count`` of the group's samples are in the data: (first position, length).

        ``start`` is the number of samples that the group reads before these.
        """
        start -= self._first
        while len(self._share) * self._width < start + count:
            self.lease()
        yield from ranges(self._share, self._width, start, count)

    def lease(self) -> None:
        """Get one more share of the data from the service, once the run has started.

        A group that is not a member any more gets arbitrary samples. It joins again after its next
        step, which then does not count.
        """
        while (answer := self.client.request("lease", number=self._leased)).get("share") is None:
            if self.client.is_lost:
                answer = {"share": [0], "width": self._width or self.start["width"]}
                break
            time.sleep(0.1)
        self._share += answer["share"]
        self._width, self._leased = answer["width"], self._leased + 1

    def is_lost(self) -> bool:
        """Return whether the group is not a member any more. Collective in the group."""
        self.lost = any(gather_json(self.client.is_lost))
        if self.lost:  # a heartbeat may set it at any moment, so it is not set to False here
            self.client.is_lost = True
        return self.lost

    def note_step(self, loss: float) -> None:
        """Count the samples and the loss of a step, for the next delivery."""
        batch = self.start["micro_batches"] * self.start["width"]
        self._read += batch
        self._new_samples += batch
        self._losses += loss * batch if math.isfinite(loss) else 0.0
        self._samples = [samples + batch for samples in self._samples]

    def poll(self) -> dict[str, Any]:
        """Return the newest answer to a heartbeat, the same on all ranks. Collective in the group.

        Raises:
            ServiceError: The service has ended the run because of a problem.
        """
        status = {"closed": 0, "grace": False, **self.client.status, "lost": self.client.is_lost}
        return _checked(gather_json(status)[0])

    def claim(self, step: int) -> bool:
        """Return whether this group evaluates the full model after ``step``. Collective."""
        return bool(gather_json(self._rank == 0 and self.client.request("claim", step=step).get("mine"))[0])

    def report(self, line: Mapping[str, Any]) -> bool:
        """Send the service a line of evaluations.jsonl. Collective in the group.

        Returns False if the group has lost its membership meanwhile, so that the line does not
        count.
        """
        if self._rank == 0 and not self.client.is_lost:
            self.client.request("evaluation", line=dict(line))
        return not self.is_lost()

    def leave(self) -> None:
        """Tell the service that this group ends."""
        if self._rank == 0 and not self.client.is_lost:
            self.client.leave()

    def whole_units(self, infos: Sequence[TensorInfo], context: RankContext) -> dict[str, torch.Tensor]:
        """Fetch the parameters ``infos`` for an evaluation, and return them by name.

        The values are the service's weights. With tensor parallelism, each rank gets its own part.
        """
        found = {info.name: torch.zeros(info.tp_shape) for info in infos}
        shard = Shard(tp=context.at.tp)
        places = (Slice(info.canonical, info.offset(shard), tuple(info.tp_shape)) for info in infos)
        self.client.fetch(zip(places, found.values(), strict=True), pinned=True)
        return {name: tensor.to(context.device, context.compute_dtype) for name, tensor in found.items()}

    @contextmanager
    def lent(self, store: GroupStore, path: int) -> Iterator[None]:
        """A context with the service's weights of a path in the model. Collective in the group."""
        others, names = store.layout.parameters_at(path), store.layout.parameters
        lent = {name: info for name in store.stepped if (info := others[names[name].path]).name != name}
        store.reshard()
        kept = {name: local_tensor(store.stepped[name].tensor.detach()).clone() for name in lent}
        values = {name: torch.empty(weight.shape) for name, weight in kept.items()}
        places = (_slice(store, name, kept[name])._replace(name=lent[name].canonical) for name in kept)
        self.client.fetch(zip(places, values.values(), strict=True), pinned=True)
        _set_weights(store, values)
        try:
            yield
        finally:
            store.reshard()
            _set_weights(store, kept)

    def deliver(self, fragment: int, changes: Sequence[tuple[Slice, torch.Tensor, Compression]]) -> Future[None]:
        """Start to send this rank's changes of weights. The future is done when all are sent."""
        average, is_late = self.closed + 1, self.client.status.get("closed", 0) > self.closed
        mean = self._losses / self._new_samples if self._new_samples else 0.0
        facts = self._samples[fragment], self._new_samples, mean, time.monotonic() - self._since
        request = {"average": average, "rank": self._rank, "ranks": self._ranks, "facts": facts}
        session = self.client.session
        self._samples[fragment] = self._new_samples = 0
        self._losses, self._since = 0.0, time.monotonic()

        async def work() -> None:
            if not is_late:
                await self.client.send(average, changes)
            await self.client.post("deliver", {"session": session, **request})

        return self.client.start(work())

    def await_close(self, sending: Future[None]) -> bool:
        """Wait until ``sending`` is done and the next average has ended. Collective in the group.

        Sets :attr:`closed` to the number of the newest average that has ended. Returns True if this
        average contains the group's changes. Returns False if the group was late, or was dropped.
        A group that was dropped is :attr:`lost`.
        """
        average, status = self.closed + 1, {"closed": -1, "accepted": 0}
        sending.result()
        while self._rank == 0 and not self.client.is_lost and status["closed"] < average:
            status |= _checked(self.client.request("wait", average=average, seconds=self._seconds))
        if self.is_lost():
            return False
        self.closed, accepted = gather_json([status["closed"], status["accepted"]])[0]
        return accepted >= average == self.closed


@torch.no_grad()
def _set_weights(store: GroupStore, values: Mapping[str, torch.Tensor]) -> None:
    for name, value in values.items():
        local_tensor(store.stepped[name].tensor.detach()).copy_(value)
    store.weights_changed()


def _slice(store: GroupStore, name: str, tensor: torch.Tensor) -> Slice:
    """Return the place of this rank's part of a parameter in the full model."""
    (piece,) = store.pieces(name, tensor)
    return Slice(piece.info.canonical, tuple(piece.offset), tuple(tensor.shape))


def _checked(status: dict[str, Any]) -> dict[str, Any]:
    if status.get("problem") is not None:
        raise ServiceError(f"the service has ended the run: {status['problem']}")
    return status


class ServedSteps:
    """Averages the weights of a rank through the service, which takes the outer steps.

    ``fragments`` has the part of the model (fragment) of each parameter, by name. ``outer`` has the
    rank's weights after the last average (the anchors).
    """

    def __init__(self, store: GroupStore, sync: SyncSection, fragments: Mapping[str, int], outer: OuterSteps):
        self._store, self._sync, self._fragments, self._context = store, sync, fragments, store.context
        self._outer, self.service = outer, store.context.service
        if sync.compression == "int8":
            shared = [name for name in outer.anchors if len(store.layout.parameters[name].holders) > 1]
            outer.errors = {name: torch.zeros_like(outer.anchors[name]) for name in shared}
        self._under_way: tuple[int, dict[str, torch.Tensor], Future[None]] | None = None
        self._norms = torch.zeros(2, dtype=torch.float64, device=self._context.device)
        self.steps_since_start, self.was_accepted = 0, False

    def _weight(self, name: str) -> torch.Tensor:
        return local_tensor(self._store.stepped[name].tensor.detach())

    @property
    def fragment_under_way(self) -> int | None:
        """The fragment whose changes were sent and whose average was not fetched yet, or None."""
        return self._under_way[0] if self._under_way is not None else None

    @torch.no_grad()
    def start(self, fragment: int) -> None:
        """Send this rank's changes of the weights in ``fragment``, in the background."""
        changes: list[tuple[Slice, torch.Tensor, Compression]] = []
        before: dict[str, torch.Tensor] = {}
        self._norms, self.steps_since_start = torch.zeros_like(self._norms), 0
        for name in [name for name in self._outer.anchors if self._fragments[name] == fragment]:
            weight, one, anchor = self._weight(name), self._store.stepped[name], self._outer.anchors[name]
            if self._sync.overlap:
                before[name] = weight.clone()
            if not self._context.counts(one) or not weight.numel():
                continue
            change = anchor.to(weight.device) - weight
            self._norms += torch.stack([squared_norm([value], self._context.device) for value in (change, anchor)])
            kind: Compression = self._sync.compression if len(one.holders) > 1 else "none"
            if name in self._outer.errors:
                change, error = change + self._outer.errors[name].to(change.device), torch.empty_like(change)
                rounded(change, error, kind)
                self._outer.errors[name].copy_(error)
            changes.append((_slice(self._store, name, weight), change.to("cpu", copy=True), kind))
        self._under_way = fragment, before, self.service.deliver(fragment, changes)

    @torch.no_grad()
    def arrive(self) -> OuterFacts:
        """Wait for the average under way, and continue from the averaged weights. Collective.

        If the group was late, the service may have averaged more fragments (parts of the model).
        Then the averages of all these fragments replace the group's own weights.
        """
        assert self._under_way is not None, "start() must be called before arrive()"
        (fragment, before, sending), self._under_way = self._under_way, None
        started, first = self._context.clock(), self.service.closed + 1
        self.was_accepted = self.service.await_close(sending)
        if not self.service.lost:
            closed = range(first, self.service.closed + 1)
            self.take({self.service.schedule.fragment(average) for average in closed}, before)
        self._outer.exposed_seconds += self._context.clock() - started
        self._context.all_reduce_control(self._norms)
        change, anchor = self._norms.sqrt().tolist()
        return OuterFacts(fragment, change / anchor if anchor else 0.0, change)

    @torch.no_grad()
    def take(self, fragments: set[int], before: Mapping[str, torch.Tensor] | None = None) -> None:
        """Fetch the service's weights (anchors) of ``fragments``, and copy them into the model.

        Collective in the group. Nothing changes if the group is not a member any more. With an
        overlap, ``before`` are the weights when the delivery began. What the group has learned
        since then is added to the fetched weights if the delivery was accepted.
        """
        before = before if before and self.was_accepted else {}
        targets = {name: self._weight(name) for name in self._outer.anchors}
        targets |= {name: local_tensor(copy.detach()) for name, copy in frozen_copies(self._store).items()}
        wanted = {
            name: torch.empty(target.shape)
            for name, target in targets.items()
            if self._fragments[name] in fragments and target.numel()
        }
        self.service.client.fetch((_slice(self._store, name, value), value) for name, value in wanted.items())
        if self.service.is_lost():  # a service that starts again may have answered only some ranks
            return
        for name, value in wanted.items():
            target = targets[name]
            moved = target - before[name] if name in before else None
            target.copy_(value)
            if name in self._outer.anchors:
                self._outer.anchors[name].copy_(value)
            if moved is not None:  # keep what the group learned while the delivery was under way
                target.add_(moved)
        self._store.weights_changed()

    def enter(self, *, joins: bool) -> None:
        """Begin to take part in the run, with the service's weights. Collective in the group.

        If ``joins``, the group first becomes a member again, because it was dropped.
        """
        self._under_way, is_lost = None, True
        while is_lost:
            self.service.enter(joins=joins)
            self.take(set(self._fragments.values()))
            is_lost = joins = self.service.lost
        for error in self._outer.errors.values():
            error.zero_()
