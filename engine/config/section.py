"""The base class of all sections of the configuration, and errors that fit in one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..errors import ConfigError, shorten, suggestion


def _take_whole_float(value: Any) -> Any:
    """Return ``value`` as an integer if it is a whole float: JSON files write 100000 as 1e5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = BeforeValidator(_take_whole_float)
PositiveInt = Annotated[int, Field(gt=0), Whole]
NonNegativeInt = Annotated[int, Field(ge=0), Whole]

# These bounds are far above every real run. Without them, one digit too many overflows torch's
# 64-bit sizes, or builds lists that fill the memory of the machine.
Layers = Annotated[int, Field(gt=0, le=2**16)]
Width = Annotated[int, Field(gt=0, le=2**24)]
Tokens = Annotated[int, Field(ge=2, le=2**24)]  # of a sample; one token alone has no next token to predict
Pixels = Annotated[int, Field(gt=0, le=2**16)]
Samples = Annotated[int, Field(gt=0, le=2**32), Whole]
RankCount = Annotated[int, Field(gt=0, le=2**20)]
NonNegative = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # the range that torch's generators accept


def _as_path(text: str) -> str:
    """Return the path with the home directory in place of ``~``."""
    if "\0" in text:
        raise ValueError("a path cannot have the character NUL; remove it")
    try:
        return str(Path(text).expanduser()) if text.startswith("~") else text
    except RuntimeError:
        raise ValueError(f"there is no home directory for {text!r}; write the whole path") from None


PathText = Annotated[str, AfterValidator(_as_path)]
KeyPath = tuple[str, ...]


class Section(BaseModel):
    """A configuration section. Unknown keys and values of another type ("4" for 4) are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


SectionType = TypeVar("SectionType", bound=Section)


def parse_section(
    schema: type[SectionType],
    raw: Mapping[str, Any],
    path: str = "",
    known_keys: Callable[[KeyPath], Sequence[str]] | None = None,
) -> SectionType:
    """Check a section of the file, and return it as an object of its ``schema``.

    Args:
        schema: The class of the section.
        raw: The section as it is in the file.
        path: The path of the section in the file.
        known_keys: A function that lists the keys of a section, given the section's path. An error
            about a misspelt key suggests one of these keys. Default: the keys of ``schema``.

    Raises:
        ConfigError: ``raw`` is not valid. The message is one line that begins with the key's path.
    """
    try:
        return schema.model_validate(dict(raw))
    except ValidationError as error:
        # Report an unknown key first, because a misspelt key often explains a missing one.
        # Otherwise report the deepest problem, which says most.
        problems = [(_path_in(raw, problem["loc"]), problem) for problem in error.errors()]
        location, problem = max(problems, key=lambda pair: (pair[1]["type"] == "extra_forbidden", len(pair[0])))
        # A union reports one problem per alternative. Name all of them, because each suggests a
        # fix.
        ways = [_message(other) for where, other in problems if where == location]
        candidates = known_keys(location[:-1]) if known_keys else list(schema.model_fields)
        where = ".".join(([path] if path else []) + [shorten(key) for key in location])
        homes = _homes(schema, location[-1]) if problem["type"] == "extra_forbidden" else []
        raise ConfigError(_explain(problem, where, ways, candidates, homes)) from None


def _homes(schema: type[BaseModel], key: str, prefix: str = "") -> list[str]:
    matches = [f"{prefix}{key}"] if key in schema.model_fields else []
    inner = ((name, field.annotation) for name, field in schema.model_fields.items())
    sections = ((name, kind) for name, kind in inner if isinstance(kind, type) and issubclass(kind, BaseModel))
    return matches + [home for name, kind in sections for home in _homes(kind, key, f"{prefix}{name}.")]


def _path_in(raw: Any, location: tuple[int | str, ...]) -> KeyPath:
    """Return ``location`` without pydantic's names of union members, which are not keys."""
    path: list[str] = []
    for part in location:
        is_key = isinstance(raw, Mapping) and part in raw
        is_index = isinstance(raw, list | tuple) and isinstance(part, int) and part < len(raw)
        if is_key or is_index:
            raw = raw[part]  # type: ignore[index]
            path.append(str(part))
    return tuple(path)


def _explain(problem: Any, where: str, ways: Sequence[str], known: Sequence[str], homes: Sequence[str]) -> str:
    """Describe a problem of pydantic in one line.

    Args:
        problem: The problem, as pydantic gives it.
        where: The path of the key.
        ways: The messages for all types that a value may have (a union).
        known: The keys of the same section.
        homes: The paths of keys of the same name in other sections.
    """
    if problem["type"] == "extra_forbidden":
        elsewhere = f", did you mean {' or '.join(homes)}?" if homes else f"; known: {', '.join(known)}"
        hint = suggestion(where.rpartition(".")[2], known) or elsewhere
        return f"{where}: unknown key{hint}"
    if problem["type"] == "missing":
        return f"{where}.{problem['loc'][-1]}: this key is required".removeprefix(".")
    if problem["type"] == "value_error":  # a message of our own
        return f"{where}: {problem['ctx']['error']}"
    return f"{where}: {' or '.join(dict.fromkeys(ways))} (found {shorten(json.dumps(problem['input'], default=str))})"


def _message(problem: Any) -> str:
    return problem["msg"][0].lower() + problem["msg"][1:]
