"""The profile that follows from gradient noise: the allocation, what it reads, and the placement
that it makes.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sdp.engine.config.load import load_config
from sdp.engine.config.noise import NoiseProfile
from sdp.engine.errors import ConfigError
from sdp.engine.placement.noise.allocation import allocate, cost_of, noise_of
from sdp.engine.placement.noise.measured import measured_traces
from sdp.engine.placement.policies import resolve_profile
from sdp.tests.support.placements import placed, units

# Traces that are near each other decide by small differences.
TRACES = st.floats(0, 1e6).filter(lambda value: value == 0 or value > 1e-6) | st.integers(0, 20).map(float)


@st.composite
def problems(draw: Any, most_units: int, most_groups: int) -> tuple[list[float], list[int], int, int]:
    """Traces, costs, groups and a budget for at least one holder of each unit."""
    costs = draw(st.lists(st.integers(1, 60), min_size=1, max_size=most_units))
    if draw(st.booleans()):
        costs = [costs[0]] * len(costs)
    traces = draw(st.lists(TRACES, min_size=len(costs), max_size=len(costs)))
    groups = draw(st.integers(1, most_groups))
    return traces, costs, groups, draw(st.integers(sum(costs), groups * sum(costs)))


@settings(max_examples=200, deadline=None)
@given(problems(most_units=5, most_groups=4))
def test_it_is_the_best_of_all_allocations(problem: tuple[list[float], list[int], int, int]) -> None:
    traces, costs, groups, budget = problem
    every = itertools.product(range(1, groups + 1), repeat=len(costs))
    best = min(noise_of(counts, traces) for counts in every if cost_of(counts, costs) <= budget)
    assert noise_of(allocate(traces, costs, groups, budget), traces) == pytest.approx(best, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(problems(most_units=40, most_groups=16))
def test_it_keeps_to_the_budget_and_uses_it(problem: tuple[list[float], list[int], int, int]) -> None:
    traces, costs, groups, budget = problem
    counts = allocate(traces, costs, groups, budget)
    assert all(1 <= k <= groups for k in counts)
    left = budget - cost_of(counts, costs)
    assert left >= 0, "never above"
    assert all(cost > left for k, cost in zip(counts, costs, strict=True) if k < groups), "one more holder would fit"
    assert counts == allocate(traces, costs, groups, budget)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.1, 100), min_size=2, max_size=30), st.integers(2, 12), st.data())
def test_a_noisier_unit_of_equal_cost_has_no_fewer_holders(traces: list[float], groups: int, data: Any) -> None:
    least = data.draw(st.integers(1, groups))
    budget = data.draw(st.integers(least * len(traces), groups * len(traces)))
    counts = allocate(traces, [1] * len(traces), groups, budget, least)
    by_noise = [k for _, k in sorted(zip(traces, counts, strict=True), key=lambda pair: (pair[0], pair[1]))]
    assert by_noise == sorted(by_noise)
    assert min(counts) >= least
    assert sum(counts) == budget


def test_what_counts_is_the_gain_of_the_next_holder() -> None:
    """A third holder removes 12/2 − 12/3 = 2 of the noise, a second one 3.5/1 − 3.5/2 = 1.75."""
    assert allocate([3.5, 12.0], [1, 1], 4, 4) == [1, 3]


def test_it_is_neymans_where_nothing_is_clamped_or_rounded() -> None:
    """k ∝ √(tr Σ / cost): 1, 2, 3 and 4 for these."""
    costs = [6, 3, 2, 1]
    traces = [cost * k**2 for cost, k in zip(costs, (1, 2, 3, 4), strict=True)]
    assert allocate(traces, costs, 8, cost_of((1, 2, 3, 4), costs)) == [1, 2, 3, 4]


def write(path: Path, *steps: dict[str, Any] | None) -> Path:
    """Write a metrics.jsonl whose measured steps have this noise, by unit (trace, preconditioned
    trace).
    """
    lines: list[dict[str, Any]] = []
    for step, noise in enumerate(steps):
        line: dict[str, Any] = {"step": step + 1, "loss": 1.0}
        if noise is not None:
            line["noise"] = {
                unit: {"holders": 4, "trace": plain, "squared_norm": -1.0}
                | ({} if scaled is None else {"preconditioned_trace": scaled})
                for unit, (plain, scaled) in noise.items()
            }
        lines.append(line)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    first = {"layers.0": (1.0, 9.0), "layers.1": (4.0, 9.0), "layers.2": (1.0, 1.0), "shared": (5.0, 5.0)}
    second = {"layers.0": (1.0, 9.0), "layers.1": (8.0, 9.0), "layers.2": (1.0, 1.0), "shared": (5.0, 5.0)}
    return write(tmp_path / "metrics.jsonl", first, None, second)


def test_traces_are_means_over_the_measured_steps(metrics: Path) -> None:
    names = ["layers.0", "layers.1", "layers.2"]
    assert measured_traces(str(metrics), names, preconditioned=False) == [1.0, 6.0, 1.0]
    shares = measured_traces(str(metrics.parent), names, preconditioned=True)
    assert shares == pytest.approx([9 / 19, 9 / 19, 1 / 19])
    with metrics.open("a") as file:
        file.write('{"step": 4, "noi')  # a kill cut this line off
    assert measured_traces(str(metrics), names, preconditioned=False) == [1.0, 6.0, 1.0]


def test_every_step_counts_equally_for_preconditioned_noise(tmp_path: Path) -> None:
    """The first steps divide by moments v that are far too small, and would hide all others."""
    first = {"layers.0": (1.0, 1e10), "layers.1": (1.0, 3e10)}
    later = {"layers.0": (1.0, 9.0), "layers.1": (1.0, 1.0)}
    path = write(tmp_path / "a.jsonl", first, later, {"layers.0": (1.0, 5.0)}, later)
    found = measured_traces(str(path), ["layers.0", "layers.1"], preconditioned=True)
    assert found == pytest.approx([(0.25 + 0.9 + 0.9) / 3, (0.75 + 0.1 + 0.1) / 3])
    nothing = write(tmp_path / "b.jsonl", {"layers.0": (0.0, 0.0), "layers.1": (0.0, 0.0)})
    assert measured_traces(str(nothing), ["layers.0", "layers.1"], preconditioned=True) == [0.0, 0.0]


@pytest.mark.parametrize("policy", ["cyclic", "balanced", "random"])
@pytest.mark.parametrize(("preconditioned", "counts"), [(False, [2, 3, 1]), (True, [3, 2, 1])])
def test_a_placement_by_noise(metrics: Path, policy: str, preconditioned: bool, counts: list[int]) -> None:
    values: dict[str, Any] = {
        "groups": 3,
        "capacity": 2 / 3,
        "placement": policy,
        "profile": {"noise": str(metrics), "preconditioned": preconditioned},
    }
    placement = placed(units([10, 10, 10]), **values)
    assert sum(map(len, placement.holders)) == 6
    assert [len(holders) for holders in placement.holders] == counts
    assert all(placement.held_fraction(group) == pytest.approx(2 / 3) for group in range(3))


@pytest.mark.parametrize("policy", ["balanced", "random"])
def test_equal_units_have_the_holders_that_groups_have_room_for(metrics: Path, policy: str) -> None:
    """Half of three units is one whole unit in each group."""
    values: dict[str, Any] = {"groups": 3, "capacity": 0.5, "placement": policy, "profile": {"noise": str(metrics)}}
    section = load_config({"sdp": values}).sdp
    resolved = resolve_profile(section, units([10, 10, 10])).profile
    assert isinstance(resolved, NoiseProfile)
    found = [len(holders) for holders in placed(units([10, 10, 10]), **values).holders]
    assert found == resolved.holders == [1, 1, 1]


def test_protected_units_take_no_part(metrics: Path) -> None:
    values: dict[str, Any] = {"groups": 4, "capacity": 0.5, "profile": {"noise": str(metrics)}, "protect": ["layers.1"]}
    placement = placed(units([10, 10, 10]), **values)
    assert [len(holders) for holders in placement.holders] == [2, 4, 2]


def test_the_resolved_profile_needs_no_file_and_makes_the_same_placement(metrics: Path) -> None:
    costs = [10, 30, 20]
    for policy in ("cyclic", "balanced", "random"):
        section = load_config(
            {"sdp": {"groups": 4, "capacity": 0.7, "placement": policy, "profile": {"noise": str(metrics)}}}
        ).sdp
        resolved = resolve_profile(section, units(costs))
        first = placed(units(costs), **section.model_dump(exclude_unset=True))
        again = json.loads(resolved.model_dump_json())["profile"]
        assert again["holders"] is not None
        moved = {**again, "noise": "nowhere"}
        second = placed(units(costs), **{**section.model_dump(exclude_unset=True), "profile": moved})
        assert first.holders == second.holders
        assert resolve_profile(resolved, units(costs)) is resolved


@pytest.mark.parametrize("value", [10**300, 1e308, math.inf, math.nan, "1", None, [], True])
def test_noise_that_is_no_usable_number_is_missing(tmp_path: Path, value: Any) -> None:
    """Sums of numbers near the largest one would overflow."""
    step = {"layers.0": (value, None), "layers.1": (1.0, None)}
    with pytest.raises(ConfigError, match=r"has no trace of 'layers\.0' \(1 of 2 units\)"):
        measured_traces(str(write(tmp_path / "a.jsonl", step, step)), ["layers.0", "layers.1"], preconditioned=False)


@pytest.mark.parametrize(
    "content", [b"[" * 100_000 + b"\n{}", b"\n\n", b"\xff\n{}", b"[1]\n3\n", b'{"noise": []}', b""]
)
def test_lines_that_no_run_writes_are_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=r"sdp\.profile\.noise: .*metrics\.jsonl") as caught:
        measured_traces(str(tmp_path), ["layers.0"], preconditioned=False)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_what_cannot_be_read_is_one_clear_line(tmp_path: Path, metrics: Path) -> None:
    these = units([10, 10, 10])

    def problem(profile: dict[str, Any]) -> str:
        with pytest.raises(ConfigError, match=r"^sdp\.profile") as error:
            placed(these, groups=4, capacity=0.5, profile=profile)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "no such file" in problem({"noise": str(tmp_path / "nothing.jsonl")})
    assert "training.noise_scale_interval" in problem({"noise": str(write(tmp_path / "a.jsonl", None, None))})
    some = write(tmp_path / "b.jsonl", {"layers.0": (1.0, None), "layers.1": (1.0, None)})
    assert "'layers.2' (1 of 3 units)" in problem({"noise": str(some)})
    assert "AdamW" in problem({"noise": str(some), "preconditioned": True})
    (tmp_path / "c.jsonl").write_text('{"step": 1\n{"step": 2}\n')
    assert "c.jsonl:1 is not a line of a run" in problem({"noise": str(tmp_path / "c.jsonl")})
    assert "3 units" in problem({"noise": str(metrics), "holders": [1, 2]})
    assert "sdp.groups is 4" in problem({"noise": str(metrics), "holders": [1, 2, 5]})
    with pytest.raises(ConfigError, match=r"sdp\.profile\.nois: unknown key"):
        load_config({"sdp": {"profile": {"noise": "a", "nois": 1}}})
