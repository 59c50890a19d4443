"""Which SDP group holds which unit: plain data, checked for coverage and connectivity, with its spectral gap.

Semantics: a unit u has holders H_u, k_u = |H_u| ≥ 1; the shared part is held by all (Singh et al., arXiv 2507.09029, and this
project's own choices, see docs/method.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .config import SDPSection
from .errors import ConfigError, PlacementError
from .mesh import Holders
from .units import Unit, resolve_name


@dataclass(frozen=True)
class Placement:
    """``holders[u]``: the sorted SDP groups that hold the unit ``units[u]``; ``costs[u]``: its number of parameters."""

    groups: int
    units: tuple[str, ...]
    holders: tuple[Holders, ...]
    costs: tuple[int, ...]

    def __post_init__(self) -> None:
        for unit, holders in zip(self.units, self.holders, strict=True):
            if not holders:
                raise PlacementError(f"sdp.placement: {unit!r} has no holder; every unit needs at least one group")
            if len(set(holders)) != len(holders):
                raise PlacementError(f"sdp.placement: {unit!r} names a group twice: {list(holders)}")
            if min(holders) < 0 or max(holders) >= self.groups:
                raise PlacementError(
                    f"sdp.placement: {unit!r} is given to group {max(holders)}, but sdp.groups is {self.groups} (groups count from 0)"
                )

    @property
    def holder_sets(self) -> list[Holders]:
        """The distinct holder sets, sorted: one communicator each."""
        return sorted(set(self.holders))

    def holds(self, group: int, unit: int) -> bool:
        return group in self.holders[unit]

    def held_fraction(self, group: int) -> float:
        """Held part of the units' parameters, 0 … 1."""
        held = sum(cost for cost, holders in zip(self.costs, self.holders, strict=True) if group in holders)
        return held / max(1, sum(self.costs))

    @property
    def matrix(self) -> np.ndarray:
        """0/1, shape (groups, units): 1 where the group holds the unit."""
        matrix = np.zeros((self.groups, len(self.units)))
        for unit, holders in enumerate(self.holders):
            matrix[list(holders), unit] = 1
        return matrix

    @property
    def connected(self) -> bool:
        """Whether the group–unit graph is connected through units alone, without the shared part."""
        reached, frontier = {0}, {0}
        while frontier:
            frontier = {g for holders in self.holders if frontier & set(holders) for g in holders} - reached
            reached |= frontier
        return len(reached) == self.groups

    @property
    def spectral_gap(self) -> float:
        """1 − σ₂², σ₂ the second singular value of D_group^{-1/2} · matrix · D_unit^{-1/2}; 0 where a group holds no unit."""
        matrix = self.matrix
        degrees = matrix.sum(axis=1)
        if not degrees.all():
            return 0.0
        normalised = matrix / np.sqrt(np.outer(degrees, matrix.sum(axis=0)))
        values = np.linalg.svd(normalised, compute_uv=False)
        return float(1 - values[1] ** 2) if len(values) > 1 else 1.0

    def communicators_of(self, group: int) -> int:
        """Number of distinct holder sets of more than one group that ``group`` takes part in."""
        return sum(group in holders and len(holders) > 1 for holders in self.holder_sets)

    def warnings(self) -> list[str]:
        """What a user should know: a graph that is not connected through units, and groups without a unit."""
        notes = []
        links, needed = sum(map(len, self.holders)), self.groups + len(self.units) - 1
        if not self.connected:
            relation = f"Σk = {links} {'<' if links < needed else '≥'} groups + units − 1 = {needed}"
            notes.append(f"the groups are connected through the shared part alone ({relation}); overlap more units to connect them")
        empty = [group for group in range(self.groups) if self.held_fraction(group) == 0]
        if empty:
            notes.append(f"groups {empty} hold no unit and train the shared part alone")
        return notes

    def describe(self) -> str:
        """One line: units, holders, capacity per group, connectivity, spectral gap, communicators."""
        counts = [len(holders) for holders in self.holders]
        held = [self.held_fraction(group) for group in range(self.groups)]
        communicators = max(self.communicators_of(group) for group in range(self.groups))
        return (
            f"{len(self.units)} units over {self.groups} groups, k = {','.join(map(str, counts))} (mean {np.mean(counts):.2f}); "
            f"a group holds {min(held):.0%} to {max(held):.0%} of the units' parameters; connected through units: "
            f"{'yes' if self.connected else 'no'}; spectral gap {self.spectral_gap:.3f}; at most {communicators} communicators a rank"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Placement:
        try:
            holders = tuple(tuple(int(group) for group in held) for held in data["holders"])
            return cls(int(data["groups"]), tuple(data["units"]), holders, tuple(int(cost) for cost in data["costs"]))
        except (KeyError, TypeError, ValueError) as error:
            raise PlacementError(f"placement: not a saved placement ({error!r})") from None


def place(section: SDPSection, units: Sequence[Unit]) -> Placement:
    """The placement that the section ``sdp`` of a configuration asks for. Raises ConfigError or PlacementError."""
    names = tuple(unit.name for unit in units)
    costs = tuple(unit.numel for unit in units)
    if isinstance(section.placement, dict):
        return Placement(section.groups, names, _explicit_holders(section, names), costs)
    counts = holder_counts(section, costs, _protected(section.protect, names))
    return Placement(section.groups, names, _cyclic_holders(counts, section.groups), costs)


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
            f"sdp.placement: no holders are given for {missing[0]!r} ({len(missing)} of {len(names)} units); name every unit"
        )
    for name in (names[unit] for unit in _protected(section.protect, names)):
        if len(given[name]) < section.groups:
            raise PlacementError(f"sdp.protect: {name!r} is protected, but sdp.placement gives it to groups {list(given[name])} only")
    return tuple(given[name] for name in names)


