"""Says which rank stands where, if ranks of a script wait for each other.

A script can let one rank alone make a call that all must make. ``sdp train`` watches its phases
itself.
"""

from __future__ import annotations

import atexit
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ..errors import PeerLostError
from .heartbeat import UNCHANGED_SECONDS, Heartbeat, Whereabouts

# The calls that wait for other ranks, by the key of `training` that limits them.
_CALLS = {
    "step_timeout": ("forward", "backward", "step", "finish_round", "check_holders"),
    "start_timeout": ("evaluate", "evaluate_subnetworks"),
    "save_timeout": (
        "save_checkpoint", "load_checkpoint", "full_state_dict", "save_pretrained", "save_16bit_model",
    ),
}  # fmt: skip
_ANSWER_SECONDS = UNCHANGED_SECONDS + 1.5
# Messages of gloo and NCCL if the process at the other end is gone. Some messages name its address
# at the start or at the end.
_ADDRESS = r"\[[0-9a-fA-F.:]+\]:\d+"
GONE = re.compile(
    rf"({_ADDRESS}: )?(Connection (reset|closed) by (remote )?peer|Broken pipe)( {_ADDRESS})?|ncclRemoteError"
    r"|Application timeout caused pair closure"
)
_SILENT = re.compile(r"Timed out waiting \d+ms|collective operation timeout")


class CallWatch:
    """Watches the calls of an engine until :meth:`stop`.

    A rank that waits writes where it stands to the store of the process group. A rank that fails,
    or that waits for longer than its call may take, reads where all ranks stand.
    """

    def __init__(self) -> None:
        self._is_inside = False
        store: Any = _get_default_store()
        # A client of its own: a rank may wait in the other one for minutes.
        self._store = dist.PrefixStore("sdp/calls", store.clone())
        self._store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
        self._beat = Heartbeat(dist.get_rank(), None, None, self._on_stall, self._publish)
        self._beat.at(0, "before its first step", None)
        atexit.register(self._at_exit)

    def stop(self) -> None:
        """Watch no longer."""
        atexit.unregister(self._at_exit)
        self._beat.stop()

    @contextmanager
    def inside(self, engine: Any, call: str, seconds: float) -> Iterator[None]:
        """A context for a call, which may take ``seconds``. Inner calls are parts of the outer one.

        Raises:
            PeerLostError: Another rank did not answer, or is gone. The message says who stands
                where.
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
            atexit.unregister(self._at_exit)  # the others shall know the call, and not the end of the script
            raise PeerLostError(f"{self._beat.whereabouts}: {lost[0]}: {self._everyone()}") from error
        finally:
            self._is_inside = False
            self._beat.at(engine.global_steps, f"in the script behind {call}", None)

    def _on_stall(self, message: str) -> None:
        print(f"sdp: error: {message}: {self._everyone()}", file=sys.stderr, flush=True)

    def _at_exit(self) -> None:
        self._beat.at(self._beat.whereabouts.step, "at the end of its script", None)
        self._publish(self._beat.whereabouts)

    def _publish(self, whereabouts: Whereabouts) -> None:
        with suppress(Exception):  # rank 0, which serves the store, may be gone
            self._store.set(str(whereabouts.rank), f"{whereabouts.phase} after step {whereabouts.step}")

    def _everyone(self) -> str:
        """Where all ranks stand, in words."""
        self._publish(self._beat.whereabouts)
        ranks: dict[str, list[int]] = defaultdict(list)
        deadline = time.monotonic() + _ANSWER_SECONDS
        for rank in range(dist.get_world_size()):
            ranks[self._place_of(rank, deadline)].append(rank)
        places = "; ".join(f"{_numbers(each)} {place}" for place, each in ranks.items())
        return f"{places}. All ranks must make the same calls, and read the same number of batches"

    def _place_of(self, rank: int, deadline: float) -> str:
        with suppress(Exception):
            while not self._store.check([str(rank)]) and time.monotonic() < deadline:
                time.sleep(0.1)
            if self._store.check([str(rank)]):
                return self._store.get(str(rank)).decode()
        return "gone, or stopped"


def watch_calls(engine: Any) -> None:
    """Let ``engine.calls`` watch the calls of an engine that wait for other ranks, unless it is
    None.
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
