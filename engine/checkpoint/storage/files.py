"""Reads, writes and checks the files of one checkpoint: ``state.json`` and the hashes in it.

A checkpoint may come from somebody else. So nothing is unpickled, sizes are limited, and no name
may lead out of the directory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ...errors import CheckpointError, quote, shorten
from ...json_files import parse_json, read_json_file

FORMAT = 5
STATE = "state.json"
MOST_BYTES = 1 << 30  # largest JSON file; for a large model, the list of tensors has tens of megabytes
INCOMPLETE = "incomplete"  # the state has this key while the checkpoint is being written

_OLDER = "remove this checkpoint to resume from an older one"


def is_plain(name: str) -> bool:
    """Return whether ``name`` is the name of a directory entry, not a path that leads elsewhere."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _check_name(name: str) -> str:
    if not is_plain(name):
        raise ValueError(f"{quote(name)} is not the name of a file in this directory")
    return name


_Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Spikes(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    loss: list[float] = []
    grad_norm: list[float] = []
    skipped: _Count = 0
    rollbacks: _Count = 0


class _Sync(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    outer_steps: _Count
    steps_alone: _Count
    under_way: _Count | None
    fragments: _Count


class _State(BaseModel):
    """The content of ``state.json`` without the format and the hash."""

    model_config = ConfigDict(strict=True)

    global_steps: _Count
    global_samples: _Count
    skipped_steps: _Count
    loss_scale: dict[str, float] | None
    mesh: list[Annotated[int, Field(gt=0)] | list[Annotated[int, Field(gt=0)]]] = Field(min_length=3, max_length=4)
    placement: dict[str, Any]
    learning_rates: dict[str, float]
    settings: dict[str, Any]
    scheduler: dict[str, Any] | None
    loader: dict[str, Any] | None
    client_state: dict[str, Any]
    spikes: _Spikes
    sync: _Sync | None
    files: dict[Annotated[str, AfterValidator(_check_name)], str]


def encode_state(state: Mapping[str, Any]) -> str:
    """Return the text of ``state.json``, which also contains a hash of the state.

    Raises:
        CheckpointError: ``state`` has a value that is not JSON.
    """
    try:
        whole = {"format": FORMAT, **state}
        text = json.dumps({**whole, "sha256": _digest(whole)}, indent=1)
        parse_json(text)  # refuse values that no load could read
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the client state or the scheduler's state is not JSON ({error}); give plain numbers, text, lists"
        ) from None


def read_state(path: Path) -> dict[str, Any]:
    """Read and check ``state.json`` of the checkpoint at ``path``, and return the content.

    Raises:
        CheckpointError: The file is missing or damaged, or was written by another version or by a
            save that did not finish.
    """
    file = path / STATE
    try:
        state = read_json_file(file, most_bytes=MOST_BYTES)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: not a checkpoint of this engine ({STATE} is missing); choose another one, or start a new run"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror}); {_OLDER}") from None
    except ValueError:
        state = None
    if not isinstance(state, dict) or "format" not in state:
        raise CheckpointError(f"{file}: damaged; {_OLDER}")
    _check_format(path, state["format"])
    if INCOMPLETE in state:
        raise CheckpointError(f"{path}: the save that wrote it did not finish; {_OLDER}")
    if state.pop("sha256", None) != _digest(state):
        raise CheckpointError(f"{file}: damaged, the content is not what was written; {_OLDER}")
    try:
        _State.model_validate(state)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{file}: damaged, {shorten(where)}: {shorten(first['msg'])}; {_OLDER}") from None
    return state


def _check_format(path: Path, found: Any) -> None:
    if found == FORMAT:
        return
    remedy = f"use the version of SDP that wrote it (this one reads format {FORMAT})"
    if found in range(1, FORMAT):
        remedy += ", or export the weights with that version and start from them with training.init_from"
    raise CheckpointError(f"{path}: has format {quote(found)} of another version; {remedy}")


def is_ours(path: Path) -> bool:
    """Return whether this engine wrote the directory ``path``, so that a save may remove it.

    The proof is an undamaged ``state.json``, also of an incomplete checkpoint. A save never removes
    a symbolic link, so the result for a link is False.
    """
    return _own_state(path) is not None


def is_whole(path: Path) -> bool:
    """Return whether ``path`` is a complete checkpoint of this engine."""
    state = _own_state(path)
    return state is not None and INCOMPLETE not in state


def _own_state(path: Path) -> dict[str, Any] | None:
    try:
        state = None if path.is_symlink() else read_json_file(path / STATE, most_bytes=MOST_BYTES)
    except (OSError, ValueError):
        return None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        return None
    return state if state.pop("sha256", None) == _digest(state) else None


def hash_files(paths: Iterable[Path]) -> dict[str, str]:
    """Return the sha256 of each file's bytes, by file name."""
    digests = {}
    for path in paths:
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def damaged_file(path: Path, expected: Mapping[str, str]) -> str | None:
    """Return a message about the first file that is missing or has a wrong hash, or None.

    ``expected`` has the sha256 of each file of the checkpoint ``path``, by name.
    """
    for name, digest in expected.items():
        if not (path / name).is_file():
            return f"{path / name}: is missing; {_OLDER}"
        try:
            found = hash_files([path / name])[name]
        except OSError as error:
            return f"{path / name}: cannot be read ({error.strerror}); {_OLDER}"
        if found != digest:
            return f"{path / name}: damaged, its sha256 is {found[:12]}… instead of {digest[:12]}…; {_OLDER}"
    return None


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
