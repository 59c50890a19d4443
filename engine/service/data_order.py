"""Assigns the data to groups that come and go. The positions of a run's data order are divided into
blocks. A block has the samples that all groups read in one round. Share g of a block has the
samples that group g reads if all groups are present. So with all groups present, every group reads
the same samples as in a run without the service. A share is assigned only once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

_FREE_AFTER = 2  # if a group is so many blocks behind, its shares are assigned to other groups


def ranges(share: Sequence[int], width: int, start: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield (first position, length) of ``count`` samples from ``start`` on, in shares whose
    micro-batches have ``width`` samples.
    """
    while count:
        micro, offset = divmod(start, width)
        length = min(count, width - offset)
        yield share[micro] + offset, length
        start, count = start + length, count - length


@dataclass
class DataOrder:
    """The shares that were assigned, of ``micro_batches`` × ``width`` samples each.

    A share is a list of the first positions of its micro-batches. Share g belongs to path g mod
    ``paths``. Only groups of this path get it, and it has positions in the order of this path. All
    attributes are JSON.
    """

    groups: int
    micro_batches: int
    width: int
    paths: int = 1
    first: int = 0  # the first block with shares that are not assigned yet
    dealt: dict[str, list[int]] = field(default_factory=dict)  # by block, from the first on

    def deal(self, slot: int, absent: Collection[int]) -> list[int]:
        """Return the next share for the group ``slot``: its share of the first block with it.

        Shares of groups that are ``absent`` or far behind are assigned to any group.
        """
        newest, block, free = max(map(int, self.dealt), default=self.first), self.first, list[int]()
        while not free:
            of_path = range(slot % self.paths, self.groups, self.paths)
            left = [index for index in of_path if index not in self.dealt.get(str(block), ())]
            others = [index for index in left if index in absent or block <= newest - _FREE_AFTER]
            free = [slot] if slot in left else others
            block += not free
        self.dealt.setdefault(str(block), []).append(free[0])
        while len(self.dealt.get(str(self.first), ())) == self.groups:
            del self.dealt[str(self.first)]
            self.first += 1
        place, groups = free[0] // self.paths, self.groups // self.paths
        first = block * self.micro_batches
        return [((first + micro) * groups + place) * self.width for micro in range(self.micro_batches)]

    @property
    def samples(self) -> int:
        """The number of samples that were assigned."""
        shares = self.first * self.groups + sum(map(len, self.dealt.values()))
        return shares * self.micro_batches * self.width

    @property
    def end(self) -> int:
        """The first position after all assigned samples."""
        blocks = max(map(int, self.dealt), default=self.first - 1) + 1
        return blocks * self.micro_batches * self.groups * self.width
