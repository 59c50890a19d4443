"""Every sample is read once, in an order that no layout and no resumption changes."""

import gc
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sdp.engine.batch.loader import EpochLoader, ResumableBatchSampler, ResumableLoader, evaluation_batches, make_loader
from sdp.engine.batch.sampler import PathSampler, PathSamples
from sdp.engine.errors import CheckpointError, DataError
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Numbers(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, item: int) -> torch.Tensor:
        return torch.tensor(item)


def sampler(samples: int, micro: int, rank: int, ranks: int, consumed: int = 0, seed: int = 3) -> ResumableBatchSampler:
    return ResumableBatchSampler(samples, micro, rank, ranks, seed=seed, consumed=consumed)


def read_global(samples: int, micro: int, ranks: int, batches: int, consumed: int = 0) -> list[int]:
    """Indices in the order of the run: micro-batch by micro-batch, rank by rank."""
    per_rank = [list(itertools.islice(sampler(samples, micro, r, ranks, consumed), batches)) for r in range(ranks)]
    return [index for batch in range(batches) for rank in range(ranks) for index in per_rank[rank][batch]]


@given(
    samples=st.integers(1, 60),
    before=st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 12)),
    after=st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 12)),
)
def test_any_layout_reads_the_same_order_and_goes_on_where_another_stopped(samples, before, after):
    consumed = before[0] * before[1] * before[2]
    read = read_global(samples, *before) + read_global(samples, *after, consumed=consumed)
    assert read == read_global(samples, 1, 1, len(read))
    whole_epochs = len(read) // samples
    for epoch in range(whole_epochs):
        assert sorted(read[epoch * samples : (epoch + 1) * samples]) == list(range(samples))
    rest = read[whole_epochs * samples :]
    assert len(set(rest)) == len(rest)


def test_unshuffled_order_is_the_data_set_s():
    unshuffled = ResumableBatchSampler(5, 3, 0, 1, seed=0, shuffle=False)
    assert list(itertools.islice(unshuffled, 3)) == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_order_is_pinned():
    # A change of this order would silently change what a resumed run reads.
    assert read_global(10, 10, 1, 2) == [9, 6, 0, 2, 1, 4, 7, 5, 3, 8, 4, 1, 2, 8, 5, 0, 7, 9, 6, 3]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_four_data_ranks_resume_as_two(num_workers):
    """The stop is inside an epoch, and some batches were prefetched."""
    samples, micro = 37, 2

    def loaders(ranks: int) -> list[ResumableLoader]:
        return [
            ResumableLoader(Numbers(samples), micro, rank, ranks, seed=3, num_workers=num_workers)
            for rank in range(ranks)
        ]

    def take(iterators, count: int) -> list[int]:
        return [i for _ in range(count) for iterator in iterators for i in next(iterator).tolist()]

    four = loaders(4)
    iterators = [iter(loader) for loader in four]
    read = take(iterators, 3)
    states = [loader.state_dict() for loader in four]
    del iterators
    assert states == [{"seed": 3, "consumed": 24, "num_samples": samples}] * 4
    two = loaders(2)
    for loader in two:
        loader.load_state_dict(states[0])
    read += take([iter(loader) for loader in two], 7)
    assert read == read_global(samples, 1, 1, 24 + 28)
    assert sorted(read[:samples]) == list(range(samples))


def test_loader_goes_on_after_a_break_and_ends_older_iterators():
    loader = ResumableLoader(Numbers(10), 2, seed=3)
    old = iter(loader)
    read = next(old).tolist()
    for batch in loader:
        read += batch.tolist()
        break
    assert read == read_global(10, 2, 1, 2)
    assert loader.consumed == 4
    with pytest.raises(RuntimeError, match="call iter"):
        next(old)


