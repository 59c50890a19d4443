"""Read what a launcher tells a rank of an elastic run: its group, and where the coordinator is."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import LaunchError, quote, shorten
from ..json_files import read_text_file

SLOT, LIFE, COORDINATOR = "SDP_ELASTIC_GROUP", "SDP_ELASTIC_LIFE", "SDP_ELASTIC_COORDINATOR"
TOKEN, TOKEN_FILE = "SDP_ELASTIC_TOKEN", "SDP_ELASTIC_TOKEN_FILE"
_LEAST_TOKEN, _MOST_TOKEN = 16, 1 << 16  # characters


@dataclass(frozen=True)
class ElasticEnvironment:
    """What a rank of an elastic run is told.

    Attributes:
        slot: the number of its SDP group.
        life: a name of this start of the group.
        host: the coordinator's host.
        port: the coordinator's port.
        token: the secret that the run's ranks share.
    """

    slot: int
    life: str
    host: str
    port: int
    token: bytes


def elastic_environment() -> ElasticEnvironment | None:
    """Return what the launcher told this rank, or None if the run is not elastic.

    The token is removed from the environment, because programs that the rank starts need none.

    Raises:
        LaunchError: a variable is missing or wrong.
    """
    slot, address = os.environ.get(SLOT), os.environ.get(COORDINATOR)
    if slot is None:
        return None
    if not address:
        raise LaunchError(f"{SLOT} is set, but {COORDINATOR} is not; set it to HOST:PORT of sdp coordinate")
    parts = split_address(address)
    if re.fullmatch("[0-9]{1,7}", slot) is None or parts is None:
        raise LaunchError(
            f"{SLOT}={quote(slot)} and {COORDINATOR}={quote(address)}: a number and HOST:PORT are expected"
        )
    return ElasticEnvironment(int(slot), os.environ.get(LIFE, ""), *parts, read_token())


def split_address(address: str) -> tuple[str, int] | None:
    """Return host and port of HOST:PORT, where IPv6 may have brackets. None if it is not that."""
    found = re.fullmatch(r"([!-~]+):([0-9]{1,5})", address)
    if found is None or int(found[2]) >= 1 << 16:
        return None
    return found[1].strip("[]"), int(found[2])


def hidden_loopback(host: str, address: str) -> str | None:
    """Return a warning if ``host`` is a name with a loopback ``address`` on this host, else None.

    Many systems give their own name an address such as 127.0.1.1, which no other host can reach.
    """
    if host == "localhost" or host == address or not address.startswith("127."):
        return None
    return f"{shorten(host)} is {address} on this host, which other hosts cannot reach; name an address instead"


def read_token() -> bytes:
    """Return the shared secret, from a file or from a variable.

    Raises:
        LaunchError: there is none, or it is too short.
    """
    path, token = os.environ.get(TOKEN_FILE), os.environ.pop(TOKEN, "")
    if path:
        try:
            token = read_text_file(Path(path), most_bytes=_MOST_TOKEN).strip()
        except (OSError, ValueError) as error:
            raise LaunchError(f"{TOKEN_FILE}={shorten(path)}: cannot be read ({error})") from None
    if len(token) < _LEAST_TOKEN:
        raise LaunchError(
            f"the coordinator needs a shared token of {_LEAST_TOKEN} characters or more; put it into a file and name "
            f"the file in {TOKEN_FILE}, or set {TOKEN}"
        )
    return token.encode()


def variables_of_group() -> dict[str, str]:
    """Return the variables that a launcher must give to all ranks of one group, on any host.

    Returns:
        The variables. Empty if ``SDP_ELASTIC_GROUP`` names no group.

    Raises:
        LaunchError: the token is not in a file. A launcher puts variables on command lines, which
            all users of a host can read, so the token itself must not be among them.
    """
    if (told := elastic_environment()) is None:
        return {}
    path = os.environ.get(TOKEN_FILE)
    if not path:
        raise LaunchError(f"{SLOT} is set, but {TOKEN_FILE} is not; put the token into a file that all hosts can read")
    address = f"[{told.host}]:{told.port}" if ":" in told.host else f"{told.host}:{told.port}"
    return {SLOT: str(told.slot), COORDINATOR: address, TOKEN_FILE: str(Path(path).absolute())}


def is_elastic_rank() -> bool:
    """Return whether this process belongs to a group of an elastic run.

    Either the group has its own launch, or the local launcher started the process.
    """
    return SLOT in os.environ


def gloo_interface() -> str | None:
    """Return the interface that the user chose for gloo, or None.

    Call this early: ranks of a group on one host are given the loopback interface later.
    """
    return os.environ.get("GLOO_SOCKET_IFNAME") or None
