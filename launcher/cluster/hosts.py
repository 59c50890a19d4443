"""Selects the hosts and slots of a run from DeepSpeed's hostfile, ``--include`` and ``--exclude``.

A slot is the index of a device on its host. Under every launcher, ranks are numbered host after
host in the order of the hostfile, and by ascending slots on each host.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from ...engine.errors import LaunchError, quote, shorten, suggestion
from ...engine.json_files import MOST_BYTES, read_text_file

# A shell, pdsh (n[1-3], %h), ssh (-oProxyCommand) and --include must all read a host's name as just
# a name.
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ANSWER_SECONDS = 10
_MOST_SLOTS = 2**16  # far above every host; more would fill the memory
_LINE = re.compile(r"(\S+)\s+slots=(\d+)\s*(?:#.*)?")


@dataclass(frozen=True)
class Host:
    """A host, with the indices (slots) of the devices that the run uses, one for each rank."""

    name: str
    slots: tuple[int, ...]


def read_hostfile(path: Path) -> list[Host]:
    """Read the hosts of a file in DeepSpeed's format, in the order of the file.

    Each line is ``NAME slots=N``, and ``#`` begins a comment. Raises :class:`LaunchError` with the
    line's number if a line has another form, or if a host is listed twice.
    """
    try:
        if path.parent == Path("/dev/fd"):  # from a shell's <(…)
            with path.open(encoding="utf-8") as pipe:
                lines = pipe.read(MOST_BYTES).splitlines()
        else:
            lines = read_text_file(path).splitlines()
    except (OSError, ValueError) as error:
        raise LaunchError(f"--hostfile {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is not None and (len(match[2]) > 9 or int(match[2]) > _MOST_SLOTS):
            raise LaunchError(
                f"{path}:{number}: slots={shorten(match[2])} is more than the {_MOST_SLOTS:,} of one host"
            )
        if match is None or int(match[2]) == 0:
            raise LaunchError(f"{path}:{number}: {quote(text)} cannot be read; expected the form worker-0 slots=4")
        name = check_host(match[1], f"{path}:{number}")
        if name in hosts:
            raise LaunchError(f"{path}:{number}: host {shorten(name)} is listed twice; give its slots in one line")
        hosts[name] = Host(name, tuple(range(int(match[2]))))
    if not hosts:
        raise LaunchError(f"{path}: names no host; expected lines of the form worker-0 slots=4")
    return list(hosts.values())


def check_host(name: str, where: str) -> str:
    """Return ``name`` if it can be a host name or an IPv4 address.

    Raises :class:`LaunchError` if not. The message begins with ``where``, the source of the name.
    """
    if not _HOST.fullmatch(name):
        raise LaunchError(
            f"{where}: {quote(name)} is not a host name (letters, digits, '.', '_', '-'; users and ports go to "
            "~/.ssh/config)"
        )
    return name


def select(
    hosts: Sequence[Host], include: str = "", exclude: str = "", nodes: int | None = None, per_node: int | None = None
) -> list[Host]:
    """Select the hosts and slots that a run uses.

    Give only one of these: ``include``, ``exclude``, or the numbers ``nodes`` and ``per_node``.

    Args:
        hosts: all hosts of the hostfile.
        include: the only hosts and slots to use, in DeepSpeed's form ``NAME[:SLOT,…]@NAME…``.
        exclude: the hosts and slots not to use, in the same form.
        nodes: use the first ``nodes`` hosts of the hostfile. If None, use all hosts.
        per_node: use the first ``per_node`` slots of each host. If None, use all slots.

    Raises:
        LaunchError: a host or slot is unknown, arguments exclude each other, or no slot is left.
    """
    if include and exclude:
        raise LaunchError("--include and --exclude cannot be combined; give one of them")
    if (include or exclude) and (nodes or per_node):
        raise LaunchError(
            "--nodes and --gpus-per-node cannot be combined with --include or --exclude; use one of the two ways"
        )
    if include or exclude:
        named = _parse_filter(include or exclude, hosts, "--include" if include else "--exclude")
        keep = {
            host.name: [slot for slot in host.slots if (slot in named.get(host.name, ())) == bool(include)]
            for host in hosts
        }
        chosen = [Host(name, tuple(slots)) for name, slots in keep.items() if slots]
        if not chosen:
            raise LaunchError(f"--exclude {shorten(exclude)}: no slot of the hostfile remains; exclude less")
        return chosen
    if nodes is not None and nodes > len(hosts):
        raise LaunchError(f"--nodes {nodes}: the hostfile names only {len(hosts)} hosts")
    for host in hosts[:nodes]:
        if per_node is not None and per_node > len(host.slots):
            raise LaunchError(
                f"--gpus-per-node {per_node}: the hostfile gives host {host.name} only {len(host.slots)} slots"
            )
    return [Host(host.name, host.slots[:per_node]) for host in hosts[:nodes]]


def include_text(hosts: Sequence[Host]) -> str:
    """Write ``hosts`` in the syntax of DeepSpeed's ``--include``, such as ``a:0,1@b:2``."""
    return "@".join(f"{host.name}:{','.join(map(str, host.slots))}" for host in hosts)


