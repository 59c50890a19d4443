"""Opens files that a launcher and its ranks write in the directory of a run, without following
symbolic links.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ..errors import LaunchError


def open_own_file(path: Path, flags: int = os.O_WRONLY | os.O_CREAT | os.O_APPEND) -> int:
    """Open ``path`` and return the file descriptor. By default, a missing file is created and
    writes append.

    Raises:
        LaunchError: ``path`` is a symbolic link, which somebody may have put there to have another
            file overwritten, or is not a regular file.
        OSError: ``path`` cannot be opened.
    """
    try:
        # A FIFO without a reader would block.
        opened = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            os.close(opened)
            raise LaunchError(f"{path}: is not a regular file, and a run writes a file of its own there; remove it")
        return opened
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(path)
        raise


def refuse_link(path: Path) -> None:
    """Raise LaunchError if ``path`` is a symbolic link. Its parents may be links."""
    if path.is_symlink():
        raise LaunchError(f"{path}: is a symbolic link, which a run does not follow; remove the link")
