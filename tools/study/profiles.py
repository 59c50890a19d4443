"""``sdp study profiles OUT``: which profile of holders over depth learns best at equal memory.

Every cell of a table is a capacity and a profile. Its figure is the held-out loss of the full model
over some seeds. Two columns are for comparison: the dense model, and a smaller dense model that
needs no more memory than a group does. A comparison means something only if the dense model beats
the smaller one by more than the seeds differ. The report says where it does not.

With ``--learning-rate``, each method has each of the rates with seed 0. Its other seeds have the
rate with the lowest loss.

All groups of a run are in one process. A run is an ``sdp train`` with its own files in OUT.
Finished runs are not repeated, so a sweep can be stopped and continued.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...engine.environment.child import usable_cores
from ..shared.arguments import positive_int, positive_number
from ..shared.files import make_folder, write_own
from .cells import CAPACITIES, DENSE, MATCHED, PROFILES, SMALLER, TASKS, Cell, Sweep
from .plot import plot_sweep
from .runs import figures_of, prepared_data, result_of, run_all, text_of


def best_rate(sweep: Sweep, cell: Cell, out: Path) -> Cell | None:
    """Return the run of ``cell`` whose learning rate has the lowest loss.

    None if there are several rates and no run is done.
    """
    tried = sweep.tried(cell)
    if len(tried) == 1:
        return tried[0]
    results = [(result_of(run, out), run) for run in tried]
    done = [(result["loss"], run) for result, run in results if result is not None]
    return min(done, key=lambda one: one[0])[1] if done else None


def table(sweep: Sweep, granularity: str, out: Path) -> tuple[str, list[dict[str, Any]]]:
    """Return the table of one granularity as Markdown, and its figures.

    They are means and sample deviations over the seeds that are done.
    """
    columns = [*sweep.whole, *sweep.parts]
    rows: dict[tuple[float, str], dict[str, Any]] = {}
    for capacity, matched, profile in itertools.product(sweep.capacities, sweep.lengths, columns):
        first = best_rate(sweep, sweep.cell(granularity, capacity, profile, matched=matched), out)
        if first is not None and (row := figures_of([first, *sweep.others([first])], out)):
            tuned = {"rate": first.rate} if sweep.rates else {}
            rows[capacity, first.label] = {"capacity": capacity, "profile": first.label, **tuned, **row}
    lines = [f"| C | {' | '.join(columns)} | size pays |", "|---" * (len(columns) + 2) + "|"]
    for capacity, matched in itertools.product(sweep.capacities, sweep.lengths):
        found = [
            rows.get((capacity, sweep.cell(granularity, capacity, profile, matched=matched).label))
            for profile in columns
        ]
        pays = _pays(rows.get((capacity, DENSE)), found[columns.index(SMALLER)])
        name = f"{capacity:g}, {MATCHED}" if matched else f"{capacity:g}"
        lines.append(f"| {name} | {' | '.join(_text(row, steps=matched) for row in found)} | {pays} |")
    return "\n".join(lines), list(rows.values())


def _text(row: Mapping[str, Any] | None, *, steps: bool) -> str:
    rate = f", rate {row['rate']:g}" if row is not None and "rate" in row else ""
    return text_of(row, steps=steps) + rate


def _pays(dense: Mapping[str, Any] | None, smaller: Mapping[str, Any] | None) -> str:
    """Whether the dense model is better than the smaller one by more than twice the seeds'
    deviation.
    """
    if dense is None or smaller is None or dense["spread"] is None or smaller["spread"] is None:
        return "?"
    return "yes" if smaller["mean"] - dense["mean"] > 2 * max(dense["spread"], smaller["spread"]) else "no"


def report(sweep: Sweep, out: Path) -> str:
    """Return the tables of everything that is done as Markdown.

    Also writes them to OUT, with a plot and the figures as JSON.
    """
    text, figures = [], {}
    for granularity in sweep.granularities:
        markdown, figures[granularity] = table(sweep, granularity, out)
        title = (
            f"{sweep.task}, {granularity} level: held-out loss of the full model, mean ± deviation of {sweep.seeds} "
            "seeds"
        )
        text.append(f"{title}\n\n{markdown}")
    write_own(out / f"{sweep.task}.json", json.dumps(figures, indent=1) + "\n")
    write_own(out / f"{sweep.task}.md", "\n\n".join(text) + "\n")
    plot_sweep(figures, "loss", out / f"{sweep.task}.png")
    return "\n\n".join(text)


@dataclass(frozen=True)
class ProfileOptions:
    """The sweep, the folder of its runs, and how many run at a time."""

    out: Path
    sweep: Sweep
    jobs: int

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ProfileOptions:
        """Take the parsed arguments.

        Raises :class:`ConfigError` for what the task does not have.
        """
        sweep = Sweep(
            args.task,
            args.granularity,
            args.capacity,
            args.seeds,
            args.profile,
            args.controls,
            args.flop_matched,
            args.learning_rate,
        )
        return cls(args.out, sweep, args.jobs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of runs, tables and plots")
    parser.add_argument("--task", choices=list(TASKS), default="llama", help="what is trained (default: llama)")
    parser.add_argument(
        "--granularity",
        nargs="+",
        choices=["block", "neuron"],
        default=["block"],
        help="what a group holds parts of (default: block)",
    )
    parser.add_argument(
        "--capacity", nargs="+", type=float, choices=CAPACITIES, default=list(CAPACITIES), help="of SDP (default: all)"
    )
    parser.add_argument("--profile", nargs="+", choices=PROFILES, default=[], help="default: all that the task has")
    parser.add_argument(
        "--controls", action="store_true", help="also the dense model with dropout, and with stochastic depth"
    )
    parser.add_argument(
        "--flop-matched", action="store_true", help="also runs with as many operations as the dense model's"
    )
    parser.add_argument(
        "--learning-rate",
        nargs="+",
        type=positive_number,
        default=[],
        help="rates to try for each method (default: one, 0.006 for llama and 0.002 for resnet18)",
    )
    parser.add_argument("--seeds", type=positive_int, default=3, help="runs of every cell (default: 3)")
    parser.add_argument(
        "--jobs", type=positive_int, default=usable_cores(), help="runs at a time, one thread each (default: the cores)"
    )


def run(args: argparse.Namespace) -> int:
    """Run what is missing of the sweep, and print its tables. Exit code 1: a run failed."""
    options = ProfileOptions.from_args(args)
    make_folder(options.out)
    sweep, out = options.sweep, options.out
    data = prepared_data(Cell(sweep.task, "", 1.0, DENSE, 0).config(None), out)
    cells = sweep.cells()
    for cell in cells:
        cell.config(data)  # traces here what the cell needs: threads would share the tracer's process group
    first = list(dict.fromkeys(run for cell in cells for run in sweep.tried(cell)))
    failed = list(run_all(first, out, data, options.jobs))
    best = filter(None, (best_rate(sweep, cell, out) for cell in cells))
    failed += run_all(sweep.others(list(best)), out, data, options.jobs)
    print(report(sweep, out))
    return 1 if failed else 0
