"""Assigns the data of a run to groups that come and go. Each sample is assigned only once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

_FREE_AFTER = 2  # if a group is so many blocks behind, its shares are assigned to other groups


def ranges(share: Sequence[int], width: int, start: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield where ``count`` of a group's samples are in the data, as (first position, length).

    ``share`` has the position at which each micro-batch of the group begins. A micro-batch has
    ``width`` samples. ``start`` is the number of samples of the share to leave out first.
    """
    while count:
        micro, offset = divmod(start, width)
        length = min(count, width - offset)
        yield share[micro] + offset, length
        start, count = start + length, count - length


@dataclass
class DataOrder:
    """Remembers which samples are assigned to groups. All attributes are JSON.

    The data order is divided into blocks: the samples that all groups read in one round. A block
    has a share for each group, with ``micro_batches`` micro-batches of ``width`` samples. A share
    is a list of the positions in the data at which its micro-batches begin. If all groups are
    present, group g gets share g of each block, the same samples as without the service. Share g
    has positions in the data of path g mod ``paths``, and only groups of this path get the share.
    """

    groups: int
    micro_batches: int
    width: int
    paths: int = 1
    first: int = 0  # the first block with shares that are not assigned yet
    dealt: dict[str, list[int]] = field(default_factory=dict)  # by block, from the first on

    def deal(self, slot: int, absent: Collection[int]) -> list[int]:
        """Assign a share of the data to the group ``slot``, and return it.

        A group gets its own share of a block. If that is assigned already, it gets the share of a
        group that is ``absent`` or far behind, or else its own share of a later block.
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
        """The number of samples in all shares that are assigned so far."""
        shares = self.first * self.groups + sum(map(len, self.dealt.values()))
        return shares * self.micro_batches * self.width

    @property
    def end(self) -> int:
        """The position in the data where the last block with an assigned share ends."""
        blocks = max(map(int, self.dealt), default=self.first - 1) + 1
        return blocks * self.micro_batches * self.groups * self.width
