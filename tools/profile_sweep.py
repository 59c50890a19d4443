"""``python -m sdp.tools.profile_sweep OUT``: which profile of holders over depth learns best at equal memory, all groups in one process.

Every cell of a table is a capacity and a profile, its figure the held-out loss of the full model over some seeds. Two columns say what
they are worth: the dense model, and *a smaller dense model that needs no more memory than a group does*. A comparison means something
only where the dense model beats the smaller one by more than the seeds differ; the report says where it does not.

A run is an ``sdp train`` with files of its own in OUT; finished ones are not repeated, so that a sweep can be stopped and gone on with.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..engine.errors import ConfigError, SDPError
from ..engine.units import find_units
from ..models.registry import build_model
from .metrics import read_run
from .plot import plot_sweep

GROUPS = 8
CAPACITIES = (0.25, 0.375, 0.5, 0.75)
NEURON_GROUPS = 4
DENSE, SMALLER = "dense", "smaller dense"
PROFILES = ("uniform", "linear", "depth")


@dataclass(frozen=True)
class Task:
    """A model small enough to be trained to where its size matters, and what is learned.

    ``engine``: "vectorized" where the model allows, else "reference". ``size``: the key of its section that a smaller dense model lowers,
    from ``full``. ``rows``: sequences or images of a step, over all groups.
    ``equal_units``: so many that each costs the same, by granularity; placed within every group's memory and with lists of holders; else
    by the mean of the groups.
    """

    config: dict[str, Any]
    engine: str
    size: str
    full: int
    profiles: tuple[str, ...]
    equal_units: Mapping[str, int]
    rows: int


_LLAMA = {
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 6e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WSD", "params": {"warmup_num_steps": 100, "total_num_steps": 1000, "decay_num_steps": 500}},
    "model": {
        "name": "llama", "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 4, "max_position_embeddings": 64, "tie_word_embeddings": True,
    },
    "data": {"sequence_length": 64, "tokenizer": "bytes"},
    "training": {"steps": 1000, "evaluate_batches": 16},
}  # fmt: skip
_RESNET = {
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.05}},
    "scheduler": {"type": "WSD", "params": {"warmup_num_steps": 20, "total_num_steps": 300, "decay_num_steps": 200}},
    "model": {"name": "resnet18", "stem": "cifar", "width": 8},
    "data": {"name": "digits"},
    "training": {"steps": 300, "evaluate_batches": 12, "recalibrate_batches": 20},
}
TASKS = {
    "llama": Task(_LLAMA, "vectorized", "num_hidden_layers", 8, PROFILES, {"block": 8, "neuron": 8 * 2 * NEURON_GROUPS}, 16),
    "resnet18": Task(_RESNET, "reference", "width", 8, ("uniform", "depth"), {}, 32),
}


@dataclass(frozen=True)
class Cell:
    """One run: of the ``dense`` model, a ``smaller dense`` one, or SDP by a profile."""

    task: str
    granularity: str  # "" for a dense model
    capacity: float
    profile: str
    seed: int

    @property
    def name(self) -> str:
        """Of its directory."""
        return "-".join(
            filter(None, [self.task, self.granularity, f"{self.capacity:g}", self.profile.replace(" ", "_"), f"seed{self.seed}"])
        )

    def config(self, data: Path | None) -> dict[str, Any]:
        """As a user would write it."""
        task = TASKS[self.task]
        config = json.loads(json.dumps(task.config))
        dense = self.granularity == ""
        if self.profile == SMALLER:
            config["model"][task.size] = smaller_size(self.task, self.capacity)
        groups = 1 if dense else GROUPS
        config["train_micro_batch_size_per_gpu"] = task.rows // groups
        config["steps_per_print"] = 10**6
        config["sdp"] = {"groups": groups, "engine": task.engine, "capacity": 1.0}
        if not dense:
            units = task.equal_units.get(self.granularity)
            profile = linear(units, self.capacity) if units and self.profile == "linear" else self.profile
            config["sdp"] |= {"capacity": self.capacity, "granularity": self.granularity, "profile": profile, "check_interval": 0}
            config["sdp"] |= {"placement": "balanced" if units else "cyclic"}
            config["sdp"] |= {"neuron_groups": NEURON_GROUPS} if self.granularity == "neuron" else {}
        config["training"] |= {"seed": self.seed, "evaluate_every": config["training"]["steps"], "save_every": 0}
        if data is not None:
            config["data"]["path"] = str(data)
        return config


@functools.cache
def smaller_size(task: str, capacity: float) -> int:
    """Layers or width of the largest dense model that has no more parameters than a group of this capacity."""
    chosen, ids = TASKS[task], {"vocab_size": 257} if task == "llama" else {"num_classes": 10, "image_size": 8}

    def built(size: int) -> nn.Module:
        return build_model({**chosen.config["model"], chosen.size: size}, **ids)

    def count(size: int) -> int:
        return sum(parameter.numel() for parameter in built(size).parameters())

    held = count(chosen.full) - (1 - capacity) * sum(unit.numel for unit in find_units(built(chosen.full), "auto"))
    return max(size for size in range(1, chosen.full + 1) if count(size) <= held)


def linear(units: int, capacity: float) -> list[int]:
    """Holders that fall along a straight line to one, or from all, with the mean that ``capacity`` asks for."""
    mean = capacity * GROUPS
    first = min(float(GROUPS), 2 * mean - 1)
    last = 2 * mean - first
    ideal = [first + (last - first) * unit / (units - 1) for unit in range(units)]
    steps = [round(sum(ideal[: unit + 1])) for unit in range(units)]
    return [after - before for before, after in itertools.pairwise([0, *steps])]


def cells(task: str, granularities: Sequence[str], capacities: Sequence[float], seeds: int) -> list[Cell]:
    """Every run of a sweep, seeds outermost, so that an unfinished one has whole tables of fewer seeds."""
    made = []
    for seed in range(seeds):
        made.append(Cell(task, "", 1.0, DENSE, seed))
        made += [Cell(task, "", capacity, SMALLER, seed) for capacity in capacities]
        made += [Cell(task, *key, seed) for key in itertools.product(granularities, capacities, TASKS[task].profiles)]
    return made


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
    command = [sys.executable, "-P", "-m", "sdp.launcher.main", "train", str(config), "--dump-dir", str(folder)]
    # Nobody asks for the memory of these runs: what is freed need not go back to the system at once, which takes a third of their time.
    allocator = {name: str(1 << 30) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")}
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **allocator})


def _last_words(ended: subprocess.CompletedProcess[str]) -> str:
    return next(iter(reversed(ended.stderr.strip().splitlines())), f"exit code {ended.returncode}")


def table(task: str, granularity: str, capacities: Sequence[float], seeds: int, out: Path) -> tuple[str, list[dict[str, Any]]]:
    """Markdown of one granularity, and its figures: mean and sample deviation over the seeds that are done."""
    profiles = TASKS[task].profiles
    rows: list[dict[str, Any]] = []
    for capacity in capacities:
        for profile in (DENSE, SMALLER, *profiles):
            key = (task, "" if profile in (DENSE, SMALLER) else granularity, 1.0 if profile == DENSE else capacity, profile)
            found = [result_of(Cell(*key, seed), out) for seed in range(seeds)]
            values = [result["loss"] for result in found if result is not None]
            if values:
                spread = statistics.stdev(values) if len(values) > 1 else None
                rows.append(
                    {"capacity": capacity, "profile": profile, "mean": statistics.mean(values), "spread": spread, "seeds": len(values)}
                )
    by_place = {(row["capacity"], row["profile"]): row for row in rows}
    lines = [f"| C | {' | '.join((DENSE, SMALLER, *profiles))} | size pays |", "|---" * (len(profiles) + 4) + "|"]
    for capacity in capacities:
        found = [by_place.get((capacity, profile)) for profile in (DENSE, SMALLER, *profiles)]
        lines.append(f"| {capacity:g} | {' | '.join(map(_figure, found))} | {_pays(found[0], found[1])} |")
    return "\n".join(lines), rows


def _figure(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "–"
    return f"{row['mean']:.4f}" + (f" ± {row['spread']:.4f}" if row["spread"] is not None else "")


def _pays(dense: Mapping[str, Any] | None, smaller: Mapping[str, Any] | None) -> str:
    """Whether the dense model is better than the smaller one by more than twice the seeds' deviation."""
    if dense is None or smaller is None or dense["spread"] is None or smaller["spread"] is None:
        return "?"
    return "yes" if smaller["mean"] - dense["mean"] > 2 * max(dense["spread"], smaller["spread"]) else "no"


