"""Reads texts of this machine as bytes: Python to pre-train on, C++ and English to continue on."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

BYTES = 12_000_000  # of a text, at most
LARGEST = 60_000  # of a file
HELD_OUT = 12  # one file of so many is held out
WINDOWS = 256  # of held-out text


@dataclass(frozen=True)
class Text:
    """A kind of text: bytes to train on, and windows (windows, length) of held-out files."""

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
    """Return the texts by name, and the first digits of a hash of all texts."""
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
        for part in (train, held_out):
            digest.update(part.numpy().tobytes())
        generator = torch.Generator().manual_seed(7)
        found[name] = Text(train, cut(held_out, WINDOWS, length, generator))
    return found, digest.hexdigest()[:12]


def _texts(paths: Iterable[Path]) -> Iterator[bytes]:
    for path in sorted(paths):
        if path.is_file() and not path.is_symlink() and 500 < path.stat().st_size < LARGEST:
            content = path.read_bytes()
            if b"\0" not in content:
                yield content


def _joined(files: Iterable[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"\0".join(files)[:BYTES]), dtype=torch.uint8)
