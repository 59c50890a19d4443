"""Signal the ranks of one run on this host.

The command is ``python -m sdp.launcher.cluster.stop HOST:PORT NUMBER``. HOST:PORT is the address of
the run's rank 0. DeepSpeed's runner answers Ctrl-C with ``pkill -f`` on every host. That ends all
DeepSpeed runs of the user there, before they can write a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def main() -> int:
    """Signal the ranks, and return the exit code: 1 if there are none."""
    found = ranks_of(*sys.argv[1].rsplit(":", 1))
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, int(sys.argv[2]))
    return 0 if found else 1


def ranks_of(address: str, port: str) -> list[int]:
    """Find the processes on this host that a launcher started with this master address.

    Their children inherit the address and are left out.
    """
    told = {f"MASTER_ADDR={address}".encode(), f"MASTER_PORT={port}".encode()}

    def is_told(pid: int) -> bool:
        with contextlib.suppress(OSError):
            return told <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        return False

    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if is_told(pid) and not is_told(_parent(pid))]


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
