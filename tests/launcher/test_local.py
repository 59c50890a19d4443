"""The local launcher against tiny ranks: ends, failures and signals."""

import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import sdp
from sdp.launcher.fatal_errors import described_end
from sdp.tests.support.processes import alive, until

HOST = socket.gethostname()
PACKAGE_FOLDER = str(Path(sdp.__path__[0]).parent)

# What every tiny rank starts with; `say` writes a note that the test reads, `note(rank)` waits for
# another rank's.
RANK_HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {folder!r})
from sdp.engine.environment.detect import supervision
from sdp.launcher.fatal_errors import report_fatal, tie_to_parent
above = supervision()
tie_to_parent(above.parent_pid)
rank = int(os.environ["RANK"])
notes = Path({notes!r})
def say(name, text=""):
    (notes / "aside").with_suffix("." + name).write_text(str(text))
    (notes / "aside").with_suffix("." + name).replace(notes / name)
def await_note(name):
    while not (notes / name).exists():
        time.sleep(0.01)
say(f"pid-{{rank}}", os.getpid())
"""
DRIVER = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {folder!r})
from sdp.launcher.local import start_local
logs, options = Path({logs!r}), dict(grace_seconds={grace}, restarts={restarts}, command={command!r})
sys.exit(start_local({argv!r}, {processes}, logs, **options))
"""


class Job:
    def __init__(
        self, folder: Path, body: str, processes: int = 2, grace: float = 5.0, restarts: int = 0, **options
    ) -> None:
        self.notes, self.logs, self.processes = folder / "notes", folder / "logs", processes
        self.notes.mkdir()
        script = folder / "rank.py"
        script.write_text(RANK_HEAD.format(folder=PACKAGE_FOLDER, notes=str(self.notes)) + body)
        driver = DRIVER.format(
            folder=PACKAGE_FOLDER,
            argv=["argument"],
            processes=processes,
            logs=str(self.logs),
            grace=grace,
            restarts=restarts,
            command=(sys.executable, str(script)),
        )
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder, **options}
        self.process = subprocess.Popen([sys.executable, "-c", driver], **options)

    def note(self, name: str) -> str:
        return until(lambda: (self.notes / name).read_text() if (self.notes / name).exists() else None)

    def pids(self) -> list[int]:
        return [int(self.note(f"pid-{rank}")) for rank in range(self.processes)]

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


def test_all_ranks_end_well(tmp_path: Path) -> None:
    body = """
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
print(*sys.argv[1:], *(os.environ[name] for name in names), os.environ["MALLOC_ARENA_MAX"], os.getpgrp() == os.getpid())
"""
    code, out, err = Job(tmp_path, body, processes=3).end()
    assert code == 0
    assert out == "argument 0 3 0 3 127.0.0.1 1 True\n"
    assert (tmp_path / "logs/rank-2.log").read_text() == "argument 2 3 2 3 127.0.0.1 1 True\n"
    assert err == ""
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rank-0.log", "rank-1.log", "rank-2.log"]


ENDS = {
    "a mistake seen by one rank, told from its log": (
        """
if rank == 1:
    print("some text\\nsdp: error: shard 7 is damaged\\n", flush=True)
    sys.exit(2)
time.sleep(60)
""",
        2, "sdp: error: shard 7 is damaged",
    ),
    "a mistake of all ranks, told once": (
        """
report_fatal("sdp: error: steps: missing", 2, above)
sys.exit(2)
""",
        2, "sdp: error: steps: missing",
    ),
    "a killed rank": (
        """
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
""",
        1, f"sdp: error: rank 2 on {HOST} was killed by SIGKILL, perhaps for lack of memory; its log: LOG",
    ),
    "the cause and not what followed": (
        """
if rank == 2:
    report_fatal("Traceback\\nValueError: the cause", 1, above)
    say("failed")
    time.sleep(0.2)
else:
    await_note("failed")
    report_fatal("Traceback\\nRuntimeError: connection closed by peer", 1, above)
sys.exit(1)
""",
        1, f"sdp: error: rank 2 on {HOST} ended with exit code 1 (ValueError: the cause); its log: LOG",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_an_end_is_told_in_one_line(tmp_path: Path, name: str) -> None:
    body, expected, line = ENDS[name]
    job = Job(tmp_path, body, processes=3 if "rank == 2" in body else 2)
    pids = job.pids()
    code, _, err = job.end()
    log = job.logs / "rank-2.log"
    assert (code, err.splitlines()) == (expected, [line.replace("LOG", str(log))])
    assert not any(alive(pid) for pid in pids)
    assert not list(job.logs.glob("*.error"))
    assert "the cause" not in line or "ValueError: the cause" in log.read_text()


def test_traceback_of_rank_0_goes_to_terminal_and_log(tmp_path: Path) -> None:
    body = """
if rank == 0:
    report_fatal("Traceback\\nValueError: x", 1, above)
    sys.exit(1)
time.sleep(60)
"""
    code, _, err = Job(tmp_path, body).end()
    assert code == 1
    assert err.splitlines()[:2] == ["Traceback", "ValueError: x"]
    assert (tmp_path / "logs/rank-0.log").read_text() == "Traceback\nValueError: x\n"


def test_rank_that_ignores_the_signal_is_killed_after_the_grace(tmp_path: Path) -> None:
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
helper = subprocess.Popen(["sleep", "60"])
say(f"helper-{rank}", helper.pid)
if rank == 0:
    await_note("helper-1")
    sys.exit(1)
time.sleep(60)
"""
    job = Job(tmp_path, body, grace=0.5)
    pids = [*job.pids(), int(job.note("helper-0")), int(job.note("helper-1"))]
    code, _, err = job.end()
    assert code == 1
    assert f"rank 0 on {HOST} ended with exit code 1" in err
    until(lambda: not any(alive(pid) for pid in pids), 5)


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_is_forwarded_once(tmp_path: Path, number: signal.Signals, expected: int) -> None:
    body = """
def stop(caught, _):
    say(f"caught-{rank}", caught)
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, stop)
say(f"ready-{rank}")
time.sleep(60)
"""
    job = Job(tmp_path, body)
    for rank in range(2):
        job.note(f"ready-{rank}")
    job.process.send_signal(number)
    code, _, err = job.end()
    assert code == expected
    assert f"{number.name} received" in err
    assert [job.note(f"caught-{rank}") for rank in range(2)] == [str(int(number))] * 2
    assert not any(alive(pid) for pid in job.pids())


def test_second_signal_kills(tmp_path: Path) -> None:
    body = """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: say(f"caught-{rank}"))
