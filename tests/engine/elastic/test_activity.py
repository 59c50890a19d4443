"""Whether a process is active. Each test looks at a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

# The main thread does something, while another thread looks ten times in a second.
LOOKING = """
import fcntl, os, socket, subprocess, sys, threading, time
from sdp.engine.elastic.activity import ProcessActivity

found, use = [], ProcessActivity()

def look():
    while True:
        quiet = use.quiet_seconds()
        found.append(quiet[KIND] + 100 * use.is_sending())
        time.sleep(0.1)

def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass

threading.Thread(target=look, daemon=True).start()
"""


def looks(action: str, kind: int = 0) -> list[float]:
    """Return what was found while the main thread did ``action``.

    ``kind``: 0 for the seconds for which the process was idle, 1 for those without files.
    """
    script = f"KIND = {kind}\n{LOOKING}{action}\nprint(*found)"
    done = subprocess.run([sys.executable, "-P", "-c", script], check=True, capture_output=True, text=True)
    return list(map(float, done.stdout.split()))


def test_a_main_thread_that_sleeps_is_idle() -> None:
    found = looks("time.sleep(6)")
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
        other.quiet_seconds()

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


# Another rank comes late to a collective.
LATE = """
import torch
import torch.distributed as dist
store = dist.HashStore()

def reduce(rank, seconds):
    group = dist.ProcessGroupGloo(store, rank, 2)
    time.sleep(seconds)
    group.allreduce([torch.ones(8)]).wait()

other = threading.Thread(target=reduce, args=(1, 6))
other.start(), reduce(0, 0), other.join()
"""


@pytest.mark.parametrize(
    "action",
    [
        "lock = threading.Lock(); lock.acquire(); lock.acquire(timeout=6)",
        LATE,
        "one, other = socket.socketpair(); threading.Timer(6, other.send, (b'1',)).start(); one.recv(1)",
        # A child that has ended, and another one that waits.
        "subprocess.Popen(['true']), subprocess.Popen(['sleep', '6']).wait()",
        # A thread that reads what nobody writes.
        "threading.Thread(target=os.read, args=(os.pipe()[0], 1), daemon=True).start(); time.sleep(6)",
    ],
    ids=["lock", "collective", "socket", "children", "pipe"],
)
def test_a_wait_for_another_thread_a_process_or_a_message_is_idle(action: str) -> None:
    """As a call that hangs."""
    assert max(looks(action)) > 3


# Waits for the lock of a file, as for a file system that does not answer.
FILE = """
import tempfile
first = tempfile.NamedTemporaryFile("w")
second = open(first.name, "w")
fcntl.flock(first, fcntl.LOCK_EX)
threading.Timer(4, fcntl.flock, (first, fcntl.LOCK_UN)).start()
"""


@pytest.mark.parametrize(
    "action",
    [
        f"{FILE}fcntl.flock(second, fcntl.LOCK_EX)",
        f"{FILE}one = threading.Thread(target=fcntl.flock, args=(second, fcntl.LOCK_EX)); one.start(); one.join()",
        # A terminal or a program that shows the run's lines does not read them.
        "ends = os.pipe(); threading.Timer(4, os.read, (ends[0], 1 << 20)).start(); os.write(ends[1], bytes(1 << 17))",
        "for _ in range(40): os.path.exists(sys.executable), time.sleep(0.1)",
    ],
    ids=["file", "file of another thread", "full pipe", "looks again and again"],
)
def test_a_wait_for_a_file_is_no_idleness(action: str) -> None:
    assert max(looks(action)) < 2.5


@pytest.mark.parametrize(
    ("action", "uses_file"),
    [
        (f"{FILE}fcntl.flock(second, fcntl.LOCK_EX)", True),
        (
            f"{FILE}one = threading.Thread(target=fcntl.flock, args=(second, fcntl.LOCK_EX)); one.start(); compute(4)",
            True,
        ),
        ("compute(4)", False),
        ("time.sleep(4)", False),
    ],
)
def test_the_seconds_without_files_are_counted_also_while_the_cpu_is_used(action: str, uses_file: bool) -> None:
    assert (max(looks(action, kind=1)) < 2.5) == uses_file


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


def test_a_slow_link_on_which_it_sends_is_activity() -> None:
    """About as much as gloo writes to a link of 10 Mbit/s, which takes less than 1 % of a core."""
    action = """
ends = socket.socketpair()

def send():
    while True:
        os.write(ends[0].fileno(), bytes(1 << 17)), time.sleep(0.1)

def receive():
    while True:
        os.read(ends[1].fileno(), 1 << 17)

for each in (send, receive):
    threading.Thread(target=each, daemon=True).start()
time.sleep(5)
"""
    assert max(each % 100 for each in looks(action)) < 2.5  # looks() adds 100 while it sends


def test_after_work_the_seconds_begin_again() -> None:
    found = looks("time.sleep(3); compute(0.5); time.sleep(2)")
    assert max(found) > 2
    assert any(later < 0.5 for later in found[found.index(max(found)) :])