def report(task: str, granularities: Sequence[str], capacities: Sequence[float], seeds: int, out: Path) -> str:
    """All tables of what is done, as Markdown; also written to OUT with a plot and the figures as JSON."""
    text, figures = [], {}
    for granularity in granularities:
        markdown, figures[granularity] = table(task, granularity, capacities, seeds, out)
        title = f"{task}, {granularity} level: held-out loss of the full model, mean ± deviation of {seeds} seeds"
        text.append(f"{title}\n\n{markdown}")
    (out / f"{task}.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    (out / f"{task}.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    plot_sweep(figures, "loss", out / f"{task}.png")
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
    parser = argparse.ArgumentParser(prog="python -m sdp.tools.profile_sweep", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", metavar="OUT", type=Path, help="directory of runs, tables and plots")
    parser.add_argument("--task", choices=list(TASKS), default="llama")
    parser.add_argument("--granularity", nargs="+", choices=["block", "neuron"], default=["block"])
    parser.add_argument("--capacity", nargs="+", type=float, choices=CAPACITIES, default=list(CAPACITIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, one thread each")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        data = prepared_data(args.task, args.out)
    except ConfigError as error:
        parser.error(str(error))
    failed = list(_run_all(cells(args.task, args.granularity, args.capacity, args.seeds), args.out, data, args.jobs))
    print(report(args.task, args.granularity, args.capacity, args.seeds, args.out))
    return 1 if failed else 0


def _run_all(wanted: Sequence[Cell], out: Path, data: Path | None, jobs: int) -> Iterator[str]:
    with ThreadPoolExecutor(jobs) as pool:
        for number, (cell, error) in enumerate(zip(wanted, pool.map(lambda cell: run_cell(cell, out, data), wanted), strict=True), 1):
            print(f"{number}/{len(wanted)} {error or cell.name}", file=sys.stderr, flush=True)
            if error is not None:
                yield error


if __name__ == "__main__":
    sys.exit(main())
