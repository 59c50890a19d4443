"""The output directory of ``sdp prepare``: checks it, locks it and cleans it up."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..engine.errors import DataError
from ..engine.files import PARTIAL
from .files import INDEX_FILE
from .index import SPLITS, Index, load_index
from .tokenizers import HF_DIRECTORY, MODEL_FILE, tokenizer_from_spec

_SHARD = re.compile(rf"({'|'.join(SPLITS)})-\d{{5,}}\.bin(\.tmp)?")
_DRAFTS = {f".{name}{PARTIAL}" for name in (MODEL_FILE, INDEX_FILE)}
_OTHER_FILES = {MODEL_FILE, HF_DIRECTORY, *_DRAFTS}


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """A context that turns an OSError, such as a full disk, into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{directory}: cannot be written: {error}") from error


@contextlib.contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """A context that makes ``directory`` and keeps any other ``sdp prepare`` from writing to it.

    It locks the directory; a killed process loses the lock. Raises DataError if another process
    holds the lock.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{directory}: another sdp prepare is writing here; wait until it ends, or choose another output"
            ) from None
        except OSError as error:  # some network file systems do not support locks
            print(
                f"{directory} cannot be locked ({error.strerror}); make sure that no other sdp prepare writes here",
                file=sys.stderr,
                flush=True,
            )
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def nothing_left_on_error(directory: Path, new_directories: list[Path]) -> Iterator[None]:
    """A context that, on an error inside it, removes the new prepared files in ``directory``.

    It then also removes ``new_directories`` (innermost first), which were made for this run.
    """
    before = {path.name for path in directory.iterdir()}
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # the first error matters more than errors here
            for path in directory.iterdir():
                if path.name not in before and (_SHARD.fullmatch(path.name) or path.name in _OTHER_FILES):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            for path in new_directories:
                path.rmdir()
        raise


def missing_directories(directory: Path) -> list[Path]:
    """List the directories that making ``directory`` would create, the innermost first."""
    directory = directory.absolute()
    return [path for path in (directory, *directory.parents) if not os.path.lexists(path)]


def check_writable(directory: Path) -> None:
    """Raise DataError unless this user may write to ``directory``, or make it."""
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if os.access(path, os.F_OK))
    if not existing.is_dir():
        raise DataError(f"{directory}: cannot be written: {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise DataError(f"{directory}: cannot be written: no permission to write in {existing}")


def find_index(directory: Path, settings: Mapping[str, Any], *, overwrite: bool) -> Index | None:
    """Return the index in ``directory`` if its data is whole and was made with these settings.

    Returns None if there is no index, or if ``overwrite`` allows to replace other or damaged data.

    Raises:
        DataError: There is other or damaged data, and ``overwrite`` is not given.
    """
    if not os.access(directory / INDEX_FILE, os.F_OK):
        return None
    try:
        index = load_index(directory)
        index.check_sizes(directory)
        tokenizer_from_spec(index.tokenizer, directory)
    except DataError:
        if overwrite:
            return None
        raise
    changed = [key for key, value in settings.items() if index.settings.get(key) != value]
    if changed and not overwrite:
        raise other_data(directory, changed)
    return None if changed else index


def other_data(directory: Path, changed: list[str]) -> DataError:
    """Return the error that ``directory`` has data with other settings. ``changed`` names these."""
    return DataError(
        f"{directory} has data that was made in another way ({', '.join(changed)} changed); choose another output, "
        "or add --overwrite"
    )


def clear(directory: Path, *, overwrite: bool) -> None:
    """Remove the files of an earlier or interrupted run, the index first.

    Raises DataError if there is an index and ``overwrite`` is not set, because another run has just
    written it.
    """
    if (directory / INDEX_FILE).exists() and not overwrite:
        raise DataError(
            f"{directory}: another sdp prepare has written data here meanwhile; run the command again to compare "
            "with it"
        )
    with writing(directory):
        (directory / INDEX_FILE).unlink(missing_ok=True)
        for path in directory.iterdir():
            if _SHARD.fullmatch(path.name) or path.name in _DRAFTS:
                path.unlink()
