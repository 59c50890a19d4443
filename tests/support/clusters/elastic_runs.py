"""Runs of ``sdp train`` with elastic groups, whose groups a test kills or stops."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..forks.command import ForkedCommand, forked_rank
from ..processes import until, written_lines
from ..small_runs import SMALL_LLAMA

SECONDS = 240.0  # of a run, on a machine that others use too
MANY = 100_000  # steps that no run reaches
MICRO = 2  # samples of one rank in a step


class ElasticRun:
    """``sdp train`` as a process of its own, with its groups.

    Args:
        config: the configuration's file.
        dump_dir: the directory of the run.
        *more: further words of the command line.
        new_interpreters: start the command and its ranks as users do, instead of forking them.
        script: a Python file that takes the place of ``-m sdp`` in new interpreters.
        prepare: called in the forked command first, so that it changes the command and its ranks.
    """

    def __init__(
        self,
        config: Path,
        dump_dir: Path,
        *more: str,
        new_interpreters: bool = False,
        script: Path | None = None,
        prepare: Callable[[], object] | None = None,
    ):
        self.dump_dir = dump_dir
        self._said = dump_dir.with_suffix(".stderr")
        words = ["train", str(config), "--dump-dir", str(dump_dir), *more]
        self._are_forked = not new_interpreters
        self.process: ForkedCommand | subprocess.Popen[bytes]
        with self._said.open("w") as said, Path(os.devnull).open("w") as null:
            if new_interpreters:
                program = ["-m", "sdp"] if script is None else [str(script)]
                self.process = subprocess.Popen([sys.executable, "-P", *program, *words], stdout=null, stderr=said)
            else:
                self.process = ForkedCommand(words, stdout=null, stderr=said, prepare=prepare)

    @property
    def said(self) -> str:
        """What the terminal shows: messages of the launcher, and the progress of the run."""
        return self._said.read_text()

    def lines(self) -> list[dict[str, Any]]:
        """The whole lines of metrics.jsonl."""
        return written_lines(self.dump_dir / "metrics.jsonl")

    def ranks(self) -> dict[int, list[int]]:
        """The process ids of the ranks that run now, by group."""
        found: dict[int, list[int]] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == self.process.pid and (group := self._group_of(folder)) is not None:
                    found.setdefault(group, []).append(int(folder.name))
        return found

    def _group_of(self, process: Path) -> int | None:
        """Return the group of a process, of which ``process`` is the folder below /proc."""
        if self._are_forked:
            return forked_rank(process)
        given = re.search(rb"(?:^|\0)SDP_ELASTIC_GROUP=(\d+)\0", (process / "environ").read_bytes())
        return int(given[1]) if given else None

    def wait_for(self, steps: int, groups: int) -> list[dict[str, Any]]:
        """Wait for ``steps`` more lines, the last one with so many groups; return all lines."""
        goal = len(self.lines()) + steps

        def reached() -> list[dict[str, Any]] | None:
            assert self.process.poll() is None, self.said
            lines = self.lines()
            return lines if len(lines) >= goal and lines[-1]["groups"] == groups else None

        return self._until(reached)

    def hit(self, group: int, number: int) -> None:
        """Send a signal to the first process of a group."""
        os.kill(until(lambda: self.ranks().get(group))[0], number)

    def lose(self, *groups: int, of: int) -> None:
        """Kill groups ``of`` so many, and wait until they are back.

        A forked group may be back after a few steps, or in local steps before a round ended without
        it. So lines of a later generation are waited for.
        """
        before = self.lines()[-1]["generation"]
        for group in groups:
            self.hit(group, signal.SIGKILL)

        def went_on() -> bool:
            assert self.process.poll() is None, self.said
            return self.lines()[-1]["generation"] > before

        self._until(went_on)
        self.wait_for(5, groups=of)

    def _until(self, condition: Callable[[], Any]) -> Any:
        try:
            return until(condition, seconds=SECONDS, pause=0.05)
        except AssertionError as error:
            raise AssertionError(f"{error}; the run says:\n{self.said}") from None

    def end(self) -> int:
        """Wait for the end of the run, and return its exit code."""
        try:
            return self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def stop(self) -> int:
        """Let the run end after its present step, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.end()

    def kill(self) -> None:
        """Leave nothing behind: the ranks end with the launcher."""
        self.process.kill()
        self.process.wait()


def elastic_config(corpus: Path, *, steps: int = MANY, groups: int = 4, **elastic: float) -> dict[str, Any]:
    """Return the configuration of a tiny LLaMA whose units have two to four holders.

    Holders are compared after each step. A machine that is busy with other things lets no rank miss
    its heartbeat.
    """
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
        "scheduler": {"type": "WSD", "params": {"warmup_num_steps": 2, "total_num_steps": steps, "decay_num_steps": 5}},
        "sdp": {
            "groups": groups, "capacity": 0.6, "survive": 1, "check_interval": 1,
            "elastic": {"enabled": True, "wait_seconds": 60, "heartbeat_seconds": 30, **elastic},
        },
        "model": dict(SMALL_LLAMA),
        "data": {"path": str(corpus), "sequence_length": 32},
        "training": {"steps": steps, "evaluate_every": 40, "evaluate_batches": 2, "save_every": 40, "keep": 2},
    }  # fmt: skip


Start = Callable[..., ElasticRun]