def test_what_is_fetched_ahead_counts_when_it_is_handed_out():
    loader = ResumableLoader(Numbers(10), 2, seed=3)
    loader.fetch_ahead()  # nothing is being read yet
    batches, read = iter(loader), []
    for _ in range(3):
        read += next(batches).tolist()
        loader.fetch_ahead()
        loader.fetch_ahead()
    assert read == read_global(10, 2, 1, 3)
    assert loader.consumed == 6
    resumed = ResumableLoader(Numbers(10), 2, seed=3)
    resumed.load_state_dict(loader.state_dict())
    following = read_global(10, 2, 1, 1, consumed=6)
    assert next(iter(resumed)).tolist() == following
    assert next(iter(loader)).tolist() == following  # a new iterator reads it again
    loader.fetch_ahead()
    loader.load_state_dict({"seed": 3, "consumed": 2, "num_samples": 10})
    assert next(iter(loader)).tolist() == read_global(10, 2, 1, 1, consumed=2)


def test_fetching_ahead_is_one_read_of_the_data():
    class Counted(Numbers):
        reads = 0

        def __getitem__(self, index: int):
            Counted.reads += 1
            return super().__getitem__(index)

    loader = ResumableLoader(Counted(10), 2, seed=3)
    batches = iter(loader)
    next(batches)
    loader.fetch_ahead()
    assert Counted.reads == 4
    next(batches)
    assert Counted.reads == 4


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"seed": 3, "consumed": 0, "num_samples": 9}, "a data set of 9 samples, but this one has 10"),
        ({"seed": 4, "consumed": 0, "num_samples": 10}, "shuffled with seed 4, but this run has seed 3"),
        ({"seed": 3, "num_samples": 10}, "'consumed' must be an integer"),
        ({"seed": 3, "consumed": "8", "num_samples": 10}, "'consumed' must be an integer"),
        ({"seed": 3, "consumed": -1, "num_samples": 10}, "must be an integer ≥ 0, but is -1"),
    ],
)
def test_foreign_state_is_refused(state, message):
    loader = ResumableLoader(Numbers(10), 2, seed=3)
    with pytest.raises(CheckpointError, match=message):
        loader.load_state_dict(state)
    assert loader.consumed == 0


class Damaged(Numbers):
    def __getitem__(self, item: int) -> torch.Tensor:
        raise DataError(f"train.bin: sample {item}: damaged")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_of_workers_stay_one_line(num_workers):
    loader = ResumableLoader(Damaged(3), 1, shuffle=False, num_workers=num_workers)
    with pytest.raises(DataError) as caught:
        next(iter(loader))
    assert str(caught.value) == "train.bin: sample 0: damaged"


def test_bad_arguments():
    with pytest.raises(DataError, match="no samples"):
        ResumableLoader(Numbers(0), 2)
    with pytest.raises(DataError, match="Stream has no length"):
        ResumableLoader(type("Stream", (Dataset,), {})(), 2)
    with pytest.raises(ValueError, match="data_rank 2 must be from 0 to 1"):
        sampler(4, 1, 2, 2)
    with pytest.raises(ValueError, match="must not be negative"):
        sampler(4, 1, 0, 1, seed=-1)


