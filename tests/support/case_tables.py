"""Tables of cases: every pair of two factors' values, and all combinations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest
from sdp.tests.support.cases import Case

FACTORS: dict[str, Sequence[Any]] = {
    "masking": ["forward", "backward"],
    "layout": [(2, 1), (2, 2), (4, 1), (4, 2), (1, 4)],
    "stage": [0, 1, 2, 3],
    "accumulation": [1, 3],
    "clip": [False, True],
    "optimizer": ["sgd", "adamw"],
    "placement": ["mixed", "cyclic", "profile", "full"],
    "granularity": ["block", "neuron"],
    "kind": ["mlp", "llama", "llama-tied"],
    "meta": [False, True],
}


TENSOR_FACTORS = FACTORS | {
    "layout": [(2, 1, 2), (1, 2, 2), (2, 2, 2), (4, 1, 2)],
    "kind": ["wide-llama", "wide-llama-tied"],
}


TAKE_TURNS = ("granularity", "kind", "meta")  # in the full table, whose rows use their values one after the other


# Schedules of maskings, whose phases meet in the middle of the run.
SCHEDULED_STEPS = 4
TO_BACKWARD = '[{"until": 2, "masking": "forward"}, {"masking": "backward"}]'
TO_FORWARD = '[{"until": 2, "masking": "backward"}, {"masking": "forward"}]'
THERE_AND_BACK = '[{"until": 1, "masking": "forward"}, {"until": 3, "masking": "backward"}, {"masking": "forward"}]'
OF_SCHEDULES: dict[str, Any] = {
    "masking": [TO_BACKWARD, TO_FORWARD],
    "placement": ["mixed", "profile"],
    "meta": [True],
    "steps": [SCHEDULED_STEPS],
}


def case_of(row: dict[str, Any]) -> Case | None:
    """Return the case of a row, or None if its values exclude each other.

    One group must hold everything. Backward masking needs a group that lacks a unit. The MLP
    declares no branches, so its neurons cannot be cut.
    """
    groups, fsdp, *tp = row["layout"]
    if (groups == 1 and row["placement"] != "full") or (row["masking"] == "backward" and row["placement"] == "full"):
        return None
    if row["granularity"] == "neuron" and row["kind"] == "mlp":
        return None
    others = {key: value for key, value in row.items() if key not in ("layout", *TAKE_TURNS)}
    model = row["kind"] + "-meta" * row["meta"]
    neurons = 0 if row["granularity"] == "block" else 2 if tp else 3
    return Case(groups, fsdp, **others, tp=tp[0] if tp else 1, model=model, neurons=neurons)


def pairwise_cover(factors: dict[str, Sequence[Any]]) -> list[Case]:
    """Choose cases greedily until every possible pair of two factors' values occurs."""
    rows = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    pairs_of = {}
    for row in rows:
        case = case_of(row)
        if case is not None:
            pairs_of[case] = frozenset(itertools.combinations(row.items(), 2))
    missing, cover = set().union(*pairs_of.values()), []
    while missing:
        best = max(pairs_of, key=lambda case: len(pairs_of[case] & missing))
        cover.append(best)
        missing -= pairs_of[best]
    return cover


def mostly_slow(cases: Sequence[Case]) -> list[Any]:
    """Mark cases as slow, except for a few that have each value of each factor at least once."""
    values_of = {case: {(each.name, str(getattr(case, each.name))) for each in fields(case)} for case in cases}
    missing, kept = set().union(*values_of.values()), set()
    while missing:
        best = max(values_of, key=lambda case: len(values_of[case] & missing))
        kept.add(best)
        missing -= values_of[best]
    return [case if case in kept else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def full_table(factors: dict[str, Sequence[Any]]) -> list[Case]:
    """Combine all factors with each other; only the model and its granularity take turns."""
    turns = [
        dict(zip(TAKE_TURNS, values, strict=True))
        for values in itertools.product(*(factors[name] for name in TAKE_TURNS))
    ]
    kinds = itertools.cycle(turn for turn in turns if (turn["granularity"], turn["kind"]) != ("neuron", "mlp"))
    others = {name: values for name, values in factors.items() if name not in TAKE_TURNS}
    rows = (dict(zip(others, values, strict=True)) for values in itertools.product(*others.values()))
    return [case for row in rows if (case := case_of({**row, **next(kinds)})) is not None]
