"""The TCP sockets of processes on this host, as Linux lists them."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ESTABLISHED, LISTEN = 0x01, 0x0A  # of include/net/tcp_states.h of Linux


@dataclass(frozen=True)
class TcpSocket:
    """A socket. ``host`` and ``port`` are its own address."""

    host: str
    port: int
    inode: int

    @property
    def is_on_loopback(self) -> bool:
        """Whether other hosts cannot connect."""
        return ipaddress.ip_address(self.host).is_loopback


def sockets_in(state: int, process: int | str = "self") -> Iterator[TcpSocket]:
    """Yield the TCP sockets in one state, of a process's network namespace."""
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        path, wanted = Path(f"/proc/{process}/net") / table, f"{state:02X}"
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            words = line.split(maxsplit=10)
            if words[3] == wanted:
                host, _, port = words[1].partition(":")
                yield TcpSocket(_address(host, family), int(port, 16), int(words[9]))


def listening_sockets(*processes: int) -> dict[int, list[TcpSocket]]:
    """Return the sockets at which each of these processes listens, those that it inherited too."""
    found = {}
    for process in processes:
        waiting = {each.inode: each for each in sockets_in(LISTEN, process)}
        found[process] = [waiting[inode] for inode in _inodes(process) if inode in waiting]
    return found


def connections_at(port: int) -> int:
    """Return the number of connections of clients to a port of this host."""
    return sum(each.port == port for each in sockets_in(ESTABLISHED))


def _address(written: str, family: int) -> str:
    """Return an address that Linux wrote as numbers of 32 bits in the processor's byte order."""
    numbers = bytes.fromhex(written)
    step = -1 if sys.byteorder == "little" else 1
    return socket.inet_ntop(family, b"".join(numbers[start : start + 4][::step] for start in range(0, len(numbers), 4)))


def _inodes(process: int) -> set[int]:
    found = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if (inode := re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink()))) is not None:
                found.add(int(inode[1]))
    return found
