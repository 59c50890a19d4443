"""Writing files: a file is written as a whole or not at all, and a full disk is one line."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ...engine.errors import SDPError

# The disk, the user's quota, or the largest file that a process may write.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class WriteError(SDPError):
    """A file cannot be written, most often because the disk is full."""

    @classmethod
    def of(cls, path: object, error: OSError) -> WriteError:
        """The error for ``path``, with the reason of the operating system."""
        remedy = "; free space there" if error.errno in NO_ROOM else ""
        return cls(f"{path}: cannot be written ({error.strerror}){remedy}")


def refuse_link(path: Path) -> None:
    """Raise WriteError if ``path`` is a symbolic link. Its parents may be links.

    Somebody else may have put a link among the files of a run, to have another file overwritten.
    """
    if os.path.islink(path):  # noqa: PTH114  # Path.is_symlink raises an error for a name that is too long
        raise WriteError(f"{path}: is a symbolic link, which a run does not follow; remove the link")


def require_own_file(path: Path) -> None:
    """Raise WriteError for a link, a directory or a FIFO at ``path``. Opening a FIFO would hang."""
    refuse_link(path)
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # opening it gives the reason
    # Only the administrator can make a device.
    if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
        raise WriteError(f"{path}: is not a regular file, and a run writes a file of its own there; remove it")


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path``. A reader sees the old content or all of the new one, also if the
    disk fills up.

    A path that is not a regular file, such as a pipe, is written directly. Raises OSError, and
    WriteError if the draft of the file is not a regular file.
    """
    path = Path(os.path.realpath(path))  # writes to the target of a link, and keeps the link
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    new = path.with_name(path.name + ".partial")
    require_own_file(new)
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
