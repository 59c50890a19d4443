"""Counts the public DeepSpeed configuration files that load here.

    python tests/deepspeed_compat/count.py

``files.json`` has the keys and values of 79 files from public repositories, by repository and path.
Each gets the section ``"sdp": {"groups": 2, "capacity": 0.5}``. The script loads it for
``sdp.engine`` "fsdp2" and "deepspeed", and prints the counts. It also prints the reasons of the
refusals, the most frequent first.

A script may pass its own optimizer and schedule, which replace those of the file. So a file loads
even if its own ones do not exist here. The script counts these files separately.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError
from sdp.engine.optim.optimizers import build_optimizer
from sdp.engine.optim.schedules import build_scheduler

FILES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("files.json").read_text(encoding="utf-8"))
ENGINES = ("fsdp2", "deepspeed")


def find_reason(settings: Mapping[str, Any], engine: str) -> str | None:
    """Return why the file does not load for ``engine``, or None if it loads."""
    try:
        load_config({**settings, "sdp": {"groups": 2, "capacity": 0.5, "engine": engine}})
    except ConfigError as error:
        return str(error)
    return None


def find_engines(settings: Mapping[str, Any]) -> list[str]:
    """Return the engines for which the file loads."""
    return [engine for engine in ENGINES if find_reason(settings, engine) is None]


def find_missing_part(settings: Mapping[str, Any]) -> str | None:
    """Return why the script must pass its own optimizer or schedule, or a value for "auto".

    None if it need not.
    """
    config = load_config({**settings, "sdp": {"groups": 2, "capacity": 0.5}})
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer: torch.optim.Optimizer = torch.optim.SGD([parameter])
    try:
        if config.optimizer is not None:
            section = config.optimizer
            optimizer, _ = build_optimizer(section.type, section.params, [parameter], torch.device("cpu"))
        if config.scheduler is not None:
            build_scheduler(config.scheduler.type, config.scheduler.params, optimizer)
    except ConfigError as error:
        return str(error)
    return None


def print_reasons(reasons: Mapping[str, list[str]]) -> None:
    """Print each reason with its files, the most frequent first."""
    for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(names)} × {reason}")
        for name in names:
            print(f"    {name}")


def main() -> None:
    """Print the counts and the reasons."""
    engines = {name: find_engines(settings) for name, settings in FILES.items()}
    refused: dict[str, list[str]] = defaultdict(list)
    incomplete: dict[str, list[str]] = defaultdict(list)
    for name, found in engines.items():
        reason = find_missing_part(FILES[name]) if "fsdp2" in found else None
        if not found:
            refused[str(find_reason(FILES[name], "fsdp2"))].append(name)
        elif reason is not None:
            incomplete[reason].append(name)
    print(f"{sum(map(bool, engines.values()))} of {len(FILES)} files load")
    for engine in ENGINES:
        print(f'  {sum(engine in found for found in engines.values())} with sdp.engine "{engine}"')
    print(f"\nRefused: {sum(map(len, refused.values()))} files")
    print_reasons(refused)
    print(f"\nThe script must pass an optimizer, a schedule or args: {sum(map(len, incomplete.values()))} files")
    print_reasons(incomplete)


if __name__ == "__main__":
    main()
