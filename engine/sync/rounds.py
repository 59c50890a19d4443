"""When groups average their weights, and which units they average then (local steps).

A round has H steps (``sdp.sync.every``). The units are divided into P fragments. Fragment p is
averaged after the steps t with (t + p·H/P) mod H = 0, where t counts from 1 after ``start_after``
(Streaming DiLoCo, arXiv 2501.18512).
"""

from __future__ import annotations

from ..config.sync import SyncSection
from ..placement.layout import Layout
from ..placement.units import SHARED


class Rounds:
    """The schedule of a run's averages.

    Steps are numbered from 1, as in ``global_steps`` after the step.
    """

    def __init__(self, sync: SyncSection):
        self._sync = sync

    @property
    def fragments(self) -> range:
        return range(self._sync.fragments)

    def is_local(self, step: int) -> bool:
        """Return whether groups take this step on their own."""
        return step > self._sync.start_after

    def starting(self, step: int) -> int | None:
        """Return the fragment whose average starts after this step, or None."""
        local, every, count = step - self._sync.start_after, self._sync.every, self._sync.fragments
        if local <= 0 or local % (every // count):
            return None
        return -local // (every // count) % count

    def arriving(self, step: int) -> int | None:
        """Return the fragment whose average is applied after this step, or None."""
        return self.starting(step - self._sync.overlap)

    def travelling(self, step: int) -> int | None:
        """Return the fragment whose average is under way after this step, or None.

        There is at most one, because ``overlap`` is less than the steps between two starts.
        """
        started = (self.starting(step - age) for age in range(self._sync.overlap))
        return next((fragment for fragment in started if fragment is not None), None)

    def steps_alone(self, step: int, fragment: int) -> int:
        """Return the number of steps that groups have taken after the last average of ``fragment``
        started.
        """
        if not self.is_local(step):
            return 0
        local, every = step - self._sync.start_after, self._sync.every
        since = (local + fragment * (every // self._sync.fragments)) % every
        return min(since, local)


def fragments_of(layout: Layout, fragments: int) -> dict[str, int]:
    """Return the fragment of every parameter, slice and buffer of the layout, by name.

    Unit i belongs to fragment i mod P. All groups of neurons of a block belong to the block's
    fragment. The shared part belongs to fragment 0.
    """
    of_unit, of_sliced = {SHARED: 0}, {}
    for unit in layout.units:
        index = unit.index if unit.is_block else layout.blocks.index(layout.block_of(unit))
        of_unit[unit.name] = index % fragments
        for part in (*unit.slices, *unit.buffers):
            if part.dim is not None:
                of_sliced[part.parameter] = index % fragments
    tensors = {**layout.parameters, **layout.buffers}
    return {name: of_sliced.get(info.canonical, of_unit.get(info.unit, 0)) for name, info in tensors.items()}
