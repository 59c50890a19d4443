"""The rounds of a run whose groups come and go: who takes part, and when averages close.

Averages are numbered 1, 2, … With rounds of H steps and P fragments, average k covers fragment
−k mod P, and is due after step k·H/P. A group sends changes for average k + 1 only when it has the
weights after average k. So one average is open at a time. This file reads no clock.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..config.method import SyncSection
from ..errors import ServiceError
from .anchors import Anchors, Delivery, Slice
from .data_order import DataOrder

log = logging.getLogger("sdp")
_START_SECONDS = 30.0  # by how many seconds processes that start together may differ


class Schedule:
    """Says when each average is due, and which part of the model (fragment) it covers.

    ``steps`` is rounded up to whole rounds. Averages are numbered from 1.
    """

    def __init__(self, sync: SyncSection, steps: int):
        self.every, self.fragments = sync.every, sync.fragments
        self.steps = -(-steps // sync.every) * sync.every
        # After the last step, the fragments follow that were averaged before it.
        self.last = self.steps * sync.fragments // sync.every + sync.fragments - 1

    def fragment(self, average: int) -> int:
        """Return which part of the model (fragment) the average with this number covers."""
        return -average % self.fragments

    def due(self, average: int) -> int:
        """Return the step after which an average is due. Number 0 means the initial weights."""
        return min(self.steps, average * self.every // self.fragments)


class UnknownMemberError(ServiceError):
    """A group is not a member: it was dropped, or the service has started again."""


@dataclass
class Member:
    """What the service knows of a group that takes part in the run."""

    slot: int  # its number in the placement
    session: str  # a secret that names this membership
    seen: float  # when it made its last request
    delivery: Delivery  # its changes for the open average
    begun: bool = False  # whether it has anchors, so that rounds wait for it
    shares: list[list[int]] = field(default_factory=list)  # the data that it was assigned
    unsettled: int = 0  # samples in shares, neither counted nor skipped yet
    accepted: int = 0  # the last average to which it has contributed
    pinned: dict[str, torch.Tensor] | None = None  # the anchors of its evaluation


class ServedRun:
    """The state of a run in the service: living groups, the open average, data, and counters.

    The run begins when all groups have begun, or when no further group has joined or begun for
    ``grace_seconds`` (at least 30 s). In all methods, ``now`` is the time in seconds.
    """

    def __init__(self, anchors: Anchors, sync: SyncSection, steps: int, groups: int, tokens_per_sample: int):
        assert sync.service is not None
        self.anchors, self._service, self.groups = anchors, sync.service, groups
        self.schedule, self.tokens_per_sample = Schedule(sync, steps), tokens_per_sample
        self.members: dict[str, Member] = {}  # by session
        self.order: DataOrder | None = None
        self.closed = self.late = 0  # averages so far, and deliveries that came too late
        self.samples = self.skipped_samples = 0  # that were counted, and that were skipped
        self.data_ranks = 1  # of the group that began last
        self.problem: str | None = None  # why the run has ended before its last step
        self.orphans: dict[str, int] = {}  # units that no holder delivered, with the number of the first such average
        self._deliveries: list[Delivery] = []  # of the open average
        self._is_closing = self._is_started = False
        self._closed_at: float | None = None
        self._grace_ends: float | None = None
        self._changed = 0.0  # when a group last joined or began
        self._ticked = self._few_since = math.inf  # the last tick, and since when too few groups live

    @property
    def step(self) -> int:
        """The number of steps in the rounds that have ended."""
        return min(self.schedule.steps, self.closed // self.schedule.fragments * self.schedule.every)

    @property
    def has_ended(self) -> bool:
        return self.problem is not None or self.closed == self.schedule.last

    def join(self, slot: int | None, now: float) -> Member | None:
        """Add a group to the run, and return it as a member, or None if the run has all groups.

        The group gets the number ``slot`` in the placement if it is free, and otherwise the first
        free number. Raises ServiceError if the run has ended.
        """
        if self.has_ended:
            raise ServiceError("the run has ended")
        if not (free := self._absent()):
            return None
        slot = slot if slot in free else free[0]
        member = Member(slot, secrets.token_hex(16), now, Delivery(slot))
        self.members[member.session], self._changed = member, now
        log.info("group %d joined, %d of %d live", member.slot, len(self.members), self.groups)
        return member

    def _absent(self) -> list[int]:
        return sorted({*range(self.groups)} - {member.slot for member in self.members.values()})

    def member(self, session: str, now: float) -> Member:
        """Return the member whose secret is ``session``, or raise UnknownMemberError."""
        if session not in self.members:
            raise UnknownMemberError("this group is no longer a member of the run; it must join again")
        self.members[session].seen = now
        return self.members[session]

    def drop(self, session: str, why: str) -> None:
        """Remove a member, and log ``why``. Samples that it did not deliver count as skipped."""
        member = self.members.pop(session)
        self.skipped_samples += member.unsettled
        log.info("group %d %s, %d of %d live", member.slot, why, len(self.members), self.groups)

    def begin(self, member: Member, micro_batches: int, width: int, data_ranks: int, now: float) -> int:
        """Let a member take part in rounds, and return the number of the newest average.

        In a step, the member reads ``micro_batches`` micro-batches of ``width`` samples, which
        ``data_ranks`` ranks of the member share.
        """
        self.data_ranks = data_ranks
        if self.order is None:
            paths = self.anchors.layout.paths
            self.order = DataOrder(self.groups, self.schedule.every * micro_batches, width, paths)
        member.begun, self._changed = True, now
        return self.closed

    def lease(self, member: Member, number: int) -> list[int] | None:
        """Return the member's share of the data by number, from 0. None before the run starts."""
        assert self.order is not None
        if number > (following := len(member.shares)):
            raise ServiceError(f"share {number} of the data was requested before share {following}; request in order")
        if self._is_started and number == following:
            member.shares.append(self.order.deal(member.slot, self._absent()))
            member.unsettled += len(member.shares[-1]) * self.order.width
        return member.shares[number] if self._is_started else None

    def receive(self, member: Member, average: int, changes: Mapping[Slice, torch.Tensor], nbytes: int) -> None:
        """Keep a member's changes for the open average. Slices that are sent again are replaced."""
        if self._is_open(average) and member.accepted < average:
            for piece in changes:
                self.anchors.info_of(piece)
            member.delivery.changes.update(changes)
            member.delivery.nbytes += nbytes

    def deliver(
        self, member: Member, average: int, rank: int, ranks: int, facts: tuple[int, int, float, float]
    ) -> None:
        """Record that one of the ``ranks`` ranks of a group has sent all its changes of weights.

        The delivery counts when all have. If the average is not open any more, the group's samples
        count as skipped. ``facts`` are samples, new samples, loss and seconds, used of rank 0 only.
        """
        if member.accepted >= average:
            return
        delivery = member.delivery
        if rank == 0:
            delivery.samples, delivery.new_samples, delivery.loss, delivery.seconds = facts
        delivery.ranks.add(rank)
        is_late = not self._is_open(average)
        if not is_late and len(delivery.ranks) < ranks:
            return
        member.delivery = Delivery(member.slot)
        if not is_late:
            self.anchors.check(member.slot, self.schedule.fragment(average), delivery.changes)
        settled = min(delivery.new_samples, member.unsettled)
        member.unsettled -= settled
        if is_late:
            self.late += delivery.samples > 0  # once, with the facts of rank 0
            self.skipped_samples += settled
        else:
            member.accepted, self.samples = average, self.samples + settled
            self._deliveries.append(delivery)

    def _is_open(self, average: int) -> bool:
        return average == self.closed + 1 and not self._is_closing and not self.has_ended

    def status(self, member: Member) -> dict[str, Any]:
        """Return what the service answers to a heartbeat of a member."""
        grace = (self._grace_ends is not None or self.problem is not None) and member.accepted <= self.closed
        return {"closed": self.closed, "accepted": member.accepted, "grace": grace}

    def tick(self, now: float) -> bool:
        """Drop groups that are gone, and return whether the open average must close now."""
        service, was_stopped = self._service, now - self._ticked > self._service.heartbeat_seconds
        self._ticked = now
        for session, member in list(self.members.items()):
            member.seen = now if was_stopped else member.seen  # the service itself could not listen
            if now - member.seen > 2 * service.heartbeat_seconds:
                self.drop(session, f"made no request for {now - member.seen:.1f} s and was dropped")
        living, count = [member for member in self.members.values() if member.begun], len(self.members)
        is_enough = count >= service.min_groups or self.has_ended or not self._is_started
        self._few_since = math.inf if is_enough else min(self._few_since, now)
        if now - self._few_since >= (service.grace_seconds if count else service.wait_seconds):
            self.problem = f"{count} groups live, fewer than sdp.sync.service.min_groups = {service.min_groups}"
        if not self._is_started:
            waits = count < self.groups and now - self._changed < max(service.grace_seconds, _START_SECONDS)
            self._is_started = len(living) == count >= service.min_groups and not waits
            return False
        if self.has_ended or self._is_closing or not self._deliveries:
            return False
        delivered = sum(member.accepted > self.closed for member in living)
        if self._grace_ends is None and delivered >= math.ceil(service.quorum * len(living)):
            self._grace_ends = now + service.grace_seconds
        return self._grace_ends is not None and (delivered == len(living) or now >= self._grace_ends)

    def begin_close(self) -> tuple[int, list[Delivery]]:
        """Accept no more deliveries for the open average. Returns its fragment and deliveries."""
        self._is_closing = True
        return self.schedule.fragment(self.closed + 1), self._deliveries

    def finish_close(self, now: float) -> dict[str, Any]:
        """Close the open average after the outer step. Returns its line of metrics.jsonl."""
        deliveries, self._deliveries = self._deliveries, []
        self.closed, self._is_closing, self._grace_ends = self.closed + 1, False, None
        fragment, tokens = self.schedule.fragment(self.closed), self.tokens_per_sample
        infos, slots = self.anchors.layout.parameters.values(), {one.slot for one in deliveries}
        of_fragment = [info for info in infos if info.trainable and self.anchors.fragments[info.name] == fragment]
        for unit, holders in {info.unit: info.holders for info in of_fragment}.items():
            if slots & set(holders):
                self.orphans.pop(unit, None)
            elif self.orphans.setdefault(unit, self.closed) == self.closed:
                log.warning("unit %s: no changes came in time from holders %s; its weights stay", unit, holders)
        new = sum(one.new_samples for one in deliveries)
        loss = sum(one.loss * one.new_samples for one in deliveries) / new if new else None
        seconds, self._closed_at = now - (self._closed_at or now), now
        by_group = {
            str(one.slot): {"tokens": one.new_samples * tokens, "seconds": one.seconds, "bytes": one.nbytes}
            for one in deliveries
        }
        return {
            "step": self.step, "round": -(-self.closed // self.schedule.fragments), "fragment": fragment,
            "outer_step": self.closed, "loss": loss, "groups": len(by_group), "alive": len(self.members),
            "tokens": self.samples * tokens, "samples": self.samples, "skipped_tokens": self.skipped_samples * tokens,
            "late": self.late, "seconds": seconds or None, "bytes": sum(one.nbytes for one in deliveries),
            "by_group": by_group, "orphans": dict(self.orphans),
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the run as JSON. A checkpoint saves the data order separately."""
        return {"closed": self.closed, "samples": self.samples, "late": self.late, "orphans": dict(self.orphans)}

    def load_state_dict(self, state: Mapping[str, Any] | None, order: Mapping[str, Any] | None) -> None:
        """Continue a run from a saved ``state`` and data ``order`` (None if not saved).

        Samples that were assigned, but not delivered when ``state`` was saved, count as skipped.
        """
        if state is not None:
            self.closed, self.samples, self.late = state["closed"], state["samples"], state["late"]
            self.orphans = dict(state["orphans"])
        self.order = DataOrder(**order) if order is not None else None
        self.skipped_samples = (self.order.samples if self.order is not None else 0) - self.samples
