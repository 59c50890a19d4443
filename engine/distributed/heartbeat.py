"""Records what a rank is doing, and ends a rank that makes no progress.

A second thread of the process watches the main thread. If the main thread hangs in a call that
holds the GIL, no Python thread can run. In this case a thread of ``faulthandler`` ends the process.

:class:`Heartbeat` watches one rank. :class:`CallWatch` is for scripts: if only some ranks make a
call, it prints in which call every rank is. Only :class:`CallWatch` imports torch, because the
launcher uses this file, too.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import math
import os
import re
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

from ..errors import PeerLostError
from ..files import open_own_file
from ..json_files import read_json_file

_LOOK_SECONDS = 0.5
UNCHANGED_SECONDS = 5.0
_REPORT_SECONDS = 10.0
STUCK_SECONDS = _REPORT_SECONDS + 5.0  # faulthandler waits so many seconds longer than the Python thread
_RECORD_BYTES = 256  # all records have the same size, because each one overwrites the last one


@dataclass(frozen=True)
class RankPosition:
    """What a rank is doing, for messages about a rank that hangs.

    Attributes:
        host: the name of the rank's host.
        step: the number of the present or last optimizer step.
        phase: what the rank is doing, in words.
        since: when the rank began to do this, in seconds since the epoch.
    """

    rank: int
    host: str
    step: int
    phase: str
    since: float

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}, step {self.step}, {self.phase}"

    @classmethod
    def read(cls, path: Path) -> RankPosition | None:
        """Return the last :class:`RankPosition` that a rank wrote to ``path``, or None."""
        try:
            return cls(**read_json_file(path, most_bytes=1 << 16))
        except (OSError, ValueError, TypeError):
            return None


class Heartbeat:
    """Ends this process if the training loop makes no progress.

    At the start of each activity, such as a step, the loop calls :meth:`at` with a time limit. When
    the limit is exceeded, the stacks of all threads are appended to ``log``, ``on_stall`` is called
    with a message, and the process ends, even if the file system hangs.

    Args:
        file: the file in which the :class:`RankPosition` is written, or None.
        log: the rank's log file, or None.
        on_stall: called with a message if there is no progress.
        on_wait: called with the position if it has not changed for ``UNCHANGED_SECONDS``.

    Attributes:
        position: what the rank is doing now.
    """

    def __init__(
        self,
        rank: int,
        file: Path | None,
        log: Path | None,
        on_stall: Callable[[str], None],
        on_wait: Callable[[RankPosition], None] = lambda _: None,
    ):
        self._rank, self._host, self._on_stall, self._on_wait = rank, socket.gethostname(), on_stall, on_wait
        self._log = os.fdopen(open_own_file(log), "a", encoding="utf-8") if log is not None else None
        self._file = open_own_file(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if file is not None else None
        self.position = RankPosition(rank, self._host, 0, "starting", time.time())
        self._seconds: float | None = None
        self._started = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()

    def at(self, step: int, phase: str, seconds: float | None) -> None:
        """Record that the rank begins the activity ``phase``, described in words.

        ``seconds`` is the time limit of the activity. If None, there is no limit.
        """
        self.position = RankPosition(self._rank, self._host, step, phase, time.time())
        self._started, self._seconds = time.monotonic(), seconds
        if self._file is not None:
            with contextlib.suppress(OSError):  # on a full disk, only the message after a hang lacks the position
                os.pwrite(self._file, json.dumps(asdict(self.position)).ljust(_RECORD_BYTES).encode(), 0)

    def stop(self) -> None:
        """Stop watching, so that the process may do other work after the run."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        if self._log is not None:
            faulthandler.cancel_dump_traceback_later()
            self._log.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _watch(self) -> None:
        waiting: RankPosition | None = None
        while not self._stopped.wait(_LOOK_SECONDS):
            position, started, seconds = self.position, self._started, self._seconds
            if position is not waiting and time.monotonic() - started >= UNCHANGED_SECONDS:
                self._on_wait(waiting := position)
            left = started + seconds - time.monotonic() if seconds is not None else math.inf
            if self._log is not None:
                if seconds is None:
                    faulthandler.cancel_dump_traceback_later()
                elif left >= 0:
                    faulthandler.dump_traceback_later(left + STUCK_SECONDS, file=self._log, exit=True)
            if left < 0 and position is self.position and not self._stopped.is_set():
                self._end(f"no progress for {seconds:g} s")

    def _end(self, reason: str) -> None:
        """End the process with exit code 1, for a reason such as "no progress for 600 s"."""
        reporting = threading.Thread(target=self._report, args=(f"{self.position}: {reason}",), daemon=True)
        reporting.start()
        reporting.join(_REPORT_SECONDS)
        os._exit(1)

    def _report(self, message: str) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):
                faulthandler.dump_traceback(file=self._log)
        self._on_stall(message)


