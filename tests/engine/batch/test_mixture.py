"""Mixtures: proportions, exact resumption, changed weights, every sample once per epoch."""

import bisect
import itertools
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sdp.engine.batch.loader import ResumableLoader
from sdp.engine.batch.mixture import BLOCK, MixtureSampler, Source
from sdp.engine.batch.sampler import ResumableBatchSampler
from sdp.engine.errors import CheckpointError, DataError

SAMPLES = (700, 90, 2500, 13)
ENDS = list(itertools.accumulate(SAMPLES))
weights = st.lists(st.floats(0.01, 10), min_size=2, max_size=4)


def sources(values, samples=SAMPLES) -> list[Source]:
    return [Source(f"s{i}", f"key{i}", samples[i], value) for i, value in enumerate(values)]


def sampler(values, micro=1, rank=0, ranks=1, seed=5) -> MixtureSampler:
    return MixtureSampler(sources(values), micro, rank, ranks, seed)


def read(one: ResumableBatchSampler, batches: int) -> list[int]:
    return [index for batch in itertools.islice(one, batches) for index in batch]


def source_of(index: int) -> int:
    return bisect.bisect_right(ENDS, index)


def check_each_sample_once_per_epoch(indices: list[int]) -> None:
    """Samples of a source are whole epochs without a repetition, then a part of one."""
    for source, of_source in itertools.groupby(sorted(indices, key=source_of), key=source_of):
        own, samples = list(of_source), SAMPLES[source]  # sorted() is stable: the order of the run
        for start in range(0, len(own), samples):
            part = own[start : start + samples]
            assert len(set(part)) == len(part)


@given(values=weights, blocks=st.integers(1, 6))
@settings(deadline=None, max_examples=50)
def test_after_whole_blocks_the_proportions_are_those_of_the_weights(values, blocks):
    counts = Counter(source_of(index) for index in read(sampler(values), blocks * BLOCK))
    for source, value in enumerate(values):
        share = value / sum(values)
        assert abs(counts[source] - share * blocks * BLOCK) < len(values)


@given(values=weights, batches=st.integers(1, 4000))
@settings(deadline=None, max_examples=40)
def test_every_sample_at_most_once_per_epoch_of_its_source(values, batches):
    one = sampler(values)
    indices = read(one, batches)
    check_each_sample_once_per_epoch(indices)
    counts = Counter(f"s{source_of(index)}" for index in indices)
    assert {name: count for name, count in one.counts_at(batches).items() if count} == counts


@given(
    values=weights,
    before=st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 90)),
    after=st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 90)),
)
@settings(deadline=None, max_examples=40)
def test_any_layout_reads_the_same_order_and_goes_on_where_another_stopped(values, before, after):
    def read_global(state, micro, ranks, batches):
        readers = [sampler(values, micro, rank, ranks) for rank in range(ranks)]
        for reader in readers:
            if state is not None:
                reader.load_state_dict(json.loads(json.dumps(state)))
        per_rank = [list(itertools.islice(reader, batches)) for reader in readers]
        states = [reader.state_at((state or {}).get("consumed", 0) + batches * micro * ranks) for reader in readers]
        assert all(other == states[0] for other in states)
        return [index for batch in range(batches) for rank in range(ranks) for index in per_rank[rank][batch]], states[
            0
        ]

    first, state = read_global(None, *before)
    second, _ = read_global(state, *after)
    whole, _ = read_global(None, 1, 1, len(first) + len(second))
    assert first + second == whole


@given(phases=st.lists(st.tuples(weights, st.integers(1, 1500)), min_size=2, max_size=4))
@settings(deadline=None, max_examples=40)
def test_weights_and_sources_may_change_and_no_sample_is_repeated(phases):
    indices, state = [], None
    for values, batches in phases:
        one = sampler(values)
        if state is not None:
            one.load_state_dict(json.loads(json.dumps(state)))
        new = read(one, batches)
        indices += new
        state = one.state_at(len(indices))
        assert state["consumed"] == len(indices)
        # The new proportions hold from the change on.
        whole = len(new) // BLOCK * BLOCK
        counts = Counter(source_of(index) for index in new[:whole])
        if state["block"] != len(indices) - len(new) % BLOCK:
            continue  # the weights did not change, so the blocks began earlier
        for source, value in enumerate(values):
            assert abs(counts[source] - value / sum(values) * whole) < len(values)
    check_each_sample_once_per_epoch(indices)


def test_a_source_goes_on_after_it_was_away_and_in_another_place():
    one = sampler([1.0, 1.0])
    first = read(one, 100)
    two = MixtureSampler(sources([1.0, 1.0])[:1], 1, 0, 1, 5)
    two.load_state_dict(one.state_at(100))
    read(two, 50)
    three = MixtureSampler(sources([1.0, 1.0])[::-1], 1, 0, 1, 5)  # indices of the second source come first
    three.load_state_dict(json.loads(json.dumps(two.state_at(150))))
    later = [index for index in read(three, 100) if index < SAMPLES[1]]
    before = [index - SAMPLES[0] for index in first if index >= SAMPLES[0]]
    assert sorted([*before, *later[: SAMPLES[1] - len(before)]]) == list(range(SAMPLES[1]))


class Numbers:
    sources = sources([3.0, 1.0])

    def __len__(self) -> int:
        return sum(SAMPLES[:2])

    def __getitem__(self, item: int) -> int:
        return item


@pytest.mark.parametrize("workers", [0, 1])
def test_the_state_of_a_loader_does_not_count_what_was_read_ahead(workers):
    loader = ResumableLoader(Numbers(), 4, seed=1, num_workers=workers)  # type: ignore[arg-type]
    batches = iter(loader)
    for _ in range(300):
        next(batches)
    loader.fetch_ahead()
    state = json.loads(json.dumps(loader.state_dict()))
    expected = [next(batches).tolist() for _ in range(30)]
    other = ResumableLoader(Numbers(), 4, seed=1)  # type: ignore[arg-type]
    other.load_state_dict(state)
    assert [batch.tolist() for batch in itertools.islice(other, 30)] == expected


def test_states_that_do_not_fit_are_refused():
    one, plain = sampler([1.0, 2.0]), ResumableBatchSampler(SAMPLES[0] + SAMPLES[1], 1, 0, 1, seed=5)
    state = one.state_at(10)
    with pytest.raises(CheckpointError, match="the saved run read several sources, but this run reads one data set"):
        plain.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"written with data\.path, but this run has data\.sources"):
        one.load_state_dict(plain.state_at(0))
    with pytest.raises(CheckpointError, match="read 700 samples of 's0', which now has 10"):
        MixtureSampler(sources([1.0, 2.0], (10, 90)), 1, 0, 1, 5).load_state_dict(state)
    with pytest.raises(CheckpointError, match="damaged, 'sources' does not have the counts"):
        one.load_state_dict({**state, "sources": {"key0": {"read": "x"}}})
    with pytest.raises(CheckpointError, match="shuffled with seed 5, but this run has seed 6"):
        sampler([1.0, 2.0], seed=6).load_state_dict(state)
    with pytest.raises(DataError, match="the source s1 has no samples"):
        MixtureSampler(sources([1.0, 2.0], (10, 0)), 1, 0, 1, 5)
