"""Finds blocks that repeat, so that a trace runs only a few of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..module_paths import parents
from ..placement.layout import Layout

# If a pattern of blocks repeats, its first and last repetitions are traced, and one between them.
_FIRST, _LAST = 2, 2
_MANY = 8  # a repeating sequence of at most this many blocks is traced completely
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PERIOD = 4  # the largest number of blocks in a pattern


def left_out(runs: Sequence[Sequence[str]], blocks: Sequence[str]) -> list[list[list[str]]]:
    """Find the repetitions that need not be traced.

    The result has one list for each long sequence of blocks in which a pattern of kinds repeats.
    The list has the repetitions between the first ones and the last ones. Each repetition adds the
    same bytes to the memory in use at either end of the sequence. Each list needs a trace of its
    own, so only those are in the result with which the traces run the fewest blocks.
    """
    kinds = {name: index for index, names in enumerate(runs) for name in names}
    order = [name for name in blocks if name in kinds]
    found, start = [], 0
    while start < len(order):
        ends = {
            period: _repeats_until([kinds[name] for name in order], start, period) for period in range(1, _PERIOD + 1)
        }
        period, end = max(ends.items(), key=lambda pair: pair[1])  # of equally long ones, the shortest period
        times = (end - start) // period
        if end - start <= _MANY or times <= _FIRST + _LAST:
            start += 1
            continue
        firsts = range(start + _FIRST * period, start + (times - _LAST) * period, period)
        found.append([order[first : first + period] for first in firsts])
        start = end
    found.sort(key=lambda repetitions: len(repetitions) * len(repetitions[0]), reverse=True)

    def traced(lists: int) -> int:
        some = found[:lists]
        once = len(order) - sum(len(repetitions) * len(repetitions[0]) for repetitions in some)
        return (1 + lists) * once + sum(len(repetitions[0]) for repetitions in some)

    return found[: min(range(len(found) + 1), key=traced)]


def _repeats_until(kinds: Sequence[int], start: int, period: int) -> int:
    """Return the end of the sequence that repeats the ``period`` kinds after ``start``."""
    end = min(start + period, len(kinds))
    while end < len(kinds) and kinds[end] == kinds[end - period]:
        end += 1
    return end


def describe_blocks(model: nn.Module, layout: Layout, group: int) -> dict[str, Any]:
    """Return hashable descriptions of the blocks that ``group`` runs or skips, in order.

    Blocks with equal descriptions need the same memory and time. Of slices, the numbers count that
    the group holds, whichever these are. A block that the group skips begins with False.

    Args:
        model: The full model.
        layout: Its layout.
        group: The group.
    """
    parts: dict[str, Counter[Any]] = {name: Counter() for name in layout.blocks}
    run: set[str] = set()
    for info in layout.parameters.values():
        block = next((name for name in parents(info.path) if name in parts), None)
        if block is not None:
            held = group in info.holders
            parts[block][info.path.removeprefix(block), info.tp_shape, info.trainable, held] += 1
            if held or layout.keeps_frozen or info.cut is not None:
                run.add(block)
    return {
        name: (name in run, frozenset(counts.items()), settings_of(model.get_submodule(name)))
        for name, counts in parts.items()
    }


def kinds_of(descriptions: Mapping[str, Any]) -> tuple[list[list[str]], list[list[str]]]:
    """Return the blocks that a group runs and the blocks that it skips.

    Each is a list of lists of identical blocks, in order.
    """
    kinds: dict[Any, list[str]] = {}
    for name, description in descriptions.items():
        kinds.setdefault(description, []).append(name)
    run = [names for (is_run, *_), names in kinds.items() if is_run]
    return run, [names for (is_run, *_), names in kinds.items() if not is_run]


def settings_of(block: nn.Module) -> str:
    """Describe the differences that blocks with equal parameters may have.

    They are the classes of the modules and the plain values that the modules keep.
    """
    facts = []
    for module in block.modules():
        values = sorted((key, _plain(value)) for key, value in vars(module).items() if key not in _OF_EVERY_MODULE)
        facts.append((type(module).__name__, values))
    return str(facts)


def _plain(value: Any) -> str:
    """Return a plain value, or a container of plain values, as text. Else return its class name."""
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    if isinstance(value, Mapping):
        return str(sorted((str(key), _plain(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return str([_plain(item) for item in value])
    if isinstance(value, set | frozenset):
        return str(sorted(map(_plain, value)))
    return type(value).__name__
