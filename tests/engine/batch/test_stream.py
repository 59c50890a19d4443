"""Iterable data sets: ranks read different samples, and resume where they stopped."""

import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.batch.loader import EpochLoader, ResumableLoader, make_loader
from sdp.engine.batch.stream import StreamLoader
from sdp.engine.errors import CheckpointError, ConfigError, DataError
from sdp.tests.support.models import IN, OUT, Mlp
from sdp.tests.support.ranks import RankPool
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler


class Counting(IterableDataset):
    """Gives 0, 1, … ``length`` - 1, plus 100 × the epoch. Counts what it gave."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch, self.given = length, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            self.given += 1
            yield index + 100 * self.epoch


class Stateful(Counting):
    """Continues from a state, as torchdata's convention has it."""

    def __init__(self, length: int, start: Any = 0) -> None:
        super().__init__(length)
        self._next = start

    def __iter__(self) -> Iterator[int]:
        for index in range(self._next, self.length):
            self.given += 1
            self._next = index + 1
            yield index + 100 * self.epoch
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


class Tagged(Stateful):
    """Its state is not JSON."""

    def state_dict(self) -> dict[Any, Any]:
        return {0: (self._next,)}


def loaders(kind: type[Counting], length: int, micro: int, ranks: int) -> list[StreamLoader]:
    return [StreamLoader(kind(length), micro, rank, ranks) for rank in range(ranks)]


def read(loader: Any, count: int | None = None) -> list[int]:
    return [number for batch in itertools.islice(iter(loader), count) for number in batch.tolist()]


@pytest.mark.parametrize("kind", [Counting, Stateful])
def test_ranks_read_different_rows_in_the_order_of_the_stream(kind):
    rows = [read(loader, 3) for loader in loaders(kind, 100, 2, 2)]
    assert rows == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]


def test_any_layout_reads_the_same_global_batches():
    for ranks, micro in ((1, 6), (2, 3), (3, 2), (6, 1)):
        batches = zip(*(itertools.islice(iter(each), 4) for each in loaders(Counting, 10, micro, ranks)), strict=True)
        order = [number for batch in batches for part in batch for number in part.tolist()]
        assert order == [*range(10), *range(100, 110), *range(200, 204)]


def test_the_loader_ends_with_each_pass_and_leaves_nothing_out():
    loader = EpochLoader(StreamLoader(Counting(7), 2))
    assert [read(loader), read(loader)] == [[0, 1, 2, 3, 4, 5, 6, 100], [101, 102, 103, 104, 105, 106]]
    with pytest.raises(TypeError, match="has no length"):
        len(loader)


def test_a_pass_of_whole_batches_ends_without_a_batch_of_the_next_one():
    loader = EpochLoader(StreamLoader(Counting(4), 2))
    assert [read(loader), read(loader)] == [[0, 1, 2, 3], [100, 101, 102, 103]]


def test_an_iterator_is_read_once_and_its_rest_is_left_out():
    loaders_of_iterators = [StreamLoader(iter(range(9)), 2, rank, 2) for rank in range(2)]
    assert [read(each) for each in loaders_of_iterators] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert read(loaders_of_iterators[0]) == []


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("kind", "skips"), [(Stateful, False), (Counting, True), (Tagged, True)])
def test_a_resumed_run_continues_exactly_on_any_number_of_ranks(kind, skips, ahead, caplog):
    first = StreamLoader(kind(10), 2, 0, 2)
    batches = iter(first)
    before = [next(batches).tolist() for _ in range(3)]  # the third one extends into the second pass
    if ahead:
        first.fetch_ahead()  # is not in the state
    state = json.loads(json.dumps(first.state_dict()))
    assert before == [[0, 1], [4, 5], [8, 9]]
    assert first.consumed == 12
    resumed = loaders(kind, 10, 1, 4)
    with caplog.at_level(logging.WARNING, "sdp"):
        for loader in resumed:
            loader.load_state_dict(state)
    expected = [[102, 106], [103, 107], [104, 108], [105, 109]]
    assert [read(loader, 2) for loader in resumed] == expected
    assert ("read and dropped" in caplog.text) == skips
    assert resumed[0].stream.given == (10 if skips else 8)
    if ahead:
        assert next(batches).tolist() == [102, 103]


def test_an_iterator_resumes_by_skipping_and_cannot_go_back():
    first = StreamLoader(iter(range(20)), 2)
    assert read(first, 2) == [0, 1, 2, 3]
    state = first.state_dict()
    resumed = StreamLoader(iter(range(20)), 2)
    resumed.load_state_dict(state)
    assert read(resumed, 1) == [4, 5]
    with pytest.raises(CheckpointError, match="and cannot go back"):
        resumed.check_state(state)
    with pytest.raises(CheckpointError, match="has fewer; use the same data"):
        StreamLoader(iter(range(3)), 2).load_state_dict(state)


