"""Tables of cases in which every pair of two factors' values occurs."""

import itertools
import random
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any

import pytest
from sdp.tests.support.cases import STEPS, Case

# Schedules of maskings, whose phases meet in the middle of the run.
SCHEDULED_STEPS = 4
TO_BACKWARD = '[{"until": 2, "masking": "forward"}, {"masking": "backward"}]'
TO_FORWARD = '[{"until": 2, "masking": "backward"}, {"masking": "forward"}]'
THERE_AND_BACK = '[{"until": 1, "masking": "forward"}, {"until": 3, "masking": "backward"}, {"masking": "forward"}]'
Row = dict[str, Any]
FACTORS: dict[str, Sequence[Any]] = {
    "masking": ["forward", "backward", TO_BACKWARD, TO_FORWARD, THERE_AND_BACK],
    "layout": [(2, 1, 1), (2, 2, 1), (4, 1, 1), (4, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)],
    "stage": [0, 1, 2, 3],
    "accumulation": [1, 3],
    "clip": [False, True],
    "optimizer": ["sgd", "momentum", "adamw"],
    "placement": ["mixed", "cyclic", "profile", "full", "balanced", "random"],
    "neurons": [0, 2, 3],
    "model": ["mlp", "llama-meta", "llama-tied-meta", "wide-llama", "wide-llama-tied-meta", "resnet-meta", "swin-meta"],
    "checkpointing": ["none", "full", "selective"],
    "branch_scale": ["none", "train"],
    "lr_scale": ["none", "auto"],
}


def case_of(row: Row) -> Case | None:
    """Return the case of a row, or None if its values exclude each other."""
    groups, fsdp, tp = row["layout"]
    holds_all, scheduled = row["placement"] == "full", row["masking"][0] == "["
    possible = (
        (groups > 1 or holds_all)
        and not (holds_all and (row["masking"] != "forward" or row["lr_scale"] != "none"))
        and not (row["branch_scale"] == "train" and (row["masking"] == "backward" or holds_all))
        and not (row["neurons"] and row["model"] == "mlp")  # it declares no branches
        and not (row["neurons"] == 3 and tp > 1)  # tensor ranks share the neurons of a group
        and (tp == 1 or row["model"].startswith("wide"))
        # These placements list the holders of four units, or have no room for its large slices.
        and not (row["placement"] in ("profile", "random") and row["model"] == "resnet-meta")
    )
    steps = SCHEDULED_STEPS if scheduled else STEPS
    values = {key: value for key, value in row.items() if key != "layout"}
    return Case(groups, fsdp, tp=tp, steps=steps, **values) if possible else None


def pairs_of(row: Row) -> set[tuple[Any, Any]]:
    return set(itertools.combinations(row.items(), 2))


def pairwise_cover(factors: dict[str, Sequence[Any]]) -> list[Case]:
    """Choose cases until every pair of two factors' values occurs that can.

    Each case has a pair that is still missing, and is the best of some that are drawn.
    """
    draw, cover = random.Random(0), []
    missing = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(factors, 2)
        for a, b in itertools.product(factors[one], factors[other])
    }
    for pair in sorted(missing, key=str):
        if pair in missing:
            drawn = ({name: draw.choice(factors[name]) for name in factors} | dict(pair) for _ in range(400))
            possible = itertools.islice((row for row in drawn if case_of(row) is not None), 25)
            best = max(possible, key=lambda row: len(pairs_of(row) & missing), default=None)
            if best is not None:  # else the two values exclude each other
                missing -= pairs_of(best)
                cover.append(case_of(best))
    return cover


def mostly_slow(cases: Sequence[Case], elsewhere: Collection[tuple[str, str]] = ()) -> list[Any]:
    """Mark cases as slow, except for a few that have each value of each factor at least once.

    Cases with few ranks are preferred, because they take less time. Other tests have the values of
    ``elsewhere``.
    """
    values_of = {case: {(each.name, str(getattr(case, each.name))) for each in fields(case)} for case in cases}
    missing, kept = set().union(*values_of.values()) - set(elsewhere), set()
    while missing:
        best = max(values_of, key=lambda case: len(values_of[case] & missing) / case.world)
        kept.add(best)
        missing -= values_of[best]
    return [case if case in kept else pytest.param(case, marks=pytest.mark.slow) for case in cases]
