"""A directory of checkpoints: how they are named, found, replaced and removed.

``latest.json`` names the newest checkpoint. Other programs may have files in the directory. So a
save renames or removes a directory only if this engine wrote it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, cast

from ...errors import CheckpointError, quote
from ...files import PARTIAL, write_whole
from ...json_files import read_json_file
from .dcp import METADATA
from .files import INCOMPLETE, STATE, encode_state, hash_files, is_ours, is_plain, is_whole

log = logging.getLogger("sdp")

LATEST = "latest.json"
MOST_TAG_BYTES = 200  # a name has at most 255 bytes, and hidden names are longer than the tag
REPLACED = ".sdp-replaced"  # the end of the hidden name of a checkpoint that is being replaced

_SHARED_SECONDS = 30.0  # for how long a network file system may not show the files of other hosts
_OWN_NAMES = (LATEST, STATE, METADATA)


def check_tag(tag: Any) -> str:
    """Return ``tag``, the name of a checkpoint, as text. As in DeepSpeed, it may be a number.

    Raises:
        CheckpointError: ``tag`` cannot be the name of a checkpoint's directory.
    """
    is_number = isinstance(tag, Real) and not isinstance(tag, bool)  # numpy's numbers, too
    if is_number and -(2**63) < cast(float, tag) < 2**63:
        tag = str(tag)
    if not isinstance(tag, str):
        problem: str | None = "is not text"
    elif tag in _OWN_NAMES:
        problem = "is the name of one of this engine's own files"
    elif tag.startswith(".") or not is_plain(tag) or not tag.isprintable():
        problem = "is not the name of one directory"
    elif len(tag.encode()) > MOST_TAG_BYTES:
        problem = f"is longer than {MOST_TAG_BYTES} bytes"
    else:
        return tag
    raise CheckpointError(f"the tag {quote(tag)} {problem}; use letters, digits and dashes, such as step-100")


def locate(directory: Path, tag: str) -> Path:
    """Return the path of the checkpoint ``tag`` in ``directory``.

    A save that replaces a checkpoint first gives the old one a hidden name. If the save was killed
    before the new checkpoint got its name, this function returns the hidden path of the old one.
    """
    path, hidden = directory / tag, directory / f".{tag}{REPLACED}"
    return hidden if not os.path.lexists(path) and is_whole(hidden) else path


def latest(directory: Path) -> str | None:
    """Return the tag of the newest checkpoint in ``directory``, or None if there is none."""
    return newest_of(
        directory, lambda: read_json_file(directory / LATEST), step_tags(directory),
        lambda tag: locate(directory, tag).is_dir(),
    )  # fmt: skip


def newest_of(
    place: str | Path, read: Callable[[], Any], steps: Sequence[str], is_there: Callable[[str], bool]
) -> str | None:
    """Return the tag of the newest of the checkpoints at ``place``, or None if there is none.

    ``latest.json`` names the newest checkpoint. If this file is missing, or if that checkpoint is
    gone, the checkpoint of the highest step is the newest.

    Args:
        place: The directory of the checkpoints, or its URL.
        read: A function that returns the content of ``latest.json``.
        steps: The tags of the checkpoints that are named after a step, oldest first.
        is_there: A function that returns whether there is a checkpoint with a given tag.
    """
    newest, pointer = steps[-1] if steps else None, f"{place}/{LATEST}"
    remedy = f"remove this file to resume from {newest or 'the start'}"
    try:
        tag = read()["tag"]
    except FileNotFoundError:
        return newest
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{pointer}: cannot be read; {remedy}") from None
    try:
        if not isinstance(tag, str):
            raise CheckpointError("not text")
        check_tag(tag)
    except CheckpointError:
        found = f"names {quote(tag)}, which is not a checkpoint in this directory"
        raise CheckpointError(f"{pointer}: {found}; {remedy}") from None
    if is_there(tag):
        return tag
    if newest is None:
        found = "is gone, and no other checkpoint is there"
        raise CheckpointError(f"{place}/{tag}: {found}; remove {pointer} to start again")
    log.warning("%s names %s, which is gone; using %s", pointer, tag, newest)
    return newest


def step_tags(directory: Path) -> list[str]:
    """Return the tags of the checkpoints that are named after a step, oldest first."""
    tags = {path.name for path in directory.glob("step-*") if path.is_dir()}
    hidden = (path for path in directory.glob(f".step-*{REPLACED}") if is_whole(path))
    tags |= {path.name.removeprefix(".").removesuffix(REPLACED) for path in hidden}
    return sorted_steps(tags)


def sorted_steps(tags: Iterable[str]) -> list[str]:
    """Return those ``tags`` that have the form ``step-N``, in ascending order of N."""
    steps = {tag: tag.removeprefix("step-") for tag in tags if tag.startswith("step-")}
    return sorted((tag for tag in steps if steps[tag].isdecimal()), key=lambda tag: int(steps[tag]))


def surplus(tags: Iterable[str], keep: int, saved: str, every: int) -> list[str]:
    """Return the tags of the old checkpoints that a save removes, so that ``keep`` are left.

    The checkpoint that was just ``saved`` is one of those that are left. Checkpoints of steps that
    are multiples of ``every`` also stay and are not counted, unless ``every`` is 0.
    """
    others = [tag for tag in sorted_steps(tags) if tag != saved]
    others = [tag for tag in others if not every or int(tag.removeprefix("step-")) % every]
    return others[: max(0, len(others) - (keep - 1))]


class DirectoryTarget:
    """Writes the checkpoint ``tag`` to a directory that all hosts share.

    The files are written under a hidden name. A complete checkpoint then gets its name, in place of
    an earlier checkpoint with the same tag. A save calls the methods in this order:
    :meth:`make_room`, :meth:`enter`, :meth:`add`, :meth:`publish`, :meth:`prune` and :meth:`clean`.
    """

    def __init__(self, directory: Path, tag: str):
        self._directory, self._tag = directory, tag
        self._final, self._replaced = directory / tag, directory / f".{tag}{REPLACED}"
        self.aside = directory / f".{tag}{PARTIAL}"  # where all ranks write

    def make_room(self) -> None:
        """Make the hidden directory of this save. Only rank 0 calls this.

        First, what killed saves have left is cleaned up: an old checkpoint that was being replaced
        gets its name back, and half-written checkpoints are removed.

        Raises:
            CheckpointError: A name that the save needs belongs to a file or directory that this
                engine did not write.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        _restore_replaced(self._directory)
        _remove_leftovers(self._directory)
        if os.path.lexists(self._final) and not is_whole(self._final):
            found = "exists and is not a whole checkpoint of this engine, so it is not replaced"
            raise CheckpointError(f"{self._final}: {found}; move it away or use another tag")
        for path in (self.aside, self._replaced):
            if os.path.lexists(path):
                found = "exists and is not a checkpoint of this engine, so it is not removed"
                raise CheckpointError(f"{path}: {found}; move it away")
        self.aside.mkdir()
        try:
            write_whole(self.aside / STATE, encode_state({INCOMPLETE: True}))
        except OSError:
            shutil.rmtree(self.aside, ignore_errors=True)
            raise

    def enter(self, rank: int) -> None:
        """Wait until this rank sees the directory that rank 0 made, or raise CheckpointError."""
        deadline = time.monotonic() + _SHARED_SECONDS
        while not self.aside.is_dir():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank {rank} on {socket.gethostname()} does not see {self._directory}, which rank 0 made; "
                    "checkpoints need a directory that all hosts share"
                )
            time.sleep(0.1)

    def add(self, files: Iterable[Path]) -> dict[str, str]:
        """Return the hashes of ``files`` of the new checkpoint, by file name."""
        return hash_files(files)

    def publish(self, state: str, *, is_newest: bool) -> None:
        """Write ``state.json`` with the text ``state``, and give the checkpoint its name.

        If ``is_newest``, a load without a tag finds this checkpoint.
        """
        write_whole(self.aside / STATE, state)
        if is_whole(self._final):
            self._final.rename(self._replaced)
        self.aside.rename(self._final)
        if is_newest:
            write_whole(self._directory / LATEST, json.dumps({"tag": self._tag}))
        if is_whole(self._replaced):
            shutil.rmtree(self._replaced, ignore_errors=True)

    def prune(self, keep: int, every: int) -> None:
        """Remove old checkpoints (see :func:`surplus`) that this engine wrote."""
        tags = [tag for tag in step_tags(self._directory) if is_ours(self._directory / tag)]
        for tag in surplus(tags, keep, self._tag, every):
            shutil.rmtree(self._directory / tag, ignore_errors=True)

    def clean(self, rank: int) -> None:
        """Remove what a failed save has written, because the disk may be full."""
        if rank == 0 and is_ours(self.aside):
            shutil.rmtree(self.aside, ignore_errors=True)


def _restore_replaced(directory: Path) -> None:
    for path in directory.glob(f".*{REPLACED}"):
        final = directory / path.name.removeprefix(".").removesuffix(REPLACED)
        if not is_whole(path):
            continue
        if not os.path.lexists(final):
            path.rename(final)
        elif is_whole(final):
            shutil.rmtree(path, ignore_errors=True)


def _remove_leftovers(directory: Path) -> None:
    for path in directory.glob(f".*{PARTIAL}"):
        if is_ours(path):
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_dir() and not path.is_symlink():
            draft = path / f".{STATE}{PARTIAL}"
            if {*path.iterdir()} <= {draft}:  # the save was killed before it wrote the state
                draft.unlink(missing_ok=True)
                path.rmdir()
