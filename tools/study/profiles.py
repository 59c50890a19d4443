"""``sdp study profiles OUT``: which profile of holders over depth learns best at equal memory.

Every cell of a table is a capacity and a profile. Its figure is the held-out loss of the full model over
some seeds. Two columns are for comparison: the dense model, and a smaller dense model that needs no
more memory than a group does. A comparison means something only if the dense model beats the smaller
one by more than the seeds differ. The report says where it does not.

All groups of a run are in one process. A run is an ``sdp train`` with its own files in OUT. Finished
runs are not repeated, so a sweep can be stopped and continued.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...engine.environment.child import child_environment, usable_cores
from ...engine.errors import ConfigError, SDPError
from ..runs.run_files import read_run
from ..shared.arguments import positive_int
from .cells import CAPACITIES, DENSE, MATCHED, PROFILES, SMALLER, TASKS, Cell, Sweep
from .plot import plot_sweep


def result_of(cell: Cell, out: Path) -> dict[str, float] | None:
    """Return the last evaluation of a finished run, or None."""
    with contextlib.suppress(SDPError):
        run = read_run(out / cell.name)
        if run.summary is not None and run.evaluations:
            return {key: value for key, value in run.evaluations[-1].items() if isinstance(value, int | float)}
    return None


Train = Callable[[Path, Path], subprocess.CompletedProcess[str]]


def start_training(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Train ``config`` in its own process, and wait for it."""
    command = [sys.executable, "-P", "-m", "sdp", "train", str(config), "--dump-dir", str(folder)]
    # Nobody measures the memory of these runs. Returning freed memory to the system at once would
    # take a third of their time.
    allocator = {name: str(1 << 30) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")}
    return subprocess.run(
        command, capture_output=True, text=True, env=child_environment({"OMP_NUM_THREADS": "1", **allocator}, {})
    )


def run_cell(cell: Cell, out: Path, data: Path | None, train: Train = start_training) -> str | None:
    """Train ``cell`` in its own process, unless it is done. Returns its last line if it failed.

    A run that was cut off, or that had another configuration, starts again.
    """
    path, folder = out / f"{cell.name}.json", out / cell.name
    config = json.dumps(cell.config(data), indent=1) + "\n"
    made = path.read_text(encoding="utf-8") if path.exists() else None
    if made == config and result_of(cell, out) is not None:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    path.write_text(config, encoding="utf-8")
    ended = train(path, folder)
    return None if ended.returncode == 0 else f"{cell.name}: {_last_words(ended)}"


def _last_words(ended: subprocess.CompletedProcess[str]) -> str:
    return next(iter(reversed(ended.stderr.strip().splitlines())), f"exit code {ended.returncode}")


def table(sweep: Sweep, granularity: str, out: Path) -> tuple[str, list[dict[str, Any]]]:
    """Return the table of one granularity as Markdown, and its figures.

    They are means and sample deviations over the seeds that are done.
    """
    columns = [*sweep.whole, *sweep.parts]
    rows: dict[tuple[float, str], dict[str, Any]] = {}
    for capacity, matched, profile in itertools.product(sweep.capacities, sweep.lengths, columns):
        found = [sweep.cell(granularity, capacity, profile, seed, matched=matched) for seed in range(sweep.seeds)]
        if row := _row(found, out):
            rows[capacity, found[0].label] = {"capacity": capacity, "profile": found[0].label, **row}
    lines = [f"| C | {' | '.join(columns)} | size pays |", "|---" * (len(columns) + 2) + "|"]
    for capacity, matched in itertools.product(sweep.capacities, sweep.lengths):
        found = [
            rows.get((capacity, sweep.cell(granularity, capacity, profile, 0, matched=matched).label))
            for profile in columns
        ]
        pays = _pays(rows.get((capacity, DENSE)), found[columns.index(SMALLER)])
        name = f"{capacity:g}, {MATCHED}" if matched else f"{capacity:g}"
        lines.append(f"| {name} | {' | '.join(_figure(row, steps=matched) for row in found)} | {pays} |")
    return "\n".join(lines), list(rows.values())


def _row(cells: Sequence[Cell], out: Path) -> dict[str, Any] | None:
    """The figures of a run over the seeds that are done."""
    results = [result for cell in cells if (result := result_of(cell, out)) is not None]
    if not results:
        return None
    values = [result["loss"] for result in results]
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "spread": spread, "seeds": len(values), "steps": results[0]["step"]}


