"""Computes the number of holders k_u of every unit from ``sdp.capacity`` and ``sdp.profile``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence, Set

import numpy as np

from ..config.schema import SDPSection
from ..errors import ConfigError


def capacities(section: SDPSection) -> Sequence[float]:
    """Return the capacity of each group: the fraction of the units' parameters that it holds.

    Raises:
        ConfigError: a value is out of range, the number of values is wrong, or the sum is below 1,
            so that some unit would have no holder.
    """
    given = section.capacity if isinstance(section.capacity, list) else [section.capacity] * section.groups
    if len(given) != section.groups:
        raise ConfigError(
            f"sdp.capacity: {len(given)} values are given for {section.groups} groups; give one number, or one per "
            "group"
        )
    for capacity in given:
        if not 0 < capacity <= 1:
            raise ConfigError(
                f"sdp.capacity: {capacity} is out of range; it is the held fraction of the model, more than 0 and at "
                "most 1"
            )
    if sum(given) < 1 - 1e-9:
        if isinstance(section.capacity, list):
            what, remedy = f"the values add up to {sum(given):.3g}", "values that add up to at least 1"
        else:
            what = f"{section.capacity} × {section.groups} groups = {sum(given):.3g}"
            remedy = f"a capacity of at least {math.ceil(10_000 / section.groups - 1e-9) / 10_000:g}"
        raise ConfigError(f"sdp.capacity: {what} holders per unit, and every unit needs at least one; use {remedy}")
    return given


def holder_counts(section: SDPSection, costs: Sequence[int], protected: Set[int] = frozenset()) -> list[int]:
    """Return the number of holders k_u of every unit, in the order of the units.

    Protected units have k = N, the number of groups. The other units follow ``sdp.profile``. Their
    mean k, weighted by parameters, is N times the capacity.

    Args:
        section: the section ``sdp`` of the configuration.
        costs: the number of parameters of each unit.
        protected: indices of the units that every group holds.

    Raises:
        ConfigError: the capacity is out of range or gives less than one holder per unit, or the
            mean of a listed profile contradicts the capacity.
    """
    mean = sum(capacities(section))
    if (listed := listed_counts(section, len(costs), protected)) is not None:
        return listed
    counts = [section.groups] * len(costs)
    free = [unit for unit in range(len(costs)) if unit not in protected]
    for unit, k in zip(free, shaped_counts(section, mean, [costs[unit] for unit in free]), strict=True):
        counts[unit] = k
    return counts


def shaped_counts(section: SDPSection, mean: float, costs: Sequence[int]) -> list[int]:
    """Return the number of holders of each unit for a profile that is not a list.

    The numbers are whole. Their mean, weighted by ``costs``, is as near to ``mean`` as possible.
    """
    # "auto" is the best rule known so far; see docs/specification_placement.md.
    ideal = [mean] * len(costs) if section.profile == "uniform" else _depth_profile(section.groups, mean, costs)
    return _round_to_mean(ideal, costs, section.groups)


def listed_counts(section: SDPSection, units: int, protected: Set[int] = frozenset()) -> list[int] | None:
    """Check and return the numbers of holders that ``sdp.profile`` lists. None if it is no list.

    Args:
        section: the section ``sdp`` of the configuration.
        units: the number of units.
        protected: indices of the units that every group holds.

    Raises:
        ConfigError: the list has the wrong length or a number above the number of groups, a
            protected unit is not held by all groups, or the mean over the other units contradicts
            ``sdp.capacity``.
    """
    profile, mean = section.profile, sum(capacities(section))
    if not isinstance(profile, list):
        return None
    if len(profile) != units:
        raise ConfigError(
            f"sdp.profile: {len(profile)} values are given for {units} units; give one number of holders per unit"
        )
    if max(profile) > section.groups:
        raise ConfigError(f"sdp.profile: {max(profile)} holders are asked for, but sdp.groups is {section.groups}")
    for unit in sorted(protected):
        if profile[unit] != section.groups:
            raise ConfigError(
                f"sdp.profile: {profile[unit]} holders are listed for unit {unit} (counted from 0), but all groups "
                f"hold it because of sdp.protect; list {section.groups} for this unit"
            )
    free = [k for unit, k in enumerate(profile) if unit not in protected]
    asked = section.capacity != 1.0  # the default, which the file of a run states, too
    if free and asked and abs(sum(free) - mean * len(free)) >= 1:
        right, product = sum(free) / len(free), f"{section.capacity} × {section.groups} groups ="
        stated = "adds up to" if isinstance(section.capacity, list) else product
        raise ConfigError(
            f"sdp.profile: its mean is {right:.3g} holders per unit{' that is not protected' * bool(protected)}, but "
            f"sdp.capacity {stated} {mean:.3g}; set sdp.capacity to {right / section.groups:.8g} or remove it"
        )
    return list(profile)


def _depth_profile(groups: int, mean: float, costs: Sequence[int]) -> list[float]:
    """Return numbers of holders that fall geometrically with depth, from N to 1.

    The formula is k(t) = N^((1 − t)^p) for t = 0 … 1. p is chosen so that the mean is ``mean``. The
    ends are fixed, so with few units there may be no such p. Then all values are moved towards N or
    1.
    """
    if not sum(costs):
        return [mean] * len(costs)
    depth = np.linspace(0, 1, len(costs)) if len(costs) > 1 else np.zeros(1)
    weights = np.asarray(costs, dtype=float) / sum(costs)

    def ideal(log_p: float) -> np.ndarray:
        return groups ** ((1 - depth) ** math.exp(log_p))

    low, high = -12.0, 12.0  # p from almost 0 (all are N) to very large (all but the first are 1)
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
    """Round ``ideal`` to whole numbers of holders, and keep its cost-weighted mean.

    The mean is as close as whole numbers allow.
    """
    counts, carry = [], 0.0
    for k, cost in zip(ideal, costs, strict=True):
        wanted = k + (carry / cost if cost else 0.0)  # a unit may have no parameters
        count = min(groups, max(1, math.floor(wanted + 0.5 - 1e-9)))
        carry = (wanted - count) * cost
        counts.append(count)
    falling = all(a >= b for a, b in itertools.pairwise(ideal)) and len(set(ideal)) > 1
    return sorted(counts, reverse=True) if falling and len(set(costs)) == 1 else counts
