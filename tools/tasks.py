"""Runs tasks of lm-evaluation-harness on a model in Hugging Face's format."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..engine.errors import ConfigError, first_line, shorten, suggestion

Scores = dict[str, dict[str, float | int | None]]  # task → measure → value, and the number of samples

_SEEDS = (0, 1234, 1234)  # the harness's own: of Python, of numpy, and of the few-shot examples


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks of lm-evaluation-harness with their documents, ready to evaluate models.

    Attributes:
        tasks: The tasks and their groups, as the harness's task manager returns them.
        limit: The largest number of documents of each task. If None, all.
    """

    tasks: Any
    limit: int | None

    @classmethod
    def load(
        cls, names: list[str], limit: int | None, num_fewshot: int | None, include_path: str | None
    ) -> LoadedTasks:
        """Find tasks and read their documents. This may download the documents.

        Args:
            names: Names of tasks or groups, such as "hellaswag".
            limit: Evaluate the first ``limit`` documents of each task. If None, all.
            num_fewshot: The number of examples in a prompt. If None, that of each task.
            include_path: A directory with the user's own task files, which may run code.

        Raises:
            ConfigError: The package is missing, or a task is unknown or cannot be loaded.
        """
        if any(importlib.util.find_spec(package) is None for package in ("lm_eval", "accelerate", "transformers")):
            raise ConfigError("--tasks: the package lm-eval is not installed; pip install 'sdp-engine[eval]'")
        if include_path is not None and not Path(include_path).is_dir():
            raise ConfigError(f"--include-path: {shorten(include_path)} is not a directory")
        with _quiet():
            _seed()
            manager = _manager_of(names, include_path)
            try:
                loaded = manager.load(list(dict.fromkeys(names)))
            except Exception as error:  # of any package that reads or downloads data
                raise ConfigError(f"--tasks: {', '.join(names)} cannot be loaded ({_line(error)})") from None
            for name, task in loaded["tasks"].items():
                _prepare(name, task, num_fewshot)
        return cls(loaded, limit)

    def run(self, folder: Path, batch_size: int) -> Scores:
        """Evaluate the Hugging Face model in ``folder`` in float32, on a GPU if there is one.

        Raises:
            ConfigError: The harness cannot evaluate the model.
        """
        from lm_eval.evaluator import evaluate
        from lm_eval.models.huggingface import HFLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        with _quiet():
            _seed()
            for task in self.tasks["tasks"].values():
                task.set_fewshot_seed(seed=_SEEDS[2])
            try:
                make_model: Any = HFLM  # its decorator hides the parameters
                model = make_model(pretrained=str(folder), dtype="float32", device=device, batch_size=batch_size)
                results: Any = evaluate(model, self.tasks, limit=self.limit, bootstrap_iters=0, log_samples=False)
            except (ArithmeticError, LookupError, OSError, TypeError, ValueError, AttributeError) as error:
                raise ConfigError(
                    f"--tasks: the harness failed ({_line(error)}); remove the task, or repair the model's folder"
                ) from error
        return _scores(results)


def _manager_of(names: list[str], include_path: str | None) -> Any:
    from lm_eval.tasks import TaskManager

    manager = None
    if include_path is not None:
        # The package's own 10,000 files take seconds to read.
        manager = TaskManager(include_path=include_path, include_defaults=False)
    if manager is None or not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=include_path)
    known = manager.all_tasks
    for name in names:
        if name not in known:
            hint = suggestion(name, known) or "; lm-eval ls tasks lists them, --include-path adds your own"
            raise ConfigError(f"--tasks: unknown task {shorten(name)}{hint}")
    return manager


def _prepare(name: str, task: Any, num_fewshot: int | None) -> None:
    """Set the number of examples in a prompt, and build one prompt to find mistakes early.

    A task that sets 0 examples keeps 0, as in the harness.
    """
    stated = task.get_config("num_fewshot")
    if stated is None or (num_fewshot is not None and stated != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    task.set_fewshot_seed(seed=_SEEDS[2])
    try:
        task.build_all_requests(limit=1, rank=0, world_size=1)
    except Exception as error:  # a task has code of its own
        raise ConfigError(f"--tasks: the task {name} does not work ({_line(error)}); remove it") from None


def _scores(results: Mapping[str, Any]) -> Scores:
    """Return the numbers of the harness's results. NaN and infinite ones become None."""
    scores: Scores = {}
    for task, values in results["results"].items():
        measures: dict[str, float | int | None] = {}
        for key, value in values.items():
            measure, _, filtered = key.partition(",")
            if isinstance(value, bool) or not isinstance(value, int | float) or not filtered:
                continue
            if not measure.endswith("_stderr"):
                name = measure if filtered == "none" else f"{measure},{filtered}"
                measures[name] = float(value) if math.isfinite(value) else None
        samples = results.get("n-samples", {}).get(task)
        scores[task] = measures | ({"samples": samples["effective"]} if samples else {})
    return scores


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars and remarks of the packages off the terminal."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "evaluate")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _seed() -> None:
    random.seed(_SEEDS[0])
    np.random.seed(_SEEDS[1])


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {shorten(first_line(error))}"
