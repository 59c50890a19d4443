"""Starts a run again from its newest checkpoint after a rank or a host was lost."""

from __future__ import annotations

import fcntl
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..engine.batch.size import BatchSize
from ..engine.distributed.mesh import mesh_of
from ..engine.errors import LaunchError, SDPError, format_error
from ..engine.placement.profiles import capacities
from .degrees import Degrees
from .fatal_errors import say

LOCK = ".lock"  # in the dump directory; whoever writes the run's files holds it
MOST_SECONDS = 60.0  # before a restart; the first one waits for a second
# If a host is gone, a file server may keep the host's lock for 90 s.
_LOCK_SECONDS = 120.0
_POLL_SECONDS = 0.2


class End(NamedTuple):
    """How a start of the run ended. After the loss of a rank or a host, the run may start again.

    Attributes:
        code: the exit code.
        is_loss: whether a rank or a host was lost.
    """

    code: int
    is_loss: bool


def run_again(
    start: Callable[[Sequence[str]], End],
    restarts: int,
    received: Sequence[int],
    prepare: Callable[[], Sequence[str]] = list,
) -> int:
    """Run to the end, start again after the loss of a rank or a host, and return the exit code.

    A run is not started again after a mistake of the user, or after a signal.

    Args:
        start: runs ``sdp train`` with further arguments, and returns how the run ended.
        restarts: the largest number of restarts.
        received: the signals that this process has received so far.
        prepare: called before each restart. It returns further arguments for ``sdp train``.
    """
    words: Sequence[str] = ()
    for restart in itertools.count(1):
        end = start(words)
        if not end.is_loss or received or restart > restarts:
            return end.code
        seconds = min(2.0 ** (restart - 1), MOST_SECONDS)
        say(f"restart {restart} of {restarts} from the newest checkpoint in {seconds:g} s")
        waits_until = time.monotonic() + seconds
        while not received and time.monotonic() < waits_until:
            time.sleep(_POLL_SECONDS)
        try:
            words = () if received else ("--resume", *prepare())
        except SDPError as error:
            say(f"error: the run is not started again: {format_error(error)}")
            return end.code
        if received:
            return 128 + received[0]
    raise AssertionError


def await_lock(dump_dir: Path, received: Sequence[int]) -> None:
    """Wait until no process writes the run's files any more, but at most two minutes.

    Ranks notice late that another host is gone, so they may still write. A signal ends the wait.
    """
    waits_until = time.monotonic() + _LOCK_SECONDS
    while not received and time.monotonic() < waits_until:
        try:
            with (dump_dir / LOCK).open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_POLL_SECONDS)
        except OSError:  # the directory has no such file, or its file system has no locks
            return


def on_fewer_ranks(degrees: Degrees, started: int, left: int) -> tuple[int, list[str]]:
    """Decide how a run continues if only ``left`` of its ``started`` ranks are left.

    The fsdp and tp degrees and the samples of a step stay the same. The number of groups becomes as
    large as the ranks allow, but not larger than before. ``degrees`` are those of the first start.

    Returns:
        The number of ranks to use, and further arguments for ``sdp train``.

    Raises:
        LaunchError: the ranks are too few, or a setting depends on the number of groups.
        ConfigError: fewer groups do not have room for all units.
    """
    config, sdp = degrees.config, degrees.config.sdp
    size = started // sdp.groups
    groups = min(left // size, sdp.groups)
    if groups == sdp.groups:
        return started, []
    if groups == 0:
        raise LaunchError(f"{left} ranks are left, but a group needs {size} (fsdp * tp)")
    for key, depends in (
        ("sdp.placement", isinstance(sdp.placement, dict)),
        ("sdp.capacity", isinstance(sdp.capacity, list)),
    ):
        if depends:
            raise LaunchError(f"{key} is given for each of {sdp.groups} groups, but only {groups} groups are left")
    batch, data_ranks = BatchSize.resolve(config, mesh_of(config, started)), groups * size // degrees.tp
    accumulation, rest = divmod(batch.train, batch.micro * data_ranks)
    if rest:
        raise LaunchError(
            f"train_batch_size {batch.train} is not a multiple of train_micro_batch_size_per_gpu {batch.micro} * "
            f"{data_ranks} data ranks that are left"
        )
    settings = {
        "train_batch_size": batch.train,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": accumulation,
    }
    smaller = config.model_copy(update={**settings, "sdp": sdp.model_copy(update={"groups": groups})})
    capacities(smaller.sdp)
    Degrees(smaller, size // degrees.tp).check(groups * size, "ranks that are left")
    words = ["--groups", str(groups), "--fsdp", str(size // degrees.tp)]
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    return groups * size, words
