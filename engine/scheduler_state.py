"""State of a learning-rate scheduler over a change of engine, layout and schedule: what is of parameter groups is the rank's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


def shared(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` without what it lists by parameter group (``base_lrs``), where groups are those of one rank; schedulers inside it stay."""
    kept = {key: value for key, value in state.items() if not isinstance(value, list | tuple) or _of_schedulers(value)}
    return {key: [shared(each) for each in value] if isinstance(value, list | tuple) else value for key, value in kept.items()}


def fitting(saved: Any, own: Any) -> Any:
    """``saved`` for a scheduler whose state is ``own``, from which what is missing comes, and lists of other lengths."""
    if isinstance(own, Counter):  # milestones: settings, whose numbers JSON made words
        return own
    if isinstance(saved, Mapping) and isinstance(own, Mapping):
        return {**own, **{key: fitting(value, own[key]) if key in own else value for key, value in saved.items()}}
    if isinstance(saved, list | tuple) and isinstance(own, list | tuple):
        return [fitting(*pair) for pair in zip(saved, own, strict=True)] if len(saved) == len(own) else own
    return saved


def of_another_kind(saved: Any, own: Any) -> bool:
    """Whether they count steps in different words, so that a run would begin its schedule anew."""
    return isinstance(saved, Mapping) and isinstance(own, Mapping) and bool(saved) and not saved.keys() & own.keys()


def _of_schedulers(values: list[Any] | tuple[Any, ...]) -> bool:
    return bool(values) and all(isinstance(value, Mapping) for value in values)
