"""The section ``sdp.elastic``: groups that may be lost, and that may return, while a run goes
on.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field

from ..errors import ConfigError
from .section import NonNegativeInt, PositiveInt, Section

Seconds = Annotated[float, Field(gt=0, le=86400)]


class ElasticSection(Section):
    """Elastic groups: the loss of a group does not stop the others.

    ``heartbeat_seconds``: a group that is silent or hangs for so long is cut off. ``wait_seconds``:
    how long the others wait for a group without which they cannot go on. ``min_groups``: how many
    groups are enough to begin a run (None: all), once they have waited ``last_call_seconds`` for
    the others. ``restarts``: how often the launcher may restart each group within
    ``restart_window`` seconds.
    """

    enabled: bool = False
    heartbeat_seconds: Seconds = 5.0
    wait_seconds: Seconds = 600.0
    min_groups: PositiveInt | None = None
    last_call_seconds: Seconds = 30.0
    restarts: NonNegativeInt = 3
    restart_window: Seconds = 3600.0


def _refused_with_sync(sync: Any) -> dict[str, tuple[bool, object, str]]:
    """Return what of local steps elastic groups cannot do yet, by key: whether it is there, its
    value, and what to do.
    """
    if sync is None:
        return {}
    return {
        "sdp.sync.start_after": (sync.start_after > 0, sync.start_after, "use 0"),
        "sdp.sync.fragments": (sync.fragments > 1, sync.fragments, "use 1"),
        "sdp.sync.overlap": (sync.overlap > 0, sync.overlap, "use 0"),
        "sdp.sync.compression": (sync.compression == "int8", sync.compression, 'use "none" or "bf16"'),
    }


def _check_min_groups(sdp: Any) -> None:
    """Raise ConfigError if a unit may have no holder among ``min_groups`` groups."""
    least, groups, survive = sdp.elastic.min_groups, sdp.groups, sdp.survive
    if least is None:
        return
    if least > groups:
        raise ConfigError(f"sdp.elastic.min_groups: {least} is more than sdp.groups = {groups}; use at most {groups}")
    if least < groups - survive:
        raise ConfigError(
            f"sdp.elastic.min_groups: with {least} of {groups} groups, a unit may have no holder, because "
            f"sdp.survive = {survive} allows only {survive} to be absent; use {groups - survive}, or raise sdp.survive "
            f"to {groups - least}"
        )


def refuse_with_elastic(config: Any) -> None:
    """Raise ConfigError for what a Config with elastic groups cannot be combined with yet."""
    sdp = config.sdp
    if not sdp.elastic.enabled:
        return
    _check_min_groups(sdp)
    training = config.training
    refused: dict[str, tuple[bool, object, str]] = {
        "sdp.engine": (sdp.engine not in ("fsdp2", "deepspeed"), sdp.engine, 'use "fsdp2" or "deepspeed"'),
        "fp16.enabled": (sdp.engine == "deepspeed" and config.fp16.enabled, True, "use bf16"),
        "sdp.groups": (sdp.groups < 2, sdp.groups, "use 2 or more"),
        **_refused_with_sync(sdp.sync),
        "sdp.group_sizes": (sdp.group_sizes is not None, sdp.group_sizes, "remove it"),
        "data.path": (config.data.takes_default_corpus, "null", "prepare the data with sdp prepare"),
        "training.tokens": (training.tokens is not None, training.tokens, "use training.steps"),
        "training.evaluate_tasks": (getattr(training, "evaluate_tasks", None) is not None, "tasks", "remove them"),
        "training.noise_scale_interval": (
            bool(getattr(training, "noise_scale_interval", 0)),
            getattr(training, "noise_scale_interval", 0),
            "use 0",
        ),
        "training.async_save": (training.async_save, True, "use false"),
        "training.on_spike": (
            training.on_spike in ("rollback", "stop"),
            training.on_spike,
            'use "none" or "skip"',
        ),
    }
    for key, (applies, value, remedy) in refused.items():
        if applies:
            shown = value if isinstance(value, str) else json.dumps(value, default=str)
            raise ConfigError(f"{key}: {shown} is not available in this version together with sdp.elastic; {remedy}")
