"""A rank that is killed under a launcher that is not ours: what is told of it, and what is left of
it.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import sdp
from sdp.engine.environment.child import child_environment
from sdp.launcher.heartbeat import Whereabouts
from sdp.tests.support.processes import alive, until

_WITNESS = """
import sys
from sdp.launcher.cluster.witness import run_witnessed
sys.exit(run_witnessed(sys.argv[2:], {"FROM": "the launcher"}, 3, [sys.executable, "-c", sys.argv[1]]))
"""
_PLACE = Whereabouts(3, "here", 8, "backward", 0.0)
_SAY_PLACE = (
    f"import os, sys, signal, subprocess, time; open(os.environ['SDP_PLACE_FILE'], "
    f"'w').write({json.dumps(_PLACE.__dict__)!r})\n"
)


def _start(script: str, *words: str) -> subprocess.Popen[str]:
    environ = child_environment({"PYTHONPATH": str(Path(sdp.__path__[0]).parent)}, {})
    command = [sys.executable, "-P", "-c", _WITNESS, script, *words]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _ended(script: str, *words: str) -> tuple[int, str, str]:
    process = _start(script, *words)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def test_an_end_of_its_own_is_passed_on_without_a_word() -> None:
    assert _ended("import os, sys; print(sys.argv[1], os.environ['FROM']); sys.exit(7)", "word") == (
        7,
        "word the launcher\n",
        "",
    )


def test_a_killed_rank_is_named_with_host_step_and_cause() -> None:
    code, _, err = _ended(_SAY_PLACE + "os.kill(os.getpid(), signal.SIGKILL)")
    said = (
        f"sdp: error: rank 3 on {socket.gethostname()} was killed by SIGKILL, perhaps for lack of memory in step 8 "
        "(backward)\n"
    )
    assert (code, err) == (128 + signal.SIGKILL, said)


def test_one_that_is_killed_before_it_said_anything() -> None:
    code, _, err = _ended("import os; os.kill(os.getpid(), 11)")
    assert (code, err) == (
        128 + signal.SIGSEGV,
        f"sdp: error: rank 3 on {socket.gethostname()} was killed by SIGSEGV\n",
    )


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_signals_reach_it_and_are_no_failure_to_tell_of(number: signal.Signals) -> None:
    process = _start("print(0, flush=True); import time; time.sleep(60)")
    assert process.stdout is not None
    assert process.stdout.readline() == "0\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (128 + number, "")


def test_nothing_is_left_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code, out, _ = _ended(
        _SAY_PLACE
        + f"print(subprocess.Popen(['sleep', '60'], stdout=2).pid, os.listdir({str(tmp_path)!r})); sys.exit(3)"
    )
    pid, files = out.split(maxsplit=1)
    assert (code, files) == (3, "[]\n"), "what has a name may be left behind"
    until(lambda: not alive(int(pid)))


def test_nothing_outlives_a_witness_that_is_killed() -> None:
    process = _start(
        "import os, subprocess, time; print(os.getpid(), subprocess.Popen(['sleep', '60'], stdout=2).pid, "
        "flush=True)\ntime.sleep(60)"
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert [alive(pid) for pid in pids] == [True, True]
    process.kill()
    process.communicate(timeout=30)
    for pid in pids:
        until(lambda pid=pid: not alive(pid))


def test_a_guard_that_is_stopped_keeps_nobody_waiting() -> None:
    """As its group is where a process in the background reads from the terminal."""
    process = _start("import os, signal, time; print(os.getpid(), flush=True); os.killpg(0, signal.SIGSTOP)")
    assert process.stdout is not None
    rank = int(process.stdout.readline())
    until(lambda: Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    os.kill(rank, signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL
    assert "was killed by SIGKILL" in err
