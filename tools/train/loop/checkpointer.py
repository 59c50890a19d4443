"""Saves the checkpoints of a run, and resumes the run from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ....engine.checkpoint.storage.directory import LATEST
from ....engine.checkpoint.storage.remote import newest
from ....engine.distributed.agreement import Ranks
from ....engine.distributed.heartbeat import Heartbeat
from ....engine.engine import SDPEngine
from ....engine.errors import CheckpointError, StoreError, WriteError
from ....engine.object_store import is_url

log = logging.getLogger("sdp")

# Activities that the heartbeat reports.
CHECKPOINT, AWAITING, LOAD = "checkpoint", "waiting for the checkpoint", "loading the checkpoint"


class Checkpointer:
    """Writes and loads the checkpoints of a run in ``directory``, a folder or a URL.

    If a save fails, the previous checkpoint stays. ``client_state`` is stored in every checkpoint.
    ``recalibrated`` returns the context in which checkpoints are saved. In this context, batch
    norms have the statistics of the full model.
    """

    def __init__(
        self,
        engine: SDPEngine,
        dump_dir: Path,
        directory: str | Path,
        client_state: Mapping[str, Any],
        recalibrated: Callable[[], AbstractContextManager[None]],
        beat: Heartbeat,
    ):
        self._engine, self._dump_dir, self.directory, self._beat = engine, dump_dir, directory, beat
        self._training = engine.config.training
        self._client_state, self._recalibrated = client_state, recalibrated
        self._failures = 0  # consecutive saves that failed
        self._is_saving = False  # whether a save in the background has not been waited for
        self._has_directory = False  # whether this run has made or seen its directory of checkpoints

    def resume(self) -> bool:
        """Load the newest checkpoint, and return whether there is one. Collective.

        If settings have changed since the checkpoint, the new settings apply.
        """
        engine = self._engine
        self._beat.at(0, LOAD, self._training.start_timeout)
        path, _ = engine.load_checkpoint(self.directory, configured_rates=True)
        if path is None:
            return False
        self._has_directory = True
        log.info("resumed from %s", path)
        return True

    def roll_back(self) -> bool:
        """Load the newest checkpoint, and return whether there is one. Collective.

        The position in the data stays, so that the run does not read the same samples again.
        """
        engine = self._engine
        self.settle(block=True)
        self._beat.at(engine.global_steps, LOAD, self._training.start_timeout)
        position = engine.loader.state_dict()
        path, _ = engine.load_checkpoint(self.directory, configured_rates=True)
        engine.loader.load_state_dict(position)
        return path is not None

    def save(self) -> None:
        """Write a checkpoint, in the background if ``training.async_save`` says so. Collective.

        If the save fails, the run goes on.

        Raises:
            CheckpointError: ``training.max_failed_saves`` consecutive checkpoints failed.
        """
        self.settle(block=True)
        self._end_after_failures()
        try:
            self.write(background=self._training.async_save)
            self._is_saving = self._training.async_save
            self._failures = self._failures if self._is_saving else 0
        except CheckpointError as error:
            self._failures += 1
            log.error(
                "WARNING: no checkpoint at step %d: %s; %sthe run goes on",
                self._engine.global_steps,
                error,
                "the previous one stays, " if self._holds_a_checkpoint() else "",
            )
            self._end_after_failures()

    def _end_after_failures(self) -> None:
        if self._failures >= self._training.max_failed_saves:
            raise CheckpointError(
                f"the last {self._failures} checkpoints could not be written (training.max_failed_saves), see the "
                "lines above; remove the cause, and resume"
            )

    def write(self, *, background: bool = False) -> None:
        """Write a checkpoint, and raise CheckpointError if that fails. Collective."""
        self._beat.at(self._engine.global_steps, CHECKPOINT, self._training.save_timeout)
        self._make_directory()
        with self._recalibrated():
            self._engine.save_checkpoint(
                self.directory,
                client_state=self._client_state,
                keep=self._training.keep,
                keep_every=self._training.keep_every,
                background=background,
            )

    def _make_directory(self) -> None:
        """Make the directory before the first save. Collective.

        Raises, on all ranks:
            WriteError: the directory of the run was removed during the run.
            CheckpointError: the directory was removed during the run, or there is a symbolic link.
        """

        def make() -> None:
            if not self._dump_dir.is_dir():
                raise WriteError(f"{self._dump_dir}: was removed while the run was writing to it")
            if is_url(self.directory):
                return
            directory, problem = Path(self.directory), None
            links = [path for path in (directory, directory / LATEST) if path.is_symlink()]
            if links:
                problem = f"{links[0]}: is a symbolic link, which a run does not follow; remove the link"
            elif self._has_directory and not directory.is_dir():
                problem = f"{directory}: was removed while the run was writing to it; make it again to have checkpoints"
            else:
                try:
                    directory.mkdir(exist_ok=True)
                except OSError as error:
                    problem = f"{directory}: cannot be made ({error.strerror})"
            if problem is not None:
                raise CheckpointError(problem)
            self._has_directory = True

        engine = self._engine
        Ranks(alone=engine.world_size == 1).all_or_none(lambda: make() if engine.global_rank == 0 else None)

    def _holds_a_checkpoint(self) -> bool:
        try:
            return newest(self.directory) is not None
        except CheckpointError:  # the pointer is damaged, so there was one
            return True
        except StoreError:  # the store does not answer, which is what the save reports
            return False

    def settle(self, *, block: bool) -> None:
        """Report a failed save in the background. With ``block``, wait until the save has ended."""
        if block:
            self._beat.at(self._engine.global_steps, AWAITING, self._training.save_timeout)
        try:
            self._engine.wait_for_checkpoint(block=block)
            if block and self._is_saving:
                self._failures = 0
            self._is_saving = self._is_saving and not block
        except CheckpointError as error:
            self._failures, self._is_saving = self._failures + 1, False
            log.error(
                "WARNING: the last checkpoint was not written: %s; the previous one stays, the run goes on", error
            )
