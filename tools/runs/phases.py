"""The phases of a run with a schedule of maskings, as its metrics recorded them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Phase:
    """Steps in a row with one masking, from ``first`` to ``last``.

    ``tokens``: those of the run before the phase.
    """

    masking: str
    first: int
    last: int
    tokens: int


def phases_of(metrics: Iterable[Mapping[str, Any]]) -> list[Phase]:
    """Find the phases in the lines of metrics.jsonl. A run with one masking has none."""
    phases: list[Phase] = []
    tokens = 0
    for line in metrics:
        masking, step = line.get("masking"), line["step"]
        if masking is not None:
            if phases and phases[-1].masking == masking:
                phases[-1] = Phase(masking, phases[-1].first, step, phases[-1].tokens)
            else:
                phases.append(Phase(masking, step, step, tokens))
        tokens = line.get("tokens", tokens)
    return phases


def describe_phases(phases: Iterable[Phase]) -> str | None:
    """Say at which steps each phase was, or return None if there is none."""
    return ", then ".join(f"{phase.masking} {phase.first:,}–{phase.last:,}" for phase in phases) or None
