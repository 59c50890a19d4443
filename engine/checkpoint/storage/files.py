"""The files of one checkpoint: its state, its hashes, and how they are read and written safely.

A checkpoint may come from somebody else. So no name in it may lead out of its directory, and this
module opens only regular files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, quote
from ...json_files import parse_json

FORMAT = 3
READ_FORMATS = (2, 3)  # 2: the list of tensors is a pickle
STATE = "state.json"
MOST_BYTES = 1 << 30  # of a JSON file; the list of a large model's tensors has tens of megabytes
PARTIAL = ".sdp-partial"  # a name ends with this while its file or directory is being written
INCOMPLETE = "incomplete"  # the state has this key while the checkpoint is being written

_KEYS = {"global_steps", "global_samples", "mesh", "placement", "scheduler", "loader", "client_state", "files"}
_OLDER = "remove this directory to resume from an older checkpoint"


def encode_state(state: Mapping[str, Any]) -> str:
    """Return the text of ``state.json``, with its own hash.

    Raises:
        CheckpointError: ``state`` has a value that is not JSON.
    """
    try:
        whole = {"format": FORMAT, **state}
        text = json.dumps({**whole, "sha256": _digest(whole)}, indent=1)
        parse_json(text)  # refuse now what no load could read
        return text
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the client state or the scheduler's state is not JSON ({error}); give plain numbers, text, lists"
        ) from None


def read_state(path: Path) -> dict[str, Any]:
    """Read ``state.json`` of the checkpoint at ``path``.

    Raises:
        CheckpointError: The file is missing or damaged, or another version or an unfinished save
            wrote it.
    """
    try:
        state = read_json(path / STATE)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: not a checkpoint of this engine ({STATE} is missing); choose another or start a new run"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path / STATE}: cannot be read ({error.strerror}); {_OLDER}") from None
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict) or not state.keys() >= {"format"}:
        raise CheckpointError(f"{path / STATE}: damaged; {_OLDER}")
    if not _is_known_format(state["format"]):
        known = " and ".join(map(str, READ_FORMATS))
        found = f"has format {quote(state['format'])}, this version reads {known}"
        raise CheckpointError(f"{path}: {found}; use the version that wrote it")
    if INCOMPLETE in state:
        raise CheckpointError(f"{path}: the save that wrote it did not finish; {_OLDER}")
    missing = _KEYS - state.keys()
    if missing or state.pop("sha256", None) != _digest(state):
        found = f"{min(missing)!r} is missing" if missing else "its content is not what was written"
        raise CheckpointError(f"{path / STATE}: damaged, {found}; {_OLDER}")
    files = state["files"]
    if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
        raise CheckpointError(f"{path / STATE}: damaged, 'files' does not give a hash for each file; {_OLDER}")
    if wrong := _wrong_field(state):
        raise CheckpointError(f"{path / STATE}: damaged, {wrong}; {_OLDER}")
    for name in files:
        if not is_plain(name):
            found = f"names the file {quote(name)}, which is not in this directory"
            raise CheckpointError(f"{path / STATE}: {found}; do not use this checkpoint")
    return state


def _is_known_format(value: Any) -> bool:
    return type(value) is int and value in READ_FORMATS


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**63


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_object_or_null(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def _is_mesh(value: Any) -> bool:
    """Whether it has the degrees sdp, fsdp and tp, and for groups of unequal size their data
    ranks.
    """
    if not isinstance(value, list) or not 2 <= len(value) <= 4:
        return False
    sizes = value[3] if len(value) == 4 else []
    return isinstance(sizes, list) and all(_is_count(size) and size > 0 for size in (*value[:3], *sizes))


def _are_rates(value: Any) -> bool:
    rates = list(value.values()) if isinstance(value, dict) else value
    return isinstance(rates, list) and all(map(_is_number, rates))


def _is_loss_scale(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(map(_is_number, value.values())))


def _are_means(value: Any) -> bool:
    """Whether it has three numbers for each name."""
    return isinstance(value, dict) and all(
        isinstance(means, list) and len(means) == 3 and all(map(_is_number, means)) for means in value.values()
    )


# The types that the fields must have. Those of the second table are absent from checkpoints of
# earlier versions.
_REQUIRED = {
    "global_steps": (_is_count, "a count"),
    "global_samples": (_is_count, "a count"),
    "mesh": (_is_mesh, "a list of sizes"),
    "placement": (_is_object, "an object"),
    "scheduler": (_is_object_or_null, "an object or null"),
    "loader": (_is_object_or_null, "an object or null"),
    "client_state": (_is_object, "an object"),
}
_OPTIONAL = {
    "skipped_steps": (_is_count, "a count"),
    "loss_scale": (_is_loss_scale, "an object of numbers or null"),
    "client_encoding": (_is_count, "a count"),
    "learning_rates": (_are_rates, "numbers"),
    "settings": (_is_object, "an object"),
    "spikes": (_is_object, "an object"),
    "sync": (_is_object_or_null, "an object or null"),
    "noise": (_are_means, "three numbers for each unit"),
}


def _wrong_field(state: Mapping[str, Any]) -> str | None:
    """Describe the first field that has a wrong type, or return None."""
    for key, (is_valid, kind) in {**_REQUIRED, **_OPTIONAL}.items():
        if (key in state or key in _REQUIRED) and not is_valid(state[key]):
            return f"{key!r} is {quote(state[key])}, not {kind}"
    return None


def is_ours(path: Path) -> bool:
    """Whether ``path`` is a real directory with an undamaged ``state.json`` of this engine.

    The checkpoint in it may be incomplete.
    """
    return _own_state(path) is not None


def is_whole(path: Path) -> bool:
    """Whether ``path`` is a checkpoint of this engine that was written to the end."""
    state = _own_state(path)
    return state is not None and INCOMPLETE not in state


def _own_state(path: Path) -> dict[str, Any] | None:
    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            return None
        state = read_json(path / STATE)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(state, dict) or not _is_known_format(state.get("format")):
        return None
    return state if state.pop("sha256", None) == _digest(state) else None


def open_regular(path: Path) -> BufferedReader:
    """Open ``path`` to read it.

    Raises:
        OSError: ``path`` is not a regular file. A symbolic link may lead elsewhere. A FIFO would
            block.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    # The flags matter only if somebody replaces the file in between by a link or a FIFO.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def read_json(path: Path) -> Any:
    """Return the value in ``path``.

    Raises:
        OSError: ``path`` cannot be read, or is not a regular file.
        ValueError: It is not JSON within the limits.
    """
    with open_regular(path) as file:
        return parse_json_bytes(file.read(MOST_BYTES + 1))


