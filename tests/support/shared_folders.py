"""Folders that all workers of a test session share: the first that needs one fills it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def fill_once(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], object]) -> Path:
    """Return a folder that is filled once per test session, also if several workers run tests.

    Tests must not change its content, because other workers may read it at the same time.

    Args:
        factory: pytest's factory of temporary folders.
        name: The folder's name, unique in the test session.
        fill: It gets the empty folder and fills it. If it fails, the next caller tries again.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # every worker has a folder of its own below the session's
        base = base.parent
    folder, filled = base / name, base / f"{name}.filled"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not filled.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            fill(folder)
            filled.touch()
    return folder