@settings(max_examples=30, deadline=None)
@given(
    samples=st.integers(1, 80), micro=st.integers(1, 5), ranks=st.integers(1, 4), limit=st.none() | st.integers(1, 9)
)
def test_evaluation_batches_are_disjoint_equal_in_number_and_spread(samples, micro, ranks, limit):
    if samples < micro * ranks:
        with pytest.raises(DataError, match=f"need at least {micro * ranks}"):
            evaluation_batches(Numbers(samples), micro, 0, ranks, limit)
        return
    loaders = [evaluation_batches(Numbers(samples), micro, rank, ranks, limit) for rank in range(ranks)]
    batches = min(samples // (micro * ranks), limit or samples)
    assert [len(loader) for loader in loaders] == [batches] * ranks
    per_rank = [[batch.tolist() for batch in loader] for loader in loaders]
    read = [i for batch in range(batches) for rank in range(ranks) for i in per_rank[rank][batch]]
    assert len(read) == batches * micro * ranks
    assert read == sorted(set(read))
    gaps = {after - before for before, after in itertools.pairwise(read)}
    assert not gaps or max(gaps) - min(gaps) <= 1
    one = evaluation_batches(Numbers(samples), micro * ranks, 0, 1, limit)
    assert [i for batch in one for i in batch.tolist()] == read


def test_evaluation_batches_can_be_read_again():
    batches = evaluation_batches(Numbers(10), 2, limit=3)
    assert [b.tolist() for b in batches] == [b.tolist() for b in batches] == [[0, 1], [3, 5], [6, 8]]
    with pytest.raises(ValueError, match="at least 1"):
        evaluation_batches(Numbers(10), 2, limit=0)


def test_the_last_incomplete_evaluation_batch():
    def read(limit: int | None) -> list[list[list[int]]]:
        loaders = [evaluation_batches(Numbers(9), 2, rank, 2, limit, drop_last=False) for rank in range(2)]
        return [[batch.tolist() for batch in loader] for loader in loaders]

    assert read(None) == read(3) == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]
    assert read(2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert [len(batches) for batches in read(1)] == [1, 1]


def test_epoch_loader_ends_with_the_epoch_and_drops_nothing():
    loader = EpochLoader(ResumableLoader(list(range(10)), micro_batch_size=4, collate_fn=list))
    first = list(loader)
    assert len(first) == 3
    assert len({sample for batch in first for sample in batch}) == 10
    assert loader.loader.consumed == 12
    assert len(loader) == 2  # eight samples of the second epoch are left
    assert len(list(loader)) == 2
    resumed = EpochLoader(ResumableLoader(list(range(10)), micro_batch_size=4, collate_fn=list))
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == list(loader)


class Augmented(Numbers):
    """A sample is what the generators of torch, NumPy and Python draw."""

    scale = 1.0

    def __getitem__(self, item: int) -> torch.Tensor:
        return torch.tensor([float(torch.rand(())), np.random.rand(), random.random()]).double() * self.scale


def jittered(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(rows) + torch.rand(())


def draws(loader: ResumableLoader, batches: int) -> torch.Tensor:
    return torch.stack(list(itertools.islice(iter(loader), batches)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_draws_differ_between_epochs_and_ranks_and_a_resumed_run_repeats_them(num_workers):
    """In plain torch, a resumed run cannot repeat the draws."""

    def loader(rank: int = 0, workers: int = num_workers) -> ResumableLoader:
        return ResumableLoader(Augmented(8), 2, rank, 2, seed=3, num_workers=workers, collate_fn=jittered)

    undisturbed = draws(loader(), 6)
    assert undisturbed.unique().numel() == undisturbed.numel()  # no epoch repeats any draw of another one
    assert not torch.isin(draws(loader(rank=1), 6), undisturbed).any()
    first, resumed = loader(), loader(workers=1)
    assert torch.equal(draws(first, 3), undisturbed[:3])
    torch.manual_seed(9)  # what else the process draws makes no difference
    assert torch.equal(draws(first, 1), undisturbed[3:4])  # a new iterator, as at the start of an epoch
    resumed.load_state_dict({"seed": 3, "consumed": 12, "num_samples": 8})
    assert torch.equal(draws(resumed, 3), undisturbed[3:])
    assert not torch.isin(draws(ResumableLoader(Augmented(8), 2, seed=4), 3), undisturbed).any()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_reading_leaves_the_random_draws_of_the_process_alone(num_workers):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    draws(ResumableLoader(Augmented(8), 2, num_workers=num_workers), 2)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_workers_end_at_once_with_their_loader():
    started = time.monotonic()
    draws(ResumableLoader(Numbers(8), 2, num_workers=2), 2)
    gc.collect()
    assert time.monotonic() - started < 9, "torch waits 5 s for each worker whose queue was closed first"


def scale_by_ten(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.scale = 10.0 * (worker + 1)


def test_worker_init_fn_of_a_data_loader_is_called_with_the_user_s_data_set():
    own = DataLoader(Augmented(8), 2, num_workers=1, worker_init_fn=scale_by_ten)
    scaled = draws(make_loader(own, 2, 0, 1, seed=3), 2)
    assert torch.equal(scaled, 10 * draws(ResumableLoader(Augmented(8), 2, seed=3, shuffle=False), 2))


_READER = """
import os, sys
from torch.utils.data import Dataset
from sdp.engine.batch.loader import ResumableLoader

class Processes(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, item):
        return os.getpid()

if __name__ == "__main__":
    options, workers = {"multiprocessing_context": sys.argv[1]}, int(sys.argv[2])
    batches = iter(ResumableLoader(Processes(), 1, num_workers=workers, worker_options=options))
    print(*(int(next(batches)) for _ in range(workers)), flush=True)
    next(iter(sys.stdin))  # killed here
"""


@pytest.mark.parametrize(("start_method", "count"), [("fork", 2), ("forkserver", 1)])  # its workers import torch anew
def test_workers_end_with_a_rank_that_is_killed(tmp_path: Path, start_method: str, count: int) -> None:
    script = tmp_path / "reader.py"
    script.write_text(_READER)
    command = [sys.executable, str(script), start_method, str(count)]
    rank = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert rank.stdout is not None and rank.stdin is not None
    workers = {int(worker) for worker in rank.stdout.readline().split()}
    assert len(workers) == count
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    rank.stdin.close()
    rank.stdout.close()
    deadline = time.monotonic() + 60
    while left := {worker for worker in workers if Path(f"/proc/{worker}").exists()}:
        if time.monotonic() > deadline:
            for worker in left:
                os.kill(worker, signal.SIGKILL)
            pytest.fail(f"{len(left)} of {count} workers are left")
        time.sleep(0.1)


def paths_read(ranks: int, groups: int, batches: int, state: dict | None = None) -> tuple[dict, dict]:
    """What two paths read in so many batches of a run, in order, and the state after them."""
    members = [np.arange(0, 30, 3), np.setdiff1d(np.arange(30), np.arange(0, 30, 3))]
    read: dict[int, list[int]] = {0: [], 1: []}
    samplers = [PathSampler(PathSamples(members, groups), 1, rank, ranks, seed=5) for rank in range(ranks)]
    for one in samplers:
        if state is not None:
            one.load_state_dict(state)
    rows = {one.data_rank: iter(one) for one in samplers}
    for _ in range(batches):
        for one in samplers:
            read[one.path] += next(rows[one.data_rank])
    assert len({json.dumps(one.state_at(one.consumed)) for one in samplers}) == 1
    return read, samplers[0].state_at(samplers[0].consumed)


def test_each_path_reads_its_own_samples_and_all_of_them():
    read, _ = paths_read(4, 4, 10)  # 2 paths of 2 replicas: 20 samples each
    assert sorted(read[0]) == sorted([*range(0, 30, 3)] * 2)  # two epochs of 10
    assert sorted(read[1]) == [item for item in range(30) if item % 3]  # one epoch of 20
    assert read[0][:10] != read[0][10:]


def test_paths_resume_on_another_number_of_replicas_and_ranks():
    whole, _ = paths_read(8, 4, 4)
    first, state = paths_read(8, 4, 2)
    then, _ = paths_read(4, 4, 4, json.loads(json.dumps(state)))
    assert {path: first[path] + then[path] for path in whole} == whole
    with pytest.raises(CheckpointError, match="the saved run read the data of paths, but this run has no paths"):
        sampler(30, 1, 0, 1).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"use the same sdp\.paths and clusters"):
        PathSampler(PathSamples([np.arange(30)], 1), 1, 0, 1, seed=5).load_state_dict(state)


def test_a_path_without_samples_is_refused():
    with pytest.raises(DataError, match="path 1 of the model has no samples"):
        PathSampler(PathSamples([np.arange(3), np.arange(0)], 2), 1, 0, 2, seed=0)
