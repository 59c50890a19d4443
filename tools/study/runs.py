"""The runs of a study: each is an ``sdp train`` in its own process, and is not repeated once it is
done.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

from ...engine.environment.child import child_environment
from ...engine.errors import ConfigError, SDPError, escape
from ..runs.run_files import read_run
from ..shared.files import refuse_link, write_own
from .results import RunResult, SavedResults, config_digest, corpus_digest


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
    """Return the last evaluation of a finished run, or None. Its loss is infinite if it was NaN.

    ``least`` is the lowest loss of all evaluations after the first step, ``seconds`` how long the
    run trained (missing if that is not known).

    A run without a directory is looked up in ``results.json``.
    """
    with contextlib.suppress(SDPError):
        found = read_run(out / run.name)
        if found.summary is not None and found.evaluations:
            last = found.evaluations[-1]
            numbers = {key: value for key, value in last.items() if isinstance(value, int | float)}
            numbers.pop("seconds", None)  # of the evaluation
            seconds = found.summary.get("seconds")
            if isinstance(seconds, float) and 0 <= seconds < math.inf:
                numbers["seconds"] = seconds
            losses = [line["loss"] for line in found.evaluations if line["step"] and line.get("loss") is not None]
            return {"loss": math.inf, "least": min(losses, default=math.inf), **numbers}
    saved = None if os.path.lexists(out / run.name) else SavedResults.read(out)
    return saved.runs[run.name].numbers() if saved is not None and run.name in saved.runs else None


Train = Callable[[Path, Path], subprocess.CompletedProcess[str]]


def start_training(config: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Train ``config`` in its own process, and wait for it."""
    command = [sys.executable, "-P", "-m", "sdp", "train", str(config), "--dump-dir", str(folder)]
    # Nobody measures the memory of these runs. Returning freed memory to the system at once would
    # take a third of their time.
    allocator = {name: str(1 << 30) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")}
    environment = child_environment({"OMP_NUM_THREADS": "1", **allocator}, {})
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        _RUNNING.add(process)
        try:
            output, errors = process.communicate()
        finally:
            _RUNNING.discard(process)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


_RUNNING: set[subprocess.Popen[str]] = set()


@contextlib.contextmanager
def _runs_end_with_the_study(pool: ThreadPoolExecutor) -> Iterator[None]:
    """End all runs at SIGTERM, and start no other. The exit code is then 143.

    A terminal sends Ctrl-C to the runs too, but whoever ends the study by its number does not.
    """

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(_RUNNING):
            process.terminate()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def run_one(run: Run, out: Path, data: Path | None, train: Train = start_training) -> str | None:
    """Train ``run`` in its own process, unless it is done. Returns its last line if it failed.

    A run that was cut off, or that had another configuration, starts again.
    """
    path, folder = out / f"{run.name}.json", out / run.name
    config = json.dumps(run.config(data), indent=1) + "\n"
    made = read_own(path)
    if made == config and result_of(run, out) is not None:
        return None
    if made is None and not os.path.lexists(folder) and _is_saved(run, out, data):
        return None
    remove_run(folder, made)
    write_own(path, config)
    ended = train(path, folder)
    return None if ended.returncode == 0 else f"{run.name}: {_last_words(ended)}"


def _is_saved(run: Run, out: Path, data: Path | None) -> bool:
    """Whether ``results.json`` has the result of this run with this configuration."""
    saved = SavedResults.read(out)
    found = saved.runs.get(run.name) if saved is not None else None
    return found is not None and found.config == config_digest(run.config(data))


def read_own(path: Path) -> str | None:
    """Return the configuration that a study wrote, or None if there is none.

    Raises WriteError for a symbolic link, and ConfigError for what cannot be read.
    """
    refuse_link(path)
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); remove it") from None


def remove_run(folder: Path, config: str | None) -> None:
    """Remove the directory of a run that was cut off. ``config``: what the study wrote for it.

    Raises ConfigError for a directory that no run of a study made.
    """
    if not os.path.lexists(folder):
        return
    if config is None or folder.is_symlink() or not folder.is_dir():
        raise ConfigError(f"{folder}: exists, and this study did not make it; move it, or name another folder")
    shutil.rmtree(folder, ignore_errors=True)


