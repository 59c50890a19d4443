"""A directory of checkpoints: their names, the pointer to the newest, and what a save may remove.

The directory may have entries of other programs. So only a save renames or removes a directory,
and only one that this engine wrote.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable
from numbers import Real
from pathlib import Path
from typing import Any, cast

from ...errors import CheckpointError, quote
from ...files import PARTIAL, write_whole
from ...json_files import read_json_file
from .files import INCOMPLETE, STATE, encode_state, is_ours, is_plain, is_whole
from .metadata import METADATA

log = logging.getLogger("sdp")

LATEST = "latest.json"
MOST_TAG_BYTES = 200  # a name has at most 255 bytes, and hidden names are longer than the tag
REPLACED = ".sdp-replaced"  # ends the hidden name of a checkpoint that is being replaced

_OWN_NAMES = (LATEST, STATE, METADATA)


def check_tag(tag: Any) -> str:
    """Return ``tag`` as text, if it can name a checkpoint's directory. A number becomes text, as in
    DeepSpeed.

    Raises:
        CheckpointError: ``tag`` is not a name that a checkpoint's directory may have.
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


def point_to(directory: Path, tag: str) -> None:
    """Make ``tag`` the newest checkpoint."""
    write_whole(directory / LATEST, json.dumps({"tag": tag}))


def locate(directory: Path, tag: str) -> Path:
    """Return the path of the checkpoint ``tag`` in ``directory``.

    A save that replaces a checkpoint first gives the old one a hidden name. If the save was killed
    before the new checkpoint had its name, the old one still has the hidden name. This function
    then returns the hidden path.
    """
    path, hidden = directory / tag, directory / f".{tag}{REPLACED}"
    return hidden if not os.path.lexists(path) and is_whole(hidden) else path


def latest(directory: Path) -> str | None:
    """Return the tag of the newest checkpoint in ``directory``, or None if there is none.

    If the pointer is lost, or names a checkpoint that was removed, the checkpoint of the highest
    step is the newest. :func:`locate` gives its path.
    """
    tags = step_tags(directory)
    newest = tags[-1] if tags else None
    pointer = directory / LATEST
    remedy = f"remove this file to resume from {newest or 'the start'}"
    try:
        tag = read_json_file(pointer)["tag"]
    except FileNotFoundError:
        return newest
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{pointer}: cannot be read; {remedy}") from None
    try:
        if not isinstance(tag, str):
            raise CheckpointError("not text")
        check_tag(tag)
    except CheckpointError:
        found = f"names {quote(tag)}, which is not a checkpoint of this directory"
        raise CheckpointError(f"{pointer}: {found}; {remedy}") from None
    if locate(directory, tag).is_dir():
        return tag
    if newest is None:
        found = "is gone, and no other checkpoint is there"
        raise CheckpointError(f"{directory / tag}: {found}; remove {pointer} to start again")
    log.warning("%s names %s, which is gone: taking %s", pointer, tag, newest)
    return newest


def step_tags(directory: Path) -> list[str]:
    """Return the tags of the checkpoints that are named after a step, oldest first."""
    tags = {path.name for path in directory.glob("step-*") if path.is_dir()}
    hidden = (path for path in directory.glob(f".step-*{REPLACED}") if is_whole(path))
    tags |= {path.name.removeprefix(".").removesuffix(REPLACED) for path in hidden}
    return sorted_steps(tags)


def sorted_steps(tags: Iterable[str]) -> list[str]:
    """Return those of the ``tags`` that are named after a step, oldest first."""
    steps = {tag: tag.removeprefix("step-") for tag in tags if tag.startswith("step-")}
    return sorted((tag for tag in steps if steps[tag].isdecimal()), key=lambda tag: int(steps[tag]))


def prune(directory: Path, keep: int, saved: str, every: int = 0) -> None:
    """Remove the checkpoints of the lowest steps until ``keep`` are left, besides multiples of
    ``every``.

    The checkpoint that was just written, ``saved``, is never removed. A directory that is named
    after a step but is not a checkpoint of this engine stays, and does not count.
    """
    for tag in surplus([tag for tag in step_tags(directory) if is_ours(directory / tag)], keep, saved, every):
        shutil.rmtree(directory / tag, ignore_errors=True)


def surplus(tags: Iterable[str], keep: int, saved: str, every: int) -> list[str]:
    """Return which of the ``tags`` :func:`prune` removes."""
    others = [tag for tag in sorted_steps(tags) if tag != saved]
    others = [tag for tag in others if not every or int(tag.removeprefix("step-")) % every]
    return others[: max(0, len(others) - (keep - 1))]


def make_room(directory: Path, tag: str) -> Path:
    """Make the hidden directory for the checkpoint ``tag``. Only a save may call this.

    Returns its path. First it cleans up after saves that were killed. A replaced checkpoint gets
    its name back, and half-written checkpoints are removed.

    Raises:
        CheckpointError: An entry that this engine did not write has one of the needed names.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _restore_replaced(directory)
    _remove_leftovers(directory)
    final, partial, replaced = directory / tag, directory / f".{tag}{PARTIAL}", directory / f".{tag}{REPLACED}"
    if os.path.lexists(final) and not is_whole(final):
        found = "exists and is not a whole checkpoint of this engine, so it is not replaced"
        raise CheckpointError(f"{final}: {found}; move it away or use another tag")
    for path in (partial, replaced):
        if os.path.lexists(path):
            found = "exists and is not a checkpoint of this engine, so it is not removed"
            raise CheckpointError(f"{path}: {found}; move it away")
    partial.mkdir()
    try:
        write_whole(partial / STATE, encode_state({INCOMPLETE: True}))
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return partial


def publish(directory: Path, tag: str, *, is_newest: bool = True) -> None:
    """Rename the directory of :func:`make_room` to ``tag``, and make it the newest checkpoint.

    It replaces an earlier checkpoint of the same tag. Unless ``is_newest``, the pointer to the
    newest checkpoint stays as it is.
    """
    final, partial, replaced = directory / tag, directory / f".{tag}{PARTIAL}", directory / f".{tag}{REPLACED}"
    if is_whole(final):
        final.rename(replaced)
    partial.rename(final)
    if is_newest:
        point_to(directory, tag)
    if is_whole(replaced):
        shutil.rmtree(replaced, ignore_errors=True)


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
