"""Whether a process is active. Each test looks at a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

# The main thread does something, while another thread looks ten times in a second.
LOOKING = """
import subprocess, sys, threading, time
from sdp.engine.elastic.activity import ProcessActivity

found, use = [], ProcessActivity()

def look():
    while True:
        found.append(use.idle_seconds() + 100 * use.is_sending())
        time.sleep(0.1)

def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass

threading.Thread(target=look, daemon=True).start()
"""


def looks(action: str) -> list[float]:
    """Return what was found while the main thread did ``action``."""
    script = f"{LOOKING}{action}\nprint(*found)"
    done = subprocess.run([sys.executable, "-P", "-c", script], check=True, capture_output=True, text=True)
    return list(map(float, done.stdout.split()))


def test_a_main_thread_that_waits_uses_no_cpu() -> None:
    found = looks("time.sleep(4)")
    assert max(found) > 3 and found == sorted(found)


def test_many_process_groups_that_wait_are_no_activity() -> None:
    """Each has a thread that looks a hundred times in a second."""
    action = """
import torch.distributed as dist
groups = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1) for _ in range(60)]
time.sleep(6)
"""
    assert max(looks(action)) > 4


def test_short_lived_children_do_not_disturb_the_look() -> None:
    """One may end, and its folder in /proc vanish, while the other thread looks."""
    action = """
missed = []
threading.excepthook = missed.append

def look_often():
    other = ProcessActivity(look_seconds=0.0)
    while True:
        other.idle_seconds()

for _ in range(2):
    threading.Thread(target=look_often, daemon=True).start()
end = time.monotonic() + 4
while time.monotonic() < end:
    subprocess.run(["true"])
assert not missed, missed
"""
    looks(action)


def test_what_gloo_sends_is_seen() -> None:
    action = """
import torch
import torch.distributed as dist
store = dist.HashStore()

def reduce(rank):
    group = dist.ProcessGroupGloo(store, rank, 2)
    for _ in range(30):
        group.allreduce([torch.ones(100_000)]).wait()
        time.sleep(0.1)  # 8 megabytes in a second, of both ranks

other = threading.Thread(target=reduce, args=(1,))
other.start(), reduce(0), other.join()
"""
    assert looks(action)[-5] >= 100
    assert looks("time.sleep(3)")[-5] < 100


def test_a_lock_that_another_thread_never_releases_uses_no_cpu() -> None:
    assert max(looks("lock = threading.Lock(); lock.acquire(); lock.acquire(timeout=4)")) > 3


@pytest.mark.parametrize(
    "action",
    [
        "compute(4)",
        "for _ in range(40): compute(0.03), time.sleep(0.07)",  # a third of a core
        # As a compiler that is the child of another program.
        "subprocess.run([sys.executable, '-c', 'while True: pass'], timeout=4, check=False)",
        "subprocess.run(['sh', '-c', 'timeout 4 sh -c \"while true; do true; done\"; true'])",
    ],
)
def test_work_of_the_process_or_of_its_children_is_seen(action: str) -> None:
    if "timeout=4" in action:
        action = f"try: {action}\nexcept subprocess.TimeoutExpired: pass"
    assert max(looks(action)) < 2.5


def test_after_work_the_seconds_begin_again() -> None:
    found = looks("time.sleep(3); compute(0.5); time.sleep(2)")
    assert max(found) > 2
    assert any(later < 0.5 for later in found[found.index(max(found)) :])
