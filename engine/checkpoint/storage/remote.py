"""Checkpoints in an object store.

Each rank writes to a folder of its host, and then copies the files to the store. So hosts need no
shared directory. ``state.json`` is written last, so only a complete checkpoint has this file.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...environment.process import cache_folder
from ...errors import CheckpointError, StoreError
from ...files import PARTIAL
from ...json_files import parse_json
from ...object_store import Store, fetch, is_url
from .directory import LATEST, check_tag, latest, locate, newest_of, sorted_steps, surplus
from .files import STATE, hash_files


class RemoteTarget:
    """Writes the checkpoint ``tag`` to an object store, below ``url``.

    The methods and their order are those of :class:`DirectoryTarget`. An incomplete checkpoint has
    an empty marker file and no ``state.json``. A store cannot replace a checkpoint in one step. So
    an earlier checkpoint with the same tag is removed when the save begins.
    """

    aside: Path  # where this rank writes

    def __init__(self, url: str, tag: str):
        self._store, self._tag = Store(url), tag

    def make_room(self) -> None:
        """Mark the checkpoint as incomplete, and remove what killed saves have left."""
        names = self._store.sizes()
        begun = {name.partition("/")[0] for name in names if name.endswith(f"/{PARTIAL}")}
        for tag in begun - _complete(names) - {self._tag}:
            self._remove(tag, names)
        ours = self._tag in begun | _complete(names)
        if not ours and any(name.startswith(f"{self._tag}/") for name in names):
            found = "exists and is not a checkpoint of this engine, so it is not replaced"
            raise CheckpointError(f"{self._store.url}/{self._tag}: {found}; use another tag")
        self._store.write(f"{self._tag}/{PARTIAL}", b"")
        self._store.remove([f"{self._tag}/{STATE}"])

    def enter(self, rank: int) -> None:
        """Make the folder on this host to which this rank writes."""
        cache_folder().mkdir(parents=True, exist_ok=True)
        self.aside = Path(tempfile.mkdtemp(prefix=f"saving-{self._tag}-{rank}-", dir=cache_folder()))

    def add(self, files: Iterable[Path]) -> dict[str, str]:
        """Copy files of this rank to the store, and return their hashes by name."""
        files = list(files)
        for file in files:
            self._store.put(file, f"{self._tag}/{file.name}")
        return hash_files(files)

    def publish(self, state: str, *, is_newest: bool) -> None:
        """Write ``state.json`` with the text ``state``, which completes the checkpoint.

        If ``is_newest``, a load without a tag finds this checkpoint.
        """
        self._store.write(f"{self._tag}/{STATE}", state)
        self._store.remove([f"{self._tag}/{PARTIAL}"])
        if is_newest:
            self._store.write(LATEST, json.dumps({"tag": self._tag}))

    def prune(self, keep: int, every: int) -> None:
        """Remove old checkpoints (:func:`~sdp.engine.checkpoint.storage.directory.surplus`)."""
        names = self._store.sizes()
        for tag in surplus(_complete(names), keep, self._tag, every):
            self._store.write(f"{tag}/{PARTIAL}", b"")
            self._remove(tag, names)

    def clean(self, rank: int) -> None:
        """Remove this rank's folder on its host, at the end of every save."""
        if "aside" in vars(self):
            shutil.rmtree(self.aside, ignore_errors=True)

    def _remove(self, tag: str, names: Iterable[str]) -> None:
        files = [name for name in names if name.startswith(f"{tag}/") and not name.endswith(f"/{PARTIAL}")]
        self._store.remove(sorted(files, key=lambda name: name != f"{tag}/{STATE}"))
        self._store.remove([f"{tag}/{PARTIAL}"])


def describe_newest(directory: str | Path) -> str:
    """Return the path of the newest checkpoint for an error message, or say that there is none."""
    try:
        tag = newest(directory)
    except (CheckpointError, StoreError):
        return f"unknown, {directory} is damaged or cannot be read"
    if tag is None:
        return "none was written"
    return f"{directory}/{tag}" if is_url(directory) else str(locate(Path(directory), tag))


def newest(directory: str | Path) -> str | None:
    """Return the tag of the newest complete checkpoint in a directory or URL, or None."""
    if not is_url(directory):
        return latest(Path(directory))
    store = Store(str(directory))
    complete, pointer = _complete(store.sizes()), store.read(LATEST)

    def read() -> Any:
        if pointer is None:
            raise FileNotFoundError
        return parse_json(pointer.decode())

    return newest_of(store.url, read, sorted_steps(complete), complete.__contains__)


def fetch_checkpoint(url: str, tag: str) -> Path:
    """Copy the checkpoint ``url/tag`` to this host, and return the folder that contains the copy.

    Raises:
        CheckpointError: There is no such checkpoint, or it is not complete.
        StoreError: The store does not answer.
    """
    copy = fetch(f"{url}/{check_tag(tag)}", STATE)
    if copy is None:
        there = ", ".join(sorted(_complete(Store(url).sizes()))) or "none"
        raise CheckpointError(f"{url}: no complete checkpoint {tag}; found: {there}")
    return copy.parent


def _complete(names: Iterable[str]) -> set[str]:
    return {tag for tag, _, file in (name.partition("/") for name in names) if file == STATE}
