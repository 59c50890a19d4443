"""The corpus of ``sdp prepare`` without ``--input``: Python's standard library, 10 MB or more."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..engine.errors import DataError
from ..engine.json_files import parse_json
from .sources import Document, Source

# Tests are a third to two thirds of an installation, and many contain broken text on purpose.
_SKIPPED_DIRECTORIES = {"__pycache__", "dist-packages", "idle_test", "lib-dynload", "site-packages", "test", "tests"}
_MACHINE_DIRECTORY = "config-"  # build settings of this machine
_MACHINE_FILE = "_sysconfigdata"
_DOC_STRINGS = "doc-strings/"
_DOC_STRINGS_SCRIPT = Path(__file__).with_name("doc_strings.py")

# Modules that only tests use, or whose import touches the terminal, a display or the network.
_SKIPPED_MODULES = ("_test", "_ctypes_test", "_tkinter", "_xx", "antigravity", "nis", "ossaudiodev", "readline", "xx")


@dataclass(frozen=True)
class StandardLibrary:
    """A corpus: Python's standard library, as it is installed with the running interpreter.

    A document is a source file, or the docstrings of a compiled module. Documents are sorted by
    name. The name decides whether a document is held out.
    """

    files: tuple[tuple[str, bytes], ...]

    def sources(self) -> list[Source]:
        """Return name, size in bytes and sha256 of every document."""
        return [Source(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in self.files]

    def documents(self, piece: int | None = None) -> Iterator[Document]:
        """Yield all documents in order, or only the document with the index ``piece``."""
        for name, data in self.files if piece is None else (self.files[piece],):
            yield Document(data.decode(), len(data), split_key=name)


def standard_library() -> StandardLibrary:
    """Read the standard library of the running interpreter.

    Another process imports the compiled modules to read their docstrings. Raises DataError if there
    are no sources, or if the docstrings cannot be read.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = dict(_python_sources(root))
    if not files:
        raise DataError(f"{root}: no Python sources for the default corpus; name your own files with --input")
    files.update(_doc_strings(root / "lib-dynload"))
    return StandardLibrary(tuple(sorted(files.items())))


def _python_sources(root: Path) -> Iterator[tuple[str, bytes]]:
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [
            name
            for name in subdirectories
            if name not in _SKIPPED_DIRECTORIES and not name.startswith(_MACHINE_DIRECTORY)
        ]
        for name in names:
            path = Path(directory, name)
            # Debian links sitecustomize.py to /etc, where it is a setting of the machine.
            is_own = path.resolve().is_relative_to(root.resolve())
            if path.suffix == ".py" and not name.startswith(_MACHINE_FILE) and is_own and (data := path.read_bytes()):
                with contextlib.suppress(UnicodeDecodeError):  # a file in another encoding is left out
                    data.decode()
                    yield path.relative_to(root).as_posix(), data


def _doc_strings(extensions: Path) -> Iterator[tuple[str, bytes]]:
    command = [sys.executable, "-I", "-S", "-X", "utf8", str(_DOC_STRINGS_SCRIPT), str(extensions), *_SKIPPED_MODULES]
    result = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if result.returncode:
        last = (result.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise DataError(
            f"the doc strings of Python's compiled modules could not be read (status {result.returncode}: {last});"
            " name your own files with --input"
        )
    for module, text in parse_json(result.stdout.decode()).items():
        yield f"{_DOC_STRINGS}{module}", text.encode()
