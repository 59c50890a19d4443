"""The copy of a run's files in an object store. The checkpoints are there and not on this host."""

from __future__ import annotations

import logging
from pathlib import Path

from ...data.index import SHARDS
from ...data.shared.files import INDEX_FILE
from ...engine.errors import StoreError
from ...engine.object_store import Store, upload
from ..runs.run_files import CORPUS, SENT
from ..runs.start_files import START
from .observer import Line, Observer

log = logging.getLogger("sdp")


class RemoteFiles(Observer):
    """Copies the files of the run in ``dump_dir`` to ``url``, on rank 0.

    They are copied at every evaluation and with every checkpoint.
    """

    def __init__(self, url: str, dump_dir: Path, save_every: int):
        self._store, self._dump_dir, self._save_every = Store(url), dump_dir, save_every

    def on_start(self, start: int, steps: int) -> None:
        index = self._dump_dir / CORPUS / INDEX_FILE
        if index.is_file() and self._store.read(f"{CORPUS}/{INDEX_FILE}") != index.read_bytes():
            upload(index.parent, f"{self._store.url}/{CORPUS}", INDEX_FILE, SHARDS)
        self._copy()

    def on_step(self, line: Line) -> None:
        if self._save_every and line["step"] % self._save_every == 0:
            self._copy()

    def on_evaluation(self, line: Line) -> None:
        self._copy()

    def close(self) -> None:
        self._copy()

    def _copy(self) -> None:
        folder = self._dump_dir
        start = [path.relative_to(folder).as_posix() for path in (folder / START).glob("*")]
        try:
            for name in (*SENT, *start):
                if (folder / name).is_file():
                    self._store.write(name, (folder / name).read_bytes())
        except (StoreError, OSError) as error:
            log.warning("WARNING: the files of the run are in %s, but their copy is old: %s", folder, error)
