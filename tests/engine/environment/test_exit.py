"""The end of a script: threads that still let go of something get the interpreter's lock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sdp

ENDING = """
import threading
from sdp.engine.environment import exit as leaving

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
from sdp.engine.environment import exit as leaving

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


def test_a_script_that_initialises_waits() -> None:
    script = """
import torch, sdp
from sdp.engine.environment import exit as leaving
leaving.wait_for_threads = lambda: print("waited")
sdp.initialize(model=torch.nn.Sequential(torch.nn.Linear(2, 2)), config={
    "train_micro_batch_size_per_gpu": 1, "sdp": {"units": ["0"]},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
"""
    assert _printed(script) == "waited\n"
