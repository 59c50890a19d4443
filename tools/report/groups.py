"""How many groups of an elastic run were alive, from the lines of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def describe_groups(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Say how many groups were alive at the end and at the least, and how often that changed.

    None if the run was not elastic.
    """
    alive = [line["groups"] for line in lines if isinstance(line.get("groups"), int)]
    if not alive:
        return None
    generations = len({line.get("generation") for line in lines if "groups" in line})
    changes = f", {generations - 1} change{'s' * (generations != 2)}" if generations > 1 else ""
    return f"{alive[-1]}, at least {min(alive)}{changes}"
