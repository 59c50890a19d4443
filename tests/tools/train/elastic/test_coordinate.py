"""``sdp coordinate``: every group is a launch of its own, here through torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from sdp.engine.elastic.coordination.assembly import Identity
from sdp.engine.elastic.coordination.errors import RunFinishedError
from sdp.engine.elastic.coordination.member import CoordinatorClient
from sdp.engine.elastic.coordination.records import STEP
from sdp.tests.support.clusters.elastic_runs import SECONDS, elastic_config
from sdp.tests.support.processes import until, unused_port, written_lines
from sdp.tests.support.small_runs import run_sdp
from sdp.tools.cli import main


@contextmanager
def started(log: Path, *words: object, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-P", "-m", *map(str, words)]
    with log.open("a") as said:
        process = subprocess.Popen(command, env=os.environ | environment, stdout=said, stderr=said)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_groups_that_torchrun_starts_one_by_one(corpus: Path, tmp_path: Path) -> None:
    """One of them is killed, and another launch takes its place."""
    config, port, run = tmp_path / "config.json", unused_port(), tmp_path / "run"
    settings = elastic_config(corpus, groups=2)
    config.write_text(json.dumps(settings | {"sdp": settings["sdp"] | {"capacity": 1.0}}))
    token, log = tmp_path / "token", tmp_path / "coordinator.log"
    token.write_text("a secret that the groups share")

    def group(slot: int) -> subprocess.Popen[bytes]:
        return processes.enter_context(
            started(
                tmp_path / f"group-{slot}.log", "torch.distributed.run",
                "--nproc-per-node", "1", "--master-port", unused_port(), "-m", "sdp",
                "train", config, "--dump-dir", run,
                SDP_ELASTIC_GROUP=str(slot), SDP_ELASTIC_COORDINATOR=f"127.0.0.1:{port}",
                SDP_ELASTIC_TOKEN_FILE=str(token),
            )
        )  # fmt: skip

    def groups_of_lines() -> list[int]:
        return [line["groups"] for line in written_lines(run / "metrics.jsonl")]

    with ExitStack() as processes:
        coordinator = processes.enter_context(
            started(log, "sdp", "coordinate", config, "--bind", f"127.0.0.1:{port}", SDP_ELASTIC_TOKEN_FILE=str(token))
        )
        first, second = group(0), group(1)
        until(lambda: groups_of_lines()[-3:] == [2, 2, 2], seconds=SECONDS, pause=0.1)
        os.kill(child_of(second.pid), signal.SIGKILL)  # torchrun then ends the launch
        until(lambda: groups_of_lines()[-1:] == [1], seconds=SECONDS, pause=0.1)
        second = group(1)
        until(lambda: groups_of_lines()[-3:] == [2, 2, 2], seconds=SECONDS, pause=0.1)
        for each in (first, second):  # torchrun passes the signal on, and both groups stop after the same step
            each.terminate()
        assert coordinator.wait(SECONDS) == 0, log.read_text()
    done = len(groups_of_lines())
    assert (run / "checkpoints" / f"step-{done}" / "state.json").is_file()


def child_of(pid: int) -> int:
    """The process that torchrun has started as its rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(status[1]) == pid and b"RANK=0" in (folder / "environ").read_bytes().split(b"\0"):
                return int(folder.name)
    raise AssertionError("torchrun has no rank")


@pytest.mark.slow
@pytest.mark.parametrize("sync", [{"sync": {"every": 4}}, {}])
def test_groups_go_on_when_the_coordinator_is_started_again_or_was_stopped(
    corpus: Path, tmp_path: Path, sync: dict[str, Any]
) -> None:
    """They meet again where the coordinator left them, perhaps in a vote. Local steps or not."""
    config, port, run, heartbeat = tmp_path / "config.json", unused_port(), tmp_path / "run", 10.0
    settings = elastic_config(corpus, groups=2, heartbeat_seconds=heartbeat)
    settings["sdp"] |= {"capacity": 1.0} | sync
    settings["training"] |= {"evaluate_every": 6, "save_every": 12}
    config.write_text(json.dumps(settings))
    log, told = tmp_path / "coordinator.log", {"SDP_ELASTIC_TOKEN": "a secret that the groups share"}
    told["SDP_ELASTIC_COORDINATOR"] = f"127.0.0.1:{port}"
    words = ["sdp", "coordinate", config, "--bind", f"127.0.0.1:{port}", "--dump-dir", run]

    def lines() -> list[dict[str, Any]]:
        return written_lines(run / "metrics.jsonl")

    def more(count: int) -> None:
        goal = len(lines()) + count
        until(lambda: len(lines()) >= goal, seconds=SECONDS, pause=0.02)

    with ExitStack() as processes:
        group_logs = [tmp_path / f"group-{slot}.log" for slot in range(2)]
        with started(log, *words, **told):
            groups = [
                processes.enter_context(
                    started(
                        group_logs[slot], "sdp", "train", config, "--dump-dir", run, SDP_ELASTIC_GROUP=str(slot), **told
                    )
                )
                for slot in range(2)
            ]
            more(8)
        for _ in range(3):  # killed at the end of each context
            with started(log, *words, **told):
                more(8)
        with started(log, *words, **told) as coordinator:
            more(8)
            coordinator.send_signal(signal.SIGSTOP)
            time.sleep(1.5 * heartbeat)
            coordinator.send_signal(signal.SIGCONT)
            more(8)
            for group in groups:
                group.terminate()
            assert [group.wait(SECONDS) for group in groups] == [143, 143], [each.read_text() for each in group_logs]
    found = lines()
    assert [line["step"] for line in found] == list(range(1, len(found) + 1))
    assert {line["groups"] for line in found} == {2}
    if sync:
        assert found[-1]["skipped_samples"] == 0
        assert [line["step"] for line in found if "outer_step" in line] == list(range(4, len(found) + 1, 4))
    assert "was lost" not in log.read_text()
    assert log.read_text().count("the coordinator's process was stopped for a while") == 1


