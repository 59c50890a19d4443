"""Makes the placement that a configuration asks for (``sdp.placement``).

Every rank computes the placement by itself. So the result must not depend on the time, on hashes of
strings or on the order of a set.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np

from ..config.schema import SDPSection
from ..distributed.mesh import Holders
from ..errors import ConfigError, PlacementError
from ..module_paths import parents, resolve_name
from .packing import Packing, connect, holders_of, pack
from .placement import Placement, list_groups
from .profiles import capacities, holder_counts
from .units import Unit

MOST_HELD = 0.75  # if a group holds a larger fraction of the model's parameters, a warning says so
MOST_LISTED = 5  # names in a warning


def make_placement(section: SDPSection, units: Sequence[Unit]) -> Placement:
    """Choose the holders of the units as the section ``sdp`` of a configuration says.

    Raises:
        ConfigError: the capacity, the profile or a protected unit is not valid.
        PlacementError: the placement is not valid, or the groups do not have enough room.
    """
    names = tuple(unit.name for unit in units)
    costs = tuple(unit.numel for unit in units)
    flops = tuple(unit.flops for unit in units) if all(unit.flops for unit in units) else ()
    if isinstance(section.placement, dict):
        named = Placement(section.groups, names, _explicit_holders(section, names), costs, flops)
        _require_connected(named)
        return named
    protected = _protected(section.protect, names)
    if section.placement == "contiguous":
        return Placement(section.groups, names, _contiguous(section, costs, protected), costs, flops)
    if section.placement == "cyclic":
        return Placement(section.groups, names, _cyclic(section, costs, flops or costs, protected), costs, flops)
    return Placement(section.groups, names, pack(section, names, costs, flops or costs, protected), costs, flops)


def _require_connected(named: Placement) -> None:
    """Raise PlacementError if a stated placement does not connect all groups, but could.

    It could if the same number of holders can connect them. The engine's own placements only warn,
    because the groups' room may forbid every exchange.
    """
    if named.connected or not named.can_be_connected:
        return
    one, other = (list_groups(part) for part in named.components()[:2])
    raise PlacementError(
        f"sdp.placement: groups {one} and groups {other} have no unit in common, although there are enough holders "
        f"to connect all groups ({named.links}, and {named.links_needed} suffice); give a unit holders in both sets"
    )


def warnings_of(section: SDPSection, placement: Placement) -> list[str]:
    """Return warnings about the placement, for the log.

    For example, ``sdp.placement`` "cyclic" looks only at the number of units, so groups may hold
    very different shares of the parameters. With ``sdp.paths``, the list is empty, because the
    configuration itself places the units.
    """
    if section.paths is not None:
        return []
    held = [placement.held_fraction(group) for group in range(placement.groups)]
    uneven = max(held) > 2 * min(held) or (placement.imbalance > 1.1 and len(set(placement.costs)) > 1)
    if section.placement != "cyclic" or not uneven:
        return placement.warnings()
    return [
        f"a group holds {min(held):.0%} to {max(held):.0%} of the units' parameters, and the slowest has "
        f'{placement.imbalance:.2f} × the mean work; sdp.placement "balanced" fills groups equally, or says why units '
        "do not allow it",
        *placement.warnings(),
    ]


def warn_of_left_out(reasons: Mapping[str, str]) -> list[str]:
    """Return a warning that all groups share some blocks, because no group could skip them.

    ``reasons`` has the reason for each such block. If it is empty, there is no warning.
    """
    if not reasons:
        return []
    kinds = {reason: [name for name in reasons if reasons[name] == reason] for reason in reasons.values()}
    shown = "; ".join(f"{_listed(names)} ({reason})" for reason, names in kinds.items())
    return [
        f"all groups share blocks that no group could skip: {shown}; to make them units, use sdp.masking "
        '"backward" or patterns in sdp.units'
    ]


def warn_of_large_share(numels: Mapping[str, int], units: Sequence[Unit], placement: Placement) -> list[str]:
    """Return a warning, with what all groups share, if a group holds most of the model.

    If a large shared module has submodules, the warning also suggests to make them units.
    ``numels`` has the number of elements of each parameter of the full model.
    """
    total, costs = sum(numels.values()), sum(placement.costs)
    held = max(total - costs + placement.held_fraction(group) * costs for group in range(placement.groups))
    if held <= MOST_HELD * total or all(len(holders) == placement.groups for holders in placement.holders):
        return []
    inside = {part.parameter for unit in units for part in unit.slices}
    above = {path for unit in units for path in parents(unit.name)} | {
        path for name in inside for path in parents(name)
    }
    shared = Counter[str]()
    for name in numels.keys() - inside:
        top = next((path for path in [*parents(name)][::-1] if path not in above), name)
        shared[top] += numels[name]
    largest = sorted((name for name in shared if 100 * shared[name] >= total), key=lambda name: (-shared[name], name))
    has_blocks = any(name.startswith(f"{top}.") and "." in name[len(top) + 1 :] for top in largest for name in numels)
    more = "name more blocks in sdp.units, or " if has_blocks else ""
    parts = _listed([f"{name} {shared[name] / total:.0%}" for name in largest])
    share = f"all groups share {sum(shared.values()) / total:.0%}" + (f": {parts}" if parts else "")
    return [f"a group holds up to {held / total:.0%} of the model's parameters; {share}; {more}lower sdp.capacity"]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return ", ".join(names[:MOST_LISTED]) + more


def _explicit_holders(section: SDPSection, names: Sequence[str]) -> tuple[Holders, ...]:
    assert isinstance(section.placement, dict)
    given: dict[str, Holders] = {}
    for key, groups in section.placement.items():
        name = resolve_name(key, names)
        if name in given:
            raise PlacementError(f"sdp.placement: {name!r} is named twice (again as {key!r})")
        given[name] = tuple(sorted(groups))
    missing = [name for name in names if name not in given]
    if missing:
        raise PlacementError(
            f"sdp.placement: no holders are given for {missing[0]!r} ({len(missing)} of {len(names)} units); name "
            "every unit"
        )
    for name in (names[unit] for unit in sorted(_protected(section.protect, names))):
        if len(given[name]) < section.groups:
            raise PlacementError(
                f"sdp.protect: {name!r} is protected, but in sdp.placement only groups {list(given[name])} hold it"
            )
    return tuple(given[name] for name in names)


def _protected(protect: Sequence[str], names: Sequence[str]) -> set[int]:
    protected = set()
    for name in protect:
        try:
            protected.add(names.index(resolve_name(name, names)))
        except PlacementError:
            raise ConfigError(f"sdp.protect: {name!r} is not a unit; units are {names[0]!r} … {names[-1]!r}") from None
    return protected


def _contiguous(section: SDPSection, costs: Sequence[int], protected: set[int]) -> tuple[Holders, ...]:
    """Give each group a run of neighbouring units, in the model's order.

    The units lie one after the other on a line, with their numbers of parameters as lengths. Group
    w of N holds the units from w / N of the line to w / N plus the capacity. After the last unit
    comes the first one.
    """
    if section.profile != "uniform":
        raise ConfigError(
            f'sdp.profile: {json.dumps(section.profile)} contradicts sdp.placement "contiguous", whose groups hold '
            'equally many adjacent units; use "uniform"'
        )
    total, ends = sum(costs), [*accumulate(costs)]
    held = [set(protected) for _ in range(section.groups)]
    for group, capacity in enumerate(_one_capacity(section)):
        first = Fraction(total * group, section.groups)
        last = first + total * Fraction(str(capacity))
        for unit, (cost, end) in enumerate(zip(costs, ends, strict=True)):
            if any(end - cost + turn < last and end + turn > first for turn in (0, total)):
                held[group].add(unit)
    return tuple(tuple(group for group, units in enumerate(held) if unit in units) for unit in range(len(costs)))


def _one_capacity(section: SDPSection) -> Sequence[float]:
    """Return the capacity of every group. All must be equal."""
    if isinstance(section.capacity, list) and len(set(section.capacity)) > 1:
        raise ConfigError(
            f"sdp.capacity: a {section.placement} placement needs the same capacity for all groups; give one number, "
            'or use sdp.placement "balanced" or "random"'
        )
    return capacities(section)


def _cyclic(section: SDPSection, costs: Sequence[int], work: Sequence[int], protected: set[int]) -> tuple[Holders, ...]:
    """Give unit i to k_i neighbours in the ring of groups.

    With the uniform profile and with a listed one, the neighbours start at group i. If there are
    more groups than units, the starts are spread over the ring. If k falls with depth, the
    neighbours start after the last holder of unit i − 1, so all groups hold the same number of
    units, plus or minus one. If the result does not connect the groups, units are exchanged.
    """
    _one_capacity(section)
    groups, counts = section.groups, holder_counts(section, costs, protected)
    held = np.zeros((groups, len(counts)), dtype=bool)
    before = np.cumsum([0, *counts])
    for unit, k in enumerate(counts):
        spread = unit * max(groups, len(counts)) // len(counts)
        start = before[unit] if section.profile in ("depth", "auto") else spread
        held[np.arange(start, start + k) % groups, unit] = True
    everything = np.full(groups, sum(costs), dtype=np.int64)
    packing = Packing(
        everything, np.array(costs, dtype=np.int64), np.array(work, dtype=np.int64), np.array(counts, dtype=np.int64)
    )
    return holders_of(connect(packing, held) if len(counts) else held)