def _protected(protect: Sequence[str], names: Sequence[str]) -> set[int]:
    """Indices of the units that every group must hold."""
    protected = set()
    for name in protect:
        try:
            protected.add(names.index(resolve_name(name, names)))
        except PlacementError:
            raise ConfigError(f"sdp.protect: {name!r} is no unit; units are {names[0]!r} … {names[-1]!r}") from None
    return protected


def _cyclic_holders(counts: Sequence[int], groups: int) -> tuple[Holders, ...]:
    """Unit i is held by the groups i, i + 1, …, i + k_i − 1 (mod N)."""
    return tuple(tuple(sorted((unit + offset) % groups for offset in range(k))) for unit, k in enumerate(counts))


def holder_counts(section: SDPSection, costs: Sequence[int], protected: Set[int] = frozenset()) -> list[int]:
    """Holders k_u of every unit, in the units' order.

    ``capacity`` is the mean held fraction of the units that are not ``protected`` (indices), weighted by their parameters;
    protected units have k = N. Raises :class:`ConfigError` if the capacity is out of range, below one holder, or not the mean
    of an explicit profile.
    """
    free = [unit for unit in range(len(costs)) if unit not in protected]
    mean = _mean_holders(section)
    if isinstance(section.profile, list):
        counts = _explicit_profile(section, mean, len(costs))
    else:
        free_costs = [costs[unit] for unit in free]
        ideal = _depth_profile(section.groups, mean, free_costs) if section.profile == "depth" else [mean] * len(free)
        counts = [section.groups] * len(costs)
        for unit, k in zip(free, _round_to_mean(ideal, free_costs, section.groups), strict=True):
            counts[unit] = k
    for unit in protected:
        counts[unit] = section.groups
    return counts


def _mean_holders(section: SDPSection) -> float:
    assert not isinstance(section.capacity, list)
    if not 0 < section.capacity <= 1:
        raise ConfigError(
            f"sdp.capacity: {section.capacity} is out of range; it is the held fraction of the model, more than 0 and at most 1"
        )
    mean = section.capacity * section.groups
    if mean < 1 - 1e-9:
        raise ConfigError(
            f"sdp.capacity: {section.capacity} × {section.groups} groups = {mean:.3g} holders a unit, and every unit needs at least one; "
            f"use a capacity of at least {1 / section.groups:.4g}"
        )
    return mean


def _explicit_profile(section: SDPSection, mean: float, units: int) -> list[int]:
    profile = section.profile
    assert isinstance(profile, list)
    if len(profile) != units:
        raise ConfigError(f"sdp.profile: {len(profile)} values are given for {units} units; give one number of holders a unit")
    if max(profile) > section.groups:
        raise ConfigError(f"sdp.profile: {max(profile)} holders are asked for, but sdp.groups is {section.groups}")
    asked = "capacity" in section.model_fields_set
    if asked and abs(sum(profile) - mean * units) >= 1:
        raise ConfigError(
            f"sdp.profile: its mean is {sum(profile) / units:.3g} holders a unit, but sdp.capacity {section.capacity} × "
            f"{section.groups} groups = {mean:.3g}; set sdp.capacity to {sum(profile) / units / section.groups:.4g} or remove it"
        )
    return list(profile)


def _depth_profile(groups: int, mean: float, costs: Sequence[int]) -> list[float]:
    """Holders that fall geometrically with depth from N to 1: k(t) = N^((1 − t)^p), t = 0 … 1, p chosen so that the mean holds.

    A mean that no p reaches (of few units, whose ends are fixed) is reached by moving all of them towards N or 1.
    """
    if not sum(costs):
        return [mean] * len(costs)
    depth = np.linspace(0, 1, len(costs)) if len(costs) > 1 else np.zeros(1)
    weights = np.asarray(costs, dtype=float) / sum(costs)

    def ideal(log_p: float) -> np.ndarray:
        return groups ** ((1 - depth) ** math.exp(log_p))

    low, high = -12.0, 12.0  # p from almost 0 (all N) to very large (all 1 but the first)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if weights @ ideal(middle) > mean else (low, middle)
    curve = ideal((low + high) / 2)
    reached = float(weights @ curve)
    if reached < mean - 1e-6:
        curve = curve + (groups - curve) * (mean - reached) / (groups - reached)
    elif reached > mean + 1e-6:
        curve = 1 + (curve - 1) * (mean - 1) / (reached - 1)
    return curve.tolist()


def _round_to_mean(ideal: Sequence[float], costs: Sequence[int], groups: int) -> list[int]:
    """Whole numbers of holders near ``ideal`` whose cost-weighted mean is that of ``ideal``, as nearly as whole units allow."""
    counts, carry = [], 0.0
    for k, cost in zip(ideal, costs, strict=True):
        wanted = k + (carry / cost if cost else 0.0)  # a unit may have no parameters
        count = min(groups, max(1, math.floor(wanted + 0.5 - 1e-9)))
        carry = (wanted - count) * cost
        counts.append(count)
    falling = all(a >= b for a, b in itertools.pairwise(ideal)) and len(set(ideal)) > 1
    return sorted(counts, reverse=True) if falling and len(set(costs)) == 1 else counts
