"""Bytes sent, counted where they are sent.

The formulas are those of ring algorithms over n ranks (as in nccl-tests' "bus bandwidth"). In an
all-reduce a rank sends 2(n − 1)/n of the buffer. In a reduce-scatter or an all-gather a rank sends
(n − 1)/n of the whole buffer. A broadcast goes round the ring from its source, and every rank
except the last sends the buffer once. So n − 1 copies are sent, which is the least that any
algorithm can send.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
Scope = Literal["between groups", "inside groups", "tensor parallel", "control"]


def sent_bytes(kind: Kind, nbytes: int, ranks: int) -> float:
    """Return the bytes that one rank sends in a collective over ``ranks`` ranks.

    ``nbytes`` is the size of the whole (unsharded) buffer.
    """
    if ranks == 1:
        return 0.0
    if kind == "broadcast":
        return float(nbytes)
    return (2 if kind == "all_reduce" else 1) * nbytes * (ranks - 1) / ranks


def passes_on(member: int, source: int, ranks: int) -> bool:
    """Return whether a rank sends anything in a broadcast round a ring of ``ranks``.

    ``member`` is the rank's position in the ring, and ``source`` is the position of the source.
    """
    return (member - source) % ranks != ranks - 1


class Traffic:
    """Counts what this rank sends, by (scope, kind, number of ranks)."""

    def __init__(self) -> None:
        self._buffers: Counter[tuple[Scope, Kind, int]] = Counter()

    def record(self, scope: Scope, kind: Kind, nbytes: int, ranks: int) -> None:
        """Count one collective over ``ranks`` ranks.

        Args:
            scope: the purpose of the collective.
            kind: the kind of collective.
            nbytes: bytes of the whole buffer, not yet divided by the number of ranks.
            ranks: the number of ranks.
        """
        if ranks > 1:
            self._buffers[scope, kind, ranks] += nbytes

    def add(self, other: Traffic) -> None:
        """Add what another count has."""
        self._buffers.update(other._buffers)

    def reset(self) -> None:
        self._buffers.clear()

    def buffers(self, scope: Scope) -> Counter[tuple[Kind, int]]:
        """Return the bytes of whole buffers since the last reset, by kind and number of ranks."""
        return Counter({(kind, ranks): nbytes for (of, kind, ranks), nbytes in self._buffers.items() if of == scope})

    def by_kind(self) -> dict[str, int]:
        """Return the bytes that this rank sent since the last reset, by "scope/kind"."""
        totals: Counter[str] = Counter()
        for (scope, kind, ranks), nbytes in self._buffers.items():
            totals[f"{scope}/{kind}"] += sent_bytes(kind, nbytes, ranks)  # type: ignore[assignment]
        return {name: round(total) for name, total in sorted(totals.items())}

    def total(self) -> int:
        return sum(self.by_kind().values())
