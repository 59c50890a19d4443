"""Read what an SDP launcher tells the processes that it starts: its id, their files and their
socket.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .launchers import ERROR_FILE, LISTENING_SOCKET, PARENT_PID, WHEREABOUTS_FILE


@dataclass(frozen=True)
class Supervision:
    """The facts that an SDP launcher gives to a process that it starts.

    ``parent_pid`` is the launcher's process id. The process reports its own fatal error in
    ``error_file``.
    """

    parent_pid: int
    error_file: Path | None


def supervision() -> Supervision | None:
    """Return what the SDP launcher told this process, or None if its parent is not an SDP launcher.

    The launcher's id is removed from the environment, because programs that a rank starts have
    another parent.
    """
    parent, error_file = os.environ.pop(PARENT_PID, ""), os.environ.get(ERROR_FILE, "")
    return Supervision(int(parent), Path(error_file) if error_file else None) if parent.isdigit() else None


def whereabouts_file() -> Path | None:
    """Return the file in which this rank writes its whereabouts for its launcher, or None."""
    path = os.environ.get(WHEREABOUTS_FILE, "")
    return Path(path) if path else None


def inherited_socket() -> int | None:
    """Return the file descriptor of the socket on which rank 0 serves the store.

    Returns None if the launcher handed no socket over. The variable is removed, because programs
    that the rank starts do not inherit the socket.
    """
    handle = os.environ.pop(LISTENING_SOCKET, "")
    return int(handle) if handle.isdigit() else None


def launcher_serves_store() -> bool:
    """Return whether the launcher itself serves the store for the ranks, as torchrun does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
