"""Data loaders for map-style data sets, and the choice of a loader for a script's training data.

Each data rank reads different samples. The state of a loader is a few integers.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)

from ..errors import ConfigError, DataError, SDPError
from .mixture import MixtureSampler
from .sampler import PathSampler, PathSamples
from .sampler import ResumableBatchSampler as ResumableBatchSampler
from .stream import StreamLoader


class ResumableLoader:
    """Yields one data rank's micro-batches of a map-style data set, epoch after epoch, without end.

    The state counts the batches that were yielded. Batches that workers have only read ahead are
    read again after a resume. A new ``iter()`` continues after the last yielded batch, and ends
    earlier iterators.

    Random numbers in the data set and in ``collate_fn`` depend only on the seed and on the batch's
    position in the run. So a resumed run draws the same numbers as a run without interruption.

    Args:
        dataset: A map-style data set, the same on every data rank. Three attributes are optional:
            ``reads_positions``: if true, an index is epoch × length + number of the sample.
            ``sources``: parts (:class:`~sdp.engine.batch.mixture.Source`) to mix by weights.
            ``paths``: a :class:`~sdp.engine.batch.sampler.PathSamples`. A rank reads only the
            samples of its path.
        worker_options: Further arguments of torch's ``DataLoader``.

    Raises:
        DataError: The data set is empty.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        micro_batch_size: int,
        data_rank: int = 0,
        data_ranks: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        worker_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.dataset = dataset
        paths, sources = getattr(dataset, "paths", None), getattr(dataset, "sources", None)
        self.sampler: ResumableBatchSampler
        if isinstance(paths, PathSamples):  # a user's data set may have other ``paths``
            self.sampler = PathSampler(paths, micro_batch_size, data_rank, data_ranks, seed)
        elif sources is not None:
            self.sampler = MixtureSampler(sources, micro_batch_size, data_rank, data_ranks, seed)
        else:
            positions = getattr(dataset, "reads_positions", False)
            self.sampler = ResumableBatchSampler(
                _length(dataset), micro_batch_size, data_rank, data_ranks, seed, shuffle=shuffle, positions=positions
            )
        options = dict(worker_options or {})
        start = _WorkerStart(options.pop("worker_init_fn", None))
        options |= {"collate_fn": collate_fn, "num_workers": num_workers, "pin_memory": pin_memory}
        self._options: dict[str, Any] = options | {"worker_init_fn": start}
        self._consumed = 0
        self._generation = 0
        self._source: Iterator[Any] | None = None
        self._ahead: list[Any] = []

    @property
    def consumed(self) -> int:
        """The number of samples that all data ranks together have yielded since the run's start."""
        return self._consumed

    @property
    def epoch(self) -> int:
        """The number of the epoch to which the next sample belongs, from 0."""
        return self._consumed // self.sampler.num_samples

    def __iter__(self) -> Iterator[Any]:
        self._end_iterators()
        return self._batches(self._generation)

    def epoch_batches(self) -> Iterator[Any]:
        """Yield the micro-batches up to the end of this epoch."""
        epoch = self.epoch
        for batch in self:
            yield batch
            if self.epoch != epoch:
                return

    def batches_left(self) -> int:
        """Return the number of micro-batches up to the end of this epoch."""
        samples = self.sampler.num_samples
        return -(-(samples - self.consumed % samples) // self.sampler.global_batch_size)

    def _end_iterators(self) -> None:
        self._generation += 1
        self._source, self._ahead = None, []

    def fetch_ahead(self) -> None:
        """Read the next batch while the device computes, unless a batch is read ahead already."""
        if self._source is not None and not self._ahead:
            self._ahead.append(self._read())

    def _batches(self, generation: int) -> Iterator[Any]:
        self._refuse_stale(generation)
        self.sampler.consumed = self._consumed
        # Without a generator of its own, the loader would draw from torch's global one when an
        # iteration starts, and a resumed run would differ.
        batches = DataLoader(
            _SeededReads(self.dataset, self.sampler.seed),
            batch_sampler=_positions(self.sampler),  # pyright: ignore[reportArgumentType]  # any iterable will do
            generator=torch.Generator().manual_seed(self.sampler.seed),
            **self._options,
        )
        self._source = iter(_plain_errors(batches))
        while True:
            self._refuse_stale(generation)  # before reading, because all iterators share the sampler
            batch = self._ahead.pop() if self._ahead else self._read()
            self._consumed += self.sampler.global_batch_size
            yield batch

    def _read(self) -> Any:
        assert self._source is not None
        with nullcontext() if self._options["num_workers"] else _random_state_kept():
            return next(self._source)

    def _refuse_stale(self, generation: int) -> None:
        if generation != self._generation:
            raise RuntimeError(
                "the loader was iterated again or loaded a state, which ends this iterator; call iter(loader)"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded batch, which is equal on all data ranks."""
        return self.sampler.state_at(self._consumed)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if ``state`` belongs to other data or another seed."""
        self.sampler.checked_position(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position ``state``. Raises CheckpointError for other data or seeds."""
        self.sampler.load_state_dict(state)
        self._consumed = self.sampler.consumed
        self._end_iterators()


class EpochLoader:
    """Wraps an endless loader so that ``for batch in loader`` ends with each epoch.

    The last batch of an epoch is filled with samples of the next epoch, so no sample is dropped.
    """

    def __init__(self, loader: ResumableLoader | StreamLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self.loader.epoch_batches()

    def __len__(self) -> int:
        """Return the number of batches left in this epoch, or raise TypeError for a data stream."""
        return self.loader.batches_left()

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position, to save it."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position ``state``. Raises CheckpointError for other data or seeds."""
        self.loader.load_state_dict(state)


def evaluation_batches(
    dataset: Dataset[Any],
    micro_batch_size: int,
    data_rank: int = 0,
    data_ranks: int = 1,
    limit: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    *,
    drop_last: bool = True,
) -> DataLoader[Any]:
    """Return a loader of one data rank's evaluation batches, which can be iterated again.

    The samples are spread evenly over the data set, also with a ``limit``. Which samples are read
    depends only on ``data_ranks × micro_batch_size`` and on ``limit``.

    Args:
        dataset: A map-style data set, the same on every data rank.
        limit: The largest number of batches per data rank. None means no limit.
        collate_fn: Makes a batch from a list of samples.
        drop_last: Whether samples are left out that do not fill a batch on all data ranks. If
            False, all samples are read, unless ``limit`` ends the evaluation earlier. The last
            batch of a rank may then be smaller or missing.

    Raises:
        DataError: The data set has less than one batch per data rank.
    """
    rows = evaluation_rows(_length(dataset), data_ranks * micro_batch_size, limit, drop_last=drop_last)
    starts = range(data_rank * micro_batch_size, len(rows), data_ranks * micro_batch_size)
    indices = [rows[start : start + micro_batch_size] for start in starts]
    return DataLoader(
        dataset, batch_sampler=indices, collate_fn=collate_fn, num_workers=num_workers, generator=torch.Generator()
    )


def evaluation_rows(samples: int, global_batch: int, limit: int | None = None, *, drop_last: bool = True) -> list[int]:
    """Return the indices of the samples that all data ranks read in :func:`evaluation_batches`.

    The data set has ``samples`` samples. All data ranks together read ``global_batch`` at a time.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 batch, but is {limit}")
    batches = samples // global_batch
    if batches < 1:
        raise DataError(
            f"the evaluation data has {samples} samples, and all data ranks together need at least {global_batch}: "
            "hold out more data, or use a shorter sequence or a smaller micro-batch"
        )
    total = min(batches, limit or batches) * global_batch
    if not drop_last and batches < (limit or samples):
        total = samples
    return [row * samples // total for row in range(total)]


class _SeededReads(Dataset[Any]):
    """Reads a batch with random numbers that depend on ``seed`` and the batch's position."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitems__(self, batch: tuple[int, list[int]]) -> Any:
        position, indices = batch
        words = np.random.SeedSequence([self.seed, position]).generate_state(6)
        torch.default_generator.manual_seed(int(words[0]) << 32 | int(words[1]))
        random.seed(int(words[2]) << 32 | int(words[3]))
        np.random.seed(words[4:])
        read_many = getattr(self.dataset, "__getitems__", None)
        return read_many(indices) if read_many else [self.dataset[index] for index in indices]


def _positions(sampler: ResumableBatchSampler) -> Iterator[tuple[int, list[int]]]:
    """Yield the position of each batch in the order of the run, and its indices.

    This is not a method of the loader. As a method, it would make a reference cycle, and the
    garbage collector would close the workers' queues before it ends the workers, which takes 5 s
    each.
    """
    for indices in sampler:
        first = sampler.consumed - sampler.global_batch_size + sampler.data_rank * sampler.micro_batch_size
        yield next(iter(sampler.ranges(first, 1)))[0], indices


class _WorkerStart:
    """Prepares a new worker process, and calls the user's ``worker_init_fn``.

    The worker ends when the rank ends, for whatever reason. torch itself watches the parent
    process, which under the start method "forkserver" is not the rank.
    """

    def __init__(self, function: Callable[[int], object] | None) -> None:
        self._function = function

    def __call__(self, worker: int) -> None:
        threading.Thread(target=_end_with_rank, daemon=True).start()
        info = get_worker_info()
        assert info is not None
        shown: Any = info.dataset
        object.__setattr__(info, "dataset", shown.dataset)  # torch refuses a plain assignment
        if self._function is not None:
            self._function(worker)


def _end_with_rank() -> None:
    rank = multiprocessing.parent_process()
    assert rank is not None
    rank.join()
    os._exit(1)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """A context after which the generators of torch (CPU), NumPy and Python are as before."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _plain_errors(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield ``batches``. Remove the traceback that torch puts into a worker's SDPError."""
    try:
        yield from batches
    except SDPError as error:
        lines = str(error).strip().splitlines() or [""]
        if len(lines) == 1:
            raise
        raise type(error)(lines[-1].partition(f"{type(error).__name__}: ")[2] or lines[-1]) from error


def _length(dataset: Dataset[Any]) -> int:
    try:
        return len(dataset)  # pyright: ignore[reportArgumentType]  # torch's Dataset declares no __len__
    except TypeError:
        raise DataError(
            f"{type(dataset).__name__} has no length: a map-style data set (__len__ and __getitem__) is needed"
        ) from None


def make_loader(
    data: Any,
    micro_batch_size: int,
    data_rank: int,
    data_ranks: int,
    *,
    seed: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> ResumableLoader | StreamLoader:
    """Return a loader that divides a script's training data among data ranks.

    Args:
        data: A map-style data set, an iterable, an iterator, or a DataLoader.
        seed: The seed of the order in which a map-style data set is read.
        collate_fn: Makes a batch from a list of samples.

    Raises:
        ConfigError: ``data`` is a DataLoader with settings that cannot be kept, or the data cannot
            be read with ``num_workers``.
        DataError: The data set is empty, or is neither map-style nor iterable.
    """
    if isinstance(data, DataLoader):
        given = "sdp.initialize: training_data is a DataLoader"
        if collate_fn is not None:
            raise ConfigError(f"{given}, which has a collate_fn; leave collate_fn out of the call of sdp.initialize")
        if data.batch_size != micro_batch_size:
            raise ConfigError(
                f"{given} and has batch_size {data.batch_size}, but a rank's micro-batch is {micro_batch_size}; make "
                "them equal, or give the data set itself"
            )
        if isinstance(data.dataset, IterableDataset):
            if not data.drop_last:
                raise ConfigError(
                    f"{given} of an iterable data set, whose last batch may be short; pass drop_last=True to DataLoader"
                )
            return StreamLoader(data, micro_batch_size, data_rank, data_ranks, of_batches=True)
        if not isinstance(data.sampler, RandomSampler | SequentialSampler | DistributedSampler):
            raise ConfigError(
                f"{given} and has a {type(data.sampler).__name__}, which cannot be divided among ranks; give the data "
                "set itself, in the order that you want"
            )
        shuffle = getattr(data.sampler, "shuffle", not isinstance(data.sampler, SequentialSampler))
        names = ("worker_init_fn", "multiprocessing_context", "prefetch_factor", "timeout")
        options = {name: getattr(data, name) for name in names if data.num_workers}
        return ResumableLoader(
            data.dataset, micro_batch_size, data_rank, data_ranks, seed, shuffle, data.collate_fn, data.num_workers,
            pin_memory, options
        )  # fmt: skip
    if is_stream(data):
        if num_workers:
            raise ConfigError(
                f"data.num_workers: is {num_workers}, but an iterable data set is read by the rank itself; set this "
                "key to 0, or give training_data=DataLoader(data, batch_size=…, num_workers=…, drop_last=True)"
            )
        return StreamLoader(data, micro_batch_size, data_rank, data_ranks, collate_fn)
    return ResumableLoader(
        data, micro_batch_size, data_rank, data_ranks, seed, collate_fn=collate_fn, num_workers=num_workers,
        pin_memory=pin_memory
    )  # fmt: skip


def is_stream(data: Any) -> bool:
    """Whether ``data`` is an iterable data set, which can be iterated but not indexed."""
    if isinstance(data, IterableDataset):
        return True
    by_number = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return isinstance(data, Iterable) and not by_number and not hasattr(data, "sources")
