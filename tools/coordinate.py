"""``sdp coordinate``: keep the membership of an elastic run whose groups are started one by one."""

from __future__ import annotations

import argparse
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..engine.config.load import load_config
from ..engine.config.schema import Config
from ..engine.elastic.coordination.coordinator import Coordinator
from ..engine.elastic.coordination.membership import Membership
from ..engine.environment.elastic import hidden_loopback, read_token, split_address
from ..engine.errors import ConfigError, LaunchError, PeerLostError, shorten
from ..launcher.notes import GROUPS_LOG, say, say_and_note
from ..launcher.own_files import refuse_link
from ..launcher.signals import caught_signals
from .shared.arguments import add_config_arguments, positive_int

_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class CoordinateOptions:
    """The options of ``sdp coordinate``.

    Attributes:
        config: the run's configuration.
        host: the address at which to listen.
        port: the port at which to listen.
        ranks: the number of ranks of each group.
        dump_dir: the run's directory. None: losses and returns are only printed.
    """

    config: Config
    host: str
    port: int
    ranks: int
    dump_dir: Path | None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> CoordinateOptions:
        """Take the parsed arguments.

        Raises ConfigError if the address is not HOST:PORT, or if the run is not elastic.
        """
        config = load_config(args.config, args.set)
        if not config.sdp.elastic.enabled:
            raise ConfigError("sdp.elastic.enabled: is false, and only an elastic run needs a coordinator; set it true")
        address = split_address(args.bind)
        if address is None:
            raise ConfigError(f"--bind {shorten(args.bind)}: expected HOST:PORT")
        return cls(config, *address, args.ranks, args.dump_dir)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(parser, "the run's JSON file, for sdp.groups and sdp.elastic")
    parser.add_argument(
        "--bind", metavar="HOST:PORT", default="127.0.0.1:29400", help="where to listen (default: 127.0.0.1:29400)"
    )
    parser.add_argument("--ranks", metavar="R", type=positive_int, default=1, help="ranks of each group (default: 1)")
    parser.add_argument(
        "--dump-dir", metavar="DIR", type=Path, help="the run's directory: losses and returns go to DIR/logs/groups.log"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until the run is over or a signal comes, and return the exit code.

    Raises:
        ConfigError: the address is not HOST:PORT, or the run is not elastic.
        LaunchError: there is no token, or the address cannot be listened on.
        PeerLostError: the run cannot go on.
    """
    options = CoordinateOptions.from_args(args)
    sdp = options.config.sdp
    coordinator = Coordinator(
        sdp.groups,
        options.ranks,
        read_token(),
        partial(say_and_note, _log(options.dump_dir)) if options.dump_dir is not None else say,
        host=options.host,
        port=options.port,
        heartbeat_seconds=sdp.elastic.heartbeat_seconds,
        wait_seconds=sdp.elastic.wait_seconds,
        min_groups=sdp.elastic.min_groups,
        last_call_seconds=sdp.elastic.last_call_seconds,
    )
    coordinator.start()
    if (warning := hidden_loopback(options.host, coordinator.host)) is not None:
        say(f"WARNING: --bind: {warning}")
    say(f"coordinating {sdp.groups} groups on {coordinator.address}")
    membership = coordinator.membership
    with caught_signals() as received:
        while not received and not membership.is_finished and membership.failure is None:
            time.sleep(_LOOK_SECONDS)
        time.sleep(_LOOK_SECONDS)  # the last messages are on their way
        if membership.is_finished and not received:
            _tell_absent_groups(membership, set(range(sdp.groups)), sdp.elastic.wait_seconds, received)
        coordinator.stop()
    if membership.failure is None:
        return 0 if membership.is_finished else 128 + signal.Signals(received[0])
    if membership.step:  # the coordinator has said it
        return PeerLostError.exit_code
    raise PeerLostError(f"the run cannot go on: {membership.failure}")


def _tell_absent_groups(membership: Membership, groups: set[int], seconds: float, received: list[int]) -> None:
    """Wait until groups that were away at the end of the run know that it is over.

    Without a coordinator these groups would fail, and would be launched again.

    Args:
        membership: knows which groups are alive, and which have been told.
        groups: all groups of the run.
        seconds: the longest wait.
        received: signals to this process, which end the wait.
    """
    end, was_said = time.monotonic() + seconds, False
    while not received and time.monotonic() < end and (away := groups - set(membership.living) - membership.told):
        if not was_said:
            names = ", ".join(map(str, sorted(away)))
            say(
                f"the run is over; waiting up to {seconds:g} s to tell this to the groups {names} (Ctrl-C: do not wait)"
            )
            was_said = True
        time.sleep(_LOOK_SECONDS)


def _log(dump_dir: Path) -> Path:
    """Return the path of the run's ``groups.log``, and make its directory.

    Raises:
        LaunchError: the directory cannot be made, or is a symbolic link.
    """
    logs = dump_dir / "logs"
    refuse_link(logs)
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--dump-dir {shorten(dump_dir)}: cannot be written ({error.strerror})") from None
    return logs / GROUPS_LOG
