"""Start the groups of an elastic run on this host, serve the coordinator, and restart groups that
are lost. Or start one group, for a coordinator that runs elsewhere.
"""

from __future__ import annotations

import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..engine.elastic.coordination.coordinator import Coordinator
from ..engine.elastic.coordination.membership import Membership
from ..engine.environment.child import allocator_settings, child_environment, loopback_settings, thread_settings
from ..engine.environment.detect import LOOPBACK, local_environment
from ..engine.environment.elastic import COORDINATOR, LIFE, SLOT, TOKEN
from ..engine.environment.launchers import LISTENING_SOCKET
from .fatal_errors import described_end
from .notes import GROUPS_LOG, say, say_and_note, show
from .own_command import own_command, search_path
from .rank_process import RankProcess
from .restarts import Group, RestartBudget
from .signals import GRACE_SECONDS, caught_signals
from .stopped import StoppedRanks, describe

_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class ElasticRun:
    """What to start, and how often again.

    Attributes:
        groups: the number of SDP groups.
        ranks: the ranks of each group.
        heartbeat_seconds: see ``sdp.elastic``.
        wait_seconds: see ``sdp.elastic``.
        min_groups: see ``sdp.elastic``.
        last_call_seconds: see ``sdp.elastic``.
        restarts: see ``sdp.elastic``.
        restart_window: see ``sdp.elastic``.
    """

    groups: int
    ranks: int
    heartbeat_seconds: float = 5.0
    wait_seconds: float = 600.0
    min_groups: int | None = None
    last_call_seconds: float = 30.0
    restarts: int = 3
    restart_window: float = 3600.0


def start_elastic(
    argv: Sequence[str],
    run: ElasticRun,
    log_dir: Path,
    *,
    on_cpu: bool = True,
    stop_seconds: float = GRACE_SECONDS,
    command: Sequence[str] | None = None,
) -> int:
    """Run ``sdp`` as groups of processes on this host, with a coordinator, and return the exit code
    of the whole.

    A group whose process ends before the run is over is killed and started again. The other groups
    go on. A signal to this process is passed on to all ranks. A second one kills them at once.

    Args:
        argv: the words that follow ``sdp``.
        run: the groups.
        log_dir: the directory of the logs. Rank R of all ranks has ``rank-R.log``.
        on_cpu: give the ranks glibc's allocator settings for a CPU.
        stop_seconds: from a signal to this process until the ranks are killed.
        command: what to run in place of ``python -m sdp``.

    Returns:
        0 if a group finished the run. Else 128 + the signal that ended the run, 2 for the user's
        mistake, and 1 for other failures.

    Raises:
        LaunchError: a process cannot be started, or its log cannot be written.
    """
    token = secrets.token_hex(32)
    note = partial(say_and_note, log_dir / GROUPS_LOG)
    coordinator = Coordinator(
        run.groups,
        run.ranks,
        token.encode(),
        note,
        heartbeat_seconds=run.heartbeat_seconds,
        wait_seconds=run.wait_seconds,
        min_groups=run.min_groups,
        last_call_seconds=run.last_call_seconds,
    )
    coordinator.start()
    told = {TOKEN: token, COORDINATOR: coordinator.address}
    defaults = loopback_settings() | (allocator_settings() if on_cpu else {})
    started = _Started([*(command or own_command()), *argv], run, log_dir, range(run.groups), told, defaults)
    started.membership = coordinator.membership
    try:
        return started.run(stop_seconds)
    finally:
        coordinator.stop()


def start_group(
    argv: Sequence[str],
    run: ElasticRun,
    log_dir: Path,
    slot: int,
    token: bytes,
    *,
    on_cpu: bool = True,
    stop_seconds: float = GRACE_SECONDS,
    command: Sequence[str] | None = None,
) -> int:
    """Run ``sdp`` as the processes of one group on this host, and return its exit code.

    If the group is lost, it is started again as by :func:`start_elastic`, which documents the other
    arguments. Environment variables name the coordinator.

    Args:
        slot: the number of the group.
        token: the secret that the run's ranks share.
    """
    defaults = allocator_settings() if on_cpu else {}
    started = _Started([*(command or own_command()), *argv], run, log_dir, [slot], {TOKEN: token.decode()}, defaults)
    return started.run(stop_seconds)


