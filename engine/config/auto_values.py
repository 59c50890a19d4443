"""Resolves Hugging Face's "auto" values, and spellings of earlier versions of DeepSpeed.

Hugging Face's Trainer replaces "auto" before DeepSpeed reads the file. A value comes from the
script's arguments if they have it under the Trainer's name, else from the file, else it is
DeepSpeed's default. Each decision is one line of the log.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from .deepspeed_keys import (
    ALIASES,
    DEEPSPEED_CLIPS_AT,
    HINT_SECTIONS,
    HINTS,
    IGNORED_BY_DEEPSPEED,
    NEUTRAL,
    OFFLOAD_HINTS,
    SCHEDULES,
)

AUTO = "auto"
NEVER = 2**40  # a number of steps that no run reaches
_COMMENTS = ("_", "#", "//")  # a key that starts like this is a comment
# Sections in which "auto" has a meaning of its own, or none.
_OWN_SECTIONS = ("sdp", "model", "data", "training", "env", "activation_checkpointing")

# The name of each value in Hugging Face's TrainingArguments.
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("max_grad_norm",),
    "fp16.enabled": ("fp16",),
    "bf16.enabled": ("bf16",),
    "optimizer.params.lr": ("learning_rate",),
    "optimizer.params.betas": ("adam_beta1", "adam_beta2"),
    "optimizer.params.eps": ("adam_epsilon",),
    "optimizer.params.weight_decay": ("weight_decay",),
    "scheduler.params.warmup_max_lr": ("learning_rate",),
    "scheduler.params.warmup_num_steps": ("warmup_steps",),
    "scheduler.params.total_num_steps": ("max_steps",),
}

# The meaning of "auto" without an argument for it. DeepSpeed's default applies to all other keys.
_WITHOUT_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "train_batch_size": (None, "from the other two"),
    "train_micro_batch_size_per_gpu": (None, "from the other two, else 1"),
    "gradient_accumulation_steps": (None, "from the other two, else 1"),
    "gradient_clipping": (DEEPSPEED_CLIPS_AT, f"{DEEPSPEED_CLIPS_AT}"),
    "scheduler.params.warmup_max_lr": (None, "the optimizer's learning rate"),
}


def resolve_spellings(raw: dict[str, Any]) -> dict[str, Any]:
    """Return ``raw`` with the spellings of DeepSpeed 0.19: aliases, comments, inf, null and old
    switches.
    """
    known = {key: value for key, value in raw.items() if key != "comment" and not key.startswith(_COMMENTS)}
    for old, new in ALIASES.items():
        if old in known and new not in known:
            known[new] = known.pop(old)
    if "steps_per_print" in known and _is_infinite(known["steps_per_print"]):
        known["steps_per_print"] = NEVER
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
        if isinstance(section, dict) and isinstance(section.get("device"), str):
            kept[key] = section | {"device": section["device"].lower()}
    return kept


def resolve_auto(
    raw: dict[str, Any], arguments: Any, is_known: Callable[[str], bool]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Replace every "auto" of DeepSpeed's keys.

    Args:
        raw: The configuration file.
        arguments: The script's arguments, or None: any object with attributes.
        is_known: Whether a key with this path exists in the schema.

    Returns:
        The file, and a line for each decision about a setting. Hints are not listed.
    """
    notes: list[str] = []

    def resolve(section: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, value in section.items():
            path = f"{prefix}{key}"
            if path in HINT_SECTIONS or path in IGNORED_BY_DEEPSPEED:
                kept[key] = value
            elif isinstance(value, dict) and path not in _OWN_SECTIONS:
                kept[key] = resolve(value, f"{path}.")
            elif value != AUTO or not _may_be_auto(path, is_known):
                kept[key] = value
            else:
                _resolve_one(path, raw, arguments, kept, notes)
        return kept

    return resolve(raw, ""), tuple(notes)


def _may_be_auto(path: str, is_known: Callable[[str], bool]) -> bool:
    return (
        path in HINTS
        or path in NEUTRAL
        or path.rpartition(".")[2] in OFFLOAD_HINTS
        or path.startswith(("optimizer.params.", "scheduler.params."))
        or is_known(path)
    )


def _resolve_one(path: str, raw: dict[str, Any], arguments: Any, kept: dict[str, Any], notes: list[str]) -> None:
    """Put the value of ``path`` into ``kept``, or nothing if DeepSpeed's default applies."""
    key = path.rpartition(".")[2]
    names = _ARGUMENTS.get(path, ())
    given = [getattr(arguments, name, None) for name in names]
    if names and all(_is_usable(path, value) for value in given):
        kept[key] = given[0] if len(given) == 1 else given
        if key == "warmup_num_steps":
            kept[key] = max(1, int(kept[key]))  # DeepSpeed refuses 0, and treats 1 as 2
        notes.append(f"{path} = {json.dumps(kept[key])} (the script's {' and '.join(names)})")
    elif path == "scheduler.params.total_num_steps":
        steps = (raw.get("training") or {}).get("steps")
        kept[key] = steps if steps is not None else AUTO  # the schedule refuses what is left
        if steps is not None:
            notes.append(f"{path} = {steps} (training.steps)")
    elif path in _WITHOUT_ARGUMENTS:
        value, meaning = _WITHOUT_ARGUMENTS[path]
        if value is not None or path.startswith("scheduler."):
            kept[key] = value
        notes.append(f"{path} = {meaning}")
    elif path not in HINTS and key not in OFFLOAD_HINTS:
        notes.append(f"{path} = its default")


def _is_usable(path: str, value: Any) -> bool:
    """Whether an argument of the script has a value.

    The Trainer's max_steps is -1 if it is not set.
    """
    if path.endswith(".enabled"):
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    whole = path.endswith(("_steps", "_gpu"))
    return (isinstance(value, int) and value >= 0 if whole else value >= 0) and not (
        path.endswith(("total_num_steps", "_gpu", "accumulation_steps")) and value <= 0
    )
