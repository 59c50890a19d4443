"""Elastic runs that lose something at a named moment, and runs without elastic groups that must end
with the same weights.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from sdp.engine.checkpoint.load import find, load
from sdp.engine.checkpoint.storage.dcp import SafeReader
from sdp.tests.support.forks.command import ForkedCommand, run_forked
from sdp.tests.support.processes import until, unused_port, written_lines

from .moments import Stop, die_in_decision, note_newcomers, stop_at

SECONDS = 120.0  # for something that takes a second on idle cores
ENDING_SECONDS = 30.0  # for a coordinator that waits for nobody. It would wait 60 s for somebody
Living = tuple[tuple[int, ...], ...]  # the groups that take part in each step


class SeparateGroups:
    """A coordinator, and a launch for each group, as on hosts of their own, but all on loopback. No
    group is launched again by itself.

    Args:
        folder: for all files.
        config: the configuration, without restarts.
        ranks: the ranks of each group.
        stops: where ranks stop.
        last_decision: the first coordinator is killed when it has sent so many. 0: it lives.
        prepare: prepares each launch, None to let it stop at ``stops``.
        resume: whether the launches get ``--resume``.
        absent: groups that are not launched yet.
    """

    address = "127.0.0.1"  # of the coordinator

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        ranks: int,
        stops: Sequence[Stop],
        *,
        last_decision: int = 0,
        prepare: Callable[[], object] | None = None,
        resume: bool = False,
        absent: Sequence[int] = (),
    ):
        self._prepare = prepare or partial(stop_at, stops)
        self._more = ["--resume"] if resume else []
        self._last_decision = last_decision
        self._folder, self._ranks, self._port = folder, ranks, unused_port()
        self._config, self.dump_dir, self._stack = folder / "config.json", folder / "run", ExitStack()
        self._config.write_text(json.dumps(config))
        self._log = self._stack.enter_context((folder / "said").open("w"))
        self.coordinate()
        self._launches: dict[int, ForkedCommand] = {}
        self._lost = set(absent)
        for group in range(config["sdp"]["groups"]):
            if group not in absent:
                self.launch(group)

    def __enter__(self) -> SeparateGroups:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, prepare: Any, *words: object, **environment: str) -> ForkedCommand:
        told = {"SDP_ELASTIC_TOKEN": "a secret that the groups share"} | environment
        process = ForkedCommand(words, self._log, self._log, environment=told, prepare=prepare)
        self._stack.callback(process.kill)
        return process

    def coordinate(self) -> None:
        """Start the coordinator, at the same address each time."""
        bind = f"{self.address}:{self._port}"
        words = [self._config, "--bind", bind, "--ranks", self._ranks, "--dump-dir", self.dump_dir]
        prepare = partial(note_newcomers, self._newcomer, self._ranks)
        if self._last_decision:
            prepare = partial(die_in_decision, self._folder / "a decision", self._last_decision + 1)
        self._coordinator = self._start(self._there(None, prepare), "coordinate", *words)

    def replace_coordinator(self) -> None:
        """Wait for the coordinator's death, and start it again."""
        self.wait_until(lambda: self._coordinator.poll() is not None)
        self.coordinate()

    def launch(self, group: int) -> None:
        """Launch a group."""
        self._lost -= {group}
        told = {"SDP_ELASTIC_GROUP": str(group), "SDP_ELASTIC_COORDINATOR": f"{self.address}:{self._port}"}
        words = ["train", self._config, "--dump-dir", self.dump_dir, "--nproc", self._ranks, *self._more]
        self._launches[group] = self._start(self._there(group, self._prepare), *words, **told)

    def _there(self, group: int | None, prepare: Callable[[], object]) -> Callable[[], object]:
        """Return what prepares the launch of a group, or the coordinator, where it runs."""
        del group
        return prepare

    @property
    def _newcomer(self) -> Path:
        return self._folder / "a group wants to return"

    @property
    def said(self) -> str:
        return (self._folder / "said").read_text()

    def wait_until(self, condition: Any) -> None:
        def holds() -> Any:
            ended = {group: process.poll() for group, process in self._launches.items() if group not in self._lost}
            assert not any(ended.values()), f"exit codes by group: {ended}"
            return condition()

        try:
            until(holds, SECONDS, pause=0.01)
        except AssertionError as error:
            raise AssertionError(f"{error}; the run says:\n{self.said}") from None

    def wait_for(self, stop: Stop) -> None:
        """Wait until all ranks have come that stop there."""
        self.wait_until(lambda: len(stop.arrived()) == len(stop.groups))

    def lose_ranks(self, stop: Stop) -> None:
        """Kill the ranks that have stopped there."""
        self._lost |= set(stop.groups)
        for process in stop.arrived().values():
            os.kill(process, signal.SIGKILL)

    def stop_ranks(self, stop: Stop) -> None:
        """Stop the ranks that have come there for good."""
        self._lost |= set(stop.groups)
        for process in stop.arrived().values():
            os.kill(process, signal.SIGSTOP)

    def lose_host(self, stop: Stop) -> None:
        """Kill everything that the host of these groups runs."""
        self._lost |= set(stop.groups)
        for group in stop.groups:
            self._launches[group].kill()
        self.lose_ranks(stop)

    def lose_coordinator(self, stop: Stop, late: float = 0.0) -> None:
        """Kill the coordinator while a rank has stopped, and start it again.

        The rank goes on ``late`` seconds later.
        """
        self._coordinator.kill()
        self._coordinator.wait(SECONDS)
        if late:
            self.coordinate()
            time.sleep(late)
            stop.go_on()
        else:
            stop.go_on()
            self.coordinate()

    def signal_ranks(self, stop: Stop, groups: Sequence[int]) -> None:
        """Send SIGTERM to ranks that have stopped there. They notice it before they go on."""
        for group, process in stop.arrived().items():
            if group in groups:
                os.kill(process, signal.SIGTERM)

    def take_back(self, group: int, gate: Stop) -> None:
        """Launch a group again, while the others wait at ``gate`` for its request to return."""
        self.wait_for(gate)
        self.launch(group)
        self.wait_until(self._newcomer.exists)
        gate.go_on()

    def launch_again(self, group: int) -> None:
        """Launch a group again when it has ended."""
        self._launches[group].wait(SECONDS)
        self.launch(group)

    def codes(self, groups: Sequence[int]) -> list[int]:
        """Wait for the end of these groups, and return their exit codes."""
        found = [self._launches[group].wait(SECONDS) for group in groups]
        self._coordinator.send_signal(signal.SIGTERM)
        return found

    def end(self, groups: Sequence[int]) -> None:
        """Wait until these groups have finished the run."""
        for group in groups:
            assert self._launches[group].wait(SECONDS) == 0, self.said
        if self._lost:
            self._coordinator.send_signal(signal.SIGTERM)  # it waits for groups that do not come
        assert self._coordinator.wait(ENDING_SECONDS) == 0 or self._lost, self.said

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The whole lines of one of the run's files."""
        return written_lines(self.dump_dir / name)


