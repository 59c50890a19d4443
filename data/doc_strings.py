"""Prints the docstrings of this interpreter's compiled modules as JSON.

Usage: ``python doc_strings.py FOLDER [SKIPPED…]``. FOLDER is where the extension modules are.
Modules whose names start with one of SKIPPED are not imported.

``sdp prepare`` runs this script in a fresh, isolated interpreter (``-I -S``), so that its output
does not depend on what another process has imported or patched. The script imports compiled modules
only, and nothing of this package.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any


def collect(folder: Path, skipped: tuple[str, ...]) -> dict[str, str]:
    """Return the joined docstrings of each compiled module, by the module's name.

    Docstrings of functions, classes and members are included. A docstring that occurs again is left
    out, and so are modules whose names start with one of ``skipped``.
    """
    extensions = {file.name.split(".")[0] for file in folder.glob("*") if file.suffix in (".so", ".pyd")}
    seen: set[str] = set()
    documents: dict[str, str] = {}
    for name in sorted(extensions | set(sys.builtin_module_names)):
        if name == "__main__" or name.startswith(skipped):
            continue
        try:
            module = importlib.import_module(name)
        except Exception:  # for example, the shared library of the module is not installed
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
    # A doc string may contain half of a surrogate pair, which UTF-8 cannot encode.
    return f"{name}\n\n{text.strip()}\n".encode("utf-8", "replace").decode()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    json.dump(collect(Path(sys.argv[1]), tuple(sys.argv[2:])), sys.stdout)
