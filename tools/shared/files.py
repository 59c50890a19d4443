"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, of which a reader sees all or what was there before, also where a disk fills up. What is no file, such as
    a pipe, is written to as it is. Raises OSError.
    """
    path = Path(os.path.realpath(path))  # a link stays one
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    new = path.with_name(path.name + ".partial")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