def test_a_data_set_with_its_own_share_is_read_whole_and_does_not_end():
    shares = []
    for rank in range(2):
        data = Counting(3)
        data.reads_own_share = True  # type: ignore[attr-defined]
        shares.append(StreamLoader(data, 2, rank, 2))
    assert [read(EpochLoader(each), 3) for each in shares] == [[0, 1, 2, 100, 101, 102]] * 2
    assert shares[0].consumed == 12
    with pytest.raises(CheckpointError, match="among None in this run"):
        StreamLoader(Counting(3), 2, 0, 2).load_state_dict(shares[0].state_dict())


class Rows(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


def _plus_1000(rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows) + 1000


def test_ranks_take_the_batches_of_a_data_loader_in_turn():
    def loader(rank: int) -> Any:
        batches = DataLoader(Counting(11), batch_size=2, drop_last=True, collate_fn=_plus_1000)
        return make_loader(batches, 2, rank, 2, seed=0)

    first = loader(0)
    batches = iter(first)
    assert [next(batches).tolist() for _ in range(2)] == [[1000, 1001], [1004, 1005]]
    assert read(EpochLoader(loader(1))) == [1002, 1003, 1006, 1007]  # the fifth batch has no partner
    resumed = loader(1)
    resumed.load_state_dict(first.state_dict())
    assert read(resumed, 1) == [1002, 1003]


def test_of_a_map_style_data_loader_the_parts_are_used():
    ordered = make_loader(DataLoader(Rows(), batch_size=2, collate_fn=_plus_1000), 2, 1, 2, seed=3)
    assert isinstance(ordered, ResumableLoader)
    assert read(ordered, 2) == [1002, 1003, 1006, 1007]
    shuffled = make_loader(DataLoader(Rows(), batch_size=2, shuffle=True), 2, 1, 2, seed=3)
    assert read(shuffled, 3) == read(make_loader(Rows(), 2, 1, 2, seed=3), 3)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (DataLoader(Counting(8), batch_size=2), {}, "pass drop_last=True to DataLoader"),
        (DataLoader(Counting(8), batch_size=4, drop_last=True), {}, "micro-batch is 2"),
        (DataLoader(Rows(), batch_size=2, sampler=WeightedRandomSampler([1.0] * 12, 12)), {}, "WeightedRandomSampler"),
        (DataLoader(Rows(), batch_size=2), {"collate_fn": _plus_1000}, "leave collate_fn out"),
        (Counting(8), {"num_workers": 2}, "data.num_workers: is 2"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(data, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_loader(data, 2, 0, 2, seed=0, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [Counting(0), iter(())])
def test_an_empty_stream_is_an_error(data):
    with pytest.raises(DataError, match="has only 0 samples"):
        read(StreamLoader(data, 2))


def test_checkpoints_of_map_style_and_iterable_data_are_not_mixed():
    stream, rows = StreamLoader(Counting(8), 2), ResumableLoader(Rows(), 2)
    with pytest.raises(CheckpointError, match="read an iterable data set"):
        rows.check_state(stream.state_dict())
    with pytest.raises(CheckpointError, match="read a map-style data set"):
        stream.check_state(rows.state_dict())


def _train(data: Any, steps: int, folder: str | None = None, save: str | None = None) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
              "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
              "sdp": {"groups": 2, "capacity": 0.5}}  # fmt: skip
    engine, _, loader, _ = sdp.initialize(model=Mlp(), config=config, training_data=data)
    if folder is not None:
        engine.load_checkpoint(folder)
    read = []
    batches = iter(loader)  # type: ignore[arg-type]
    while engine.global_steps < steps:
        batch = next(batches)
        read += batch.flatten().tolist()
        engine.backward(engine(batch.repeat(1, IN), batch.repeat(1, OUT)))
        engine.step()
    if save is not None:
        engine.save_checkpoint(save)
    return read, engine.full_state_dict()


class Floats(Stateful):
    def __iter__(self) -> Iterator[torch.Tensor]:  # type: ignore[override]
        for number in super().__iter__():
            yield torch.tensor([number / 100])


def _resumes(folder: str) -> tuple[list[float], bool]:
    """What a run of four steps reads; whether two runs of two steps end with the same weights."""
    whole, expected = _train(Floats(1000), 4)
    start, _ = _train(Floats(1000), 2, save=folder)
    rest, weights = _train(Floats(1000), 4, folder=folder)
    assert start + rest == whole
    same = dist.get_rank() or all(torch.equal(weights[name], value) for name, value in expected.items())
    return whole, bool(same)


def test_an_engine_trains_on_an_iterable_and_resumes_exactly(ranks: RankPool, tmp_path: Path):
    (first, same), (second, _) = ranks.run(_resumes, str(tmp_path), world=2)
    assert same
    assert not set(first) & set(second)
    assert sorted(first + second) == pytest.approx([number / 100 for number in range(32)])
