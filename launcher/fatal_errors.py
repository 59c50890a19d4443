"""Reports the failure of a run with many ranks in one message, the cause first.

Under the local launcher, a rank writes its error to a file, and the launcher prints the first
error. Under another launcher, ranks above 0 wait before they print their error, because rank 0 may
print the same one. Every rank waits before it prints that another rank is gone, so that the cause
comes first.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ..engine.distributed.heartbeat import RankPosition
from ..engine.environment.detect import Supervision, detect
from ..engine.errors import LaunchError, escape
from ..engine.files import write_whole
from ..engine.json_files import read_json_file

PREFIX = "sdp: error: "
_PR_SET_PDEATHSIG = 1
# Possible causes of a signal that no user sent.
_REASONS = {
    "SIGKILL": ", perhaps for lack of memory",
    "SIGBUS": ", perhaps because a file that it reads was cut short (sdp prepare --verify) or /dev/shm is full",
}
_MOST_BYTES = 1 << 20  # of a report; a traceback has some KB
# How long a rank waits, so that its launcher can end it before it prints its error. Launchers look
# at their processes every 0.1 s (torchrun) to 1 s (DeepSpeed).
HOLD_BACK_SECONDS = 2.0


@dataclass(frozen=True)
class FatalError:
    """The error with which a rank ends, as the rank reports it to its launcher.

    Attributes:
        exit_code: the exit code with which the rank will end.
        text: the text for the user.
        time: when the rank failed, in seconds since the epoch.
        stalled: whether the rank made no progress. The cause may be another rank.
        follows: whether the rank ends because another rank is gone.
    """

    exit_code: int
    text: str
    time: float
    stalled: bool = False
    follows: bool = False

    @property
    def is_known(self) -> bool:
        """Whether the text is an error message of this package, and not a report of a lost rank."""
        return self.text.startswith(PREFIX) and not self.follows

    @property
    def is_loss(self) -> bool:
        """Whether a rank or a host was probably lost, so that a restart may help."""
        return self.exit_code != 2 and (self.stalled or not self.is_known)

    @classmethod
    def read(cls, path: Path) -> FatalError | None:
        """Return the error that a rank wrote to the file ``path``, or None if there is none."""
        try:
            return cls(**read_json_file(path, most_bytes=_MOST_BYTES))
        except (OSError, ValueError, TypeError):
            return None


def show(text: str) -> None:
    """Print a text on stderr with control characters escaped, if the terminal still exists."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(escape(text), file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Print ``text`` on stderr with ``sdp:`` before it, if the terminal still exists."""
    show(f"sdp: {text}")


def names_lost_rank(reason: str) -> bool:
    """Whether the message of a rank may mean that a rank or a host was lost."""
    return ": no progress for " in reason or ": another rank is gone " in reason


def described_end(rank: int, exit_code: int, position: RankPosition | None) -> str:
    """Return a text about how a rank of this host ended, and in which step it was.

    A negative ``exit_code``, such as -9, means that the signal with this number killed the rank.
    """
    if exit_code >= 0:
        how = f"ended with exit code {exit_code}"
    else:
        name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else f"signal {-exit_code}"
        how = f"was killed by {name}{_REASONS.get(name, '')}"
    where = f" in step {position.step} ({position.phase})" if position else ""
    return f"rank {rank} on {socket.gethostname()} {how}{where}"


def tie_to_parent(parent_pid: int) -> None:
    """Make this process end when its launcher ends, even if SIGKILL ends the launcher."""
    # Rank 0 is in a background process group of the terminal. Under `stty tostop` writing to the
    # terminal would stop it.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # the launcher died before the line above
        os._exit(1)


def report_fatal(
    text: str, exit_code: int, supervision: Supervision | None, *, stalled: bool = False, follows: bool = False
) -> None:
    """Report why this process ends, so that a job of many ranks prints the error once.

    Args:
        text: the text for the user.
        exit_code: the exit code with which this process will end.
        supervision: what this package's launcher gave this process, or None under another launcher.
        stalled: whether this rank made no progress.
        follows: whether this rank ends because another rank is gone.
    """
    rank, text = _rank(), escape(text)  # the text may repeat bytes of the input
    if supervision is not None and supervision.error_file is not None:
        with contextlib.suppress(OSError):  # on a full disk the error is printed instead
            report = FatalError(exit_code, text, time.time(), stalled, follows)
            write_whole(supervision.error_file, json.dumps(asdict(report)))
            if rank == 0:
                return
    elif rank > 0 or follows:
        time.sleep(HOLD_BACK_SECONDS)
    with contextlib.suppress(OSError):  # stderr may be on the full disk, too
        print(text, file=sys.stderr, flush=True)


def _rank() -> int:
    try:
        environment = detect()
    except LaunchError:
        return 0
    return environment.rank if environment else 0


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(1)
    os.killpg(os.getpgrp(), signal.SIGKILL)
