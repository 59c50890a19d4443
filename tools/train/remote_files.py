"""The copy of a run's files in an object store. The checkpoints are there and not on this host."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
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
    """Copies the files of the run in ``dump_dir`` to ``url``, in a thread of rank 0.

    They are copied at every evaluation and with every checkpoint.
    """

    def __init__(self, url: str, dump_dir: Path, save_every: int):
        self._save_every = save_every
        self._store, self._dump_dir = Store(url), dump_dir
        self._thread, self._copying = ThreadPoolExecutor(1, thread_name_prefix="run files"), Future[None]()
        self._copying.set_result(None)
        self._has_corpus = False

    def on_start(self, start: int, steps: int) -> None:
        self._send()

    def on_step(self, line: Line) -> None:
        if self._save_every and line["step"] % self._save_every == 0:
            self._send()

    def on_evaluation(self, line: Line) -> None:
        self._send()

    def close(self) -> None:
        self._send()
        self._thread.shutdown()

    def _send(self) -> None:
        if self._copying.done() or self._copying.running():  # else one waits already
            self._copying = self._thread.submit(self._copy)

    def _copy(self) -> None:
        folder = self._dump_dir
        start = [path.relative_to(folder).as_posix() for path in (folder / START).glob("*")]
        try:
            index = folder / CORPUS / INDEX_FILE
            is_new = not self._has_corpus and index.is_file()
            if is_new and self._store.read(f"{CORPUS}/{INDEX_FILE}") != index.read_bytes():
                upload(folder / CORPUS, f"{self._store.url}/{CORPUS}", INDEX_FILE, SHARDS)
            self._has_corpus = True
            for name in (*SENT, *start):
                if (folder / name).is_file():
                    self._store.write(name, (folder / name).read_bytes())
        except (StoreError, OSError) as error:
            log.warning("WARNING: the files of the run are in %s, but their copy is old: %s", folder, error)