def _last_words(ended: subprocess.CompletedProcess[str]) -> str:
    return next(iter(reversed(ended.stderr.strip().splitlines())), f"exit code {ended.returncode}")


def run_all(wanted: Sequence[Run], out: Path, data: Path | None, jobs: int) -> Iterator[str]:
    """Run what is not done, ``jobs`` at a time, and yield the last lines of those that failed.

    ``results.json`` in ``out`` gets the result of each run. Runs that it has are not repeated.
    Raises ConfigError if its runs learned from another corpus.
    """
    corpus = corpus_digest(data)
    saved = SavedResults.read(out)
    if saved is not None:
        saved.require_corpus(corpus, out)
    known = dict(saved.runs) if saved is not None else {}
    with ThreadPoolExecutor(jobs) as pool, _runs_end_with_the_study(pool):
        ended = pool.map(lambda run: run_one(run, out, data), wanted)
        for number, (run, error) in enumerate(zip(wanted, ended, strict=True), 1):
            print(escape(f"{number}/{len(wanted)} {error or run.name}"), file=sys.stderr, flush=True)
            if error is not None:
                yield error
            elif result := result_of(run, out):
                loss, least = (result[key] if math.isfinite(result[key]) else None for key in ("loss", "least"))
                digest = config_digest(run.config(data))
                known[run.name] = RunResult(
                    config=digest, step=int(result["step"]), loss=loss, least=least, seconds=result.get("seconds")
                )
                SavedResults(corpus, known).write(out)


def prepared_data(config: Mapping[str, Any], out: Path) -> Path | None:
    """Return the corpus that all runs share, which a first run of one step prepares.

    Args:
        config: the configuration of a run that prepares its own data.
        out: the folder of the study.

    Returns:
        None if each run makes its data set in a second.
    """
    section = config.get("data", {})
    if "tokenizer" not in section or "path" in section or "sources" in section:
        return None
    data = out / "corpus"
    if not data.exists():
        path, folder = out / "first.json", out / "first"
        first = deepcopy(dict(config))
        first["training"] = first.get("training", {}) | {"steps": 1, "evaluate_every": 0}
        # A schedule of maskings would need more steps. The corpus does not depend on it.
        masking = first.get("sdp", {}).get("masking")
        if isinstance(masking, list):
            first["sdp"]["masking"] = masking[-1]["masking"]
        remove_run(folder, read_own(path))
        write_own(path, json.dumps(first))
        ended = start_training(path, folder)
        if ended.returncode != 0:
            raise ConfigError(f"{path}: the run that prepares the corpus failed: {_last_words(ended)}")
        (folder / "corpus").rename(data)
    return data.resolve()


def figures_of(runs: Sequence[Run], out: Path, key: str = "loss") -> dict[str, Any] | None:
    """Return mean and sample deviation over the seeds that are done, and what each seed has.

    None if no seed is done.

    Args:
        runs: the runs of all seeds.
        out: the folder of the study.
        key: what is averaged, "loss" or "least" of :func:`result_of`.
    """
    results = [result_of(run, out) for run in runs]
    done = [result for result in results if result is not None]
    if not done:
        return None
    by_seed = [None if result is None else result[key] for result in results]
    return mean_and_spread([result[key] for result in done]) | {"steps": done[0]["step"], "by_seed": by_seed}


def mean_and_spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean, the sample deviation (None of one value, or of one that is infinite), and
    the number of values.
    """
    is_finite = all(map(math.isfinite, values))
    spread = statistics.stdev(values) if len(values) > 1 and is_finite else None
    return {"mean": statistics.mean(values), "spread": spread, "seeds": len(values)}


def text_of(figures: Mapping[str, Any] | None, *, steps: bool = False) -> str:
    """Write :func:`figures_of` as a cell of a table."""
    if figures is None:
        return "–"
    spread = f" ± {figures['spread']:.4f}" if figures["spread"] is not None else ""
    return f"{figures['mean']:.4f}{spread}" + (f" ({figures['steps']:,} steps)" if steps else "")
