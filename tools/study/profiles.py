"""``python -m sdp.tools.study.profiles OUT``: which profile of holders over depth learns best at equal memory, all groups in one process.

Every cell of a table is a capacity and a profile, its figure the held-out loss of the full model over some seeds. Two columns say what
they are worth: the dense model, and *a smaller dense model that needs no more memory than a group does*. A comparison means something
only where the dense model beats the smaller one by more than the seeds differ; the report says where it does not.

A run is an ``sdp train`` with files of its own in OUT; finished ones are not repeated, so that a sweep can be stopped and gone on with.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ...engine.errors import ConfigError, SDPError
from ..runs.plot import plot_sweep
from ..runs.run_files import read_run
from .cells import CAPACITIES, DENSE, MATCHED, PROFILES, SMALLER, TASKS, Cell, Sweep


def result_of(cell: Cell, out: Path) -> dict[str, float] | None:
    """What a finished run reached, or None."""
    with contextlib.suppress(SDPError):
        run = read_run(out / cell.name)
        if run.summary is not None and run.evaluations:
            return {key: value for key, value in run.evaluations[-1].items() if isinstance(value, int | float)}
    return None


def run_cell(cell: Cell, out: Path, data: Path | None) -> str | None:
    """Train ``cell`` in a process of its own, unless it is done; its last words where it failed.

    One that was cut off, or was made by another configuration, begins anew.
    """
    path, folder = out / f"{cell.name}.json", out / cell.name
    config = json.dumps(cell.config(data), indent=1) + "\n"
    made = path.read_text(encoding="utf-8") if path.exists() else None
    if made == config and result_of(cell, out) is not None:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    path.write_text(config, encoding="utf-8")
    ended = _train(path, folder)
    return None if ended.returncode == 0 else f"{cell.name}: {_last_words(ended)}"


def _train(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "sdp", "train", str(config), "--dump-dir", str(folder)]
    # Nobody asks for the memory of these runs: what is freed need not go back to the system at once, which takes a third of their time.
    allocator = {name: str(1 << 30) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")}
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **allocator}
    )


def _last_words(ended: subprocess.CompletedProcess[str]) -> str:
    return next(iter(reversed(ended.stderr.strip().splitlines())), f"exit code {ended.returncode}")


def table(sweep: Sweep, granularity: str, out: Path) -> tuple[str, list[dict[str, Any]]]:
    """Markdown of one granularity, and its figures: mean and sample deviation over the seeds that are done."""
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
    """The figures of one run of several seeds, as far as they are done."""
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
    """Whether the dense model is better than the smaller one by more than twice the seeds' deviation."""
    if dense is None or smaller is None or dense["spread"] is None or smaller["spread"] is None:
        return "?"
    return "yes" if smaller["mean"] - dense["mean"] > 2 * max(dense["spread"], smaller["spread"]) else "no"


def report(sweep: Sweep, out: Path) -> str:
    """All tables of what is done, as Markdown; also written to OUT with a plot and the figures as JSON."""
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
    """The corpus that all runs share: made by a first run of no length. None where a set is made anew in a second by each."""
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
        ended = _train(path, folder)
        if ended.returncode != 0:
            raise ConfigError(f"{path}: the run that prepares the corpus failed: {_last_words(ended)}")
        (folder / "corpus").rename(data)
    return data.resolve()


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing of the sweep, then print its tables."""
    parser = argparse.ArgumentParser(
        prog="python -m sdp.tools.study.profiles", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="directory of runs, tables and plots")
    parser.add_argument("--task", choices=list(TASKS), default="llama")
    parser.add_argument("--granularity", nargs="+", choices=["block", "neuron"], default=["block"])
    parser.add_argument("--capacity", nargs="+", type=float, choices=CAPACITIES, default=list(CAPACITIES))
    parser.add_argument(
        "--profile", nargs="+", choices=PROFILES, default=[], help="which profiles (default: all that the task has)"
    )
    parser.add_argument(
        "--controls", action="store_true", help="the dense model with dropout, and with stochastic depth, too"
    )
    parser.add_argument(
        "--flop-matched", action="store_true", help="also runs of as many operations as the dense model's"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, one thread each")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        sweep = Sweep(
            args.task, args.granularity, args.capacity, args.seeds, args.profile, args.controls, args.flop_matched
        )
        data = prepared_data(args.task, args.out)
    except ConfigError as error:
        parser.error(str(error))
    failed = list(_run_all(sweep.cells(), args.out, data, args.jobs))
    print(report(sweep, args.out))
    return 1 if failed else 0


def _run_all(wanted: Sequence[Cell], out: Path, data: Path | None, jobs: int) -> Iterator[str]:
    for cell in wanted:
        cell.config(data)  # what is traced for it is traced here: threads would share the process group of that
    with ThreadPoolExecutor(jobs) as pool:
        for number, (cell, error) in enumerate(
            zip(wanted, pool.map(lambda cell: run_cell(cell, out, data), wanted), strict=True), 1
        ):
            print(f"{number}/{len(wanted)} {error or cell.name}", file=sys.stderr, flush=True)
            if error is not None:
                yield error


if __name__ == "__main__":
    sys.exit(main())
