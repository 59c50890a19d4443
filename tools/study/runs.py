"""The runs of a study: each is an ``sdp train`` in its own process, and is not repeated once it is
done.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

from ...engine.environment.child import child_environment
from ...engine.errors import ConfigError, SDPError
from ..runs.run_files import read_run


class Run(Protocol):
    """A run of a study."""

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        ...

    def config(self, data: Path | None) -> dict[str, Any]:
        """The configuration as a user would write it. ``data`` is the prepared corpus of all
        runs.
        """
        ...


def result_of(run: Run, out: Path) -> dict[str, float] | None:
    """Return the last evaluation of a finished run, or None."""
    with contextlib.suppress(SDPError):
        found = read_run(out / run.name)
        if found.summary is not None and found.evaluations:
            return {key: value for key, value in found.evaluations[-1].items() if isinstance(value, int | float)}
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


def run_one(run: Run, out: Path, data: Path | None, train: Train = start_training) -> str | None:
    """Train ``run`` in its own process, unless it is done. Returns its last line if it failed.

    A run that was cut off, or that had another configuration, starts again.
    """
    path, folder = out / f"{run.name}.json", out / run.name
    config = json.dumps(run.config(data), indent=1) + "\n"
    made = path.read_text(encoding="utf-8") if path.exists() else None
    if made == config and result_of(run, out) is not None:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    path.write_text(config, encoding="utf-8")
    ended = train(path, folder)
    return None if ended.returncode == 0 else f"{run.name}: {_last_words(ended)}"


def _last_words(ended: subprocess.CompletedProcess[str]) -> str:
    return next(iter(reversed(ended.stderr.strip().splitlines())), f"exit code {ended.returncode}")


def run_all(wanted: Sequence[Run], out: Path, data: Path | None, jobs: int) -> Iterator[str]:
    """Run what is not done, ``jobs`` at a time, and yield the last lines of those that failed."""
    with ThreadPoolExecutor(jobs) as pool:
        ended = pool.map(lambda run: run_one(run, out, data), wanted)
        for number, (run, error) in enumerate(zip(wanted, ended, strict=True), 1):
            print(f"{number}/{len(wanted)} {error or run.name}", file=sys.stderr, flush=True)
            if error is not None:
                yield error


def prepared_data(config: Mapping[str, Any], out: Path) -> Path | None:
    """Return the corpus that all runs share, which a first run of one step prepares.

    Args:
        config: the configuration of a run that prepares its own data.
        out: the folder of the study.

    Returns:
        None if each run makes its data set in a second.
    """
    if "tokenizer" not in config["data"] or "path" in config["data"]:
        return None
    data = out / "corpus"
    if not data.exists():
        path, folder = out / "first.json", out / "first"
        first = deepcopy(dict(config))
        first["training"] = first.get("training", {}) | {"steps": 1, "evaluate_every": 0}
        shutil.rmtree(folder, ignore_errors=True)
        path.write_text(json.dumps(first), encoding="utf-8")
        ended = start_training(path, folder)
        if ended.returncode != 0:
            raise ConfigError(f"{path}: the run that prepares the corpus failed: {_last_words(ended)}")
        (folder / "corpus").rename(data)
    return data.resolve()


def figures_of(runs: Sequence[Run], out: Path) -> dict[str, Any] | None:
    """Return mean and sample deviation of the loss over the seeds that are done. None if none
    is.
    """
    results = [result for run in runs if (result := result_of(run, out)) is not None]
    if not results:
        return None
    values = [result["loss"] for result in results]
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "spread": spread, "seeds": len(values), "steps": results[0]["step"]}


def text_of(figures: Mapping[str, Any] | None, *, steps: bool = False) -> str:
    """Write :func:`figures_of` as a cell of a table."""
    if figures is None:
        return "–"
    spread = f" ± {figures['spread']:.4f}" if figures["spread"] is not None else ""
    return f"{figures['mean']:.4f}{spread}" + (f" ({figures['steps']:,} steps)" if steps else "")
