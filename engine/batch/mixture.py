"""Mixes several sources of samples by their weights. A resumed run may change the weights.

The samples of a run are divided into blocks of 1,024. Each block has so many samples of each source
that all samples since the weights last changed are as nearly as possible in the proportions of the
weights. Sources are in random order within a block. The order of samples within a source does not
depend on the weights, so no sample is read twice in an epoch of its source.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import CheckpointError, DataError, quote
from .sampler import ResumableBatchSampler

log = logging.getLogger("sdp")

BLOCK = 1024  # positions


@dataclass(frozen=True)
class Source:
    """One source of a mixed data set, such as a corpus. The samples of a source are adjacent.

    Attributes:
        name: The name of the source in messages and metrics.
        key: What identifies the source in a checkpoint, such as a hash of the content.
        samples: The number of samples.
        weight: How much is read from the source, relative to the weights of other sources.
    """

    name: str
    key: str
    samples: int
    weight: float


@dataclass(frozen=True)
class _Anchor:
    """The state at the start of a block.

    Attributes:
        position: The samples of all sources before the block.
        read: For each source, its samples before the block.
        counted: The same, but only since the weights were last changed.
    """

    position: int
    read: np.ndarray
    counted: np.ndarray


class MixtureSampler(ResumableBatchSampler):
    """Yields indices into a data set of several sources, mixed in the proportions of their weights.

    A resumed run may have other weights, or more or fewer sources. The new proportions hold from
    the next sample on, and each source continues after the last sample that was read from it.

    Raises DataError if a source has no samples.
    """

    def __init__(
        self, sources: Sequence[Source], micro_batch_size: int, data_rank: int, data_ranks: int, seed: int
    ) -> None:
        self.sources = tuple(sources)
        empty = next((source.name for source in self.sources if source.samples < 1), None)
        if empty is not None:
            raise DataError(f"the source {empty} has no samples; give it more data or a shorter sequence length")
        total = sum(source.samples for source in self.sources)
        super().__init__(total, micro_batch_size, data_rank, data_ranks, seed)
        weights = np.array([source.weight for source in self.sources], dtype=np.float64)
        self._shares = weights / weights.sum()
        self._offsets = np.cumsum([0, *(source.samples for source in self.sources)])
        zeros = np.zeros(len(self.sources), dtype=np.int64)
        self._saved = _Anchor(0, zeros, zeros)  # at the last call of state_at
        self._anchor, self._indices = self._saved, np.empty(0, dtype=np.int64)  # the block that is being read
        self._removed: dict[str, dict[str, Any]] = {}  # entries of the state for sources that this run does not have
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    # -- reading -----------------------------------------------------------------------------------

    def _rows(self, start: int, count: int) -> list[int]:
        rows: list[int] = []
        while count:
            if not (self._anchor.position <= start < self._anchor.position + len(self._indices)):
                first = self._anchor if self._anchor.position <= start else self._saved
                self._anchor = self._advanced(first, start)
                self._indices = self._make_indices(self._anchor)
            offset = start - self._anchor.position
            taken = self._indices[offset : offset + count].tolist()
            rows += taken
            start, count = start + len(taken), count - len(taken)
        return rows

    def _advanced(self, anchor: _Anchor, position: int) -> _Anchor:
        while anchor.position + BLOCK <= position:
            parts = _apportion(self._shares, anchor.counted)
            anchor = _Anchor(anchor.position + BLOCK, anchor.read + parts, anchor.counted + parts)
        return anchor

    def _sources_in_block(self, anchor: _Anchor) -> np.ndarray:
        order = np.repeat(np.arange(len(self.sources)), _apportion(self._shares, anchor.counted))
        np.random.Generator(np.random.PCG64([self.seed, anchor.position])).shuffle(order)
        return order

    def _make_indices(self, anchor: _Anchor) -> np.ndarray:
        chosen = self._sources_in_block(anchor)
        indices = np.empty(len(chosen), dtype=np.int64)
        for source in range(len(self.sources)):
            places = np.flatnonzero(chosen == source)
            positions = anchor.read[source] + np.arange(len(places))
            epochs, offsets = np.divmod(positions, self.sources[source].samples)
            found = np.empty(len(places), dtype=np.int64)
            for epoch in np.unique(epochs):
                found[epochs == epoch] = self._source_order(source, int(epoch))[offsets[epochs == epoch]]
            indices[places] = self._offsets[source] + found
        return indices

    def _source_order(self, source: int, epoch: int) -> np.ndarray:
        if self._orders.get(source, (-1,))[0] != epoch:
            samples, key = self.sources[source].samples, self.sources[source].key
            order = np.arange(samples, dtype=np.uint32 if samples < 2**32 else np.int64)
            # The order depends on the source's key. Its position in the list may change.
            source_seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
            np.random.Generator(np.random.PCG64([self.seed, source_seed, epoch])).shuffle(order)
            self._orders[source] = (epoch, order)
        return self._orders[source][1]

    # -- state -------------------------------------------------------------------------------------

    def counts_at(self, consumed: int) -> dict[str, int]:
        """Return how many of the first ``consumed`` samples of the run came from each source."""
        read = self._read_before(consumed)
        return {source.name: int(count) for source, count in zip(self.sources, read, strict=True)}

    def _read_before(self, consumed: int) -> np.ndarray:
        anchor = self._advanced(self._saved, consumed)
        chosen = self._sources_in_block(anchor)[: consumed - anchor.position]
        return anchor.read + np.bincount(chosen, minlength=len(self.sources))

    def state_at(self, consumed: int) -> dict[str, Any]:
        """Return the state after ``consumed`` samples as JSON, which is equal on all data ranks.

        A later call must not have a smaller ``consumed``.
        """
        self._saved = self._advanced(self._saved, consumed)
        entries = {
            source.key: {
                "name": source.name,
                "samples": source.samples,
                "share": float(share),
                "read": int(read),
                "counted": int(counted),
            }
            for source, share, read, counted in zip(
                self.sources, self._shares, self._saved.read, self._saved.counted, strict=True
            )
        }
        # If remainders are equal, the order of the sources decides.
        order = [source.key for source in self.sources]
        state = super().state_at(consumed)
        return {**state, "block": self._saved.position, "order": order, "sources": {**self._removed, **entries}}

    def checked_position(self, state: Mapping[str, Any]) -> int:
        """Return how many samples had been read when ``state`` was saved.

        Raises CheckpointError if the state is incomplete, has another seed, or has a source
        with another number of samples.
        """
        consumed = self._checked_counts(state, same_samples=False)
        entries, order = state.get("sources"), state.get("order")
        if not isinstance(entries, Mapping):
            raise CheckpointError(
                "data loader state: the checkpoint was written with data.path, but this run has data.sources; set "
                "data.path again, or start a new run from the weights with training.init_from"
            )
        good = isinstance(order, list) and all(_is_entry(entries.get(key)) for key in {*order, *entries})
        if not good or type(state.get("block")) is not int or not 0 <= state["block"] <= consumed:
            raise CheckpointError("data loader state: damaged, 'sources' does not have the counts of each source")
        for source in self.sources:
            saved = entries.get(source.key, {}).get("samples", source.samples)
            if saved != source.samples:
                raise CheckpointError(
                    f"data loader state: the saved run read {saved:,} samples of {quote(source.name)}, which now has "
                    f"{source.samples:,} samples; use the same sequence length, or start a new run"
                )
        return consumed

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position ``state``, with the weights and sources of this run.

        Raises the errors of :meth:`checked_position`.
        """
        self.consumed = self.checked_position(state)
        entries: Mapping[str, Any] = state["sources"]
        before = MixtureSampler(
            [
                Source(entries[key]["name"], key, entries[key]["samples"], entries[key]["share"])
                for key in state["order"]
            ],
            1, 0, 1, self.seed,
        )  # fmt: skip
        # A division by the sum could change the last digit.
        before._shares = np.array([entries[key]["share"] for key in state["order"]], dtype=np.float64)
        before._saved = _Anchor(
            state["block"], *(np.array([entries[key][name] for key in state["order"]]) for name in ("read", "counted"))
        )
        keys = [source.key for source in self.sources]
        self._removed = {key: entry for key, entry in entries.items() if key not in keys}
        self._orders = {}
        if keys == state["order"] and np.allclose(self._shares, before._shares, rtol=1e-12, atol=0):
            self._shares, self._saved = before._shares, before._saved
        else:
            ends = dict(zip(state["order"], before._read_before(self.consumed).tolist(), strict=True))
            for key, end in ends.items():
                if key in self._removed:
                    self._removed[key] = {**self._removed[key], "read": end, "counted": 0}
            old = {key: entries[key]["read"] for key in entries} | ends
            read = np.array([old.get(key, 0) for key in keys], dtype=np.int64)
            self._saved = _Anchor(self.consumed, read, np.zeros_like(read))
        self._anchor, self._indices = replace(self._saved), np.empty(0, dtype=np.int64)


def _apportion(shares: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Return how many of the ``BLOCK`` samples of the next block come from each source.

    Each source gets the whole part of what it lacks. The rest goes to the largest remainders.
    """
    lacking = shares * (counted.sum() + BLOCK) - counted
    parts = np.floor(np.maximum(lacking, 0)).astype(np.int64)
    missing = BLOCK - int(parts.sum())
    by_remainder = np.argsort(parts - lacking, kind="stable")  # the largest remainder first
    if missing > 0:
        parts[by_remainder[:missing]] += 1
    while missing < 0:
        last = next(source for source in by_remainder[::-1] if parts[source])
        parts[last] -= 1
        missing += 1
    return parts


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, Mapping):
        return False
    counts = all(type(entry.get(key)) is int and 0 <= entry[key] < 2**63 for key in ("samples", "read", "counted"))
    share = entry.get("share")
    return counts and isinstance(entry.get("name"), str) and isinstance(share, float | int) and 0 <= share <= 1
