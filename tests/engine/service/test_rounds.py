"""The rounds of a served run, driven by a clock that is an argument."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sdp.engine.batch.mixture import MixtureSampler, Source
from sdp.engine.batch.sampler import PathSampler, PathSamples
from sdp.engine.config.method import SyncSection
from sdp.engine.config.schema import Config
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.errors import ServiceError
from sdp.engine.placement.layout import Layout
from sdp.engine.service.anchors import Anchors, Slice
from sdp.engine.service.data_order import DataOrder, ranges
from sdp.engine.service.rounds import Member, Schedule, ServedRun, UnknownMemberError
from sdp.tests.support import models

PLACEMENT = {"layers.0": [0, 1], "layers.1": [1, 2], "layers.2": [2]}
SERVICE: dict[str, Any] = {"quorum": 0.5, "grace_seconds": 10.0, "heartbeat_seconds": 1.0}


class Clock:
    """A run, its members, and a time that moves when a test says so."""

    def __init__(self, steps: int = 8, **sync: Any):
        service = {**SERVICE, **sync.pop("service", {})}
        self.sync = SyncSection.model_validate({"every": 4, "service": service, **sync})
        model = models.build("mlp-of-3")
        sdp = {"groups": 3, "units": ["layers.*"], "placement": PLACEMENT}
        config = Config.model_validate({"sdp": {**sdp, "sync": self.sync.model_dump()}})
        layout = Layout.of(model, config, Mesh(3))
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self.anchors = Anchors(layout, self.sync, weights)
        self.run = ServedRun(self.anchors, self.sync, steps, 3, 10)
        self.now = 100.0
        self.members: list[Member] = []

    def start(self, count: int = 3) -> list[Member]:
        """Let groups join and begin, until the run has started."""
        for _ in range(count):
            member = self.run.join(None, self.now)
            assert member is not None
            self.members.append(member)
            self.run.begin(member, 1, 2, 1, self.now)
        assert not self.run.tick(self.now)
        return self.members

    def changes(self, member: Member, value: float) -> dict[Slice, torch.Tensor]:
        """Return a delivery in which every element is ``value``."""
        fragment = self.run.schedule.fragment(self.run.closed + 1)
        infos = [
            info for info in self.anchors.layout.held(member.slot) if self.anchors.fragments[info.name] == fragment
        ]
        return {
            Slice(info.name, (0,) * len(info.shape), tuple(info.shape)): torch.full(info.shape, value) for info in infos
        }

    def deliver(self, member: Member, value: float = 1.0, samples: int = 8) -> None:
        average = self.run.closed + 1
        self.run.receive(member, average, self.changes(member, value), 100)
        self.run.deliver(member, average, 0, 1, (samples, samples, 2.0, 1.0))

    def close(self) -> dict[str, Any]:
        """Close the open average, which must be ready."""
        assert self.run.tick(self.now)
        self.anchors.step(*self.run.begin_close())
        return self.run.finish_close(self.now)

    def pass_seconds(self, seconds: float, *silent: Member) -> bool:
        """Let time pass, while all members but the silent ones make requests."""
        ready = False
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            for member in self.members:
                if member not in silent and member.session in self.run.members:
                    self.run.member(member.session, self.now)
            ready = self.run.tick(self.now)
        return ready


def test_an_average_closes_when_all_living_groups_have_delivered() -> None:
    clock = Clock(outer_optimizer={"type": "SGD", "params": {"lr": 1.0}})
    before = clock.anchors.snapshot()
    a, b, c = clock.start()
    for member, value, samples in ((a, 1.0, 8), (b, 2.0, 8)):
        clock.run.lease(member, 0)
        clock.deliver(member, value, samples)
        assert not clock.run.tick(clock.now)
    clock.run.lease(c, 0)
    clock.deliver(c, 4.0, 4)
    line = clock.close()
    assert {key: line[key] for key in ("step", "round", "fragment", "groups", "alive", "late", "tokens", "loss")} == {
        "step": 4, "round": 1, "fragment": 0, "groups": 3, "alive": 3, "late": 0, "tokens": 200, "loss": 2.0
    }  # fmt: skip
    after = clock.anchors.snapshot()
    moved = {name: (before[name] - after[name]).unique() for name in before}
    for name, expected in (
        ("layers.0.up.weight", (8 * 1 + 8 * 2) / 16),
        ("layers.1.up.weight", (8 * 2 + 4 * 4) / 12),
        ("layers.2.up.weight", 4.0),
        ("stem.weight", (8 * 1 + 8 * 2 + 4 * 4) / 20),
    ):
        torch.testing.assert_close(moved[name].mean(), torch.tensor(expected), rtol=0, atol=1e-5, msg=name)


def test_the_grace_begins_with_the_quorum_and_ends_the_average() -> None:
    clock = Clock()
    a, b, c = clock.start()
    for member in (a, b, c):
        clock.run.lease(member, 0)
    clock.deliver(a)
    clock.pass_seconds(3)
    assert not clock.run.status(c)["grace"]  # one of three is less than half
    clock.deliver(b)
    assert not clock.run.tick(clock.now)
    assert clock.run.status(c)["grace"]
    assert not clock.pass_seconds(9.5)
    assert clock.pass_seconds(0.5)
    line = clock.close()
    assert line["groups"] == 2
    assert line["orphans"] == {"layers.2": 1}  # whose only holder did not deliver
    skipped = clock.run.skipped_samples
    clock.run.deliver(c, 1, 0, 1, (6, 6, 2.0, 1.0))
    status = clock.run.status(c)
    assert (status["accepted"], status["closed"], clock.run.late) == (0, 1, 1)
    assert clock.run.skipped_samples == skipped + 6


def test_a_group_that_delivers_in_the_grace_ends_it() -> None:
    clock = Clock()
    a, b, c = clock.start()
    for member in (a, b):
        clock.deliver(member)
    clock.run.tick(clock.now)
    clock.deliver(c, samples=2)
    assert clock.close()["groups"] == 3


def test_a_silent_group_is_dropped_and_its_samples_are_skipped() -> None:
    clock = Clock()
    a, b, c = clock.start()
    share = clock.run.lease(c, 0)
    assert share is not None
    assert len(share) == 4
    clock.deliver(a)
    clock.deliver(b)
    clock.pass_seconds(2, c)
    assert c.session in clock.run.members
    assert clock.pass_seconds(0.5, c)
    assert clock.run.skipped_samples == 8
    with pytest.raises(UnknownMemberError):
        clock.run.member(c.session, clock.now)
    assert clock.close()["alive"] == 2
    again = clock.run.join(c.slot, clock.now)
    assert again is not None
    assert again.slot == c.slot
    assert clock.run.begin(again, 1, 2, 1, clock.now) == 1


def test_a_stopped_service_does_not_drop_its_groups() -> None:
    clock = Clock()
    clock.start()
    clock.now += 60
    clock.run.tick(clock.now)
    assert len(clock.run.members) == 3


def test_a_run_starts_with_all_groups_or_after_the_grace() -> None:
    clock = Clock()
    clock.start(2)
    assert clock.run.lease(clock.members[0], 0) is None
    clock.pass_seconds(29.5)
    assert clock.run.lease(clock.members[0], 0) is None
    clock.pass_seconds(1)
    assert clock.run.lease(clock.members[0], 0) is not None
    full = Clock()
    full.start(3)
    assert full.run.lease(full.members[0], 0) is not None


def test_a_group_can_only_join_a_free_slot() -> None:
    clock = Clock()
    clock.start()
    assert clock.run.join(1, clock.now) is None
    clock.run.drop(clock.members[1].session, "left")
    member = clock.run.join(2, clock.now)
    assert member is not None
    assert member.slot == 1


def test_too_few_groups_end_the_run() -> None:
    paused = Clock(service={"min_groups": 3})
    paused.start()
    paused.now += 12  # a long outer step, in which a group leaves
    paused.run.drop(paused.members[0].session, "left")
    assert not paused.run.tick(paused.now) and paused.run.problem is None  # the grace begins now
    clock = Clock(service={"min_groups": 2})
    clock.start()
    clock.pass_seconds(8, *clock.members[1:])
    assert clock.run.problem is None
    clock.pass_seconds(6)
    assert clock.run.problem is not None
    assert "1 groups live" in clock.run.problem
    assert clock.run.has_ended


def test_a_delivery_of_a_dropped_group_counts() -> None:
    clock = Clock()
    a, b, c = clock.start()
    for member in (a, b, c):
        clock.run.lease(member, 0)
    clock.deliver(c)
    clock.pass_seconds(3, c)
    clock.deliver(a)
    clock.deliver(b)
    line = clock.close()
    assert (line["groups"], line["alive"], line["tokens"], line["skipped_tokens"]) == (3, 2, 240, 0)


def test_only_whole_deliveries_of_held_units_are_accepted() -> None:
    clock = Clock()
    a, b, _ = clock.start()
    changes = clock.changes(a, 1.0)
    missing = dict(itertools.islice(changes.items(), 1, None))
    clock.run.receive(a, 1, missing, 1)
    with pytest.raises(ServiceError, match="sent 0 elements of"):
        clock.run.deliver(a, 1, 0, 1, (1, 1, 0.0, 0.0))
    clock.run.receive(a, 1, clock.changes(b, 1.0) | changes, 1)
    with pytest.raises(ServiceError, match=r"elements of layers\.1"):
        clock.run.deliver(a, 1, 0, 1, (1, 1, 0.0, 0.0))
    with pytest.raises(ServiceError, match="is not in the model"):
        clock.run.receive(a, 1, {Slice("stem.weight", (1, 0), (10**9, 1)): torch.zeros(1)}, 1)


def test_every_rank_of_a_group_must_have_sent_its_slices() -> None:
    clock = Clock()
    a, *_ = clock.start()
    first, second = dict(list(clock.changes(a, 1.0).items())[::2]), dict(list(clock.changes(a, 1.0).items())[1::2])
    clock.run.receive(a, 1, first, 1)
    clock.run.deliver(a, 1, 0, 2, (4, 4, 0.0, 0.0))
    assert a.accepted == 0
    clock.run.receive(a, 1, second, 1)
    clock.run.deliver(a, 1, 1, 2, (0, 0, 0.0, 0.0))
    assert a.accepted == 1


@pytest.mark.parametrize(("every", "fragments", "steps"), [(4, 1, 8), (6, 3, 10), (4, 2, 8)])
def test_the_schedule_is_that_of_local_steps(every: int, fragments: int, steps: int) -> None:
    schedule = Schedule(SyncSection(every=every, fragments=fragments), steps)
    assert schedule.steps % every == 0
    assert schedule.steps >= steps
    found = [(schedule.due(k), schedule.fragment(k)) for k in range(1, schedule.last + 1)]
    expected = [
        (step, fragment)
        for step in range(1, schedule.steps + 1)
        for fragment in range(fragments)
        if (step + fragment * every // fragments) % every == 0
    ]
    assert found[: len(expected)] == expected
    assert sorted(found[len(expected) :]) == [(schedule.steps, fragment) for fragment in range(1, fragments)]


def test_data_is_dealt_as_without_a_service_and_never_twice() -> None:
    order = DataOrder(3, micro_batches=2, width=4)
    shares = [order.deal(slot, ()) for slot in (0, 1, 2)]
    # The micro-batches of step 0 come first, in the order of the groups.
    assert shares == [[0, 12], [4, 16], [8, 20]]
    assert list(ranges(shares[1], 4, 2, 4)) == [(6, 2), (16, 2)]
    assert (order.samples, order.end) == (24, 24)


def test_a_mixture_is_dealt_as_without_a_service() -> None:
    sources = [Source("a", "a", 50, 3.0), Source("b", "b", 40, 1.0)]
    order = DataOrder(3, micro_batches=2, width=4)
    for slot in range(3):
        expected = iter(MixtureSampler(sources, 4, slot, 3, seed=0))
        sampler, share = MixtureSampler(sources, 4, 0, 1, seed=0), order.deal(slot, ())
        sampler.ranges = partial(ranges, share, 4)
        found = iter(sampler)
        assert [next(found) for _ in range(2)] == [next(expected) for _ in range(2)]


def test_a_group_gets_the_data_of_its_path_only() -> None:
    members = [np.arange(0, 40, 2), np.arange(1, 25, 2)]
    order, found = DataOrder(4, micro_batches=2, width=4, paths=2), list[list[int]]()
    for slot in (0, 1, 2, 3, 3, 3):  # group 1 is absent in the second block
        sampler = PathSampler(PathSamples(members, 4, alone=slot), 4, 0, 1, seed=0)
        share = order.deal(slot, (1,) if len(found) > 3 else ())
        sampler.ranges = partial(ranges, share, 4)
        rows = iter(sampler)
        found.append([row for _ in range(2) for row in next(rows)])
        assert {row % 2 for row in found[-1]} == {slot % 2}
    for slot in range(4):
        rows = iter(PathSampler(PathSamples(members, 4), 4, slot, 4, seed=0))
        assert found[slot] == [row for _ in range(2) for row in next(rows)]
    restored = DataOrder(**asdict(order))
    assert restored.deal(1, ()) == [32, 40]
    assert (restored.samples, restored.end) == (7 * 8, 3 * 4 * 8)


def test_shares_of_absent_and_slow_groups_are_dealt_to_others() -> None:
    order, dealt = DataOrder(3, 2, 4), []
    absent = [order.deal(0, {2}) for _ in range(3)]  # group 2 is absent, group 1 is slow
    assert absent == [[0, 12], [8, 20], [24, 36]]
    for _ in range(12):
        dealt.append(order.deal(0, ()))
    restored = DataOrder(**asdict(order))
    dealt += [restored.deal(slot, ()) for slot in (0, 1, 2, 1, 1)]
    every = [first for first, _ in (*absent, *dealt)]
    assert len(set(every)) == len(every)
    assert 4 in every  # nobody leaves it behind


def test_a_service_goes_on_from_its_state() -> None:
    clock = Clock()
    for member in clock.start():
        clock.run.lease(member, 0)
        clock.deliver(member)
    clock.close()
    state, (weights, momenta) = clock.run.state_dict(), (clock.anchors.weights, clock.anchors.momenta)
    clock.run.lease(clock.members[0], 1)
    order = clock.run.order
    assert order is not None
    other = Clock()
    for mine, saved in ((other.anchors.weights, weights), (other.anchors.momenta, momenta)):
        assert mine.keys() == saved.keys()
        for name, tensor in mine.items():
            tensor.copy_(saved[name])
    other.run.load_state_dict(state, asdict(order))
    assert (other.run.closed, other.run.samples, other.run.skipped_samples) == (1, 24, 8)
    for run in (clock, other):
        run.members = []
        run.run.members.clear()
        for member in run.start():
            run.deliver(member, 0.5)
        run.close()
    ours, theirs = clock.anchors.weights, other.anchors.weights
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
