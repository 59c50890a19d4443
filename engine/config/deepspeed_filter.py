"""Reads DeepSpeed's keys: other spellings, "auto", the keys that we do not act on, and the settings
that DeepSpeed itself reads.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from ..errors import ConfigError, shorten, suggestion
from .deepspeed_keys import (
    ALIASES,
    CURRICULUM,
    HINT_SECTIONS,
    HINTS,
    HONOURED_BY_DEEPSPEED,
    IGNORED_BY_DEEPSPEED,
    KEPT_FROM_DEEPSPEED,
    REFUSED,
    SCHEDULES,
    WHY_NOT_DEEPSPEED,
)

_NEVER = 2**40  # a number of steps that no run reaches
_COMMENTS = ("_", "#", "//")  # a key that starts like this is a comment

# Sections with a switch. While the switch is off, the other keys of the section do not matter.
_SWITCHES = {path.rpartition(".")[0]: path for path in REFUSED if path.endswith(".enabled")}

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
# Sections in which "auto" has a meaning of its own, or none.
_WITHOUT_AUTO = _OURS[:6]


def resolve_spellings(raw: dict[str, Any]) -> dict[str, Any]:
    """Return ``raw`` with the spellings of DeepSpeed 0.19: aliases, comments, inf, null and old
    switches.
    """
    known = {key: value for key, value in raw.items() if key != "comment" and not key.startswith(_COMMENTS)}
    for old, new in ALIASES.items():
        if old in known and new not in known:
            known[new] = known.pop(old)
    if "steps_per_print" in known and _is_infinite(known["steps_per_print"]):
        known["steps_per_print"] = _NEVER
    scheduler = known.get("scheduler")
    if isinstance(scheduler, dict) and isinstance(scheduler.get("type"), str):
        names = {name.lower(): name for name in SCHEDULES}
        known["scheduler"] = scheduler | {"type": names.get(scheduler["type"].lower(), scheduler["type"])}
    optimizer = known.get("optimizer")
    if isinstance(optimizer, dict) and isinstance(optimizer.get("params"), dict):
        known["optimizer"] = optimizer | {"params": _without_equal_norm(optimizer["params"], known)}
    zero = known.get("zero_optimization")
    if isinstance(zero, bool):
        known["zero_optimization"] = {"stage": int(zero)}
    elif isinstance(zero, dict):
        known["zero_optimization"] = _resolve_offloads(zero)
    return {key: value for key, value in known.items() if value is not None}


def _without_equal_norm(params: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """Return the optimizer's ``params`` without a ``max_grad_norm`` that says what
    gradient_clipping says.
    """
    same = params.get("max_grad_norm") in (0, raw.get("gradient_clipping"))
    return {key: value for key, value in params.items() if key != "max_grad_norm" or not same}


def _is_infinite(value: Any) -> bool:
    """Whether ``value`` means that a line is never printed."""
    if isinstance(value, str):
        return value.lower() in ("inf", "infinity")
    return value is None or (isinstance(value, float) and math.isinf(value))


def _resolve_offloads(zero: dict[str, Any]) -> dict[str, Any]:
    """Return the section with today's names of the offload sections, and devices in lower case."""
    kept = {key: value for key, value in zero.items() if value is not None or not key.startswith("offload_")}
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_params", "offload_param"),
                     ("cpu_offload_param", "offload_param")):  # fmt: skip
        if isinstance(kept.get(old), bool):
            switch = kept.pop(old)
            kept.setdefault(new, {"device": "cpu" if switch else "none"})
    for key in ("offload_optimizer", "offload_param"):
        section = kept.get(key)
        if isinstance(section, dict):
            stated = {name: value for name, value in section.items() if value is not None}
            if isinstance(section.get("device"), str):
                stated["device"] = section["device"].lower()
            kept[key] = stated
    return kept


