"""Reads a map-style data set endlessly on many data ranks. The whole state is three integers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ..errors import CheckpointError, DataError, SDPError, quote


class ResumableBatchSampler:
    """Yields lists of data-set indices without end. Its state is valid for any layout.

    The *sample order* of a run is the permutation of epoch 0, then that of epoch 1, and so on. One
    global micro-batch is the next ``data_ranks × micro_batch_size`` positions of that order. Data
    rank ``r`` reads rows ``[r × micro_batch_size, (r + 1) × micro_batch_size)`` of the global
    micro-batch. So one process with ``micro_batch_size = R × m`` reads exactly the rows of R ranks
    in rank order. A global micro-batch may extend into the next epoch. So within an epoch, no
    sample is left out and no sample is read twice.

    ``consumed`` counts the samples that all data ranks have read since the start of the run. With
    ``positions``, the sampler yields epoch × ``num_samples`` + index, for a data set that gives a
    sample another form in each epoch. Raises DataError for an empty data set.
    """

    def __init__(
        self,
        num_samples: int,
        micro_batch_size: int,
        data_rank: int,
        data_ranks: int,
        seed: int,
        shuffle: bool = True,
        consumed: int = 0,
        positions: bool = False,
    ) -> None:
        if num_samples < 1:
            raise DataError("the data set has no samples; give it more data or a shorter sequence length")
        if micro_batch_size < 1 or not 0 <= data_rank < data_ranks:
            raise ValueError(f"no data rank {data_rank} of {data_ranks} with micro-batch {micro_batch_size}")
        if seed < 0 or consumed < 0:
            raise ValueError(f"seed ({seed}) and consumed ({consumed}) must not be negative")
        self.num_samples = num_samples
        self.micro_batch_size = micro_batch_size
        self.data_rank = data_rank
        self.data_ranks = data_ranks
        self.seed = seed
        self.shuffle = shuffle
        self.consumed = consumed
        self.positions = positions
        self._epoch = -1
        self._order: np.ndarray | None = None

    @property
    def global_batch_size(self) -> int:
        """Samples that all data ranks read together in one micro-batch."""
        return self.data_ranks * self.micro_batch_size

    @property
    def epoch(self) -> int:
        """The epoch that the next sample belongs to, from 0."""
        return self.consumed // self.num_samples

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            start = self.consumed + self.data_rank * self.micro_batch_size
            rows = self._rows(start, self.micro_batch_size)
            self.consumed += self.global_batch_size
            yield rows

    def state_dict(self) -> dict[str, int]:
        """Return ``seed``, ``consumed`` and ``num_samples``. They are equal on all data ranks."""
        return {"seed": self.seed, "consumed": self.consumed, "num_samples": self.num_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after ``state``, by the rules of :meth:`checked_position`."""
        self.consumed = self.checked_position(state)

    def checked_position(self, state: Mapping[str, Any]) -> int:
        """Return the ``consumed`` of ``state``, which any layout may have written.

        Raises CheckpointError for an incomplete state, and for another data set or seed.
        """
        for key in ("seed", "consumed", "num_samples"):
            value = state.get(key)
            if type(value) is not int or not 0 <= value < 2**63:
                raise CheckpointError(f"data loader state: {key!r} must be an integer from 0, it is {quote(value)}")
        if state["num_samples"] != self.num_samples:
            raise CheckpointError(
                f"data loader state: the checkpoint read a data set of {state['num_samples']:,} samples, this one has"
                f" {self.num_samples:,}; use the same data and sequence length, or start a new run"
            )
        if state["seed"] != self.seed:
            raise CheckpointError(
                f"data loader state: the checkpoint shuffled with seed {state['seed']}, this run with {self.seed};"
                f" set the seed to {state['seed']}, or start a new run"
            )
        return state["consumed"]

    def _rows(self, start: int, count: int) -> list[int]:
        rows: list[int] = []
        while count:
            epoch, offset = divmod(start, self.num_samples)
            taken = min(count, self.num_samples - offset)
            first = epoch * self.num_samples if self.positions else 0
            rows += [first + index for index in self._epoch_order(epoch)[offset : offset + taken].tolist()]
            start, count = start + taken, count - taken
        return rows

    def _epoch_order(self, epoch: int) -> np.ndarray:
        # One epoch is kept, because a rank's positions only grow. It takes 4 bytes per sample up to
        # 2³² samples, and 8 bytes above.
        if self._order is None or self._epoch != epoch:
            order = np.arange(self.num_samples, dtype=np.uint32 if self.num_samples < 2**32 else np.int64)
            if self.shuffle:
                np.random.Generator(np.random.PCG64([self.seed, epoch])).shuffle(order)
            self._epoch, self._order = epoch, order
        return self._order


