"""Hosts on this machine for ``sdp bench CONFIG --network``: network namespaces on a virtual switch, with shaped links.

Every rank is a host of its own, at 10.78.0.RANK+1 on ``eth0``; what it sends and what it is sent pass a token bucket (tc tbf) of the
link's rate. Only namespaces made here are touched, and they are removed at the end, also after SIGINT, SIGTERM or SIGHUP. Needs root,
iproute2 and a kernel with tbf.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...engine.environment.child import search_program
from ...engine.environment.detect import export
from ...engine.errors import ConfigError, LaunchError
from ...launcher.signals import caught_signals

_NETNS, _CLONE_NEWNET = Path("/run/netns"), 0x40000000
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg])bit")
_SCALE = {"k": 1e3, "m": 1e6, "g": 1e9}
_LATENCY = "100ms"  # of the bucket's queue
_BURST_SECONDS = 0.002  # of the rate, no less than a packet train's 64 KiB


@dataclass(frozen=True)
class Link:
    """A rate as tc writes it, such as 300mbit."""

    rate: str

    @classmethod
    def parse(cls, text: str) -> Link:
        link = cls(text)
        if not _RATE.fullmatch(text) or link.bytes_per_second < 1:
            raise ConfigError(
                f"--network {text}: expected rates above zero as tc writes them, such as 100mbit,300mbit,1gbit"
            )
        return link

    @property
    def bytes_per_second(self) -> float:
        """In either direction."""
        match = _RATE.fullmatch(self.rate)
        assert match is not None
        return float(match[1]) * _SCALE[match[2]] / 8


@contextmanager
def hosts(count: int) -> Iterator[str]:
    """While inside there are hosts 0 … ``count`` − 1; the name under which ranks enter them. Raises :class:`LaunchError`."""
    name = f"sdp{os.getpid()}"
    if missing := [program for program in ("ip", "tc") if search_program(program) is None]:
        raise LaunchError(f"--network: there is no {' and no '.join(missing)} here; install iproute2")
    made: list[str] = []
    with caught_signals() as received:  # none may end this process while it has hosts
        try:
            _make(name, count, made, received)
            if not received:
                yield name
        finally:
            for namespace in made:
                _quiet("ip", "netns", "del", namespace)
    if received:
        signal.raise_signal(received[0])
        raise SystemExit(128 + received[0])  # somebody's handler has returned


def _make(name: str, count: int, made: list[str], received: Sequence[int]) -> None:
    """The switch and its hosts, in ``made`` as soon as they are there; no more of them once a signal was ``received``."""
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
    return f"10.78.0.{rank + 1}"


def enter(name: str, rank: int) -> None:
    """Make this process, which has no threads yet that use the network, run on host ``rank``, and rank 0's host its master."""
    with (_NETNS / f"{name}-{rank}").open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise LaunchError(f"--network: rank {rank} cannot enter its host: {os.strerror(ctypes.get_errno())}")
    export({"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": "eth0"})


def shape(name: str, count: int, link: Link) -> None:
    """Give all hosts links of this rate, in both directions; connections stay."""
    burst = str(max(65536, int(link.bytes_per_second * _BURST_SECONDS)))
    for rank in range(count):
        for namespace, device in ((f"{name}-{rank}", "eth0"), (f"{name}-switch", f"host{rank}")):
            _run(
                "tc",
                "-n",
                namespace,
                "qdisc",
                "replace",
                "dev",
                device,
                "root",
                "tbf",
                "rate",
                link.rate,
                "burst",
                burst,
                "latency",
                _LATENCY,
            )


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = _quiet(*words)
    if done.returncode:
        raise LaunchError(
            f"--network: this machine makes no shaped hosts ({' '.join(words)}: {done.stderr.strip()}); it needs root and Linux"
        )


def _quiet(*words: str) -> subprocess.CompletedProcess[str]:
    # In a group of its own: Ctrl-C on the terminal is for this process alone.
    return subprocess.run(words, capture_output=True, text=True, check=False, process_group=0)
