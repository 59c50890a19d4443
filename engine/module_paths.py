"""Finds modules of a model by patterns and by shortened paths."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .errors import ModelError, PlacementError, suggestion


def resolve_name(name: str, known: Iterable[str]) -> str:
    """Return the whole path of a module or unit, of which ``name`` may be only the end.

    For example, "layers.0" stands for "model.layers.0". Raises PlacementError if no path in
    ``known`` ends with ``name``, or several do.
    """
    known = list(known)
    if name in known:
        return name
    endings = [path for path in known if path.endswith(f".{name}")]
    if len(endings) == 1:
        return endings[0]
    if endings:
        raise PlacementError(f"sdp.placement: {name!r} could be {endings[0]!r} or {endings[1]!r}; write the whole path")
    raise PlacementError(f"sdp.placement: {name!r} is not a module of the model{suggestion(name, known)}")


def match_patterns(modules: Mapping[str, object], patterns: Sequence[str], source: str = "sdp.units") -> set[str]:
    """Return the paths in ``modules`` that match at least one pattern, such as "layers.*".

    Raises ModelError if a pattern matches nothing. ``source`` is the configuration key of the
    patterns, for the message.
    """
    hits = {pattern: {name for name in modules if _matches(name, pattern)} for pattern in patterns}
    wrong = [pattern for pattern, names in hits.items() if not names]
    if len(wrong) > 1:
        raise ModelError(f"{source}: these patterns match no module of the model: {', '.join(map(repr, wrong))}")
    if wrong:
        raise ModelError(f"{source}: {wrong[0]!r} matches no module of the model{suggestion(wrong[0], modules)}")
    return set().union(*hits.values())


def _matches(name: str, pattern: str) -> bool:
    parts, globs = name.split("."), pattern.split(".")
    return len(parts) == len(globs) and all(
        fnmatch.fnmatchcase(part, glob) for part, glob in zip(parts, globs, strict=True)
    )


def parents(name: str) -> Iterator[str]:
    """Yield the paths of the modules that contain ``name``, the nearest first."""
    while name := name.rpartition(".")[0]:
        yield name
