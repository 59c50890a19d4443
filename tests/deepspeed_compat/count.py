"""Counts the public DeepSpeed configuration files that load here.

    python tests/deepspeed_compat/count.py

``files.json`` has the keys and values of 79 files from public repositories, by repository and path.
Each gets the section ``"sdp": {"groups": 2, "capacity": 0.5}``. The script loads it for
``sdp.engine`` "fsdp2", and for "deepspeed" if "fsdp2" refuses it. It prints the count, and the
reasons of the refusals, the most frequent first.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError

FILES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("files.json").read_text(encoding="utf-8"))
ENGINES = ("fsdp2", "deepspeed")


def find_reason(settings: dict[str, Any], engine: str) -> str | None:
    """Return why the file does not load for ``engine``, or None if it loads."""
    try:
        load_config({**settings, "sdp": {"groups": 2, "capacity": 0.5, "engine": engine}})
    except ConfigError as error:
        return str(error)
    return None


def find_engines(settings: dict[str, Any]) -> list[str]:
    """Return the engines for which the file loads."""
    return [engine for engine in ENGINES if find_reason(settings, engine) is None]


def main() -> None:
    """Print the counts and the reasons."""
    engines = {name: find_engines(settings) for name, settings in FILES.items()}
    loaded = [name for name, found in engines.items() if found]
    print(f"{len(loaded)} of {len(FILES)} files load")
    for engine in ENGINES:
        print(f'  {sum(engine in found for found in engines.values())} with sdp.engine "{engine}"')
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, found in engines.items():
        if not found:
            reasons[str(find_reason(FILES[name], "fsdp2"))].append(name)
    for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(names)} × {reason}")
        print("".join(f"    {name}\n" for name in names), end="")


if __name__ == "__main__":
    main()
