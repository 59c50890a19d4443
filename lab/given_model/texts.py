"""Reads texts of this machine as bytes: Python to pre-train on, C++ and English to continue on."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

BYTES = 12_000_000  # of a text, at most
LARGEST = 60_000  # of a file
HELD_OUT = 12  # one file of so many is held out
WINDOWS = 256  # of held-out text
REPEATED = 64  # a window with so many bytes in a row that are in the training text is not used


@dataclass(frozen=True)
class Text:
    """A kind of text: bytes to train on, and windows (windows, length) of held-out files.

    No 64 bytes in a row of a held-out window are in the bytes to train on.
    """

    train: Tensor
    held_out: Tensor

    def windows(self, rows: int, length: int, seed: int) -> Iterator[Tensor]:
        """Yield random windows (rows, length) of the text without end."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield cut(self.train, rows, length, generator)


def cut(text: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(0, len(text) - length, (rows,), generator=generator)
    return text[starts[:, None] + torch.arange(length)].long()


def find_texts(length: int) -> tuple[dict[str, Text], str]:
    """Return the texts by name, and the first digits of a hash of all bytes that are used."""
    packages = Path(sysconfig.get_paths()["purelib"])
    library = Path(sysconfig.get_paths()["stdlib"])
    python = (path for path in library.rglob("*.py") if not {"site-packages", "test", "tests"} & {*path.parts})
    english = (path for kind in ("*.rst", "*.txt", "*.md") for path in Path("/usr/share").rglob(kind))
    digest, found = hashlib.sha256(), {}
    for name, paths in {
        "Python": python, "C++": (packages / "torch" / "include").rglob("*.h"), "English": english,
    }.items():  # fmt: skip
        files = list(_texts(paths))
        random.Random(0).shuffle(files)
        held_out, train = (_joined(part) for part in (files[: len(files) // HELD_OUT], files[len(files) // HELD_OUT :]))
        found[name] = Text(train, _new_windows(held_out, train, length))
        for part in (train, found[name].held_out):
            digest.update(part.numpy().tobytes())
    return found, digest.hexdigest()[:12]


def _texts(paths: Iterable[Path]) -> Iterator[bytes]:
    for path in sorted(paths):
        if path.is_file() and not path.is_symlink() and 500 < path.stat().st_size < LARGEST:
            content = path.read_bytes()
            if b"\0" not in content:
                yield content


def _new_windows(held_out: Tensor, train: Tensor, length: int) -> Tensor:
    """Return random windows (WINDOWS, length) of ``held_out`` that do not repeat ``train``."""
    drawn = cut(held_out, 4 * WINDOWS, length, torch.Generator().manual_seed(7))
    hashes = np.stack([_hashes(window) for window in drawn])
    new = drawn[torch.from_numpy(~np.isin(hashes, _hashes(train)).any(axis=1))]
    if len(new) < WINDOWS:
        raise ValueError(f"only {len(new)} of {len(drawn)} held-out windows are not in the training text")
    return new[:WINDOWS]


def _hashes(text: Tensor) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Hash every REPEATED bytes in a row of ``text``."""
    content = text.to(torch.uint8).numpy().tobytes()
    stretches = (hash(content[start : start + REPEATED]) for start in range(len(content) - REPEATED + 1))
    return np.fromiter(stretches, np.int64)


def _joined(files: Iterable[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"\0".join(files)[:BYTES]), dtype=torch.uint8)