class StaticRuns:
    """Runs without elastic groups. Each has only some groups, and goes on where another one ended.

    Args:
        folder: for all files.
        config: of the elastic run.
        ranks: the ranks of its groups. Here a group has one rank, with as many samples.
    """

    def __init__(self, folder: Path, config: dict[str, Any], ranks: int):
        self._folder, self._config, self._ranks = folder, config, ranks
        self._made: dict[tuple[Living, tuple[int, ...]], Path] = {}

    def checkpoint(self, living: Living) -> dict[str, torch.Tensor]:
        """Return weights and optimizer state after the steps of ``living``."""
        return tensors_of(self._run(living) / "checkpoints", f"step-{len(living)}")

    def losses(self, living: Living) -> list[float]:
        """Return the loss of each step."""
        found = []
        for step in range(1, len(living) + 1):
            lines = map(json.loads, (self._run(living[:step]) / "metrics.jsonl").read_text().splitlines())
            found += [line["loss"] for line in lines if line["step"] == step]
        return found

    def _run(self, living: Living) -> Path:
        """Return the run that ends with the last groups of ``living``, or goes on with them."""
        *before, (groups, last) = [(groups, len([*steps])) for groups, steps in groupby(living)]
        del before
        start = len(living) - last
        key = living[:start], groups
        if key not in self._made:
            self._made[key] = self._train(living[:start], groups)
        return self._made[key]

    def _train(self, before: Living, groups: tuple[int, ...]) -> Path:
        dump_dir, words = self._folder / str(len(self._made)), []
        if before:
            shutil.copytree(
                self._run(before) / "checkpoints" / f"step-{len(before)}",
                dump_dir / "checkpoints" / f"step-{len(before)}",
            )
            words = ["--resume"]
        config = json.loads(json.dumps(self._config))
        config["train_micro_batch_size_per_gpu"] *= self._ranks
        config["zero_optimization"] = {"stage": 0}
        del config["sdp"]["elastic"]
        config["sdp"].pop("survive", None)  # a part of the groups holds fewer copies
        config["sdp"]["groups"] = len(groups)
        config["sdp"]["placement"] = {
            unit: [groups.index(group) for group in holders if group in groups]
            for unit, holders in self._config["sdp"]["placement"].items()
        }
        config["training"] |= {"evaluate_every": 0, "save_every": 1}
        path = self._folder / f"{dump_dir.name}.json"
        path.write_text(json.dumps(config))
        ended = run_forked("train", path, "--dump-dir", dump_dir, "--nproc", len(groups), *words)
        assert ended.returncode == 0, ended.stderr
        return dump_dir


def tensors_of(directory: Path, tag: str) -> dict[str, torch.Tensor]:
    """Return what a checkpoint holds, without the ranks' random states. Its files must be whole."""
    found = find(directory, tag)
    assert found is not None
    path, state = found
    known: Any = SafeReader(path).read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {
        key: torch.zeros(value.size, dtype=value.properties.dtype)
        for key, value in known.items()
        if not key.startswith("random/")
    }
    load(path, tensors, state["files"], alone=True)
    return tensors
