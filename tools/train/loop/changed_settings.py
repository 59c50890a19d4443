"""Applies settings that were changed since the run was started, for ``sdp train --resume``.

For the settings below the new value applies, and the optimizer's moments stay. A checkpoint holds
the learning rates of its step, so the new ones are set after it was loaded. The other settings are
not part of a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from ....engine.config.noise import NoiseProfile
from ....engine.config.schema import Config
from ....engine.engine import SDPEngine
from ....engine.json_files import read_json_file
from ...runs.run_files import CONFIG

_OPTIMIZER_KEYS = ("lr", "weight_decay", "betas", "momentum", "eps")
_UNSET = "unset"
_DECIDE_ABOUT_HOLDERS = (
    "groups", "capacity", "granularity", "neuron_groups", "placement", "units", "protect", "survive",
)  # fmt: skip


def saved_settings(dump_dir: Path) -> dict[str, Any] | None:
    """Read the configuration that the run was last started with.

    Returns None if its file is missing or damaged.
    """
    try:
        saved = read_json_file(dump_dir / CONFIG)
    except (OSError, ValueError):
        return None
    return saved if isinstance(saved, dict) else None


def keep_holders(config: Config, dump_dir: Path) -> Config:
    """Return the configuration of a resumed run with the numbers of holders that its start found.

    This is about a profile that follows from measured noise. The file with the noise is not needed
    any more. If another setting that decides about holders has changed, they are found again.
    """
    profile, saved = config.sdp.profile, (saved_settings(dump_dir) or {}).get("sdp")
    if not isinstance(profile, NoiseProfile) or profile.holders is not None or not isinstance(saved, dict):
        return config
    now = config.sdp.model_dump(mode="json")
    before = saved.get("profile")
    if not isinstance(before, dict) or {**before, "holders": None} != now["profile"]:
        return config
    if any(saved.get(key) != now[key] for key in _DECIDE_ABOUT_HOLDERS):
        return config
    try:
        found = NoiseProfile.model_validate(before)
    except ValidationError:
        return config
    return config.model_copy(update={"sdp": config.sdp.model_copy(update={"profile": found})})


def describe_changes(before: Mapping[str, Any], config: Config) -> list[str]:
    """One line, ``key: old → new``, for each setting that the new ``config`` changes."""
    old, new = _settings(before), _settings(config.resolved())
    keys = [*old, *(key for key in new if key not in old)]
    pairs = [(key, old.get(key, _UNSET), new.get(key, _UNSET)) for key in keys]
    return [f"{key}: {was} → {now}" for key, was, now in pairs if was != now]


def _settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that a resumed run may change, as JSON by key."""
    optimizer = (config.get("optimizer") or {}).get("params") or {}
    found = {f"optimizer.params.{key}": optimizer[key] for key in _OPTIMIZER_KEYS if key in optimizer}
    found["gradient_clipping"] = config.get("gradient_clipping", 0.0)
    scheduler = config.get("scheduler") or {}
    found |= {"scheduler.type": scheduler["type"]} if scheduler else {}
    found |= {f"scheduler.params.{key}": value for key, value in (scheduler.get("params") or {}).items()}
    if sources := (config.get("data") or {}).get("sources"):
        found["data.sources"] = {source["path"]: source["weight"] for source in sources}
    return {key: json.dumps(value) for key, value in found.items()}


def apply_rates(engine: SDPEngine, configured: Sequence[float], *, told: bool) -> list[str]:
    """Replace the checkpoint's learning rates by those of the configuration for the next step.

    Args:
        engine: the engine, after a checkpoint was loaded.
        configured: the rate of every parameter group before that.
        told: whether a changed setting was reported, which explains the new rates.

    Returns:
        A line about the rates if they differ and nothing explains that.
    """
    loaded = engine.get_lr()
    schedule = engine.lr_scheduler
    if schedule is not None:
        # This sets the rates of the iteration that was loaded.
        schedule.step(schedule.last_batch_iteration)
    else:
        for group, rate in zip(engine.optimizer.param_groups, configured, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
    set_now = engine.get_lr()
    if told or all(float(new) == float(old) for new, old in zip(set_now, loaded, strict=True)):
        return []
    return [f"learning rate: {float(loaded[0]):g} → {float(set_now[0]):g}"]
