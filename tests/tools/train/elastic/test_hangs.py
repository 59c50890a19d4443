"""A rank's main thread hangs while its other threads run, in a step, an evaluation, a checkpoint or
a meeting.
"""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sdp.engine.distributed import world
from sdp.engine.elastic import session
from sdp.tests.support.clusters.elastic_runs import SECONDS, ElasticRun, elastic_config
from sdp.tests.support.processes import until
from sdp.tools.train import elastic_files

HEARTBEAT = 5.0
LOST = r"group 1 on .* was lost after step .* \(no progress for ([\d.]+) s\)"
# Takes the place of ``python -m sdp``, in the launcher and in its ranks. A rank of group 1 hangs
# when the file exists.
SCRIPT = """
import os, sys, time
from pathlib import Path
from {module} import {owner}
from sdp.launcher import elastic
from sdp.tools.cli import entry

sign, method, calls = Path({sign!r}), {owner}.{method}, []

def hangs(self, *args, **keywords):
    calls.append(time.monotonic())
    if os.environ["SDP_ELASTIC_GROUP"] == "1" and os.environ["RANK"] == "0" and sign.exists():
        sign.unlink()
        {hang}
    while len(calls) in {slow_calls} and time.monotonic() < calls[-1] + {slow_seconds}:
        pass
    return method(self, *args, **keywords)

{owner}.{method} = hangs
elastic.own_command = lambda: [sys.executable, "-P", __file__]
entry()
"""


BACKEND = ("sdp.engine.backends.fsdp2.backend", "FSDP2Backend")
DEEPSPEED = ("sdp.engine.backends.deepspeed.backend", "DeepSpeedBackend")
ENGINE = ("sdp.engine.engine", "SDPEngine")
SESSION = ("sdp.engine.elastic.session", "Session")
RETURN = ("sdp.engine.elastic", "bringing_back")  # a module
MEETING_INSIDE = ("sdp.engine.elastic", "session")
METER = ("sdp.tools.train.loop.meter", "StepMeter")
BETWEEN_GROUPS = ("sdp.engine.elastic.process_groups", "AbortableGroup")


def hanging_config(corpus: Path, masking: str, stage: int) -> dict[str, Any]:
    settings = elastic_config(corpus, groups=3, heartbeat_seconds=HEARTBEAT, restarts=1)
    settings["sdp"] |= {"capacity": 0.7, "masking": masking}
    settings["zero_optimization"] = {"stage": stage}
    return settings


def hanging_run(
    tmp_path: Path,
    settings: dict[str, Any],
    ranks: int,
    owner: tuple[str, str],
    method: str,
    hang: str = "time.sleep(1e6)",
    more: Sequence[str] = (),
    slow_calls: range = range(0),
    slow_seconds: float = 0.0,
) -> tuple[ElasticRun, Path]:
    """Start a run whose group 1 hangs once in ``method`` when a file exists. Returns both.

    In all ranks, the calls of the method with the numbers ``slow_calls`` first compute for
    ``slow_seconds``.
    """
    sign, script, config = tmp_path / "hang", tmp_path / "script.py", tmp_path / "config.json"
    script.write_text(
        SCRIPT.format(
            sign=str(sign), module=owner[0], owner=owner[1], method=method, hang=hang,
            slow_calls=slow_calls, slow_seconds=slow_seconds,
        )
    )  # fmt: skip
    if owner == DEEPSPEED:
        settings["sdp"]["engine"] = "deepspeed"
    config.write_text(json.dumps(settings))
    words = ("--nproc", str(3 * ranks), *more)
    return ElasticRun(config, tmp_path / "run", *words, new_interpreters=True, script=script), sign