def test_a_group_that_comes_after_the_end_of_the_run_is_told(corpus: Path, tmp_path: Path) -> None:
    """Its launch ends, and is not repeated. The coordinator waits for it, and then ends."""
    config, port, token = tmp_path / "config.json", unused_port(), "a secret that the groups share"
    config.write_text(json.dumps(elastic_config(corpus, groups=2)))
    words = ["coordinate", config, "--bind", f"127.0.0.1:{port}", "--dump-dir", tmp_path / "run"]

    def group(slot: int, life: str) -> CoordinatorClient:
        who = Identity(slot, 0, 1, f"{life}-{slot}", "here", "127.0.0.1:1")
        return CoordinatorClient(("127.0.0.1", port), token.encode(), who, heartbeat_seconds=30, wait_seconds=60)

    log = tmp_path / "coordinator.log"
    with started(log, "sdp", *words, SDP_ELASTIC_TOKEN=token) as coordinator, ThreadPoolExecutor(1) as thread:
        stays, dies = group(0, "first"), group(1, "first")
        waiting = thread.submit(dies.join, step=0, phase=STEP, fresh=True)
        stays.join(step=0, phase=STEP, fresh=True)
        waiting.result(60)
        dies.hang_up()
        until(stays.abort.is_set, seconds=60)
        assert stays.join(step=0, phase=STEP, fresh=False).slots == [0]
        stays.vote([], step=0)
        stays.leave()
        until(lambda: "the run is over; waiting up to 60 s to tell this to the groups 1" in log.read_text(), 60)
        with pytest.raises(RunFinishedError):
            group(1, "second").join(step=0, phase=STEP, fresh=True)
        assert coordinator.wait(60) == 0, log.read_text()
    assert "group 1 on here was lost after step 0" in (tmp_path / "run/logs/groups.log").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "needs a shared token of 16 characters or more"),
        (("--set", "sdp.elastic.enabled=false"), "sdp.elastic.enabled: is false"),
        (("--bind", "nowhere"), "--bind nowhere: expected HOST:PORT"),
    ],
)
def test_mistakes_are_one_line(corpus: Path, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(elastic_config(corpus)))
    ended = run_sdp("coordinate", config, *words)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("variables", "words", "message"),
    [
        ({"SDP_ELASTIC_COORDINATOR": ""}, (), "SDP_ELASTIC_GROUP is set, but SDP_ELASTIC_COORDINATOR is not"),
        ({"SDP_ELASTIC_GROUP": "one"}, (), "a number and HOST:PORT are expected"),
        ({"SDP_ELASTIC_TOKEN": "short"}, (), "needs a shared token of 16 characters or more"),
        ({}, ("--nproc", "3", "--fsdp", "2"), "12 processes (--nproc) are not"),
        ({}, ("--set", "sdp.elastic.enabled=false"), "sdp.elastic.enabled: is false, but SDP_ELASTIC_GROUP is set"),
        ({}, ("--set", "sdp.engine=deepspeed", "fp16.enabled=true"), "fp16.enabled"),
    ],
)
def test_mistakes_in_the_launch_of_a_group_are_one_line(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    words: tuple[str, ...],
    message: str,
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(elastic_config(corpus)))
    told = {"GROUP": "1", "COORDINATOR": "127.0.0.1:1", "TOKEN": "x" * 16}
    for name, value in ({f"SDP_ELASTIC_{name}": value for name, value in told.items()} | variables).items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(config), "--dump-dir", str(tmp_path / "run"), *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists()
