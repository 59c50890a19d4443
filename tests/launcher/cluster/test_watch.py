"""A launcher that says that its job ends, and does not end itself."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sdp
from sdp.engine.errors import LaunchError
from sdp.launcher.cluster.watch import run_watched
from sdp.tests.support.processes import until


@pytest.mark.parametrize(
    "line",
    [
        "sdp: error: rank 0 on host-a, step 2, backward: no progress for 8 s",
        "Primary job  terminated normally, but 1 process returned",
        "mpirun.openmpi noticed that process rank 3 with PID 0 on node b exited on signal 9 (Killed).",
        "[1,2]<stderr>:sdp: error: rank 2 on host-b, step 2, backward: no progress for 8 s",
        "mpirun detected that one or more processes exited with non-zero status, thus causing",
    ],
)
def test_ended_when_it_hangs_after_its_job(capfdbinary: pytest.CaptureFixture[bytes], line: str) -> None:
    started = time.monotonic()
    script = 'echo "$1" >&2; exec sleep 60'
    assert run_watched(["sh", "-c", script, "sh", line], os.environ, 0.3, []).code == 1
    assert time.monotonic() - started < 30
    out, err = capfdbinary.readouterr()
    assert (out, err.decode().splitlines()) == (
        b"",
        [line, "sdp: sh still waited for a host 0.3 s after the end of the job, and was killed"],
    )


def test_ranks_that_a_launcher_leaves_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdp.launcher.cluster.watch.GRACE_SECONDS", 0.2)
    told: list[tuple[int, bool]] = []

    def tell(process: subprocess.Popen[bytes], number: int, hurry: bool) -> None:
        told.append((number, hurry))
        process.terminate()

    command = ["sh", "-c", "echo 'sdp: error: rank 0' >&2; exec sleep 60"]
    assert run_watched(command, os.environ, 30, [], tell, ends_ranks=True).code == 128 + signal.SIGTERM
    assert told == [(signal.SIGTERM, True)]


def test_left_alone_while_its_job_runs(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    script = "echo out; echo 'a line about sdp: error: and noticed that' >&2; sleep 1; printf last >&2; exit 7"
    assert run_watched(["sh", "-c", script], os.environ, 0.1, []).code == 7
    assert capfdbinary.readouterr() == (b"out\n", b"a line about sdp: error: and noticed that\nlast")


def test_killed_by_a_signal() -> None:
    assert run_watched(["sh", "-c", "kill -9 $$"], os.environ, 1, []).code == 128 + signal.SIGKILL


def test_signals_are_passed_on(tmp_path: Path) -> None:
    script = f"trap 'echo told > {tmp_path}/told; exit 5' USR1; echo > {tmp_path}/ready; while :; do sleep 0.1; done"
    code = "import os, sys; from sdp.launcher.cluster.watch import run_watched\n"
    code += "from sdp.launcher.signals import caught_signals\n"
    code += "with caught_signals() as received:\n"
    code += "    sys.exit(run_watched(['sh', '-c', sys.argv[1]], os.environ, 20, received).code)"
    environ = dict(os.environ, PYTHONPATH=str(Path(sdp.__path__[0]).parent))
    process = subprocess.Popen([sys.executable, "-P", "-c", code, script], env=environ)
    try:
        until(lambda: (tmp_path / "ready").exists())
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
        assert (tmp_path / "told").exists()
    finally:
        process.kill()


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(LaunchError, match="no-mpirun cannot be started"):
        run_watched(["./no-mpirun"], os.environ, 1, [])


def test_the_signals_of_the_caller_stay_as_they_were() -> None:
    """What a process ignores, the commands that it starts later ignore too."""
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    assert run_watched(["true"], os.environ, 1, []).code == 0
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
