"""Find blocks that repeat, so that a trace runs only a few of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..module_paths import parents
from ..placement.layout import Layout

_FIRST, _LAST = 2, 2  # repetitions that are traced where a pattern of blocks repeats, and one between them


_MANY = 8


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


_PERIOD = 4  # blocks, at most, of a pattern in which kinds take turns


def _left_out(runs: Sequence[Sequence[str]], blocks: Sequence[str]) -> list[list[list[str]]]:
    """Of every long stretch of blocks in which a pattern of kinds repeats, what lies between its first repetitions and its last: a list of
    repetitions, of which each adds the same to whatever is in memory at either end.
    """
    kinds = {name: index for index, names in enumerate(runs) for name in names}
    order = [name for name in blocks if name in kinds]
    found, start = [], 0
    while start < len(order):
        ends = {
            period: _repeats_until([kinds[name] for name in order], start, period) for period in range(1, _PERIOD + 1)
        }
        period, end = max(ends.items(), key=lambda pair: pair[1])  # the shortest of those that go as far
        times = (end - start) // period
        if end - start <= _MANY or times <= _FIRST + _LAST:
            start += 1
            continue
        firsts = range(start + _FIRST * period, start + (times - _LAST) * period, period)
        found.append([order[first : first + period] for first in firsts])
        start = end
    return found


def _repeats_until(kinds: Sequence[int], start: int, period: int) -> int:
    """Where the pattern of the ``period`` kinds from ``start`` on ends."""
    end = min(start + period, len(kinds))
    while end < len(kinds) and kinds[end] == kinds[end - period]:
        end += 1
    return end


def sequence(model: nn.Module, layout: Layout, group: int) -> tuple[Any, ...]:
    """What ``group`` runs, block after block, in a form that is equal where memory and time are. ``model``: the full one."""
    run, _ = _kinds(model, layout, group)
    position = {name: index for index, name in enumerate(layout.blocks)}
    held: dict[str, Counter[Any]] = {name: Counter() for names in run for name in names}
    for info in layout.parameters.values():
        block = next((name for name in parents(info.canonical) if name in held), None)
        if block is not None:  # of slices how many it holds, not which
            held[block][info.canonical.removeprefix(block), info.part, info.trainable, group in info.holders] += 1
    ordered = sorted(held, key=lambda name: position[name])
    return tuple((frozenset(held[name].items()), settings_of(model.get_submodule(name))) for name in ordered)


def _kinds(model: nn.Module, layout: Layout, group: int) -> tuple[list[list[str]], list[list[str]]]:
    """The blocks that ``group`` runs and those that it skips, in order, those together that are alike."""
    parts: dict[str, list[Any]] = {name: [] for name in layout.blocks}
    run: set[str] = set()
    for info in layout.parameters.values():
        block = next((name for name in parents(info.canonical) if name in parts), None)
        if block is not None:
            held = group in info.holders
            parts[block].append((info.canonical.removeprefix(block), info.part, info.trainable, held))
            if held or layout.keeps_frozen or info.cut is not None:
                run.add(block)
    kinds: dict[Any, list[str]] = {}
    for name, signature in parts.items():
        kinds.setdefault((tuple(signature), settings_of(model.get_submodule(name))), []).append(name)
    return [names for names in kinds.values() if names[0] in run], [
        names for names in kinds.values() if names[0] not in run
    ]


def settings_of(block: nn.Module) -> str:
    """By which blocks of equal parameters may differ: the classes of their modules, and the plain values these keep."""
    facts = []
    for module in block.modules():
        values = sorted((key, _plain(value)) for key, value in vars(module).items() if key not in _OF_EVERY_MODULE)
        facts.append((type(module).__name__, values))
    return str(facts)


def _plain(value: Any) -> str:
    """A value as it is where it is plain, or a container of such; else its class."""
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    if isinstance(value, Mapping):
        return str(sorted((str(key), _plain(each)) for key, each in value.items()))
    if isinstance(value, list | tuple):
        return str([_plain(each) for each in value])
    if isinstance(value, set | frozenset):
        return str(sorted(map(_plain, value)))
    return type(value).__name__