say(f"ready-{rank}")
while True:
    time.sleep(1)
"""
    job = Job(tmp_path, body, grace=60)
    job.note("ready-0")
    job.note("ready-1")
    job.process.send_signal(signal.SIGINT)
    job.note("caught-0")
    job.note("caught-1")
    job.process.send_signal(signal.SIGINT)
    assert job.end()[0] == 130
    assert not any(alive(pid) for pid in job.pids())


def test_a_killed_rank_starts_the_run_again_and_a_known_error_does_not(tmp_path: Path) -> None:
    body = """
if rank == 1 and "--resume" not in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
if "--resume" in sys.argv:
    print(*sys.argv[1:], flush=True)
    await_note("pid-1")
    if rank == 0:
        report_fatal("sdp: error: the loss is NaN", 1, above)
        sys.exit(1)
time.sleep(60)
"""
    job = Job(tmp_path, body, restarts=5)
    code, out, err = job.end()
    assert (code, out) == (1, "argument --resume\n")
    killed, known = job.logs / "rank-1.log", job.logs / "rank-0.log"
    assert err.splitlines() == [
        f"sdp: error: rank 1 on {HOST} was killed by SIGKILL, perhaps for lack of memory; its log: {killed}",
        "sdp: restart 1 of 5 from the newest checkpoint in 1 s",
        f"sdp: error: rank 0 on {HOST} ended with exit code 1 (the loss is NaN); its log: {known}",
    ]


def test_no_orphans_when_the_launcher_is_killed(tmp_path: Path) -> None:
    job = Job(tmp_path, "say(f'ready-{rank}')\ntime.sleep(60)\n")
    for rank in range(2):
        job.note(f"ready-{rank}")
    job.process.kill()
    job.process.communicate(timeout=10)
    until(lambda: not any(alive(pid) for pid in job.pids()), 5)


def test_rank_whose_launcher_is_gone_ends_at_once() -> None:
    code = "from sdp.launcher.fatal_errors import tie_to_parent\ntie_to_parent(1)\nprint('still here')"
    environ = {**os.environ, "PYTHONPATH": PACKAGE_FOLDER}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def test_terminal_stays_a_terminal_for_rank_0(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    job = Job(tmp_path, "say(f'tty-{rank}', sys.stdout.isatty())\n", stdout=follower, stderr=follower)
    assert job.process.wait(timeout=30) == 0
    os.close(follower)
    os.close(leader)
    assert (job.note("tty-0"), job.note("tty-1")) == ("True", "False")


def test_program_that_cannot_be_started_is_the_users_mistake(tmp_path: Path) -> None:
    from sdp.engine.errors import LaunchError
    from sdp.launcher.local import start_local

    with pytest.raises(LaunchError, match="rank 0 cannot be started"):
        start_local([], 2, tmp_path, command=["/does/not/exist"])
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="cannot be started"):
        start_local([], 2, tmp_path / "file" / "logs")


def test_ranks_import_the_package_of_the_launcher(tmp_path: Path) -> None:
    """Also without PYTHONPATH, and with another ``sdp`` in the working directory."""
    (tmp_path / "sdp").mkdir()
    for file in ("sdp/__init__.py", "sdp/__main__.py"):
        (tmp_path / file).write_text("raise SystemExit('decoy')")
    # Rank 0 prints usage of the real command line; the path of the package is in sys.modules of a
    # rank.
    driver = f"""
import sys
from pathlib import Path
sys.path.insert(0, {PACKAGE_FOLDER!r})
import sdp
from sdp.launcher import local, rank_process
show = "import sdp, sdp.tools.cli; print(sdp.__path__[0])"
print(sdp.__path__[0], flush=True)
sys.exit(local.start_local([], 1, Path("logs"), command=[*rank_process.own_command()[:2], "-c", show])
    or local.start_local(["--version"], 1, Path("logs")))
"""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = [sys.executable, "-P", "-c", driver]
    done = subprocess.run(run, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    parent, child, version = done.stdout.splitlines()
    assert Path(child).resolve() == Path(parent).resolve()
    assert version.startswith("sdp 0.")


def test_what_a_rank_could_not_do_after_a_signal_is_told(tmp_path: Path) -> None:
    body = """
def leave(*_):
    report_fatal("sdp: error: no room for the checkpoint", 2, above)
    sys.exit(2)
signal.signal(signal.SIGTERM, leave if rank == 0 else lambda *_: sys.exit(143))
say(f"ready-{rank}")
time.sleep(60)
"""
    job = Job(tmp_path, body)
    for rank in range(2):
        job.note(f"ready-{rank}")
    job.process.terminate()
    code, _, err = job.end()
    assert code == 2
    assert err.splitlines()[-1] == "sdp: error: no room for the checkpoint"


def test_a_bus_error_is_explained() -> None:
    assert "was killed by SIGBUS, perhaps because a file that it reads was cut short" in described_end(
        0, -signal.SIGBUS, None
    )
