"""Prints the doc strings of this interpreter's compiled modules as JSON: ``python doc_strings.py FOLDER [SKIPPED…]``.

A script for a fresh, isolated interpreter (``-I -S``), so that what it finds does not depend on what another process
has imported or patched. FOLDER holds the extension modules; SKIPPED are prefixes of names that are not imported. Only
compiled modules are imported, and nothing of this package.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any


def collect(folder: Path, skipped: tuple[str, ...]) -> dict[str, str]:
    """Module name → its doc strings and those of its functions, classes and their members, each text once."""
    extensions = {file.name.split(".")[0] for file in folder.glob("*") if file.suffix in (".so", ".pyd")}
    seen: set[str] = set()
    documents: dict[str, str] = {}
    for name in sorted(extensions | set(sys.builtin_module_names)):
        if name == "__main__" or name.startswith(skipped):
            continue
        try:
            module = importlib.import_module(name)
        except Exception:  # a module whose shared library is not installed; nothing to read there
            continue
        if texts := _texts(name, module, seen):
            documents[name] = "\n".join(texts)
    return documents


def _texts(module_name: str, module: Any, seen: set[str]) -> list[str]:
    found = [_entry(module_name, module, seen)]
    for name, value in sorted(vars(module).items()):
        if callable(value):
            found.append(_entry(f"{module_name}.{name}", value, seen))
        if isinstance(value, type):
            for member, inner in sorted(vars(value).items()):
                if callable(inner) or hasattr(inner, "__get__"):
                    found.append(_entry(f"{module_name}.{name}.{member}", inner, seen))
    return [text for text in found if text]


def _entry(name: str, value: Any, seen: set[str]) -> str:
    text = vars(value).get("__doc__") if isinstance(value, type) else getattr(value, "__doc__", None)
    if not isinstance(text, str) or not text.strip() or text in seen:
        return ""
    seen.add(text)
    return f"{name}\n\n{text.strip()}\n"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    json.dump(collect(Path(sys.argv[1]), tuple(sys.argv[2:])), sys.stdout)