class ResumableLoader:
    """Yields one data rank's micro-batches without end. Its state counts what was *handed out*.

    Worker processes and :meth:`fetch_ahead` read batches ahead. These batches are not in the state,
    so a resumed run reads them again. Each ``iter()`` continues after the last batch handed out,
    and ends all earlier iterators.

    ``dataset`` is any map-style data set, the same on every data rank. If its ``reads_positions``
    is true, it is asked for epoch × length + index. ``collate_fn``, ``num_workers`` and
    ``pin_memory`` are as in torch's ``DataLoader``. Raises DataError for an empty data set.
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
    ) -> None:
        self.dataset = dataset
        positions = getattr(dataset, "reads_positions", False)
        self.sampler = ResumableBatchSampler(
            _length(dataset), micro_batch_size, data_rank, data_ranks, seed, shuffle=shuffle, positions=positions
        )
        self._collate_fn = collate_fn
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._consumed = 0
        self._generation = 0
        self._source: Iterator[Any] | None = None
        self._ahead: list[Any] = []

    @property
    def consumed(self) -> int:
        """Samples of all data ranks that were handed out since the start of the run."""
        return self._consumed

    @property
    def epoch(self) -> int:
        """The epoch that the next sample belongs to, from 0."""
        return self._consumed // self.sampler.num_samples

    def __iter__(self) -> Iterator[Any]:
        self._end_iterators()
        return self._batches(self._generation)

    def _end_iterators(self) -> None:
        self._generation += 1
        self._source, self._ahead = None, []

    def fetch_ahead(self) -> None:
        """Read the next batch now, while a device computes, unless one is read ahead already."""
        if self._source is not None and not self._ahead:
            self._ahead.append(next(self._source))

    def _batches(self, generation: int) -> Iterator[Any]:
        self._refuse_stale(generation)
        self.sampler.consumed = self._consumed
        # Without a generator of its own, the loader would draw from torch's global one when an
        # iteration starts, and a resumed run would differ.
        batches = DataLoader(
            self.dataset,
            batch_sampler=self.sampler,  # pyright: ignore[reportArgumentType]  # any iterable of lists will do
            collate_fn=self._collate_fn,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            generator=torch.Generator().manual_seed(self.sampler.seed),
        )
        source = self._source = iter(_plain_errors(batches))
        while True:
            self._refuse_stale(generation)  # before it reads: all iterators share the sampler
            batch = self._ahead.pop() if self._ahead else next(source)
            self._consumed += self.sampler.global_batch_size
            yield batch

    def _refuse_stale(self, generation: int) -> None:
        if generation != self._generation:
            raise RuntimeError("this iterator ended when its loader was iterated or loaded again; call iter(loader)")

    def state_dict(self) -> dict[str, int]:
        """Return ``seed``, ``consumed`` and ``num_samples``. They are equal on all data ranks."""
        return {**self.sampler.state_dict(), "consumed": self._consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after ``state``. Raises CheckpointError if the data set or the seed differs."""
        self._consumed = self.sampler.checked_position(state)
        self._end_iterators()


class EpochLoader:
    """A view of an endless loader that ends with the epoch.

    With it, ``for batch in loader`` works inside a loop over epochs. A global micro-batch that
    extends into the next epoch is the last one of the epoch in which it starts. Nothing is dropped.
    """

    def __init__(self, loader: ResumableLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        epoch = self.loader.epoch
        for batch in self.loader:
            yield batch
            if self.loader.epoch != epoch:
                return

    def __len__(self) -> int:
        """Return the number of batches that are left in this epoch."""
        samples = self.loader.sampler.num_samples
        return -(-(samples - self.loader.consumed % samples) // self.loader.sampler.global_batch_size)

    def state_dict(self) -> dict[str, int]:
        """Return the state of the loader."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after ``state``. Raises CheckpointError if the data set or the seed differs."""
        self.loader.load_state_dict(state)


def evaluation_batches(
    dataset: Dataset[Any],
    micro_batch_size: int,
    data_rank: int = 0,
    data_ranks: int = 1,
    limit: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Any]:
    """Return a finite, unshuffled loader. Every iteration starts from the beginning.

    Every data rank gets the same number of batches. The samples are spread evenly over the data
    set, so that a ``limit`` does not select only its first documents. Which samples are selected
    depends on ``data_ranks × micro_batch_size`` and ``limit`` alone. Without a ``limit``, fewer
    samples than one global micro-batch are left out.

    ``limit`` is the largest number of batches per data rank. Raises DataError if the data set has
    less than one batch per data rank.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1 batch, it is {limit}")
    samples, global_batch = _length(dataset), data_ranks * micro_batch_size
    batches = samples // global_batch
    if batches < 1:
        raise DataError(
            f"the evaluation data has {samples} samples: {data_ranks} data ranks with micro-batch {micro_batch_size}"
            f" need at least {global_batch}: hold out more data, or use a shorter sequence or a smaller micro-batch"
        )
    batches = min(batches, limit or batches)
    total = batches * global_batch
    first_rows = [(batch * data_ranks + data_rank) * micro_batch_size for batch in range(batches)]
    indices = [[(row + i) * samples // total for i in range(micro_batch_size)] for row in first_rows]
    return DataLoader(
        dataset,
        batch_sampler=indices,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),
    )


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
