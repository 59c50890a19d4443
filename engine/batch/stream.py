"""Reads an iterable data set on many data ranks, which train on different samples.

Every data rank reads all samples and keeps only its own, so the data set must give every rank the
same samples in the same order. Of each ``data_ranks × micro_batch_size`` samples, data rank r keeps
the r-th part. A map-style data set is faster, because a rank reads only the samples that it keeps.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import default_collate

from ..errors import CheckpointError, DataError, quote
from ..json_files import JsonError, parse_json

log = logging.getLogger("sdp")

_COUNTS = ("consumed", "epoch", "position")


@dataclass(frozen=True)
class Position:
    """How far a run has read an iterable data set.

    Attributes:
        consumed: The samples that all data ranks have read since the start of the run.
        epoch: The number of the present pass over the data set, from 0.
        position: The samples (or batches, if the data set yields batches) read in this pass.
    """

    consumed: int = 0
    epoch: int = 0
    position: int = 0


# A micro-batch (None at the end of a pass), the position after it, and whether it is the last of a
# pass.
_Read = tuple[Any, Position, bool]


class StreamLoader:
    """Yields one data rank's micro-batches of an iterable data set, without shuffling.

    An iterable is read pass after pass. Before each pass, ``set_epoch`` of the data set is called,
    if it exists. An iterator is read once, and samples that do not fill a last batch on all ranks
    are left out.

    If the data set has ``state_dict`` and ``load_state_dict``, a resumed run continues from the
    saved state of the data set. Otherwise the run reads the earlier samples of the pass again, and
    drops them.

    If the data set has a true ``reads_own_share``, it already yields only this rank's samples. Then
    ranks may have different numbers of samples, so the loader has no epochs and does not end.
    """

    def __init__(
        self,
        stream: Iterable[Any],
        micro_batch_size: int,
        data_rank: int = 0,
        data_ranks: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        *,
        of_batches: bool = False,
    ) -> None:
        """Start at the first sample.

        Args:
            stream: An iterable, or an iterator.
            collate_fn: Makes a batch from a list of samples. By default torch's.
            of_batches: Whether the stream yields batches of ``micro_batch_size`` samples, as a
                DataLoader does. The data ranks take the batches in turn.
        """
        self.stream = stream
        self.micro_batch_size = micro_batch_size
        self._has_own_share = bool(getattr(stream, "reads_own_share", False))
        self._data_rank = 0 if self._has_own_share else data_rank
        self._data_ranks = data_ranks
        self._shares = 1 if self._has_own_share else data_ranks
        self._collate = collate_fn or default_collate
        self._of_batches = of_batches
        self._is_once = isinstance(stream, Iterator)
        self._has_state = not self._is_once and all(
            callable(getattr(stream, name, None)) for name in ("state_dict", "load_state_dict")
        )
        self._keeps_state = self._has_state and not (self._has_own_share and data_ranks > 1)
        self._source: Iterator[Any] | None = None
        self._read_to = self._handed_out = Position()
        self._state: Any = None  # state of the data set, before the batch that was read ahead
        self._ahead: list[_Read] = []
        self._has_ended = False
        self._generation = 0

    @property
    def consumed(self) -> int:
        """The number of samples that all data ranks together have yielded since the run's start."""
        return self._handed_out.consumed

    @property
    def epoch(self) -> int:
        """The number of the pass over the data set to which the next sample belongs, from 0."""
        return self._handed_out.epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield micro-batches, pass after pass, or until an iterator ends."""
        return self._batches(within_pass=False)

    def epoch_batches(self) -> Iterator[Any]:
        """Yield the micro-batches up to the end of this pass over the data set.

        A batch that extends into the next pass is the last one.
        """
        return self._batches(within_pass=not self._has_own_share)

    def batches_left(self) -> int:
        """Raise TypeError, because the length of a stream is unknown."""
        raise TypeError(f"{type(self.stream).__name__} is an iterable data set, so its loader has no length")

    def fetch_ahead(self) -> None:
        """Read the next batch while the device computes, unless a batch is read ahead already."""
        if not self._ahead and not self._has_ended:
            self._state = self._state_of_stream()
            self._ahead.append(self._read())

    def _batches(self, *, within_pass: bool) -> Iterator[Any]:
        self._generation += 1
        generation = self._generation
        while not self._has_ended:
            batch, self._handed_out, ends_pass = self._ahead.pop() if self._ahead else self._read()
            self._has_ended = batch is None and self._is_once
            if batch is not None:
                yield batch
                if generation != self._generation:
                    raise RuntimeError(
                        "the loader was iterated again or loaded a state, which ends this iterator; call iter(loader)"
                    )
            if ends_pass and within_pass:
                return

    def _read(self) -> _Read:
        """Read one global micro-batch, or none if the pass has ended exactly."""
        mine: list[Any] = []
        taken, ends_pass = 0, False
        rows = self._shares * (1 if self._of_batches else self.micro_batch_size)
        first = self._data_rank * (rows // self._shares)
        before = self._read_to
        while taken < rows:
            try:
                sample = next(self._started())
            except StopIteration:
                self._end_pass()
                ends_pass = True
                if self._is_once or self._of_batches or taken == 0:  # a pass of batches starts with the batch of rank 0
                    return None, self._read_to, ends_pass
                continue
            if first <= taken < first + rows // self._shares:
                mine.append(sample)
            taken += 1
            self._read_to = replace(self._read_to, position=self._read_to.position + 1)
        consumed = before.consumed + self.micro_batch_size * self._data_ranks
        self._read_to = replace(self._read_to, consumed=consumed)
        return mine[0] if self._of_batches else self._collate(mine), self._read_to, ends_pass

    def _started(self) -> Iterator[Any]:
        if self._source is None:
            if callable(set_epoch := getattr(self.stream, "set_epoch", None)):
                set_epoch(self._read_to.epoch)
            self._source = iter(self.stream)
        return self._source

    def _end_pass(self) -> None:
        """Go to the next pass. Raise DataError if it cannot have a batch."""
        name = type(self.stream).__name__
        if self._read_to.position < self._shares and (self._of_batches or self._read_to.position == 0):
            raise DataError(
                f"training_data: {name} has only {self._read_to.position} {self._unit} in a pass, for {self._shares} "
                "ranks; give it more data"
            )
        if self._is_once and self._has_own_share:
            raise DataError(
                f"training_data: the iterator {name} of this rank ended after {self._read_to.position} samples, and "
                "other ranks may have more; give an iterable that can be read again"
            )
        self._source = None
        if not self._is_once:
            self._read_to = replace(self._read_to, epoch=self._read_to.epoch + 1, position=0)

    @property
    def _unit(self) -> str:
        return f"batches of {self.micro_batch_size}" if self._of_batches else "samples"

    def _state_of_stream(self) -> Any:
        """The present state of the data set, or None if JSON cannot hold the state."""
        if not self._keeps_state or self._source is None:
            return None
        state = copy.deepcopy(self.stream.state_dict())  # type: ignore[attr-defined]
        try:
            survives = parse_json(json.dumps(state)) == state
        except (TypeError, ValueError, JsonError):
            survives = False
        if survives:
            return state
        self._keeps_state = False
        log.warning(
            "training_data: JSON cannot hold the state_dict() of %s, so a resumed run reads and drops the samples "
            "that were read before; use numbers, text, lists, and dicts with text as keys",
            type(self.stream).__name__,
        )
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last yielded batch, which is equal on all data ranks."""
        state = self._state if self._ahead else self._state_of_stream()
        share = self._data_ranks if self._has_own_share else None
        return {"stream": self._unit, "share_of": share, "data_set": state} | vars(self._handed_out)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if ``state`` does not fit this data set and these data ranks."""
        if "stream" not in state:
            raise CheckpointError(
                "data loader state: the saved run read a map-style data set, but this run has an iterable one; use "
                "the same data"
            )
        for key in _COUNTS:
            value = state.get(key)
            if type(value) is not int or not 0 <= value < 2**63:
                raise CheckpointError(f"data loader state: {key!r} must be an integer ≥ 0, but is {quote(value)}")
        if state["stream"] != self._unit:
            raise CheckpointError(
                f"data loader state: the saved run counts {quote(state['stream'])}, but this run counts "
                f"{self._unit}; use the same kind of training_data and the same micro-batch"
            )
        shares = self._data_ranks if self._has_own_share else None
        if state.get("share_of") != shares:
            raise CheckpointError(
                f"data loader state: reads_own_share divided the data among {quote(state.get('share_of'))} ranks in "
                f"the checkpoint, and among {shares} in this run; use the same data set and number of data ranks"
            )
        if self._is_once and state["position"] < self._read_to.position:
            raise CheckpointError(
                f"data loader state: the checkpoint is at sample {state['position']}, but the iterator was already "
                f"read to sample {self._read_to.position} and cannot go back; give an iterable that can be read again"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position ``state``.

        Raises CheckpointError if the state does not fit, or the data set has fewer samples
        than before.
        """
        self.check_state(state)
        self._generation += 1
        self._ahead, self._state, self._has_ended = [], None, False
        target = Position(**{key: state[key] for key in _COUNTS})
        if not self._is_once:
            self._source, self._read_to = None, replace(target, position=0)
        if state.get("data_set") is not None and self._has_state:
            self.stream.load_state_dict(state["data_set"])  # type: ignore[attr-defined]
        else:
            self._skip(target.position)
        self._read_to = self._handed_out = target

    def _skip(self, position: int) -> None:
        """Read and drop samples up to ``position`` of this pass."""
        count = position - self._read_to.position
        if count and self._data_rank == 0:
            log.warning(
                "training_data: %s has no load_state_dict, so %d %s are read and dropped; this is exact only if the "
                "order is the same as before",
                type(self.stream).__name__, count, self._unit,
            )  # fmt: skip
        for _ in range(count):
            try:
                next(self._started())
            except StopIteration:
                raise CheckpointError(
                    f"data loader state: the saved run read {position} {self._unit} in a pass over the data set, "
                    f"but {type(self.stream).__name__} has fewer; use the same data"
                ) from None
