"""``python -m lab.grid.peaks GRID OUT``: measure the memory of a rank in each cell of a grid.

The rank is one of the group that holds the most. It takes steps with real tensors on a CPU, while
the other ranks do not exist (torch's fake process group). The table has the bytes of its state
(weights, gradients, moments, frozen copies) and the peak of all live tensors.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from sdp.engine.config.load import load_config
from sdp.engine.distributed.fake_world import fake_world
from sdp.engine.distributed.mesh import mesh_of
from sdp.engine.errors import SDPError
from sdp.engine.placement.layout import Layout
from sdp.models.registry import build_model
from sdp.tools.runs.dataset import open_corpus

from ..memory import Task, measured
from .grid_file import Grid, GridRun, read_grid
from .runs import prepared_data

STATE = ("parameters", "gradients", "optimizer", "frozen")


def peaks(grid: Grid, out: Path) -> Iterator[tuple[str, str, int, int]]:
    """Yield row, column, and the bytes of state and peak of each cell of language models."""
    data, _ = prepared_data(grid.first_runs()[0], out)
    for row, column in grid.cells():
        raw = GridRun(grid, row, column, grid.choices(row, column)[0], 0).config(data)
        raw["model"] |= open_corpus(load_config(raw), out).facts
        config = load_config(raw)
        mesh = mesh_of(config, config.sdp.groups)
        layout = Layout.of(build_model(config.model), config, mesh)
        group = max(mesh.groups, key=lambda group: sum(info.numel for info in layout.held(group)))
        task = Task(config.model, raw["train_micro_batch_size_per_gpu"], config.data.tokens_per_sample, 1)
        with fake_world(mesh.rank(group), mesh.world_size):
            found = measured(task, raw)
        yield row, column, sum(found[kind] for kind in STATE), found["peak"]


def main() -> int:
    """Print the table as Markdown. Exit code 2 means that the grid is not valid."""
    parser = argparse.ArgumentParser(prog="python -m lab.grid.peaks", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("grid", metavar="GRID", type=Path, help="JSON file with base, rows and columns")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of the grid's runs, with its corpus")
    args = parser.parse_args()
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        print("| row | column | state, kB | peak, kB |\n|---|---|---:|---:|")
        for row, column, state, peak in peaks(read_grid(args.grid), args.out):
            print(f"| {row} | {column} | {state / 1e3:,.0f} | {peak / 1e3:,.0f} |", flush=True)
    except (SDPError, OSError) as error:
        print(f"lab.grid.peaks: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
