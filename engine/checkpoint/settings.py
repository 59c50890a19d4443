"""The training settings that a checkpoint was written with, compared with those of a run that loads
it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from ..config.schema import Config
from ..errors import shorten
from ..optim.param_groups import named_rates
from ..optim.schedules import Schedule

log = logging.getLogger("sdp")

_OPTIONS = ("weight_decay", "betas", "momentum", "eps")
_MOST_PAIRS = 3  # different rates that a message lists


def settings_to_save(config: Config, optimizer: Optimizer, names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return clipping, the schedule, and the optimizer's options, as JSON.

    Args:
        config: The configuration of the run.
        optimizer: The optimizer.
        names: For each parameter group, the canonical names of its parameters. The first one names
            the group, because layouts number their groups differently.
    """
    params = config.optimizer.params if config.optimizer is not None else {}
    scheduler = {} if config.scheduler is None else {"type": config.scheduler.type, **config.scheduler.params}
    options = {}
    for group, members in zip(optimizer.param_groups, names, strict=True):
        if members:
            options[members[0]] = {key: _plain(group[key]) for key in _OPTIONS if key in group}
    return {
        "lr": _plain(params.get("lr")),
        "gradient_clipping": float(config.gradient_clipping),
        "scheduler": {key: _plain(value) for key, value in scheduler.items()},
        "options": options,
    }


def describe_settings(saved: Any, own: Mapping[str, Any], names: Sequence[Sequence[str]]) -> list[str]:
    """Describe each setting that differs: its name, the saved value, and the configured value.

    Args:
        saved: The result of :func:`settings_to_save` in the checkpoint. Earlier versions saved
            none.
        own: The same of this run.
        names: For each parameter group of this run, the canonical names of its parameters.
    """
    if not isinstance(saved, Mapping):
        return []
    pairs: dict[str, tuple[Any, Any]] = {}
    for key, label in (("lr", "optimizer.params.lr"), ("gradient_clipping", "gradient_clipping")):
        pairs[label] = saved.get(key), own[key]
    scheduler, configured = _mapping(saved.get("scheduler")), own["scheduler"]
    for key in [*scheduler, *(key for key in configured if key not in scheduler)]:
        label = "scheduler.type" if key == "type" else f"scheduler.params.{key}"
        pairs[label] = scheduler.get(key), configured.get(key)
    options = _mapping(saved.get("options"))
    for members in names:
        before = next((options[name] for name in members if name in options), None)
        after = own["options"].get(members[0]) if members else None
        if before is None or after is None:
            continue
        for key in _OPTIONS:
            old, new = _mapping(before).get(key), after.get(key)
            if old != new:
                pairs.setdefault(key, (old, new))
    return [f"{label} {_shown(old)} → {_shown(new)}" for label, (old, new) in pairs.items() if old != new]


def describe_rates(
    before: Mapping[str, float], optimizer: Optimizer, names: Sequence[Sequence[str]], scheduler: Any
) -> list[str]:
    """Describe how the loaded rates differ from those that the configuration would give at this
    step.

    Args:
        before: The rates before the checkpoint was loaded. They count if there is no schedule.
        optimizer: The optimizer, with the loaded rates.
        names: For each parameter group, the canonical names of its parameters.
        scheduler: The schedule at the loaded step, or None. Only a schedule of this engine can tell
            its rates.
    """
    if scheduler is None:
        expected = dict(before)
    elif isinstance(scheduler, Schedule):
        rates = scheduler.rates_at(scheduler.last_batch_iteration)
        expected = {name: rate for rate, members in zip(rates, names, strict=True) for name in members}
    else:
        return []
    loaded = named_rates(optimizer, names)
    pairs = dict.fromkeys((rate, expected[name]) for name, rate in loaded.items() if rate != expected[name])
    more = f" and {len(pairs) - _MOST_PAIRS} more" if len(pairs) > _MOST_PAIRS else ""
    listed = ", ".join(f"{old:g} → {new:g}" for old, new in list(pairs)[:_MOST_PAIRS])
    return [f"learning rate {listed}{more}"] if pairs else []


def warn_of_other_settings(
    path: Path,
    state: Mapping[str, Any],
    own: Mapping[str, Any],
    rates: Mapping[str, float],
    optimizer: Optimizer,
    names: Sequence[Sequence[str]],
    scheduler: Any,
) -> None:
    """Warn if a checkpoint was written with other settings.

    Args:
        path: The checkpoint.
        state: Its ``state.json``.
        own: The settings of this run.
        rates: The learning rates before the checkpoint was loaded.
        optimizer: The optimizer, with the learning rates of the checkpoint.
        names: For each parameter group, the canonical names of its parameters.
        scheduler: The schedule at the loaded step, or None.
    """
    changes = describe_settings(state.get("settings"), own, names) + describe_rates(rates, optimizer, names, scheduler)
    if changes:
        log.warning(
            "%s was written with other settings (checkpoint → configured): %s; the checkpoint's learning rates apply "
            "until a schedule sets others, all else is as configured", path, "; ".join(changes),
        )  # fmt: skip


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON: tensors of one element become numbers, tuples become lists."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return float(value) if hasattr(value, "item") else str(value)


def _shown(value: Any) -> str:
    return "unset" if value is None else shorten(value)