@pytest.mark.slow
@pytest.mark.parametrize(
    ("masking", "ranks", "stage", "owner", "method"),
    [
        ("forward", 1, 0, BACKEND, "backward"),
        ("backward", 2, 3, BACKEND, "backward"),
        ("forward", 1, 0, BETWEEN_GROUPS, "allreduce"),
        ("backward", 2, 3, BETWEEN_GROUPS, "allreduce"),
        ("forward", 1, 0, BACKEND, "evaluate"),
        ("forward", 1, 0, ENGINE, "save_checkpoint"),
        ("backward", 2, 3, ENGINE, "save_checkpoint"),
        ("forward", 1, 0, ENGINE, "check_holders"),
        ("forward", 1, 0, BACKEND, "reconnect"),
        ("backward", 2, 3, BACKEND, "reconnect"),
        ("backward", 2, 3, BACKEND, "update"),
        ("backward", 2, 3, SESSION, "vote"),
        ("backward", 2, 3, RETURN, "exchange"),
        ("backward", 2, 3, MEETING_INSIDE, "all_inside"),
        ("backward", 2, 3, DEEPSPEED, "backward"),
        ("forward", 1, 0, DEEPSPEED, "evaluate"),
    ],
)
def test_a_rank_that_hangs_is_cut_off_and_started_again(
    corpus: Path, tmp_path: Path, masking: str, ranks: int, stage: int, owner: tuple[str, str], method: str
) -> None:
    """The others go on after the heartbeat, and the stack of the hanging thread is in its log.

    At stage 3, the other rank of the group waits for it in a collective inside the group. The
    backend reconnects in a meeting, which another group's death brings about. This group gets its
    state in an exchange when it returns.
    """
    is_return = method in ("reconnect", "exchange")
    settings = hanging_config(corpus, masking, stage)
    # The run has seen some of them before one hangs.
    settings["training"] |= {"evaluate_every": 3, "save_every": 4}
    settings["sdp"]["check_interval"] = 2
    run, sign = hanging_run(tmp_path, settings, ranks, owner, method)
    try:
        run.wait_for(10, groups=3)
        sign.touch()
        if is_return:
            run.hit(2, signal.SIGKILL)
        else:
            run.wait_for(5, groups=2)
        found = until(lambda: re.search(LOST, run.said), seconds=SECONDS)
        print(f"{method}, {ranks} ranks, stage {stage}: cut off after {found[1]} s")
        assert HEARTBEAT <= float(found[1]) < 2 * HEARTBEAT  # the longest pause before counts, too
        run.wait_for(5, groups=3)
        assert run.stop() == 128 + 15, run.said
    finally:
        run.kill()
    # In a vote, the other rank of the group hears of it, and ends first.
    said = "it starts again" if method == "vote" else "the others have gone on without this group"
    assert said in run.said
    if ranks == 1:  # else the launcher may end it first
        assert re.search(r"line \d+ in hangs", (run.dump_dir / "logs" / "rank-1.log").read_text()), "the stack"
    assert run.said.count(" was lost after step ") == (2 if is_return else 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("masking", "ranks", "stage", "owner", "method"),
    [
        ("forward", 1, 0, BACKEND, "forward"),
        ("backward", 2, 3, BACKEND, "backward"),
        ("backward", 2, 3, BETWEEN_GROUPS, "allreduce"),
        ("forward", 1, 0, BACKEND, "evaluate"),
        ("forward", 1, 0, BACKEND, "reconnect"),
        ("backward", 2, 3, BACKEND, "reconnect"),
        ("forward", 1, 0, ENGINE, "save_checkpoint"),
        ("backward", 2, 3, ENGINE, "save_checkpoint"),
        ("backward", 2, 3, ENGINE, "wait_for_checkpoint"),
        ("backward", 2, 3, DEEPSPEED, "backward"),
    ],
)
def test_a_rank_that_hangs_in_the_first_run_of_a_part_is_cut_off(
    corpus: Path, tmp_path: Path, masking: str, ranks: int, stage: int, owner: tuple[str, str], method: str
) -> None:
    """As above, but the run begins with the hang. There it might also compile."""
    settings = hanging_config(corpus, masking, stage)
    settings["training"] |= {"save_every": 4}
    run, sign = hanging_run(tmp_path, settings, ranks, owner, method)
    sign.touch()  # the ranks look when they have imported torch
    try:
        run.wait_for(5, groups=3)
        found = re.search(LOST, run.said)
        assert found is not None and HEARTBEAT <= float(found[1]) < 2 * HEARTBEAT, run.said
        print(f"first {method}, {ranks} ranks, stage {stage}: cut off after {found[1]} s")
        assert run.stop() == 128 + 15, run.said
    finally:
        run.kill()
    assert run.said.count(" was lost after step ") == 1, run.said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("masking", "ranks", "stage", "owner", "method"),
    [
        ("forward", 1, 0, BACKEND, "forward"),
        ("backward", 2, 3, BACKEND, "backward"),
        ("backward", 2, 3, DEEPSPEED, "backward"),
        ("forward", 1, 0, BACKEND, "evaluate"),
    ],
)
def test_a_part_that_once_took_long_gets_no_longer_limit(
    corpus: Path, tmp_path: Path, masking: str, ranks: int, stage: int, owner: tuple[str, str], method: str
) -> None:
    """Its fourth run computes for almost a heartbeat. Later, a rank hangs in it."""
    settings = hanging_config(corpus, masking, stage)
    settings["training"] |= {"evaluate_every": 2}
    slow = 0.9 * HEARTBEAT
    run, sign = hanging_run(tmp_path, settings, ranks, owner, method, slow_calls=range(4, 5), slow_seconds=slow)
    try:
        run.wait_for(10, groups=3)
        sign.touch()
        run.wait_for(5, groups=2)
        found = re.search(LOST, run.said)
        assert found is not None and HEARTBEAT <= float(found[1]) < HEARTBEAT + 0.5 * slow, run.said
        print(f"{method} after a long one, {ranks} ranks, stage {stage}: cut off after {found[1]} s")
        run.wait_for(5, groups=3)
        assert run.stop() == 128 + 15, run.said
    finally:
        run.kill()
    assert run.said.count(" was lost after step ") == 1, run.said


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 3)])
def test_in_long_parts_the_others_wait_for_about_a_heartbeat(
    corpus: Path, tmp_path: Path, ranks: int, stage: int
) -> None:
    """A rank hangs when such a part begins. The others compute for longer, and then wait."""
    settings, slow = hanging_config(corpus, "backward", stage), 2 * HEARTBEAT
    run, sign = hanging_run(
        tmp_path, settings, ranks, BACKEND, "backward", slow_calls=range(1, 100), slow_seconds=slow
    )  # fmt: skip
    try:
        run.wait_for(5, groups=3)
        sign.touch()
        run.wait_for(1, groups=2)
        found = re.search(LOST, run.said)
        assert found is not None and slow <= float(found[1]) < slow + 1.5 * HEARTBEAT, run.said
        print(f"hang before {slow} s of others, {ranks} ranks, stage {stage}: cut off after {found[1]} s")
        assert run.stop() == 128 + 15, run.said
    finally:
        run.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 3)])
