"""Hosts on this machine: network namespaces with shaped links.

Every rank is a host with the address 10.78.0.RANK+1 on ``eth0``. All hosts are on one virtual
switch. A token bucket (tc tbf) with the link's rate limits what a host sends and what it receives.
Only namespaces made here are touched. They are removed at the end, also after SIGINT, SIGTERM or
SIGHUP. Needs root, iproute2 and a kernel with tbf.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sdp.engine.errors import ConfigError, LaunchError
from sdp.launcher.signals import caught_signals
from sdp.tools.shared.quantities import parse_bit_rate

_LATENCY = "100ms"  # the longest time that a packet waits in the bucket's queue
_BURST_SECONDS = 0.002  # the bucket holds what the link sends in this time, but at least 64 KiB (a packet train)


@dataclass(frozen=True)
class Link:
    """The rate of a link in each direction, in the user's spelling, such as ``300mbit``."""

    rate: str

    @classmethod
    def parse(cls, text: str) -> Link:
        """Read the rate of a link.

        Raises :class:`ConfigError` if it is not a finite number of bits per second above zero.
        """
        bits = parse_bit_rate(text)
        if bits is None or not 8 <= bits < math.inf:
            raise ConfigError(f"{text}: expected rates above zero in bits per second, such as 100mbit,300mbit,1gbit")
        return cls(text)

    @property
    def bits_per_second(self) -> float:
        bits = parse_bit_rate(self.rate)
        assert bits is not None
        return bits

    @property
    def bytes_per_second(self) -> float:
        return self.bits_per_second / 8


@contextmanager
def hosts(count: int) -> Iterator[str]:
    """A context in which this machine has the hosts 0 to ``count`` − 1.

    Yields a name for :func:`on_host` and :func:`shape`. Raises :class:`LaunchError` if this machine
    cannot make hosts.
    """
    name = f"sdp{os.getpid()}"
    if missing := [program for program in ("ip", "tc") if shutil.which(program) is None]:
        raise LaunchError(f"hosts need {' and '.join(missing)}, which this machine lacks; install iproute2")
    made: list[str] = []
    with caught_signals() as received:  # a signal must not end this process while it has hosts
        try:
            _make(name, count, made, received)
            if not received:
                yield name
        finally:
            for namespace in made:
                _quiet("ip", "netns", "del", namespace)
    if received:
        signal.raise_signal(received[0])
        raise SystemExit(128 + received[0])  # reached only if a handler returned


def _make(name: str, count: int, made: list[str], received: Sequence[int]) -> None:
    """Make the switch and its hosts, and add each to ``made`` at once. Stops after a signal."""
    switch = f"{name}-switch"
    _add(switch, made)
    _ip("-n", switch, "link", "add", "switch", "type", "bridge")
    _ip("-n", switch, "link", "set", "switch", "up")
    for rank in range(count):
        if received:
            return
        namespace = f"{name}-{rank}"
        _add(namespace, made)
        _ip("link", "add", "eth0", "netns", namespace, "type", "veth", "peer", "name", f"host{rank}", "netns", switch)
        _ip("-n", switch, "link", "set", "dev", f"host{rank}", "master", "switch", "up")
        _ip("-n", namespace, "addr", "add", f"{address(rank)}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        _ip("-n", namespace, "link", "set", "lo", "up")


def _add(namespace: str, made: list[str]) -> None:
    _ip("netns", "add", namespace)
    made.append(namespace)


def address(rank: int) -> str:
    """Return the address of a rank's host."""
    return f"10.78.0.{rank + 1}"


def on_host(name: str, rank: int, command: Sequence[str]) -> list[str]:
    """Return the command line that runs ``command`` on the host of ``rank``."""
    return ["ip", "netns", "exec", f"{name}-{rank}", *command]


def shape(name: str, count: int, link: Link) -> None:
    """Give the links of all hosts this rate in both directions. Connections stay open."""
    burst = str(max(65536, int(link.bytes_per_second * _BURST_SECONDS)))
    for rank in range(count):
        for namespace, device in ((f"{name}-{rank}", "eth0"), (f"{name}-switch", f"host{rank}")):
            bucket = ("tbf", "rate", f"{link.bits_per_second:.0f}bit", "burst", burst, "latency", _LATENCY)
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = _quiet(*words)
    if done.returncode:
        raise LaunchError(
            f"this machine cannot make hosts with shaped links ({' '.join(words)}: {done.stderr.strip()}); "
            "it needs root and Linux"
        )


def _quiet(*words: str) -> subprocess.CompletedProcess[str]:
    # In its own process group, so that Ctrl-C on the terminal reaches only this process.
    return subprocess.run(words, capture_output=True, text=True, check=False, process_group=0)