# The calls that wait for other ranks, by the key of `training` that limits them.
_CALLS = {
    "step_timeout": ("forward", "backward", "step", "finish_round", "check_holders"),
    "start_timeout": ("evaluate", "evaluate_subnetworks"),
    "save_timeout": (
        "save_checkpoint", "load_checkpoint", "full_state_dict", "save_pretrained", "save_16bit_model",
    ),
}  # fmt: skip
_ANSWER_SECONDS = UNCHANGED_SECONDS + 1.5
# Messages of gloo and NCCL if the process at the other end is gone. Some messages begin or end with
# its address.
_ADDRESS = r"\[[0-9a-fA-F.:]+\]:\d+"
GONE = re.compile(
    rf"({_ADDRESS}: )?(Connection (reset|closed) by (remote )?peer|Broken pipe)( {_ADDRESS})?|ncclRemoteError"
    r"|Application timeout caused pair closure"
)
_SILENT = re.compile(r"Timed out waiting \d+ms|collective operation timeout")


class CallWatch:
    """Says in which engine call every rank is, if a script's ranks do not make the same calls.

    A rank that waits in a call writes the call's name to the store of the process group. If a call
    fails or takes too long, the rank reads these names, and prints in which call every rank is.
    """

    def __init__(self) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        self._is_inside, self._world_size = False, dist.get_world_size()
        store: Any = _get_default_store()
        # A separate client, because the rank may wait in the other client for minutes.
        self._store = dist.PrefixStore("sdp/calls", store.clone())
        self._store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
        self._beat = Heartbeat(dist.get_rank(), None, None, self._on_stall, self._publish)
        self._beat.at(0, "before its first step", None)
        atexit.register(self._at_exit)

    def stop(self) -> None:
        """Stop watching."""
        atexit.unregister(self._at_exit)
        self._beat.stop()

    @contextmanager
    def inside(self, engine: Any, call: str, seconds: float) -> Iterator[None]:
        """A context for one call of an engine method. Calls inside the call are not watched.

        Args:
            call: the name of the method, for messages.
            seconds: how long the call may take. If it takes longer, the process ends.

        Raises:
            PeerLostError: Another rank did not answer, or is gone. The message says in which call
                every rank is.
        """
        if self._is_inside:
            yield
            return
        self._is_inside = True
        self._beat.at(engine.global_steps, f"in {call}", seconds)
        try:
            yield
        except RuntimeError as error:
            if (lost := GONE.search(str(error)) or _SILENT.search(str(error))) is None:
                raise
            atexit.unregister(self._at_exit)  # other ranks need the name of the call, and not "end of the script"
            raise PeerLostError(f"{self._beat.position}: {lost[0]}: {self._everyone()}") from error
        finally:
            self._is_inside = False
            self._beat.at(engine.global_steps, f"in the script behind {call}", None)

    def _on_stall(self, message: str) -> None:
        print(f"sdp: error: {message}: {self._everyone()}", file=sys.stderr, flush=True)

    def _at_exit(self) -> None:
        self._beat.at(self._beat.position.step, "at the end of its script", None)
        self._publish(self._beat.position)

    def _publish(self, position: RankPosition) -> None:
        with suppress(Exception):  # rank 0, which serves the store, may be gone
            self._store.set(str(position.rank), f"{position.phase} after step {position.step}")

    def _everyone(self) -> str:
        self._publish(self._beat.position)
        ranks: dict[str, list[int]] = defaultdict(list)
        deadline = time.monotonic() + _ANSWER_SECONDS
        for rank in range(self._world_size):
            ranks[self._place_of(rank, deadline)].append(rank)
        places = "; ".join(f"{_numbers(members)} {place}" for place, members in ranks.items())
        return f"{places}. All ranks must make the same calls, and read the same number of batches"

    def _place_of(self, rank: int, deadline: float) -> str:
        with suppress(Exception):
            while not self._store.check([str(rank)]) and time.monotonic() < deadline:
                time.sleep(0.1)
            if self._store.check([str(rank)]):
                return self._store.get(str(rank)).decode()
        return "gone, or stopped"


def watch_calls(engine: Any) -> None:
    """Wrap the engine's methods that wait for other ranks, so that ``engine.calls`` watches them.

    If ``engine.calls`` is None, the methods run unwatched.
    """
    for limit, calls in _CALLS.items():
        for call in calls:
            setattr(engine, call, _watched(engine, call, getattr(engine, call), limit))


def _watched(engine: Any, name: str, method: Callable[..., Any], limit: str) -> Callable[..., Any]:
    @wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if engine.calls is None:
            return method(*args, **kwargs)
        starts = limit == "step_timeout" and engine.global_steps == 0
        seconds = getattr(engine.config.training, "start_timeout" if starts else limit)
        with engine.calls.inside(engine, f"engine.{name}", seconds):
            return method(*args, **kwargs)

    return watched


def _numbers(ranks: list[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
