"""Builds ``state.json`` of a checkpoint, and compares its settings with those of another run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from ..config.schema import Config
from ..errors import shorten
from ..optim.schedules import keep_shared_state
from .state import SavedState

log = logging.getLogger("sdp")

_OPTIONS = ("weight_decay", "betas", "momentum", "eps")
_UNSET = "unset"


def run_state(engine: Any, share: SavedState, rates: Mapping[str, float], client: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of ``state.json`` without the hashes of the files.

    Args:
        engine: The engine (:class:`~sdp.engine.engine.SDPEngine`).
        share: This rank's share of the checkpoint.
        rates: The learning rate of each parameter of the full model.
        client: The JSON values of the script's ``client_state``.
    """
    groups, scaler, schedule = engine.groups, engine.loss_scaler, None
    if engine.lr_scheduler is not None:
        schedule = engine.lr_scheduler.state_dict()
        if groups.context.user_groups is not None:  # the schedule's groups depend on the held units
            schedule = keep_shared_state(schedule)
    return {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "loss_scale": scaler.state_dict() if scaler is not None else None,
        "mesh": share.mesh_shape(),
        "placement": engine.layout.placement.to_json(),
        "learning_rates": dict(rates),
        "settings": settings_to_save(engine.config, engine.optimizer, groups.names_of_param_groups()),
        "scheduler": schedule,
        "loader": engine.loader.state_dict() if engine.loader is not None else None,
        "client_state": client,
        "spikes": engine.spikes.state_dict(),
        "sync": engine.local_training.state_dict(engine.global_steps),
    }


def settings_to_save(config: Config, optimizer: Optimizer, names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the whole configuration, and the options of a script's own optimizer, as JSON.

    Args:
        config: The configuration of the run.
        optimizer: The optimizer.
        names: For each parameter group, the canonical names of its parameters. The first name is
            the key of the group's options, because the number of a group depends on the layout.
    """
    options = {}
    if config.optimizer is None:
        for group, members in zip(optimizer.param_groups, names, strict=True):
            if members:
                options[members[0]] = {key: _plain(group[key]) for key in _OPTIONS if key in group}
    return {"config": config.resolved(), "options": options}


def describe_changes(saved: Mapping[str, Any], present: Mapping[str, Any], names: Sequence[Sequence[str]]) -> list[str]:
    """Return a line ``KEY: saved → configured`` for each setting that differs from the checkpoint.

    Args:
        saved: The result of :func:`settings_to_save` in the checkpoint.
        present: The result of :func:`settings_to_save` in this run.
        names: For each parameter group of this run, the canonical names of its parameters.
    """
    old, new = _values(saved.get("config")), _values(present["config"])
    pairs = {key: (old.get(key, _UNSET), new.get(key, _UNSET)) for key in {**old, **new}}
    options = _mapping(saved.get("options"))
    for members in names:
        before = next((options[name] for name in members if name in options), None)
        after = present["options"].get(members[0]) if members else None
        if before is not None and after is not None:
            for key in _OPTIONS:
                pairs.setdefault(key, (json.dumps(_mapping(before).get(key)), json.dumps(after.get(key))))
    return [f"{shorten(key)}: {shorten(was)} → {shorten(now)}" for key, (was, now) in pairs.items() if was != now]


def log_changes(path: Path, changes: Sequence[str], step: int, *, configured_rates: bool) -> None:
    """Log the ``changes`` of settings since the checkpoint ``path``, saved after step ``step``."""
    if configured_rates:
        for change in changes:
            log.info("%s, from step %d on", change, step + 1)
    elif changes:
        log.warning(
            "%s was written with other settings (checkpoint → configured): %s; the checkpoint's learning rates apply "
            "until a schedule sets other rates, everything else is as configured", path, "; ".join(changes),
        )  # fmt: skip


def _values(config: Any, prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in _mapping(config).items():
        if key == "sources" and isinstance(value, list):
            value = {source["path"]: source["weight"] for source in value}
            found[prefix + key] = json.dumps(value)
        elif isinstance(value, Mapping):
            found |= _values(value, f"{prefix}{key}.")
        elif value is not None:
            found[prefix + key] = json.dumps(value)
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON: tensors of one element become numbers, tuples become lists."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return float(value) if hasattr(value, "item") else str(value)
