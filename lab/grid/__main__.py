"""``python -m lab.grid GRID OUT``: train the missing runs of a grid, and print its table.

Finished runs are not repeated, so a grid can be stopped and continued. OUT/results.json is enough
to continue on another machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from sdp.engine.errors import SDPError

from .grid_file import read_grid
from .report import later_runs, report
from .runs import Results, prepared_data, run_all


def main() -> int:
    """Run the command. Exit code 1 means that a run failed, and 2 that the grid is not valid."""
    parser = argparse.ArgumentParser(prog="python -m lab.grid", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("grid", metavar="GRID", type=Path, help="JSON file with base, rows and columns")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of runs, table and plot")
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="runs at a time, one thread each (default: the cores)",
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile the blocks of models; results differ by round-off"
    )
    args = parser.parse_args()
    try:
        grid, out = read_grid(args.grid, compiled=args.compile), args.out
        out.mkdir(parents=True, exist_ok=True)
        data, corpus = prepared_data(grid.first_runs()[0], out)
        results = Results(out / "results.json", corpus)
        failed = list(run_all(grid.first_runs(), out, data, results, args.jobs, compiled=args.compile))
        failed += run_all(list(later_runs(grid, results)), out, data, results, args.jobs, compiled=args.compile)
        print(report(grid, out, results, data))
    except (SDPError, OSError) as error:
        print(f"lab.grid: error: {error}", file=sys.stderr)
        return 2
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