def test_a_rank_that_hangs_at_the_end_or_while_it_loads_is_cut_off(
    corpus: Path, tmp_path: Path, ranks: int, stage: int
) -> None:
    """The others end the run. Then they resume it, and end it again.

    At the end, a rank hangs before the message that asks what it has sent.
    """
    settings = hanging_config(corpus, "backward", stage)
    for steps, owner, method, words in (
        (8, METER, "sent_per_step", ()),
        (16, ENGINE, "load_checkpoint", ("--resume",)),
    ):
        settings["training"] |= {"save_every": 4, "steps": steps}
        run, sign = hanging_run(tmp_path, settings, ranks, owner, method, more=words)
        sign.touch()
        try:
            assert run.end() == 0, run.said
        finally:
            run.kill()
        assert not sign.exists() and run.said.count(" lost after step ") == 1, run.said
        found = re.search(LOST, run.said)
        assert found is not None and HEARTBEAT <= float(found[1]) < 2 * HEARTBEAT, run.said
        print(f"{method}, {ranks} ranks, stage {stage}: cut off after {found[1]} s")
        assert run.lines()[-1]["step"] == steps


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 3)])
def test_a_first_checkpoint_that_waits_for_its_files_is_no_hang(
    corpus: Path, tmp_path: Path, ranks: int, stage: int
) -> None:
    """It waits three times as long as a rank may hang, to open a pipe that nobody writes to."""
    settings = hanging_config(corpus, "backward", stage)
    settings["training"] |= {"save_every": 4}
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    hang = f"os.close(os.open({str(pipe)!r}, os.O_RDONLY))"
    run, sign = hanging_run(tmp_path, settings, ranks, ENGINE, "save_checkpoint", hang)
    sign.touch()
    try:
        until(lambda: not sign.exists(), seconds=SECONDS)
        time.sleep(3 * HEARTBEAT)
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))  # an error if nobody waits for it
        run.wait_for(5, groups=3)
        assert run.stop() == 128 + 15, run.said
    finally:
        run.kill()
    assert " was lost after step " not in run.said and len(run.lines()) > 4, run.said


def wait_for_a_file(seconds: float) -> None:
    """Wait so long in the system call that opens a file, as on a slow file system."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = Path(folder) / "pipe"
        os.mkfifo(pipe)
        threading.Timer(seconds, lambda: os.close(os.open(pipe, os.O_WRONLY))).start()
        os.close(os.open(pipe, os.O_RDONLY))


def work_slowly() -> None:
    """Let this process and the ranks that it forks take long to open files, and to write the last
    checkpoint.
    """
    opens, salvages = elastic_files.RunFiles, session.salvage

    def open_slowly(folder: Path, *, resume: bool) -> Any:
        if resume:  # not at the start of the run
            wait_for_a_file(4 * HEARTBEAT)
        return opens(folder, resume=resume)

    def salvage_slowly(*args: Any) -> Any:
        if world.rank() == 0:  # the others wait for it
            wait_for_a_file(4 * HEARTBEAT)
        return salvages(*args)

    elastic_files.RunFiles, session.salvage = open_slowly, salvage_slowly  # type: ignore[assignment, misc]


@pytest.mark.slow
def test_slow_work_on_files_is_no_hang(corpus: Path, tmp_path: Path) -> None:
    """A new writer opens the run's files, and later the run ends without the holder of a unit."""
    config = tmp_path / "config.json"
    settings = elastic_config(corpus, heartbeat_seconds=HEARTBEAT, restarts=0)
    del settings["sdp"]["capacity"]
    settings["sdp"] |= {"survive": 0, "profile": [4, 3, 2, 1]}  # the last unit has one holder
    settings["training"] |= {"save_every": 4}
    config.write_text(json.dumps(settings))
    run = ElasticRun(config, tmp_path / "run", "--nproc", "4", prepare=work_slowly)
    try:
        run.wait_for(10, groups=4)
        (holder,) = json.loads((run.dump_dir / "placement.json").read_text())["holders"][3]
        assert holder != 0, "group 0 writes the files, and is lost first"
        run.hit(0, signal.SIGKILL)
        run.wait_for(10, groups=3)
        run.hit(holder, signal.SIGKILL)
        assert run.end() == 1, run.said
    finally:
        run.kill()
    assert "no progress" not in run.said
    assert re.search(r"no group that holds it will return; wrote \S+step-\d+; in it, ", run.said), run.said
