"""``python -m lab.network RATES RANKS COMMAND…``: run a command on hosts with links of each rate.

Every rank is a host of its own on this machine, and gets the environment variables that torchrun
sets. In the command, ``{rate}`` is replaced by the rate, for example in the name of a folder:

    python -m lab.network 100mbit,1gbit 4 sdp bench configs/quickstart.json --out runs/bench-{rate}
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from sdp.engine.errors import SDPError

from .hosts import Link, address, hosts, on_host, shape

PORT = 29500


def run(links: list[Link], ranks: int, command: list[str]) -> int:
    """Run the command once for each link. Returns 0, or the exit code of a rank that failed."""
    with hosts(ranks) as name:
        for link in links:
            shape(name, ranks, link)
            words = [word.replace("{rate}", link.rate) for word in command]
            started = [
                subprocess.Popen(on_host(name, rank, words), env=os.environ | variables(rank, ranks))
                for rank in range(ranks)
            ]
            if code := _wait(started):
                return code
    return 0


def _wait(started: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all ranks. If one fails, end the others and return its exit code."""
    while any(process.poll() is None for process in started):
        if code := next((process.returncode for process in started if process.poll()), 0):
            for process in started:
                process.terminate()
            return code
        time.sleep(0.2)
    return next((process.returncode for process in started if process.returncode), 0)


def variables(rank: int, ranks: int) -> dict[str, str]:
    """Return the environment variables of torchrun for one rank on a host of its own."""
    numbers = {"RANK": rank, "WORLD_SIZE": ranks, "GROUP_RANK": rank, "MASTER_PORT": PORT}
    named = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    names = {"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": "eth0"}
    return {**{key: str(value) for key, value in numbers.items()}, **named, **names}


def main(argv: list[str] | None = None) -> int:
    """Read the arguments and run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m lab.network", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rates", help="rates of the links, such as 100mbit,1gbit")
    parser.add_argument("ranks", type=int, help="number of ranks")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what every rank runs")
    args = parser.parse_args(argv)
    if args.ranks < 1 or not args.command:
        parser.error("give a number of ranks above 0, and a command")
    try:
        return run([Link.parse(rate) for rate in args.rates.split(",")], args.ranks, args.command)
    except SDPError as error:
        print(f"lab.network: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
