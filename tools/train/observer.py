"""Observers of the training loop: their base class, the memory probe, and the copy of a run's files
in an object store. Curves, progress bar and profiler have files of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ...data.index import SHARDS
from ...data.shared.files import INDEX_FILE
from ...engine.accounting.memory_probe import watched_peak
from ...engine.engine import SDPEngine
from ...engine.errors import StoreError
from ...engine.object_store import Store, upload
from ..runs.run_files import CORPUS, SENT
from ..runs.start_files import START

log = logging.getLogger("sdp")

Line = Mapping[str, Any]  # a line of metrics.jsonl or evaluations.jsonl


class Observer:
    """Watches the training loop on one rank. A subclass overrides the hooks that it needs.

    The trainer calls the observers in the order of its list. No hook is collective.
    """

    def on_start(self, start: int, steps: int) -> None:
        """Called before the run goes from step ``start`` to step ``steps``."""

    def around_step(self, step: int) -> AbstractContextManager[Any]:
        """Return a context for forward, backward and update of optimizer step ``step``."""
        return nullcontext()

    def on_step(self, line: Line) -> None:
        """Called after an optimizer step. ``line`` is its line of metrics.jsonl."""

    def on_evaluation(self, line: Line) -> None:
        """Called after the full model was evaluated. ``line`` is a line of evaluations.jsonl."""

    def on_rollback(self, step: int) -> None:
        """Called after the run returned to the checkpoint of ``step``.

        Later steps are made again.
        """

    def on_end(self) -> None:
        """Called after the loop: the run is done, or a signal stopped it."""

    def close(self) -> None:
        """Flush and close files. Called once, also when the run fails."""


PROBED_STEP = 2  # the first step allocates optimizer state; the steps after it allocate the same


class MemoryProbe(Observer):
    """Runs one step under the probe. ``peak`` is the result in bytes, first None.

    It is step ``PROBED_STEP``. With a schedule of maskings, it is the first later step with
    backward masking, which needs the most memory.
    """

    def __init__(self, engine: SDPEngine):
        self._engine = engine
        schedule = engine.config.masking_schedule
        backward = [start for start in schedule.starts if schedule.at(start) == "backward"]
        self._step = max(PROBED_STEP, backward[0]) if backward else PROBED_STEP
        self.peak: int | None = None

    @staticmethod
    def works_with(engine: SDPEngine) -> bool:
        """Whether the probe sees all memory. On a CPU, it misses allocations of compiled code."""
        return engine.device.type == "cuda" or not engine.config.training.compile

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        if step != self._step:
            yield
            return
        engine = self._engine
        kept = engine.local_training.tensors_on_device()
        with watched_peak(engine.module, engine.optimizer, engine.device, kept=kept) as peak:
            yield
        self.peak = peak()


class RemoteFiles(Observer):
    """Copies the files of the run in ``dump_dir`` to ``url``, on rank 0.

    They are copied at every evaluation and with every checkpoint. The checkpoints themselves are in
    the object store only.
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