def _figure(row: Mapping[str, Any] | None, *, steps: bool) -> str:
    if row is None:
        return "–"
    spread = f" ± {row['spread']:.4f}" if row["spread"] is not None else ""
    return f"{row['mean']:.4f}{spread}" + (f" ({row['steps']:,} steps)" if steps else "")


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
        title = f"{sweep.task}, {granularity} level: held-out loss of the full model, mean ± deviation of {sweep.seeds} seeds"
        text.append(f"{title}\n\n{markdown}")
    (out / f"{sweep.task}.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    (out / f"{sweep.task}.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    plot_sweep(figures, "loss", out / f"{sweep.task}.png")
    return "\n\n".join(text)


def prepared_data(task: str, out: Path) -> Path | None:
    """Return the corpus that all runs share, which a first run of one step prepares.

    Returns None if each run makes its data set in a second.
    """
    if "tokenizer" not in TASKS[task].config["data"]:
        return None
    first = Cell(task, "", 1.0, DENSE, 0)
    data = out / "corpus"
    if not data.exists():
        path, folder = out / "first.json", out / "first"
        config = first.config(None)
        config["training"] |= {"steps": 1, "evaluate_every": 0}
        shutil.rmtree(folder, ignore_errors=True)
        path.write_text(json.dumps(config), encoding="utf-8")
        ended = start_training(path, folder)
        if ended.returncode != 0:
            raise ConfigError(f"{path}: the run that prepares the corpus failed: {_last_words(ended)}")
        (folder / "corpus").rename(data)
    return data.resolve()


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
            args.task, args.granularity, args.capacity, args.seeds, args.profile, args.controls, args.flop_matched
        )
        return cls(args.out, sweep, args.jobs)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of runs, tables and plots")
    parser.add_argument("--task", choices=list(TASKS), default="llama")
    parser.add_argument("--granularity", nargs="+", choices=["block", "neuron"], default=["block"])
    parser.add_argument("--capacity", nargs="+", type=float, choices=CAPACITIES, default=list(CAPACITIES))
    parser.add_argument("--profile", nargs="+", choices=PROFILES, default=[], help="default: all that the task has")
    parser.add_argument(
        "--controls", action="store_true", help="also the dense model with dropout, and with stochastic depth"
    )
    parser.add_argument(
        "--flop-matched", action="store_true", help="also runs with as many operations as the dense model's"
    )
    parser.add_argument("--seeds", type=positive_int, default=3)
    parser.add_argument(
        "--jobs", type=positive_int, default=usable_cores(), help="runs at a time, one thread each (default: the cores)"
    )


def run(args: argparse.Namespace) -> int:
    """Run what is missing of the sweep, and print its tables. Exit code 1: a run failed."""
    options = ProfileOptions.from_args(args)
    options.out.mkdir(parents=True, exist_ok=True)
    data = prepared_data(options.sweep.task, options.out)
    failed = list(_run_all(options.sweep.cells(), options.out, data, options.jobs))
    print(report(options.sweep, options.out))
    return 1 if failed else 0


def _run_all(wanted: Sequence[Cell], out: Path, data: Path | None, jobs: int) -> Iterator[str]:
    for cell in wanted:
        cell.config(data)  # traces here what the cell needs: threads would share the tracer's process group
    with ThreadPoolExecutor(jobs) as pool:
        for number, (cell, error) in enumerate(
            zip(wanted, pool.map(lambda cell: run_cell(cell, out, data), wanted), strict=True), 1
        ):
            print(f"{number}/{len(wanted)} {error or cell.name}", file=sys.stderr, flush=True)
            if error is not None:
                yield error
