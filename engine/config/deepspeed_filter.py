"""Separates DeepSpeed's keys that we do not act on, and the settings that DeepSpeed reads."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel

from ..errors import ConfigError, shorten, suggestion
from .deepspeed_keys import (
    CURRICULUM,
    HINT_SECTIONS,
    HINTS,
    HONOURED_BY_DEEPSPEED,
    IGNORED_BY_DEEPSPEED,
    KEPT_FROM_DEEPSPEED,
    NEUTRAL,
    OFFLOAD_HINTS,
    SILENT_IF_OFF,
    WHY_NOT,
    WHY_NOT_DEEPSPEED,
)

_OFFLOADS = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")

# Sections with a switch. While the switch is off, the other keys of the section do not matter.
_SWITCHES = {path.rpartition(".")[0]: path for path in NEUTRAL if path.endswith(".enabled")}

# Sections in which we use no key.
_FOREIGN_SECTIONS = ("checkpoint", "data_types")

# Our own sections and the settings that we apply ourselves. DeepSpeed does not get them.
_OURS = (
    "sdp",
    "model",
    "data",
    "training",
    "env",
    "activation_checkpointing",
    "tensor_parallel",
    "torch_autocast",
    "train_batch_size",
)


def split_foreign_keys(raw: dict[str, Any], *, deepspeed: bool = False) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Remove the keys that only DeepSpeed acts on.

    Args:
        raw: The configuration file.
        deepspeed: Whether the DeepSpeed engine runs. It gets the removed keys.

    Returns:
        ``raw`` without these keys, and those of the removed hints that have no effect.

    Raises:
        ConfigError: A setting would change the results, and the engine cannot honour it.
    """
    hints: list[str] = []
    ours = _filter(raw, "", hints, deepspeed)
    if deepspeed:
        hints = [path for path in hints if path in KEPT_FROM_DEEPSPEED or path.split(".")[0] in _OURS]
    return ours, tuple(hints)


