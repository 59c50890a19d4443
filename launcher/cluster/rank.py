"""The process that DeepSpeed's launcher or mpirun starts for each rank. It becomes ``sdp train``.

First it sets the environment variables that ranks need, because the launchers do not set all of
them: DeepSpeed numbers local ranks in another order if hosts differ, and mpirun sets neither the
master's address nor the visible devices.

The command is ``python -m sdp.launcher.cluster.rank HOSTS HOST:PORT train WORD…``. Its words are
encoded, because DeepSpeed's runner joins a command with spaces, and the remote shell splits it
again. Encoded words consist of letters, digits and ``_./:,@-``. Every other byte becomes ``+`` and
two hexadecimal digits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn
from urllib.parse import quote, unquote

from ...engine.environment.detect import PARENT_PID, detect, export
from ...engine.environment.process import child_environment, thread_settings
from ...engine.errors import LaunchError, format_error
from ..fatal_errors import report_fatal
from ..rank_process import own_command, search_path
from .hosts import parse_slots

_EMPTY = "+"


def encode(word: str) -> str:
    """Encode a word so that no shell changes it: ``sdp.groups=4`` becomes ``sdp.groups+3D4``."""
    return quote(word, safe="/:,@", errors="surrogateescape").replace("~", "%7E").replace("%", "+") or _EMPTY


def decode(word: str) -> str:
    """Return the word that :func:`encode` has encoded."""
    return "" if word == _EMPTY else unquote(word.replace("+", "%"), errors="surrogateescape")


def is_safe(word: str) -> bool:
    """Whether shells and launchers pass ``word`` on unchanged."""
    return encode(word) == word and not word.startswith("-")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Replace this process by one rank of ``sdp train``, or end with an error.

    ``argv`` is HOSTS, HOST:PORT and words of ``sdp train``, encoded (default: ``sys.argv[1:]``).
    """
    hosts, master, *words = map(decode, sys.argv[1:] if argv is None else argv)
    address, _, port = master.rpartition(":")
    try:
        settings = rank_variables(parse_slots(hosts), address, port)
    except LaunchError as error:
        report_fatal(f"sdp: error: {format_error(error)}", error.exit_code, None)
        sys.exit(error.exit_code)
    settings |= thread_settings(int(settings["LOCAL_WORLD_SIZE"]))
    settings |= {PARENT_PID: str(os.getppid())}  # the rank ends with the launcher's process on this host
    command = [*own_command(), *words]
    os.execve(command[0], command, child_environment({**search_path(), **settings}, {}))


def rank_variables(slots: Sequence[Sequence[int]], address: str, port: str) -> dict[str, str]:
    """Return the environment variables of the rank that this process becomes.

    Args:
        slots: the device indices of each host of the run.
        address: the address of rank 0.
        port: the port of rank 0.

    Raises:
        LaunchError: no launcher has started this process, or the launcher started other processes
            than ``slots`` says.
    """
    export({"MASTER_ADDR": address, "MASTER_PORT": port})
    environment = detect()
    if environment is None:
        raise LaunchError("only sdp launch runs this command, and no launcher has started this process; use sdp train")
    total = sum(map(len, slots))
    if environment.world_size != total:
        raise LaunchError(
            f"{environment.source} started {environment.world_size} processes, but {total} were planned;"
            " start the run with sdp launch"
        )
    slot_of_rank = [(node, local) for node, host in enumerate(slots) for local in range(len(host))]
    node, local = slot_of_rank[environment.rank]
    if environment.source != "deepspeed" and environment.local_rank != local:
        raise LaunchError(
            f"{environment.source} gave rank {environment.rank} the local rank {environment.local_rank}, but {local}"
            f" on host number {node} was planned:"
            " set the slots of hosts only in the hostfile, without mapping options in --launcher-args"
        )
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(len(slots[node])),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, slots[node])),
    }


if __name__ == "__main__":
    main()
