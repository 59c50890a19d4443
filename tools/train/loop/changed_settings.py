"""Keeps the numbers of holders that a run's start found, for ``sdp train --resume``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ....engine.config.noise import NoiseProfile
from ....engine.config.schema import Config
from ....engine.json_files import read_json_file
from ...runs.run_files import CONFIG

_DECIDE_ABOUT_HOLDERS = (
    "groups", "capacity", "granularity", "neuron_groups", "placement", "units", "protect",
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
