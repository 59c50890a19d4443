"""The process that DeepSpeed's launcher or mpirun starts for each rank.

It completes the environment and runs ``sdp train``.

The command is ``python -m sdp.launcher.cluster.rank SLOTS HOST:PORT train WORD…``. ``quoting.py``
encodes its words. DeepSpeed numbers local ranks in another order if hosts differ. mpirun sets
neither the master's address nor the visible devices. This process sets the same variables under
every launcher.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ...engine.environment.child import thread_settings
from ...engine.environment.detect import detect, export
from ...engine.errors import LaunchError, format_error
from ..fatal_errors import report_fatal
from .hosts import parse_slots
from .numa import bind_near_device
from .quoting import decode
from .witness import run_witnessed


def main(argv: Sequence[str] | None = None) -> int:
    """Run this rank, and return its exit code."""
    slots_text, master, *words = map(decode, sys.argv[1:] if argv is None else argv)
    address, _, port = master.rpartition(":")
    try:
        settings = rank_variables(parse_slots(slots_text), address, port)
    except LaunchError as error:
        report_fatal(f"sdp: error: {format_error(error)}", error.exit_code, None)
        return error.exit_code
    # This counts the cores, so it comes before this process is bound to some of them.
    settings |= thread_settings(int(settings["LOCAL_WORLD_SIZE"]))
    bind_near_device(int(settings["LOCAL_RANK"]), settings["CUDA_VISIBLE_DEVICES"])
    environment = detect()
    assert environment is not None  # rank_variables has checked this
    return run_witnessed(words, settings, environment.rank)


def rank_variables(slots: Sequence[Sequence[int]], address: str, port: str) -> dict[str, str]:
    """Return the environment variables of this rank.

    Args:
        slots: the device indices of each host of the run.
        address: the address of rank 0.
        port: the port of rank 0.

    Raises:
        LaunchError: no launcher's variables were found, or they differ from the plan. They give the
            number of processes and the local rank.
    """
    export({"MASTER_ADDR": address, "MASTER_PORT": port})
    environment = detect()
    if environment is None:
        raise LaunchError("no launcher's variables found; this command is for sdp launch alone, use sdp train")
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
            " give hosts their slots in the hostfile alone, without mapping options in --launcher-args"
        )
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(len(slots[node])),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, slots[node])),
    }


if __name__ == "__main__":
    sys.exit(main())
