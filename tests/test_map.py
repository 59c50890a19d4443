"""The map of the rooms in CONTRIBUTING.md: complete, and of files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("engine", "data", "models", "tools", "launcher")


def files_named() -> dict[str, set[str]]:
    """Of every room the files that its rows name; rows that begin with ├ go on with the room above."""
    named: dict[str, set[str]] = {}
    room = ""
    for row in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Working")[0].splitlines():
        if begins := re.match(r"\| `(\w+)/", row):
            room = begins[1]
        named.setdefault(room, set()).update(re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", row))
    return named


def test_the_map_names_every_file() -> None:
    named = files_named()
    there = {room: {path.name for path in (ROOT / room).rglob("*.py") if path.name != "__init__.py"} for room in ROOMS}
    assert {room: named[room] for room in ROOMS} == there
