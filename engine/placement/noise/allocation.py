"""Divides holders among units so that the noise of all means together is least (Neyman allocation).

The mean of k gradients has the variance tr Σ / k. So the whole update has the noise Σ_u tr Σ_u /
k_u, and a budget limits Σ_u k_u·cost_u. Without rounding and limits, k_u is proportional to √(tr
Σ_u / cost_u).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

MOST_STATES = 20_000  # of the exact search, after each unit


def allocate(traces: Sequence[float], costs: Sequence[int], groups: int, budget: int, least: int = 1) -> list[int]:
    """Return the number of holders of every unit.

    No unit with fewer holders than groups could have one more within the budget. The result is the
    best one if all units cost the same, or if the exact search stays small. Otherwise it is that of
    the greedy rule: the holder that lowers the noise most for its cost comes first.

    Args:
        traces: tr Σ of each unit, at least 0.
        costs: what a holder of each unit costs.
        groups: the most holders of a unit.
        budget: the most that all holders may cost. At least ``least`` holders of every unit fit.
        least: the fewest holders of a unit.
    """
    counts = [groups if not cost else least for cost in costs]
    _fill(counts, traces, costs, groups, budget)
    if len(set(costs) - {0}) > 1:
        better = _search(counts, traces, costs, groups, budget, least)
        if better is not None:
            counts = better
            _fill(counts, traces, costs, groups, budget)  # holders that do not matter
    return counts


def noise_of(counts: Sequence[int], traces: Sequence[float]) -> float:
    """Return Σ tr Σ_u / k_u."""
    return math.fsum(trace / k for trace, k in zip(traces, counts, strict=True))


def cost_of(counts: Sequence[int], costs: Sequence[int]) -> int:
    """Return Σ k_u·cost_u."""
    return sum(k * cost for k, cost in zip(counts, costs, strict=True))


def _fill(counts: list[int], traces: Sequence[float], costs: Sequence[int], groups: int, budget: int) -> None:
    """Add holders in place, those that lower the noise most for their cost first, while one fits.

    The gain of a further holder falls with every holder. So with equal costs the result is the
    best.
    """
    left = budget - cost_of(counts, costs)

    def entry(unit: int) -> tuple[float, int]:
        k = counts[unit]
        return -traces[unit] / (k * (k + 1) * costs[unit]), unit

    heap = [entry(unit) for unit, cost in enumerate(costs) if cost and counts[unit] < groups]
    heapq.heapify(heap)
    while heap:
        _, unit = heapq.heappop(heap)
        if costs[unit] > left:
            continue  # less is left for ever
        counts[unit] += 1
        left -= costs[unit]
        if counts[unit] < groups:
            heapq.heappush(heap, entry(unit))


class _State(NamedTuple):
    noise: float  # of the units so far
    cost: int
    counts: tuple[int, ...]


def _search(
    greedy: Sequence[int], traces: Sequence[float], costs: Sequence[int], groups: int, budget: int, least: int
) -> list[int] | None:
    """Return the best numbers of holders, or None if the search is too large.

    It goes from unit to unit, and keeps what no other choice beats in both noise and cost. What
    cannot become better than the greedy result is dropped, by the bound of Lagrangian relaxation.
    """
    price = _price(greedy, traces, costs, groups)
    # By unit: the least of noise + price · cost, over all numbers of holders.
    relaxed = [
        min(trace / k + price * cost * k for k in range(least, groups + 1))
        for trace, cost in zip(traces, costs, strict=True)
    ]
    cheapest = [least * cost for cost in costs]
    bound = noise_of(greedy, traces) * (1 + 1e-12)
    states = [_State(0.0, 0, ())]
    for unit, (trace, cost) in enumerate(zip(traces, costs, strict=True)):
        rest, least_cost = math.fsum(relaxed[unit + 1 :]), sum(cheapest[unit + 1 :])
        reached = sorted(
            _State(state.noise + trace / k, state.cost + k * cost, (*state.counts, k))
            for state in states
            for k in (range(least, groups + 1) if cost else (groups,))
            if state.cost + k * cost + least_cost <= budget
        )
        states, lowest = [], math.inf
        for state in reached:
            hopeful = state.noise + rest - price * (budget - state.cost) <= bound
            if state.cost < lowest and hopeful:
                states.append(state)
                lowest = state.cost
        if len(states) > MOST_STATES:
            return None
    return list(states[0].counts) if states else None


def _price(counts: Sequence[int], traces: Sequence[float], costs: Sequence[int], groups: int) -> float:
    """Return the noise that the next holder would remove for its cost: the price of a unit of
    cost.
    """
    return max(
        (
            trace / (k * (k + 1) * cost)
            for k, trace, cost in zip(counts, traces, costs, strict=True)
            if cost and k < groups
        ),
        default=0.0,
    )