def for_deepspeed(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the file that DeepSpeed reads.

    Our own sections are left out, the settings that we act on ourselves, and keys that DeepSpeed
    does not know any more.
    """
    theirs = {key: copy.deepcopy(value) for key, value in raw.items() if key not in _OURS and value is not None}
    for path in KEPT_FROM_DEEPSPEED:
        section, _, key = path.rpartition(".")
        holder = theirs.get(section) if section else theirs
        if isinstance(holder, dict):
            holder.pop(key, None)
    return theirs


def _filter(section: dict[str, Any], prefix: str, hints: list[str], deepspeed: bool) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in section.items():
        path = f"{prefix}{key}"
        if path in HINTS:
            if deepspeed and path in WHY_NOT_DEEPSPEED and value is not False:
                raise ConfigError(_refusal(path, value, False))
            if path not in SILENT_IF_OFF or not _is_off(path, value):
                hints.append(path)
        elif path in IGNORED_BY_DEEPSPEED:
            hints.append(path)
        elif path in HINT_SECTIONS:
            if not value or is_switched_off(value):
                continue
            if deepspeed and path in WHY_NOT_DEEPSPEED:
                raise ConfigError(_refusal(path, value, {"enabled": False}))
            if CURRICULUM.startswith(f"{path}."):
                _require_no_curriculum(value, deepspeed)
            hints.append(path)
        elif path in _OFFLOADS and isinstance(value, dict):
            kept[key] = _filter_offload(path, value, hints, deepspeed)
        elif path in _OFFLOADS and value is None:
            continue
        elif path in NEUTRAL:
            if not is_switched_off(value):
                _require_neutral(path, value, deepspeed)
        elif path in _SWITCHES and isinstance(value, dict):
            switch = _SWITCHES[path]
            _require_neutral(switch, value.get(switch.rpartition(".")[2], NEUTRAL[switch][0]), deepspeed)
        elif isinstance(value, dict) and any(known.startswith(f"{path}.") for known in (*HINTS, *NEUTRAL)):
            rest = _filter(value, f"{path}.", hints, deepspeed)
            if path not in _FOREIGN_SECTIONS:
                kept[key] = rest
            elif rest:
                unknown = next(iter(rest))
                raise ConfigError(
                    f"{path}.{shorten(unknown)}: unknown key{suggestion(unknown, _foreign_keys(f'{path}.'))}"
                )
        else:
            if deepspeed and path in HONOURED_BY_DEEPSPEED:
                _require_neutral(path, value, deepspeed)
            kept[key] = value
    return kept


def _is_off(path: str, value: Any) -> bool:
    return value in (None, False) or (path == "gradient_predivide_factor" and value == 1)


def is_switched_off(value: Any) -> bool:
    """Whether ``value`` is a section with ``"enabled": false``."""
    return isinstance(value, dict) and value.get("enabled") is False


def _require_no_curriculum(data_efficiency: Any, deepspeed: bool) -> None:
    """Raise ConfigError for a curriculum that is switched on, in a section that is switched on."""
    section = data_efficiency
    for key in CURRICULUM.split(".")[1:]:
        if not isinstance(section, dict) or is_switched_off(section):
            return
        section = section.get(key, False)
    _require_neutral(CURRICULUM, section, deepspeed)


def _filter_offload(path: str, section: dict[str, Any], hints: list[str], deepspeed: bool) -> dict[str, Any]:
    """Return the keys of an offload section that we act on."""
    _require_neutral(f"{path}.device", section.get("device"), deepspeed)
    hints += [f"{path}.{key}" for key in section if key in OFFLOAD_HINTS]
    return {key: value for key, value in section.items() if key not in OFFLOAD_HINTS and value is not None}


def _refusal(path: str, value: Any, neutral: Any) -> str:
    reason = WHY_NOT_DEEPSPEED.get(path, WHY_NOT.get(path))
    why = f": {reason}" if reason else ""
    return (
        f'{path}: {shorten(json.dumps(value))} cannot be honoured by sdp.engine "deepspeed"{why};'
        f" remove it or set it to {json.dumps(neutral)}"
    )


def _require_neutral(path: str, value: Any, deepspeed: bool) -> None:
    allowed = NEUTRAL.get(path, ())
    if deepspeed:
        allowed = HONOURED_BY_DEEPSPEED.get(path, allowed)
    if any(_same(value, neutral) for neutral in allowed):
        return
    if path.endswith(".enabled") and not isinstance(value, bool):
        raise ConfigError(f"{path}: input should be a valid boolean (found {shorten(json.dumps(value))})")
    if deepspeed:
        raise ConfigError(_refusal(path, value, allowed[0]))
    why = f": {WHY_NOT[path]}" if path in WHY_NOT else ""
    raise ConfigError(
        f"{path}: {shorten(json.dumps(value))} cannot be honoured by this engine{why}; "
        f"remove it or set it to {json.dumps(allowed[0])}"
    )


def _same(value: Any, neutral: Any) -> bool:
    """Whether the values are equal. Upper and lower case do not matter, and 1.0 is 1."""
    if isinstance(value, str) and isinstance(neutral, str):
        return value.lower() == neutral.lower()
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


def known_keys(parents: Sequence[str], root: type[BaseModel]) -> list[str]:
    """List all keys that the section at ``parents`` may have, ours and DeepSpeed's.

    They are the candidates for a suggestion.
    """
    prefix = "".join(f"{parent}." for parent in parents)
    models: list[type[BaseModel]] = [root]
    for parent in parents:
        if parent.isdigit():  # the index of a section in a list
            continue
        fields = [model.model_fields[parent] for model in models if parent in model.model_fields]
        models = [model for field in fields for model in _sections_in(field.annotation)]
    ours = [key for model in models for key in model.model_fields]
    return list(dict.fromkeys(ours + _foreign_keys(prefix)))


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a field may hold: one, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in _sections_in(inner)]


def _foreign_keys(prefix: str) -> list[str]:
    paths = (*HINTS, *NEUTRAL, *HINT_SECTIONS)
    return sorted({path.removeprefix(prefix).split(".")[0] for path in paths if path.startswith(prefix)})
