"""A rank dies, hangs or finds no room: one message, and a resume loses nothing."""

import contextlib
import functools
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sdp.engine.distributed.heartbeat import RankPosition
from sdp.tests.support.forks.command import ForkedCommand, forked_rank
from sdp.tests.support.processes import alive, limit_addresses, until
from sdp.tests.support.small_runs import SMALL_LLAMA, make_corpus, run_sdp
from sdp.tools.cli import main

STEPS, SAVE_EVERY, RANKS = 8, 2, 2
HOST = socket.gethostname()
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failures")
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
        "sdp": {"groups": RANKS, "capacity": 0.75},
        "model": dict(SMALL_LLAMA),
        "data": {"path": str(make_corpus(folder)), "sequence_length": 32},
        "training": {"steps": STEPS, "evaluate_every": 4, "evaluate_batches": 2, "save_every": SAVE_EVERY, "keep": 3},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


# What a process does first: it limits its files.
NO_ROOM = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (200_000, 200_000))


class Job:
    """``sdp train`` as a process of its own, and its ranks. ``prepare`` is called in it first."""

    def __init__(self, config: Path, dump_dir: Path, *more: str, prepare: Callable[[], None] | None = None):
        self.dump_dir, self.errors = dump_dir, dump_dir.with_name(f"{dump_dir.name}.{next(NUMBERS)}.stderr")
        words = ["train", str(config), "--dump-dir", str(dump_dir), *more]
        with Path(os.devnull).open("w") as null, self.errors.open("w") as errors:
            self.process = ForkedCommand(words, null, errors, prepare=prepare)

    def rank_pid(self, rank: int) -> int:
        def find() -> int | None:
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                    if int(parent) == self.process.pid and forked_rank(folder) == rank:
                        return int(folder.name)
            return None

        return until(find)

    def place(self, rank: int) -> RankPosition | None:
        return RankPosition.read(self.dump_dir / "logs" / f"rank-{rank}.{self.process.pid}.position")

    def signal_rank_when(self, rank: int, number: int, reached: Callable[[RankPosition], bool]) -> list[int]:
        """Signal the rank while its place is ``reached``; returns all ranks' process ids."""
        pids = [self.rank_pid(rank) for rank in range(RANKS)]

        def is_there() -> bool:
            return (place := self.place(rank)) is not None and reached(place)

        def is_held_there() -> bool:
            if not is_there():
                return False
            os.kill(pids[rank], signal.SIGSTOP)  # a phase may last milliseconds
            if is_there():
                return True
            os.kill(pids[rank], signal.SIGCONT)
            return False

        until(is_held_there, seconds=60, pause=0.001)
        os.kill(pids[rank], number)
        if number != signal.SIGSTOP:
            os.kill(pids[rank], signal.SIGCONT)
        return pids

    def end(self, seconds: float = 180) -> tuple[int, str]:
        try:
            code = self.process.wait(seconds)
        finally:
            self.process.kill()
        return code, self.errors.read_text()