class _Started:
    """The groups ``slots`` of a run, which are started here.

    ``told`` and ``defaults`` are variables of the ranks, see
    :func:`~sdp.engine.environment.child.child_environment`.
    """

    def __init__(
        self,
        command: Sequence[str],
        run: ElasticRun,
        log_dir: Path,
        slots: Sequence[int],
        told: Mapping[str, str],
        defaults: Mapping[str, str],
    ):
        self._command, self._run, self._log_dir = command, run, log_dir
        self._told, self._defaults = told, defaults
        self._groups = [Group(slot, RestartBudget(run.restarts, run.restart_window)) for slot in slots]
        self.membership: Membership | None = None  # if the coordinator runs here
        self._starts = 0

    def run(self, stop_seconds: float) -> int:
        """Run the groups to their end, and return the exit code of the whole."""
        with caught_signals() as received:
            try:
                self.watch(received, stop_seconds)
            finally:
                self._clear()
        return self.exit_code(received)

    def watch(self, received: list[int], stop_seconds: float) -> None:
        """Start groups, and start lost ones again, until none runs and none is due."""
        known, end = 0, float("inf")
        count = "its group" if len(self._groups) == 1 else f"{len(self._groups)} groups"
        stopped: StoppedRanks | None = None
        while any(group.ranks or group.due is not None for group in self._groups):
            if len(received) > known:
                if known:
                    return
                known, end = len(received), time.monotonic() + stop_seconds
                say(f"{signal.Signals(received[0]).name} received, ending {count} (again: kill them)")
                self._signal_all(received[0])
                stopped = StoppedRanks([rank for group in self._groups for rank in group.ranks])
            if stopped is not None and (rank := stopped.for_too_long()) is not None:
                say(f"{describe(rank)}: it is killed")
                rank.kill()
            if time.monotonic() > end:
                return
            for group in self._groups:
                if group.due is not None and time.monotonic() >= group.due:
                    group.due = None
                    self._start(group)
                self._look_at(group, stops=bool(received))
            time.sleep(_POLL_SECONDS)

    def _start(self, group: Group) -> None:
        self._starts += 1
        settings = {**search_path(), **thread_settings(len(self._groups) * self._run.ranks), **self._told}
        group.life = f"{self._starts}-{secrets.token_hex(8)}"
        settings |= {SLOT: str(group.slot), LIFE: group.life}
        with socket.create_server((LOOPBACK, 0)) as listening:
            port, handle = listening.getsockname()[1], listening.fileno()
            for inside in range(self._run.ranks):
                own = local_environment(inside, self._run.ranks, port).variables()
                own |= {LISTENING_SOCKET: str(handle)} if inside == 0 else {}
                environ = child_environment({**settings, **own}, self._defaults)
                number, handles = group.slot * self._run.ranks + inside, [handle] if inside == 0 else []
                start = partial(RankProcess.start, number, self._command, environ, self._log_dir, handles)
                group.ranks.append(start(may_show_progress=inside == 0))

    def _look_at(self, group: Group, *, stops: bool) -> None:
        """If a process of the group has ended, end the group, and decide whether to start it
        again.
        """
        ended = [rank for rank in group.ranks if rank.has_ended()]
        if not ended:
            return
        failed = next((rank for rank in ended if rank.process.returncode != 0), None)
        if failed is None and len(ended) < len(group.ranks):
            return  # the others are about to end, too
        cause = failed.failure() if failed is not None else None
        self._kill(group)
        if failed is None or cause is None:
            group.ranks, group.exit_code = [], 0
            self._finish_others()
            return
        code = cause.exit_code
        text = described_end(failed.rank, code, failed.whereabouts)
        last = (cause.text.strip().splitlines() or [""])[-1]
        reason = f" ({last.removeprefix('sdp: error: ')})" if code >= 0 and last else ""
        for rank in group.ranks:
            rank.forget()
        group.ranks, group.exit_code = [], code if code in (2, 1) or code > 128 else 1
        what = f"group {group.slot}: {text}{reason}"
        if stops:
            return
        if code > 128:  # it was told to stop, and the others go on
            self._gone(group)
        elif code == 2 and self._has_begun_without(group):
            self._gone(group)
            say(f"{what}; it is not started again, and the others go on")
        elif code == 2:
            show(cause.text.strip())
            self._give_up(code)
        else:
            self._plan_restart(group, what)

    def _plan_restart(self, group: Group, what: str) -> None:
        now = time.monotonic()
        if self._is_over or (self.membership is not None and self.membership.failure is not None):
            say(what)
            return
        wait = group.restarts.take(now)
        if wait is None:
            window, count = f"{self._run.restart_window:g} s", group.restarts.used
            self._gone(group)
            say(f"{what}; it is not started again ({count} restarts in {window}, sdp.elastic.restarts)")
            return
        group.due = now + wait
        say(f"{what}; restart {group.restarts.used} of {self._run.restarts} in {wait:g} s")

    def _gone(self, group: Group) -> None:
        if self.membership is not None:
            self.membership.gone.add(group.slot)

    def _has_begun_without(self, group: Group) -> bool:
        """Whether the others have begun, and this start of the group has not met them."""
        now = self.membership
        return now is not None and now.generation is not None and not now.lives.has_met(group.life)

    @property
    def _is_over(self) -> bool:
        """Whether a group has finished the run."""
        return any(group.exit_code == 0 for group in self._groups)

    def _finish_others(self) -> None:
        for group in self._groups:
            group.due = None  # nobody needs a group that would be started now

    def _give_up(self, code: int) -> None:
        """End the run for a mistake of the user's, which every group would make."""
        for group in self._groups:
            self._kill(group)
            group.ranks, group.due, group.exit_code = [], None, code

    def _signal_all(self, number: int) -> None:
        for group in self._groups:
            group.due = None
            for rank in group.ranks:
                if not rank.has_ended():
                    rank.process.send_signal(number)

    def _kill(self, group: Group) -> None:
        for rank in group.ranks:
            if not rank.has_ended():
                rank.kill()
        _wait_for(lambda: all(rank.has_ended() for rank in group.ranks))

    def _clear(self) -> None:
        """Leave no process behind, and no file through which ranks talked to this process."""
        for group in self._groups:
            self._kill(group)
            for rank in group.ranks:
                rank.forget()

    def exit_code(self, received: list[int]) -> int:
        """Return the exit code of the whole run."""
        codes = [group.exit_code for group in self._groups if group.exit_code is not None]
        if 0 in codes:
            return 0
        if received:
            return 128 + received[0]
        return max(codes) if codes and min(codes) > 128 else 2 if 2 in codes and 1 not in codes else 1


def _wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(_POLL_SECONDS)