def drop_autos(raw: dict[str, Any], is_known: Callable[[str], bool]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Remove the keys of DeepSpeed whose value is Hugging Face's "auto", so that defaults apply.

    Hugging Face's Trainer replaces "auto" by its own values before anything reads the file.

    Args:
        raw: The configuration file.
        is_known: Whether the schema has a key with this path. Other keys stay, and are errors.

    Returns:
        The file, and the paths of these keys.
    """
    dropped: list[str] = []

    def keep(section: dict[str, Any], prefix: str) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, value in section.items():
            path = f"{prefix}{key}"
            is_ours = path in _WITHOUT_AUTO or path in HINT_SECTIONS or path in IGNORED_BY_DEEPSPEED
            may_be = path in HINTS or path in REFUSED or path.startswith(("optimizer.params.", "scheduler.params."))
            if isinstance(value, dict) and not is_ours:
                kept[key] = keep(value, f"{path}.")
            elif value == "auto" and not is_ours and (may_be or is_known(path)):
                dropped.append(path)
            else:
                kept[key] = value
        return kept

    return keep(raw, ""), tuple(dropped)


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
        if path in HINTS or path in HINT_SECTIONS or path in IGNORED_BY_DEEPSPEED:
            if not value or _is_switched_off(value):
                continue
            if deepspeed and path in WHY_NOT_DEEPSPEED:
                raise ConfigError(_refusal(path, value, {"enabled": False} if path in HINT_SECTIONS else False, True))
            if CURRICULUM.startswith(f"{path}."):
                _require_no_curriculum(value, deepspeed)
            hints.append(path)
        elif path in REFUSED:
            if not _is_switched_off(value):
                _require_neutral(path, value, deepspeed)
            if path.startswith("zero_optimization.offload_"):  # the host's memory, which we act on
                kept[key] = value
        elif path in _SWITCHES and isinstance(value, dict):
            switch = _SWITCHES[path]
            _require_neutral(switch, value.get("enabled", REFUSED[switch][0][0]), deepspeed)
        elif isinstance(value, dict) and any(known.startswith(f"{path}.") for known in (*HINTS, *REFUSED)):
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


def _is_switched_off(value: Any) -> bool:
    """Whether ``value`` is a section with ``"enabled": false``."""
    return isinstance(value, dict) and value.get("enabled") is False


def _require_no_curriculum(data_efficiency: Any, deepspeed: bool) -> None:
    """Raise ConfigError for a curriculum that is switched on, in a section that is switched on."""
    section = data_efficiency
    for key in CURRICULUM.split(".")[1:]:
        if not isinstance(section, dict) or _is_switched_off(section):
            return
        section = section.get(key, False)
    _require_neutral(CURRICULUM, section, deepspeed)


def _require_neutral(path: str, value: Any, deepspeed: bool) -> None:
    allowed: tuple[Any, ...] = REFUSED[path][0] if path in REFUSED else ()
    if deepspeed:
        allowed = HONOURED_BY_DEEPSPEED.get(path, allowed)
    if any(_same(value, neutral) for neutral in allowed):
        return
    if path.endswith(".enabled") and not isinstance(value, bool):
        raise ConfigError(f"{path}: input should be a valid boolean (found {shorten(json.dumps(value))})")
    raise ConfigError(_refusal(path, value, allowed[0], deepspeed))


def _refusal(path: str, value: Any, neutral: Any, deepspeed: bool) -> str:
    reason = REFUSED[path][1] if path in REFUSED else ""
    reason = WHY_NOT_DEEPSPEED.get(path, reason) if deepspeed else reason
    engine = 'sdp.engine "deepspeed"' if deepspeed else "this engine"
    return (
        f"{path}: {shorten(json.dumps(value))} cannot be honoured by {engine}{f': {reason}' if reason else ''}; "
        f"remove it or set it to {json.dumps(neutral)}"
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
    paths = (*HINTS, *REFUSED, *HINT_SECTIONS)
    return sorted({path.removeprefix(prefix).split(".")[0] for path in paths if path.startswith(prefix)})
