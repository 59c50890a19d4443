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
    """Find repetitions of blocks that need not be traced, because each costs as much as the next.

    A long sequence repeats a pattern of blocks. Its first and last repetitions are traced, and the
    repetitions between them are left out. An additional trace with one of these repetitions then
    shows the cost of each. A sequence is traced completely if this needs fewer blocks in all.

    Args:
        runs: Lists of identical blocks.
        blocks: The names of all blocks, in the model's order.

    Returns:
        For each shortened sequence, the repetitions (lists of blocks) that are left out.
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
    """Return a description of each block that ``group`` runs or skips, by name.

    Blocks with equal descriptions need the same memory and time. At neuron level, it matters how
    many slices of a block the group holds, and not which slices. Descriptions are hashable. The
    first element says whether the group runs the block.
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
    """Return lists of identical blocks that the group runs, and lists of those that it skips."""
    kinds: dict[Any, list[str]] = {}
    for name, description in descriptions.items():
        kinds.setdefault(description, []).append(name)
    run = [names for (is_run, *_), names in kinds.items() if is_run]
    return run, [names for (is_run, *_), names in kinds.items() if not is_run]


def settings_of(block: nn.Module) -> str:
    """Return the settings of a block as text, because blocks with equal parameters may differ.

    The text has the classes of the modules and the plain values that the modules keep.
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