def parse_json_bytes(content: bytes) -> Any:
    """Return the value of a JSON text in UTF-8. Raises ValueError if it exceeds a limit."""
    if len(content) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES >> 20} MiB")
    return parse_json(content.decode("utf-8"))


def is_plain(name: str) -> bool:
    """Whether ``name`` is the name of a directory entry, not a path that leads elsewhere."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def file_sizes(path: Path, files: Iterable[str]) -> dict[str, int]:
    """Return the sizes in bytes of the files of the checkpoint at ``path``.

    Raises:
        CheckpointError: The directory does not hold ``state.json`` and exactly ``files``, or one of
            them is not a regular file.
    """
    named, sizes = {*files}, {}
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                remedy = "remove it, or take another checkpoint"
                if not entry.is_file(follow_symlinks=False):
                    raise CheckpointError(f"{path / entry.name}: is not a regular file; {remedy}")
                if entry.name in named:
                    sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
                elif entry.name != STATE:
                    raise CheckpointError(f"{path / entry.name}: is not a file of this checkpoint; {remedy}")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); {_OLDER}") from None
    if missing := named - sizes.keys():
        raise CheckpointError(f"{path / min(missing)}: is missing; {_OLDER}")
    return sizes


def write_durably(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path`` in one step and flush it to the disk.

    After a crash the file has its old or its new content, never a mixture.
    """
    partial = path.with_name(f".{path.name}{PARTIAL}")
    partial.unlink(missing_ok=True)
    try:
        with partial.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def hash_files(paths: Iterable[Path]) -> dict[str, str]:
    """Return the sha256 of each file's bytes, by file name."""
    digests = {}
    for path in paths:
        with open_regular(path) as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def damaged_file(path: Path, expected: Mapping[str, str]) -> str | None:
    """Describe the first file of a checkpoint whose hash is wrong, or return None.

    ``expected`` has the sha256 of each file, by name.
    """
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


def share_of(files: Mapping[str, str], part: int, parts: int) -> dict[str, str]:
    """Return every ``parts``-th file from ``part`` on. This divides the reading among ranks."""
    names: Sequence[str] = sorted(files)[part::parts]
    return {name: files[name] for name in names}


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
