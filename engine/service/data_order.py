"""Deals the order of the data to groups that come and go.

The positions of a run's data order are divided into blocks. A block has what all groups read in one
round. Share g of a block has what group g reads if all groups are present. So with all groups
present, every group reads what it reads in a run without the service. A share is dealt once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

_FREE_AFTER = 2  # blocks: whoever asks gets a share that its group left behind by this much


class Share(NamedTuple):
    """A part of the data order that one group reads.

    Attributes:
        first: the first micro-batch of the share's block, counted from the start of the run.
        micro_batches: the number of micro-batches in the share.
        index: the position of the share in each micro-batch of all groups.
        groups: the number of shares in a block.
        width: the samples of a micro-batch of one group.
    """

    first: int
    micro_batches: int
    index: int
    groups: int
    width: int

    @property
    def samples(self) -> int:
        return self.micro_batches * self.width

    def ranges(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield ranges (first position, length) of ``count`` samples of the share from ``start``
        on.
        """
        while count:
            micro, offset = divmod(start, self.width)
            length = min(count, self.width - offset)
            yield ((self.first + micro) * self.groups + self.index) * self.width + offset, length
            start, count = start + length, count - length


class DataOrder:
    """The shares that were dealt.

    Args:
        groups: the number of shares in a block.
        micro_batches: the micro-batches of a share.
        width: the samples of a micro-batch of one group.
    """

    def __init__(self, groups: int, micro_batches: int, width: int):
        self.groups, self.micro_batches, self.width = groups, micro_batches, width
        self.first = 0  # the first block that was not dealt completely
        self._dealt: dict[int, set[int]] = {}

    def deal(self, slot: int, absent: Collection[int]) -> Share:
        """Return the next share for the group ``slot``.

        It is its own share of the first block that has one. Shares of groups that are ``absent``,
        or far behind, are dealt to whoever asks.
        """
        newest, block = max(self._dealt, default=self.first), self.first
        while True:
            left = [index for index in range(self.groups) if index not in self._dealt.get(block, ())]
            free = [index for index in left if index in absent or block <= newest - _FREE_AFTER]
            if slot in left or free:
                index = slot if slot in left else free[0]
                break
            block += 1
        self._dealt.setdefault(block, set()).add(index)
        while len(self._dealt.get(self.first, ())) == self.groups:
            del self._dealt[self.first]
            self.first += 1
        return Share(block * self.micro_batches, self.micro_batches, index, self.groups, self.width)

    @property
    def samples(self) -> int:
        """The number of samples that were dealt."""
        shares = self.first * self.groups + sum(len(indices) for indices in self._dealt.values())
        return shares * self.micro_batches * self.width

    @property
    def end(self) -> int:
        """The first position after everything that was dealt."""
        blocks = max(self._dealt, default=self.first - 1) + 1
        return blocks * self.micro_batches * self.groups * self.width

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        dealt = {str(block): sorted(indices) for block, indices in self._dealt.items()}
        return {
            "groups": self.groups, "micro_batches": self.micro_batches, "width": self.width, "first": self.first,
            "dealt": dealt,
        }  # fmt: skip

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> DataOrder:
        """Return the order with the state of :meth:`state_dict`."""
        found = cls(state["groups"], state["micro_batches"], state["width"])
        found.first = state["first"]
        found._dealt = {int(block): set(indices) for block, indices in state["dealt"].items()}
        return found
