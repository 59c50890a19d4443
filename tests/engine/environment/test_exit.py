"""The end of a script waits for threads, and waits for a compiler's lock are announced."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sdp
from sdp.engine.environment import process
from sdp.tests.support.forks.command import ForkedScript

ENDING = """
import threading
from sdp.engine.environment import process as leaving

leaving.SECONDS = 5.0
leaving.watch()
told = threading.Event()

def let_go():
    told.wait()
    sum(range(10_000_000))  # longer than a turn with the lock
    print("let go", flush=True)

threading.Thread(target=let_go, daemon=True).start()
told.set()
"""
ONCE = """
import sys
from sdp.engine.environment import process as leaving

leaving.wait_for_threads = lambda: print("waited")
if sys.argv[1] == "at once":
    leaving.leaves_at_once()
leaving.watch()
leaving.watch()
"""


def _printed(script: str, *words: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(Path(sdp.__path__[0]).parent)}
    command = [sys.executable, "-P", "-c", script, *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=120).stdout


def test_threads_let_go_before_the_interpreter_ends() -> None:
    assert _printed(ENDING) == "let go\n"


@pytest.mark.parametrize(("how", "printed"), [("ends", "waited\n"), ("at once", "")])
def test_it_is_waited_once_and_not_where_the_process_leaves_at_once(how: str, printed: str) -> None:
    assert _printed(ONCE, how) == printed


def test_a_script_that_initialises_waits(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import torch, sdp
from sdp.engine.environment import process as leaving
leaving.wait_for_threads = lambda: print("waited")
sdp.initialize(model=torch.nn.Sequential(torch.nn.Linear(2, 2)), config={
    "train_micro_batch_size_per_gpu": 1, "sdp": {"units": ["0"]},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
""")
    code, printed = ForkedScript(script).end()
    assert (code, printed.count("waited"), printed.splitlines()[-1]) == (0, 1, "waited")


# -- a wait for the lock of a compiler, which a killed process may have left, is told --------------


def test_a_lock_that_was_left_behind_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(process, "SILENT_SECONDS", 0.1)
    with caplog.at_level(logging.WARNING, "sdp"):
        with process.announced(process.compiler_locks):
            time.sleep(0.5)
        assert not caplog.records, "nothing is compiled"
        lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
        lock.parent.mkdir(parents=True)
        lock.touch()
        os.utime(lock, (time.time() - 600, time.time() - 600))
        with process.announced(process.compiler_locks):
            pass
        assert not caplog.records, "the wait was short"
        with process.announced(process.compiler_locks):
            time.sleep(0.5)
    (record,) = caplog.records
    assert f"{lock} (10 minutes old); if no process compiles it, remove this lock" in record.getMessage()