def parse_slots(text: str) -> list[list[int]]:
    """Return the slots of each host in a text that :func:`include_text` wrote."""
    return [[int(slot) for slot in host.partition(":")[2].split(",")] for host in text.split("@")]


def world_size(hosts: Sequence[Host]) -> int:
    """Count the ranks of a run on ``hosts``: one for each slot."""
    return sum(len(host.slots) for host in hosts)


def trim(hosts: Sequence[Host], ranks: int) -> list[Host]:
    """Return the first ``ranks`` slots of ``hosts``. Hosts without such slots are left out."""
    first = accumulate((len(host.slots) for host in hosts), initial=0)
    return [
        Host(host.name, host.slots[: ranks - begin]) for host, begin in zip(hosts, first, strict=False) if begin < ranks
    ]


def hosts_that_answer(hosts: Sequence[Host]) -> list[Host]:
    """Return the hosts on which ssh can run a command. This host is included without a test."""
    this_host, quiet = socket.gethostname().partition(".")[0], subprocess.DEVNULL
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_ANSWER_SECONDS}"]
    asked = {
        host.name: subprocess.Popen([*command, host.name, "true"], stdin=quiet, stdout=quiet, stderr=quiet)
        for host in hosts
        if host.name.partition(".")[0] not in (this_host, "localhost", "127")
    }
    waits_until = time.monotonic() + 2 * _ANSWER_SECONDS
    answers = dict[str, bool]()
    for name, process in asked.items():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, waits_until - time.monotonic()))
        answers[name] = process.returncode == 0
        process.kill()
        process.wait()
    return [host for host in hosts if answers.get(host.name, True)]


def describe(hosts: Sequence[Host]) -> list[str]:
    """Return a line of text for each host: the numbers of its ranks, its name and its devices."""
    lines, first = [], 0
    for host in hosts:
        lines.append(
            f"ranks {first} to {first + len(host.slots) - 1} on {host.name}, devices {','.join(map(str, host.slots))}"
        )
        first += len(host.slots)
    return lines


def _parse_filter(text: str, hosts: Sequence[Host], option: str) -> dict[str, set[int]]:
    known = {host.name: host.slots for host in hosts}
    named: dict[str, set[int]] = {}
    for item in text.split("@"):
        name, colon, slots = item.partition(":")
        if name not in known:
            raise LaunchError(
                f"{option} {shorten(text)}: the hostfile has no host {quote(name)}{suggestion(name, known)}"
            )
        if colon and not re.fullmatch(r"\d{1,9}(,\d{1,9})*", slots):
            raise LaunchError(
                f"{option} {shorten(text)}: {quote(item)} cannot be read; expected the form worker-0:0,2@worker-1"
            )
        wanted = {int(slot) for slot in slots.split(",")} if colon else set(known[name])
        if missing := wanted - set(known[name]):
            raise LaunchError(
                f"{option} {shorten(text)}: host {name} has {len(known[name])} slots, no slot {min(missing)} (they "
                "count from 0)"
            )
        named.setdefault(name, set()).update(wanted)
    return named
