"""The order in which a run reads the samples of a data set, and which samples a rank reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import CheckpointError, DataError, quote

_OF_OTHER_DATA = {
    "stream": "an iterable data set, but this run has a map-style one; use the same data",
    "samples_of_paths": "the data of paths, but this run has no paths; set sdp.paths again, or start a new run from "
    "the weights with training.init_from",
    "sources": "several sources, but this run reads one data set; set data.sources again",
}
"""Keys that only states of other samplers have, and what is wrong if a state has them."""


class ResumableBatchSampler:
    """Yields the indices of one data rank's micro-batches, epoch after epoch, without end.

    A run reads the samples in one order: a permutation for epoch 0, then one for epoch 1, and so
    on. The next ``data_ranks × micro_batch_size`` samples of this order are a global micro-batch,
    of which data rank r reads the r-th part. A global micro-batch may extend into the next epoch,
    so no sample is left out. The state is a position in the order, so a run may resume with another
    number of ranks.

    Args:
        consumed: The samples that all data ranks have read since the start of the run.
        positions: Whether to yield epoch × ``num_samples`` + index instead of the index. A data set
            can then augment samples differently in each epoch.

    Raises:
        DataError: The data set is empty.
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
            raise ValueError(
                f"data_rank {data_rank} must be from 0 to {data_ranks - 1}, and micro_batch_size {micro_batch_size} at "
                "least 1"
            )
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
        # Maps a range of this loader's samples, (first, length), to ranges of the run's order.
        self.ranges: Callable[[int, int], Iterable[tuple[int, int]]] = lambda start, count: ((start, count),)
        # Each path orders its samples independently.
        self._samples_in_order, self._of_path = num_samples, tuple[int, ...]()
        self._epoch = -1
        self._order: np.ndarray | None = None

    @property
    def global_batch_size(self) -> int:
        """The number of samples that all data ranks read in one micro-batch."""
        return self.data_ranks * self.micro_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            ranges = self.ranges(self._start(), self.micro_batch_size)
            rows = [row for first, count in ranges for row in self._rows(first, count)]
            self.consumed += self.global_batch_size
            yield rows

    def _start(self) -> int:
        return self.consumed + self.data_rank * self.micro_batch_size

    def state_at(self, consumed: int) -> dict[str, Any]:
        """Return the state after ``consumed`` samples as JSON, which is equal on all data ranks.

        A later call must not have a smaller ``consumed``.
        """
        return {"seed": self.seed, "consumed": consumed, "num_samples": self.num_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position ``state``. Raises CheckpointError for other data or seeds."""
        self.consumed = self.checked_position(state)

    def checked_position(self, state: Mapping[str, Any]) -> int:
        """Return how many samples had been read when ``state`` was saved.

        Raises CheckpointError if the state is incomplete, or belongs to another data set or
        seed.
        """
        for key, problem in _OF_OTHER_DATA.items():
            if key in state:
                raise CheckpointError(f"data loader state: the saved run read {problem}")
        return self._checked_counts(state)

    def _checked_counts(self, state: Mapping[str, Any], *, same_samples: bool = True) -> int:
        for key in ("seed", "consumed", "num_samples"):
            value = state.get(key)
            if type(value) is not int or not 0 <= value < 2**63:
                raise CheckpointError(f"data loader state: {key!r} must be an integer ≥ 0, but is {quote(value)}")
        if same_samples and state["num_samples"] != self.num_samples:
            raise CheckpointError(
                f"data loader state: the saved run read a data set of {state['num_samples']:,} samples, but this one "
                f"has {self.num_samples:,}; use the same data and sequence length, or start a new run"
            )
        if state["seed"] != self.seed:
            raise CheckpointError(
                f"data loader state: the saved run shuffled with seed {state['seed']}, but this run has seed "
                f"{self.seed}; set the seed to {state['seed']}, or start a new run"
            )
        return state["consumed"]

    def _rows(self, start: int, count: int) -> list[int]:
        rows: list[int] = []
        while count:
            epoch, offset = divmod(start, self._samples_in_order)
            taken = min(count, self._samples_in_order - offset)
            first = epoch * self.num_samples if self.positions else 0
            rows += [first + index for index in self._epoch_order(epoch)[offset : offset + taken].tolist()]
            start, count = start + taken, count - taken
        return rows

    def _epoch_order(self, epoch: int) -> np.ndarray:
        # Only one epoch is kept in memory, because positions only grow. It takes 4 bytes per
        # sample, or 8 bytes above 2³² samples.
        if self._order is None or self._epoch != epoch:
            samples = self._samples_in_order
            order = np.arange(samples, dtype=np.uint32 if samples < 2**32 else np.int64)
            if self.shuffle:
                np.random.Generator(np.random.PCG64([self.seed, *self._of_path, epoch])).shuffle(order)
            self._epoch, self._order = epoch, order
        return self._order


@dataclass(frozen=True)
class PathSamples:
    """Which samples of a data set each path reads (``sdp.paths``).

    Attributes:
        members: for each path, the indices of its samples.
        groups: the number of groups. With K paths, group g trains path g mod K.
        alone: the index of the only group in this torch world, if a service connects the groups,
            otherwise None.
    """

    members: Sequence[np.ndarray]
    groups: int
    alone: int | None = None

    def rank_of_path(self, data_rank: int, data_ranks: int) -> tuple[int, int, int]:
        """Return which path a data rank reads, and its place among the data ranks of this path.

        Returns:
            The path, the index of the data rank among the path's data ranks, and their number.
        """
        count = len(self.members)
        if self.alone is not None:
            return self.alone % count, data_rank, data_ranks
        inside = data_ranks // self.groups
        group, at = divmod(data_rank, inside)
        return group % count, group // count * inside + at, data_ranks // count


class PathSampler(ResumableBatchSampler):
    """Yields the indices of one data rank's micro-batches, from the samples of its path only.

    Each path has an order of its own, which the path's data ranks divide among themselves. All
    paths read equally many samples, so a path with fewer samples begins its next epoch earlier.
    Raises DataError if a path has no samples.
    """

    def __init__(self, paths: PathSamples, micro_batch_size: int, data_rank: int, data_ranks: int, seed: int) -> None:
        self.paths = len(paths.members)
        self.path, self._rank_of_path, self._ranks_of_path = paths.rank_of_path(data_rank, data_ranks)
        self._members = paths.members[self.path]
        self.samples_of_paths = [len(members) for members in paths.members]
        if 0 in self.samples_of_paths:
            raise DataError(
                f"path {self.samples_of_paths.index(0)} of the model has no samples; prepare more data or fewer "
                "clusters (sdp prepare --clusters), or use a shorter sequence length"
            )
        super().__init__(sum(self.samples_of_paths), micro_batch_size, data_rank, data_ranks, seed)
        self._samples_in_order, self._of_path = len(self._members), (self.path,)

    def _start(self) -> int:
        consumed = self.consumed * self._ranks_of_path // self.data_ranks  # of this path
        return consumed + self._rank_of_path * self.micro_batch_size

    def _rows(self, start: int, count: int) -> list[int]:
        return self._members[super()._rows(start, count)].tolist()

    def state_at(self, consumed: int) -> dict[str, Any]:
        return {**super().state_at(consumed), "samples_of_paths": self.samples_of_paths}

    def checked_position(self, state: Mapping[str, Any]) -> int:
        if state.get("samples_of_paths") != self.samples_of_paths:
            raise CheckpointError(
                f"data loader state: the paths of the saved run had {quote(state.get('samples_of_paths'))} samples, "
                f"but the paths of this run have {self.samples_of_paths}; use the same sdp.paths and clusters, or "
                "start a new run"
            )
        return self._checked_counts(state)