def losses(dump_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (dump_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line["loss"] for line in lines]


@pytest.fixture(scope="module")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    dump_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    ended = run_sdp("train", config, "--dump-dir", dump_dir)
    assert ended.returncode == 0, ended.stderr
    return losses(dump_dir)


@pytest.fixture(scope="module")
def two_steps(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps, of which tests take copies."""
    dump_dir = tmp_path_factory.mktemp("two-steps") / "run"
    ended = run_sdp("train", config, "--dump-dir", dump_dir, "--set", "training.steps=2", "training.async_save=true")
    assert ended.returncode == 0, ended.stderr
    return dump_dir


def check_resume(config: Path, dump_dir: Path, undisturbed: list[float]) -> None:
    """A resume gives the losses of the undisturbed run."""
    ended = run_sdp("train", config, "--dump-dir", dump_dir, "--resume")
    assert ended.returncode == 0, ended.stderr
    assert losses(dump_dir) == undisturbed


def check_death(job: Job, rank: int, pids: list[int]) -> str:
    """One message that names rank, host and cause; exit code 1; nobody is left."""
    code, err = job.end(seconds=60)
    assert code == 1, err
    errors = [line for line in err.splitlines() if "error" in line]
    assert len(errors) == 1, err
    assert f"sdp: error: rank {rank} on {HOST} was killed by SIGKILL" in errors[0]
    assert "Traceback" not in err
    assert not any(alive(pid) for pid in pids)
    return errors[0]


MOMENTS = {
    "start": (1, lambda place: True),
    "backward": (1, lambda place: place.step >= 5 and place.phase == "backward"),
    "evaluation": (0, lambda place: place.step == 4 and place.phase == "evaluation"),
    "checkpoint": (1, lambda place: place.step == 6 and place.phase == "checkpoint"),
}


@pytest.mark.parametrize(
    "moment",
    ["checkpoint", *(pytest.param(name, marks=pytest.mark.slow) for name in ("start", "backward", "evaluation"))],
)
def test_a_killed_rank_ends_the_run_and_a_resume_loses_nothing(
    config: Path, tmp_path: Path, undisturbed: list[float], moment: str
) -> None:
    rank, reached = MOMENTS[moment]
    job = Job(config, tmp_path / "run")
    error = check_death(job, rank, job.signal_rank_when(rank, signal.SIGKILL, reached))
    if moment == "start":
        return
    assert f"({moment})" in error
    check_resume(config, tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_ten_kills_at_random_moments(config: Path, tmp_path: Path, undisturbed: list[float]) -> None:
    chance = random.Random(time.time_ns())
    for trial in range(10):
        dump_dir, rank, wait = tmp_path / str(trial), chance.randrange(RANKS), chance.uniform(0, 8)
        job = Job(config, dump_dir)
        pids = [job.rank_pid(rank) for rank in range(RANKS)]
        time.sleep(wait)
        if alive(pids[rank]):
            os.kill(pids[rank], signal.SIGKILL)
            check_death(job, rank, pids)
        else:
            job.end()
        code, err = Job(config, dump_dir, "--resume").end()
        assert code == 0, (trial, rank, wait, err)
        assert losses(dump_dir) == undisturbed, (trial, rank, wait)


def test_a_run_that_loses_a_rank_goes_on_by_itself(
    config: Path, tmp_path: Path, undisturbed: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(config, tmp_path / "run", "--restarts", "2")
    job.signal_rank_when(1, signal.SIGKILL, lambda place: place.step >= 5 and place.phase == "backward")
    code, err = job.end()
    assert code == 0, err
    assert re.search(rf"rank 1 on {HOST} was killed by SIGKILL.* in step \d \(backward\)", err), err
    assert "sdp: restart 1 of 2 from the newest checkpoint in 1 s" in err
    assert losses(tmp_path / "run") == undisturbed
    (restart,) = map(json.loads, (tmp_path / "run" / "restarts.jsonl").read_text().splitlines())
    assert restart["step"] in (4, 6) and restart["lost_steps"] in (0, 1)
    assert main(["report", str(tmp_path / "run")]) == 0
    assert re.search(rf"restarts +1 \({restart['lost_steps']} steps lost\)", capsys.readouterr().out)


def test_a_rank_that_hangs_is_named_and_ends_the_run(config: Path, tmp_path: Path) -> None:
    job = Job(config, tmp_path / "run", "--set", "training.step_timeout=3")
    pids = job.signal_rank_when(1, signal.SIGSTOP, lambda place: place.step >= 3)
    code, err = job.end()
    assert code == 1
    line = next(line for line in err.splitlines() if "error" in line)
    assert re.search(
        rf"rank 0 on {HOST}, step \d, \w+: no progress for 3 s; stopped: rank 1 on {HOST}, step [3-9]", line
    ), err
    assert "Thread 0x" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()  # where it waits
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138)])
def test_a_signal_leaves_a_checkpoint(
    config: Path, tmp_path: Path, undisturbed: list[float], number: int, code: int
) -> None:
    job = Job(config, tmp_path / "run")
    until(lambda: (place := job.place(0)) is not None and place.step == 3, seconds=60)
    job.process.send_signal(number)
    assert job.end()[0] == code
    done = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert 2 <= done < STEPS
    assert (tmp_path / "run" / "checkpoints" / f"step-{done}" / "state.json").is_file()
    if number == signal.SIGTERM:
        check_resume(config, tmp_path / "run", undisturbed)


def test_a_signal_to_one_rank_stops_the_run_with_a_checkpoint(config: Path, tmp_path: Path) -> None:
    job = Job(config, tmp_path / "run")
    job.signal_rank_when(1, signal.SIGTERM, lambda place: place.step == 3)
    code, err = job.end()
    assert code == 143, err
    assert "stopped by SIGTERM after step" in err and "error" not in err
    done = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert (tmp_path / "run" / "checkpoints" / f"step-{done}" / "state.json").is_file()


def test_a_dump_directory_that_is_removed_ends_the_run_with_one_line(config: Path, tmp_path: Path) -> None:
    job = Job(config, tmp_path / "run", "--set", "training.steps=200", "training.save_every=0")
    until(lambda: (place := job.place(0)) is not None and place.step >= 4, seconds=120)
    shutil.rmtree(tmp_path / "run")
    code, err = job.end(seconds=60)
    assert code == 2
    assert "Traceback" not in err
    errors = [line for line in err.splitlines() if "error" in line]
    assert len(errors) == 1 and "was removed while the run was writing to it" in errors[0], err


def test_no_room_for_a_checkpoint_does_not_end_the_run(
    config: Path, two_steps: Path, tmp_path: Path, undisturbed: list[float]
) -> None:
    shutil.copytree(two_steps, tmp_path / "run")
    code, err = Job(config, tmp_path / "run", "--resume", "--set", "training.async_save=true", prepare=NO_ROOM).end()
    assert code == 0, err
    assert err.count("WARNING") == 3
    assert "the previous one stays, the run goes on" in err
    assert "File too large" in err and "unexpected pos" not in err
    assert losses(tmp_path / "run") == undisturbed
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["latest.json", "step-2"]


def test_out_of_memory_says_what_would_need_less(config: Path, tmp_path: Path) -> None:
    # Two of the widest activations, 0.33 GB each, and the weights are more than is left.
    much = (
        "--set", "model.intermediate_size=40000", "--set", "train_batch_size=128", "--set",
        "training.evaluate_batches=1",
    )  # fmt: skip
    code, err = Job(config, tmp_path / "run", *much, prepare=functools.partial(limit_addresses, 700_000_000)).end()
    assert code == 1
    line = next(line for line in err.splitlines() if "error" in line)
    assert f" on {HOST}, step " in line
    assert "out of memory. Of this rank's memory, parameters take" in line
    assert 'activation_checkpointing.mode "selective" or "full"' in line
    assert "an sdp.capacity below 0.75 (down to 0.5 with 2 groups)" in line
    assert "Traceback" not in err


def test_saves_that_fail_again_and_again_end_the_run(config: Path, two_steps: Path, tmp_path: Path) -> None:
    shutil.copytree(two_steps, tmp_path / "run")
    limit = ["--resume", "--set", "training.save_every=1"]
    code, err = Job(config, tmp_path / "run", *limit, prepare=NO_ROOM).end()
    assert code == 2, err
    assert err.count("WARNING: no checkpoint") == 3
    assert "the last 3 checkpoints could not be written" in err
