"""Reads the gradient noise of units from the metrics of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError, shorten
from ...json_files import JsonError, parse_json

METRICS = "metrics.jsonl"  # in the directory of a run
LONGEST_LINE = 64 << 20  # bytes
MOST_TRACE = 1e150  # a larger one, or NaN, is damaged; sums and quotients of smaller ones do not overflow


def measured_traces(source: str, names: Sequence[str], *, preconditioned: bool) -> list[float]:
    """Return tr Σ of each unit, the mean over the measured steps of a run.

    Preconditioned noise is the mean of each unit's share in the sum over all units. In the first
    steps 1 ÷ v is larger by orders of magnitude, so the plain mean would be that of these steps.

    Args:
        source: the run's directory, or its metrics.jsonl.
        names: the names of the units.
        preconditioned: whether the noise is that of gradients divided by the root of Adam's second
            moments.

    Raises:
        ConfigError: the file cannot be read, or does not have the noise of a unit.
    """
    path = Path(source)
    path = path / METRICS if path.is_dir() else path
    key = "preconditioned_trace" if preconditioned else "trace"
    steps = [_traces_of_step(units, names, key) for units in _measured_steps(path)]
    if preconditioned:
        steps = [_shares(traces) for traces in steps if len(traces) == len(names)]
    missing = [name for name in names if not any(name in traces for traces in steps)]
    if missing:
        remedy = "measure it where every unit has at least 2 holders, for example with sdp.capacity 1"
        if preconditioned:
            remedy += ", and with an optimizer that keeps second moments, such as AdamW"
        raise ConfigError(
            f"sdp.profile.noise: {shorten(path)} has no {key} of {missing[0]!r} ({len(missing)} of {len(names)} "
            f"units); {remedy}"
        )
    found = [[traces[name] for traces in steps if name in traces] for name in names]
    return [math.fsum(values) / len(values) for values in found]


def _traces_of_step(units: dict[str, Any], names: Sequence[str], key: str) -> dict[str, float]:
    """Return the usable values ``key`` of the named units in one measured step."""
    traces: dict[str, float] = {}
    for name in names:
        noise = units.get(name)
        value = noise.get(key) if isinstance(noise, dict) else None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MOST_TRACE:
            traces[name] = max(0.0, float(value))  # below 0 by rounding alone
    return traces


def _shares(traces: dict[str, float]) -> dict[str, float]:
    """Divide by the sum, if it is not 0."""
    total = math.fsum(traces.values()) or 1.0
    return {name: trace / total for name, trace in traces.items()}


def _measured_steps(path: Path) -> list[dict[str, Any]]:
    """Return the entry "noise" of each line that has one. A damaged last line is left out."""
    found: list[dict[str, Any]] = []
    try:
        if not path.is_file():
            raise ConfigError(f"sdp.profile.noise: {shorten(path)}: no such file; give the directory of a run")
        with path.open("rb") as file:
            lines = list(iter(lambda: file.readline(LONGEST_LINE), b""))
    except (OSError, ValueError) as error:  # a NUL in the path raises ValueError
        raise ConfigError(f"sdp.profile.noise: {shorten(path)} cannot be read ({error})") from None
    for number, line in enumerate(lines, start=1):
        try:
            entry = parse_json(line.decode())
        except (JsonError, UnicodeDecodeError) as error:
            if number == len(lines):
                break
            raise ConfigError(f"sdp.profile.noise: {shorten(path)}:{number} is not a line of a run ({error})") from None
        noise = entry.get("noise") if isinstance(entry, dict) else None
        if isinstance(noise, dict):
            found.append(noise)
    if not found:
        raise ConfigError(
            f"sdp.profile.noise: no step in {shorten(path)} has measured noise; set training.noise_scale_interval in "
            "that run"
        )
    return found
