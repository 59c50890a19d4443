"""Computes what each rank of a run sends in a step, from the trace of a single rank.

All ranks of a group send the same inside the group, so the trace of one rank shows these messages.
What a rank sends to other groups depends on the holders of each unit, which the layout lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property

from ..config.schema import Config
from ..distributed.collectives import Collective, Kind
from ..distributed.mesh import Coordinates, Holders
from ..placement.layout import Layout
from ..placement.tensor_info import TensorInfo
from ..sync.outer import fragments_of, sent_nbytes

Sums = Counter[tuple[Kind, Holders]]


class Messages:
    """Computes what each rank of a run sends, by the kind of collective."""

    def __init__(self, layout: Layout, config: Config):
        self._layout, self._mesh, self._sync = layout, layout.mesh, config.sdp.sync
        self._shards, self._compute_bytes = layout.mesh.shards(config.zero_optimization.stage), config.compute_bytes
        self._known: dict[tuple[int, int, int | None], Sums] = {}  # thousands of ranks share a few sums

    def of_step(self, rank: int, traced: int, inside: Iterable[Collective]) -> list[Collective]:
        """Return what ``rank`` sends in a step. With local steps, averages of weights are left out.

        Args:
            rank: The rank.
            traced: The rank whose step was traced. Its group computes the same as the group of
                ``rank``.
            inside: The collectives of ``traced`` in that step, without those between groups.
        """
        found = [one._replace(ranks=self._moved(one.ranks, traced, rank)) for one in inside]
        return found if self._sync is not None else found + self._between(rank, None)

    def of_round(self, rank: int) -> list[Collective]:
        """Return what ``rank`` sends to other groups in a round of local steps."""
        count = self._sync.fragments if self._sync is not None and self._sync.service is None else 0
        return [one for fragment in range(count) for one in self._between(rank, fragment)]

    def of_service(self) -> tuple[int, int]:
        """Return the bytes that the averaging service receives and sends in a round."""
        received = sent = 0
        for group in range(self._mesh.sdp):
            for info in self._layout.held(group):
                if info.trainable and self._sync is not None:
                    received += sent_nbytes(info.shape, self._sync.compression if len(info.holders) > 1 else "none")
                    sent += sent_nbytes(info.shape, "none")
            sent += sum(sent_nbytes(info.shape, "none") for info in self._layout.frozen(group))
        return received, sent

    def in_busiest_step(self, rank: int) -> float:
        """Return the bytes that ``rank`` sends between groups in the busiest step of a round.

        With overlap, averages of weights and refreshes of frozen copies are in different steps, so
        their bytes are not added.
        """
        assert self._sync is not None
        steps = []
        for fragment in range(self._sync.fragments):
            sent = Counter[bool]()
            for one in self._between(rank, fragment):
                sent[self._sync.overlap > 0 and one.kind == "broadcast"] += one.sent  # type: ignore[assignment]
            steps += sent.values()
        return max(steps, default=0.0)

    def _between(self, rank: int, fragment: int | None) -> list[Collective]:
        """Return what a rank sends between groups, in a step or in the average of ``fragment``."""
        at = self._mesh.coordinates(rank)
        index = at.fsdp if self._has_unequal_shards else 0
        key = at.sdp, index, fragment
        if key not in self._known:
            self._known[key] = self._sums(at.sdp, index, fragment)
        found = []
        for (kind, groups), nbytes in self._known[key].items():
            if len(ranks := self._among(kind, groups, at)) > 1 and nbytes:
                # Quantised changes cannot be added on the way, so all of them are gathered.
                whole = nbytes * len(ranks) if kind == "all_gather" else nbytes
                found.append(Collective("between groups", kind, ranks, whole))
        return found

    @cached_property
    def _has_unequal_shards(self) -> bool:
        rows = {info.tp_shape[0] if info.shape else 1 for info in self._layout.parameters.values()}
        return self._shards > 1 and any(count % self._shards for count in rows)

    def _sums(self, group: int, index: int, fragment: int | None) -> Sums:
        """Return the bytes of a rank's own buffers, by kind and by the groups that take part."""
        sums: Sums = Counter()
        compression = self._sync.compression if self._sync is not None and fragment is not None else "none"
        for info in self._of(fragment, self._layout.held(group)):
            if fragment is None or len(info.holders) > 1:
                first, last = info.shard_rows(self._shards, index)
                shape = (last - first, *info.tp_shape[1:]) if info.shape else ()
                kind: Kind = "all_gather" if compression == "int8" else "all_reduce"
                sums[kind, info.holders] += sent_nbytes(shape, compression)
        for refresh in self._layout.refreshes:
            if refresh.sent_by(group):
                infos = self._of(fragment, (self._layout.parameters[name] for name in refresh.names))
                copies = self._layout.copies
                sizes = (i.copy_nbytes(copies.dtype, self._compute_bytes, self._shards, index) for i in infos)
                sums["broadcast", refresh.members] += sum(sizes) // copies.refresh_every  # the mean of the steps
        return sums

    def _of(self, fragment: int | None, infos: Iterable[TensorInfo]) -> Iterator[TensorInfo]:
        return (i for i in infos if i.trainable and (fragment is None or self._fragments[i.name] == fragment))

    @cached_property
    def _fragments(self) -> dict[str, int]:
        return fragments_of(self._layout, self._sync.fragments if self._sync is not None else 1)

    def _among(self, kind: Kind, groups: Holders, at: Coordinates) -> tuple[int, ...]:
        # If nothing is sharded, the ranks of one group average among themselves too.
        everywhere = kind != "broadcast" and self._shards == 1
        positions = range(self._mesh.fsdp) if everywhere else (at.fsdp,)
        return tuple(self._mesh.rank(group, fsdp, at.tp) for group in sorted(groups) for fsdp in positions)

    def _moved(self, ranks: tuple[int, ...], one: int, other: int) -> tuple[int, ...]:
        """Return the ranks with which ``other`` communicates, if ``one`` does so with ``ranks``."""
        if one == other or len(ranks) == self._mesh.world_size:
            return ranks
        old, new = self._mesh.coordinates(one), self._mesh.coordinates(other)
        if ranks == self._mesh.neighbours(old.sdp, old.fsdp):
            return self._mesh.neighbours(new.sdp, new.fsdp)
        first, end = self._mesh.rank(new.sdp), self._mesh.rank(new.sdp + 1)
        is_group = len(ranks) == end - first
        return tuple(range(first, end) if is_group else range(first + new.tp, end, self._mesh.tp))
