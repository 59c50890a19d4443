"""The files of checkpoints beside their tensors: names, the pointer to the newest, hashes, and what may be removed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import CheckpointError

log = logging.getLogger("sdp")

FORMAT = 2
STATE, LATEST = "state.json", "latest.json"
PARTIAL, OLD = ".partial", ".old"

_KEYS = {"global_steps", "global_samples", "mesh", "placement", "scheduler", "loader", "client_state", "files"}
_OLDER = "remove this directory to resume from an older checkpoint"


def check_tag(tag: str) -> str:
    """``tag`` if it can be the name of a directory among others. Raises :class:`CheckpointError`."""
    if not tag or tag.startswith(".") or Path(tag).name != tag:
        raise CheckpointError(f"the tag {tag!r} is no name of one directory; use letters, digits and dashes, such as step-100")
    return tag


def encode_state(state: Mapping[str, Any]) -> str:
    """The text of ``state.json``, with its own hash. Raises :class:`CheckpointError` for what is not JSON."""
    try:
        whole = {"format": FORMAT, **state}
        return json.dumps({**whole, "sha256": _digest(whole)}, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the client state or the scheduler's state is not JSON ({error}); give plain numbers, text, lists") from None


def read_state(path: Path) -> dict[str, Any]:
    """``state.json`` of the checkpoint at ``path``. Raises :class:`CheckpointError`."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no checkpoint of this engine ({STATE} is missing); choose another or start anew") from None
    except (OSError, ValueError):
        state = None
    if not isinstance(state, dict) or not state.keys() >= {"format"}:
        raise CheckpointError(f"{path / STATE}: damaged; {_OLDER}")
    if state["format"] != FORMAT:
        raise CheckpointError(f"{path}: has format {state['format']!r}, this version reads {FORMAT}; use the version that wrote it")
    missing = _KEYS - state.keys()
    if missing or state.pop("sha256", None) != _digest(state):
        found = f"{min(missing)!r} is missing" if missing else "its content is not what was written"
        raise CheckpointError(f"{path / STATE}: damaged, {found}; {_OLDER}")
    return state


def write_durably(path: Path, text: str) -> None:
    """Write and flush to the disk: the rename that follows must not outlive the content."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def hash_files(paths: Iterable[Path]) -> dict[str, str]:
    """File name → sha256 of its bytes."""
    digests = {}
    for path in paths:
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def damaged_file(path: Path, expected: Mapping[str, str]) -> str | None:
    """What is wrong with the first of the checkpoint's files whose hash is not as ``expected`` (name → sha256), or None."""
    for name, digest in expected.items():
        try:
            found = hash_files([path / name])[name]
        except FileNotFoundError:
            return f"{path / name}: is missing; {_OLDER}"
        except OSError as error:
            return f"{path / name}: cannot be read ({error.strerror}); {_OLDER}"
        if found != digest:
            return f"{path / name}: damaged, its sha256 is {found[:12]}… instead of {digest[:12]}…; {_OLDER}"
    return None


def point_to(directory: Path, tag: str) -> None:
    """Make ``tag`` the newest checkpoint."""
    pointer = directory / f".{LATEST}"
    write_durably(pointer, json.dumps({"tag": tag}))
    pointer.rename(directory / LATEST)


def latest(directory: Path) -> str | None:
    """The tag of the newest whole checkpoint in ``directory``, or None where there is none.

    Where the pointer is lost, or names a checkpoint that was removed, the whole one of the highest step stands for it.
    """
    whole = checkpoints_in(directory)
    newest = whole[-1].name if whole else None
    try:
        tag = str(json.loads((directory / LATEST).read_text(encoding="utf-8"))["tag"])
    except FileNotFoundError:
        return newest
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{directory / LATEST}: cannot be read; remove this file to resume from {newest or 'the start'}") from None
    if (directory / tag).is_dir():
        return tag
    if newest is None:
        raise CheckpointError(f"{directory / tag}: is gone, and no other checkpoint is there; remove {directory / LATEST} to start anew")
    log.warning("%s names %s, which is gone: taking %s", directory / LATEST, tag, newest)
    return newest


def checkpoints_in(directory: Path) -> list[Path]:
    """The whole checkpoints in ``directory`` that carry a step's name, oldest first."""
    named = [path for path in directory.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(named, key=lambda path: int(path.name.removeprefix("step-")))


def prune(directory: Path, keep: int, saved: str) -> None:
    """Remove the checkpoints of the lowest steps until ``keep`` are left; never ``saved``, the one just written."""
    others = [path for path in checkpoints_in(directory) if path.name != saved]
    for path in others[: max(0, len(others) - (keep - 1))]:
        shutil.rmtree(path, ignore_errors=True)


def restore_replaced(directory: Path) -> None:
    """Bring back a checkpoint that was moved aside for another of its tag, where the program was killed before that one took its place."""
    for path in directory.glob(f".*{OLD}"):
        final = directory / path.name.removeprefix(".").removesuffix(OLD)
        if not final.exists():
            path.rename(final)
        else:
            shutil.rmtree(path, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Remove what saves that were killed left half written."""
    for path in directory.glob(f".*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def share_of(files: Mapping[str, str], part: int, parts: int) -> dict[str, str]:
    """Every ``parts``-th of the files: reading is divided among the ranks."""
    names: Sequence[str] = sorted(files)[part::parts]
    return {name: files[name] for name in names}


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
