"""Paths of modules inside a model: patterns, endings and parents."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .errors import ModelError, PlacementError, suggestion


def resolve_name(name: str, known: Iterable[str]) -> str:
    """Find the module or unit with this name: a whole path, or the end of exactly one path
    ("layers.0").

    Raises:
        PlacementError: no path matches, or several do.
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
    """Return the names in ``modules`` that at least one pattern matches.

    Raises:
        ModelError: a pattern matches nothing. The message names ``source``, the configuration key
            of the patterns.
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
