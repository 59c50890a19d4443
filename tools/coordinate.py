"""``sdp coordinate``: keep the membership of an elastic run whose groups are started one by one."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from dataclasses import dataclass

from ..engine.config.load import load_config
from ..engine.config.schema import Config
from ..engine.elastic.coordinator import Coordinator
from ..engine.environment.elastic import read_token, split_address
from ..engine.errors import ConfigError, PeerLostError, escape, shorten
from ..launcher.signals import caught_signals
from .shared.arguments import add_config_arguments, positive_int

_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class CoordinateOptions:
    """The options of ``sdp coordinate``.

    Attributes:
        config: the run's configuration.
        host, port: where to listen.
        ranks: ranks of each group.
    """

    config: Config
    host: str
    port: int
    ranks: int

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
        return cls(config, *address, args.ranks)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(parser, "the run's JSON file, for sdp.groups and sdp.elastic")
    parser.add_argument(
        "--bind", metavar="HOST:PORT", default="127.0.0.1:29400", help="where to listen (default: 127.0.0.1:29400)"
    )
    parser.add_argument("--ranks", metavar="R", type=positive_int, default=1, help="ranks of each group (default: 1)")


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
        _say,
        host=options.host,
        port=options.port,
        heartbeat_seconds=sdp.elastic.heartbeat_seconds,
        wait_seconds=sdp.elastic.wait_seconds,
    )
    coordinator.start()
    _say(f"coordinating {sdp.groups} groups on {coordinator.address}")
    membership = coordinator.membership
    with caught_signals() as received:
        while not received and not membership.is_finished and membership.failure is None:
            time.sleep(_LOOK_SECONDS)
        time.sleep(_LOOK_SECONDS)  # the last messages are on their way
        coordinator.stop()
    if membership.failure is not None:
        raise PeerLostError(f"the run cannot go on: {membership.failure}")
    return 128 + signal.Signals(received[0]) if received else 0


def _say(text: str) -> None:
    print(f"sdp: {escape(text)}", file=sys.stderr, flush=True)
