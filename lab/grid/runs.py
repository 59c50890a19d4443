"""Runs a grid: each run is a process, and a run with a known result is not repeated."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError
from sdp.engine.files import write_whole
from sdp.engine.json_files import JsonError, read_json_file
from sdp.tools.runs.dataset import open_corpus
from sdp.tools.runs.run_files import read_run

from .grid_file import GridRun

ROOT = Path(__file__).parents[2]


class RunResult(BaseModel):
    """The result of one run.

    Attributes:
        config: The digest of the configuration, without the place of the corpus.
        step: The number of steps.
        loss: The held-out loss of the full model after the last step. None stands for NaN.
        least: The lowest held-out loss of all evaluations. If None, use ``loss``.
        seconds: How long the run took. None if that is not known.
    """

    config: str
    step: int
    loss: float | None
    least: float | None = None
    seconds: Annotated[float, Field(ge=0)] | None = None

    def counted(self, *, least: bool) -> float:
        """Return the loss for the tables: the lowest or the last one. NaN counts as infinite."""
        loss = self.least if least and self.least is not None else self.loss
        return math.inf if loss is None else loss


class _Saved(BaseModel):
    corpus: str | None = None
    runs: dict[str, RunResult] = {}


class Results:
    """The results of a grid's runs. They are in ``results.json``, so another machine can continue.

    Args:
        path: The file. It may be missing.
        corpus: The digest of the corpus of all runs, None if runs make their own data.

    Raises:
        ConfigError: The file is damaged, or its runs learned from another corpus.
    """

    def __init__(self, path: Path, corpus: str | None):
        self.path, self._saved, self._others = path, _Saved(corpus=corpus), {}
        if not path.exists():
            return
        try:
            self._others = dict(read_json_file(path))
            self._saved = _Saved.model_validate(self._others.pop("results"))
        except (JsonError, OSError, ValidationError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: is not a file of a grid ({type(error).__name__}); remove it") from None
        if self._saved.runs and self._saved.corpus != corpus:
            raise ConfigError(f"{path}: its runs learned from another corpus; name another folder, or remove the file")
        self._saved.corpus = corpus

    def of(self, run: GridRun) -> RunResult | None:
        """Return the result of a run if it is known for this configuration, or None."""
        found = self._saved.runs.get(run.name)
        return found if found is not None and found.config == config_digest(run.config()) else None

    def add(self, run: GridRun, evaluations: Sequence[dict[str, Any]], seconds: float | None) -> None:
        """Add the result of a finished run, and write the file."""
        losses = [line["loss"] for line in evaluations if line["step"]]
        finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
        last = losses[-1] if losses[-1] is not None and math.isfinite(losses[-1]) else None
        self._saved.runs[run.name] = RunResult(
            config=config_digest(run.config()),
            step=evaluations[-1]["step"],
            loss=last,
            least=min(finite, default=None),
            seconds=seconds,
        )
        self.write(self._others)

    def write(self, figures: dict[str, Any]) -> None:
        """Write the file with all results, and with ``figures`` made from them."""
        self._others = figures
        runs = {name: result.model_dump() for name, result in sorted(self._saved.runs.items())}
        content = {**figures, "results": {"corpus": self._saved.corpus, "runs": runs}}
        write_whole(self.path, json.dumps(content, indent=1) + "\n")


def config_digest(config: dict[str, Any]) -> str:
    """Return the SHA-256 of a configuration without the path of its corpus."""
    data = {key: value for key, value in config.get("data", {}).items() if key != "path"}
    return hashlib.sha256(json.dumps({**config, "data": data}, sort_keys=True).encode()).hexdigest()


def prepared_data(run: GridRun, out: Path) -> tuple[Path | None, str | None]:
    """Prepare the corpus that all runs share in ``out``. Returns its folder and its digest.

    Both are None for an image set, which each run makes for itself in a second.
    """
    config = load_config(run.config())
    if config.data.name is not None:
        return None, None
    path = open_corpus(config, out).path.resolve()
    splits = read_json_file(path / "index.json")["splits"]  # with the digests of the shards
    return path, hashlib.sha256(json.dumps(splits, sort_keys=True).encode()).hexdigest()


Train = Callable[[GridRun, Path, Path], tuple[list[dict[str, Any]], float | None]]


def run_all(
    wanted: Sequence[GridRun],
    out: Path,
    data: Path | None,
    results: Results,
    jobs: int,
    train: Train | None = None,
    *,
    compiled: bool = False,
) -> Iterator[str]:
    """Run what is not done, ``jobs`` at a time, and yield a line for each run that failed.

    Args:
        wanted: The runs.
        out: The folder of the grid. Each run has a folder in ``out/runs``.
        data: The corpus of all runs.
        results: The known results, to which new results are added.
        jobs: How many runs train at a time, one thread each.
        train: Trains a run, and returns its evaluations and seconds. Raises RuntimeError if the run
            failed. By default, a process is started.
        compiled: Whether these processes compile the blocks of the model.
    """
    processes = Processes(compiled=compiled)
    train = train or processes.train
    missing = [run for run in wanted if results.of(run) is None]

    def trained(run: GridRun) -> Any:
        folder, path = out / "runs" / run.name, out / "runs" / f"{run.name}.json"
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off
        folder.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(run.config(data), indent=1) + "\n", encoding="utf-8")
        try:
            return train(run, path, folder)
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(jobs) as pool, processes.ended_at_the_end(pool):
        for number, (run, found) in enumerate(zip(missing, pool.map(trained, missing), strict=True), 1):
            failed = isinstance(found, str)
            print(f"{number}/{len(missing)} {run.name}{': ' + found if failed else ''}", file=sys.stderr, flush=True)
            if failed:
                yield f"{run.name}: {found}"
            else:
                results.add(run, *found)


class Processes:
    """Starts runs as processes, and ends all of them at Ctrl-C or SIGTERM.

    Args:
        compiled: Whether runs compile their blocks.
    """

    def __init__(self, *, compiled: bool = False) -> None:
        self._compiled = compiled
        self._running: set[subprocess.Popen[str]] = set()

    def train(self, run: GridRun, config: Path, folder: Path) -> tuple[list[dict[str, Any]], float | None]:
        """Train ``config`` with files in ``folder``. Returns its evaluations and seconds."""
        program = ["lab.simulator", str(config.resolve()), str(folder.resolve())]
        if not run.grid.simulate:
            program = ["sdp", "train", program[1], "--dump-dir", program[2]]
        if self._compiled:
            program += ["--set", "training.compile=true"]
        # Nobody measures the memory of these runs. Returning freed memory to the system at once
        # would take a third of their time.
        allocator = {name: str(1 << 30) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **allocator}
        with subprocess.Popen(
            [sys.executable, "-m", *program], cwd=ROOT, env=environment, text=True, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            self._running.add(process)
            _, errors = process.communicate()
            self._running.discard(process)
        if process.returncode:
            raise RuntimeError(next(iter(reversed(errors.strip().splitlines())), f"exit code {process.returncode}"))
        if run.grid.simulate:
            result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
            return result["evaluations"], result["seconds"]
        found = read_run(folder)
        return found.evaluations, (found.summary or {}).get("seconds")

    @contextmanager
    def ended_at_the_end(self, pool: ThreadPoolExecutor) -> Iterator[None]:
        """A context that ends all runs, and starts no more, if it is left by an error."""

        def leave(number: int, frame: object) -> None:
            raise SystemExit(128 + number)

        before = signal.signal(signal.SIGTERM, leave)
        try:
            yield
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(self._running):
                process.terminate()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
