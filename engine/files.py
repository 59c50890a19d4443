"""Writes files of a run: in one step, and never through a link that somebody else made."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from .errors import WriteError

PARTIAL = ".sdp-partial"  # a name ends with this while its file or directory is being written


def refuse_link(path: Path) -> None:
    """Raise WriteError if ``path`` is a symbolic link. Folders above it may be links.

    Otherwise somebody else could put a link among the files of a run, and so have another file of
    the user overwritten.
    """
    if os.path.islink(path):  # noqa: PTH114  # Path.is_symlink raises an error for a name that is too long
        raise WriteError(f"{path}: is a symbolic link, which a run does not follow; remove the link")


def require_own_file(path: Path) -> None:
    """Raise WriteError if ``path`` is a link, a directory or a FIFO, which no run may write."""
    refuse_link(path)
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # opening it gives the reason
    # Only the administrator can make a device.
    if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
        raise WriteError(f"{path}: is not a regular file, and a run must write a file of this name; remove it")


def open_own_file(path: Path, flags: int = os.O_WRONLY | os.O_CREAT | os.O_APPEND) -> int:
    """Open a regular file, and return the descriptor. By default, create it if missing, and append.

    Raises:
        WriteError: ``path`` is a symbolic link, or not a regular file.
        OSError: ``path`` cannot be opened.
    """
    try:
        # A FIFO without a reader would block.
        opened = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            os.close(opened)
            raise WriteError(f"{path}: is not a regular file, and a run must write a file of this name; remove it")
        return opened
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(path)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace the file at ``path`` in one step, and flush it to the disk.

    After a crash, or on a full disk, the file has either its old or its new content. A link at
    ``path`` is replaced by the file. Raises OSError if the file cannot be written.
    """
    partial = path.with_name(f".{path.name}{PARTIAL}")
    partial.unlink(missing_ok=True)
    try:
        with partial.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
