"""Loads tasks of lm-evaluation-harness, and runs them on a model that scores tokens."""

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

from ...data.tokenizers import load_tokenizer
from ...engine.config.schema import TasksSection
from ...engine.errors import ConfigError, SDPError, first_line, shorten, suggestion
from .scoring import Scorer

Scores = dict[str, dict[str, float | int | None]]  # task → measure → value, and the number of samples

_KINDS = ("loglikelihood", "loglikelihood_rolling", "multiple_choice")
_SEEDS = (0, 1234, 1234)  # the harness's own: of Python, of numpy, and of the few-shot examples


def check_installed(where: str) -> None:
    """Raise ConfigError if the package is missing. ``where`` names the setting that needs it."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            f"{where}: the package lm-eval is not installed; pip install 'sdp-engine[eval]', or remove {where}"
        )


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks with their documents.

    Attributes:
        where: The setting that names the tasks, for messages.
        tasks: The tasks and their groups, as the harness's own manager returns them.
        limit: The documents of each task, None for all.
    """

    where: str
    tasks: Any
    limit: int | None

    @classmethod
    def load(cls, section: TasksSection, where: str, num_fewshot: int | None = None) -> LoadedTasks:
        """Find the tasks and read their documents, which may download them.

        ``num_fewshot``: the number of examples in a prompt, None for that of each task.

        Raises ConfigError if the package is missing, if a task is unknown or cannot be loaded, or
        if it does more than to compare log-likelihoods.
        """
        check_installed(where)
        if section.include_path is not None and not Path(section.include_path).is_dir():
            raise ConfigError(f"{where}: include_path {shorten(section.include_path)} is not a directory")
        with _quiet(), _own_randomness():
            manager = _manager_of(section, where)
            try:
                loaded = manager.load(list(dict.fromkeys(section.tasks)))
            except Exception as error:  # of any package that reads or downloads data
                raise ConfigError(f"{where}: {', '.join(section.tasks)} cannot be loaded ({_line(error)})") from None
            for name, task in loaded["tasks"].items():
                _check_kind(name, task, where)
                _prepare(name, task, num_fewshot, where)
        return cls(where, loaded, section.limit)

    def run(self, scorer: Scorer, corpus: Path) -> Scores:
        """Evaluate the tasks. Call this on rank 0, inside ``scorer.lead``.

        ``corpus`` is the directory of the data, whose tokenizer makes tokens of the texts.
        """
        from lm_eval.evaluator import evaluate

        from .harness_model import HarnessModel

        model = HarnessModel(scorer, load_tokenizer(corpus))
        with _quiet(), _own_randomness():
            for task in self.tasks["tasks"].values():
                task.set_fewshot_seed(seed=_SEEDS[2])
            try:
                results: Any = evaluate(model, self.tasks, limit=self.limit, bootstrap_iters=0, log_samples=False)
            except (SDPError, MemoryError):
                raise
            except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
                raise ConfigError(f"{self.where}: the harness failed ({_line(error)}); remove the task") from error
        return _scores(results)


def _manager_of(section: TasksSection, where: str) -> Any:
    """Return a task manager that knows all tasks of ``section``."""
    from lm_eval.tasks import TaskManager

    wanted, manager = set(section.tasks), None
    if section.include_path is not None:
        # The package's own 10,000 files take seconds to read.
        manager = TaskManager(include_path=section.include_path, include_defaults=False)
    if manager is None or not wanted <= set(manager.all_tasks):
        manager = TaskManager(include_path=section.include_path)
    known = manager.all_tasks
    for name in section.tasks:
        if name not in known:
            hint = suggestion(name, known) or "; lm-eval ls tasks lists them, include_path adds your own"
            raise ConfigError(f"{where}: unknown task {shorten(name)}{hint}")
    return manager


def _check_kind(name: str, task: Any, where: str) -> None:
    kind = task.get_config("output_type") or getattr(task, "OUTPUT_TYPE", None)
    if kind not in _KINDS:
        raise ConfigError(
            f"{where}: the task {name} has output_type {kind}, and only {', '.join(_KINDS)} are possible; run it on "
            "an export of the model (sdp export)"
        )
    if getattr(task, "MULTIMODAL", False) or getattr(task, "UNSAFE_CODE", False):
        raise ConfigError(f"{where}: the task {name} needs images or runs code of the model; remove it")


def _prepare(name: str, task: Any, num_fewshot: int | None, where: str) -> None:
    """Set the number of examples in a prompt, and build one prompt to find mistakes early.

    As in the harness, a task's own 0 stays.
    """
    stated = task.get_config("num_fewshot")
    if stated is None or (num_fewshot is not None and stated != 0):
        task.set_config(key="num_fewshot", value=num_fewshot or 0)
    task.set_fewshot_seed(seed=_SEEDS[2])
    try:
        task.build_all_requests(limit=1, rank=0, world_size=1)
    except Exception as error:  # a task has code of its own
        raise ConfigError(f"{where}: the task {name} does not work ({_line(error)}); remove it") from None


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


@contextlib.contextmanager
def _own_randomness() -> Iterator[None]:
    """Give tasks the harness's seeds. The generators of the run continue afterwards."""
    state, arrays = random.getstate(), np.random.get_state()
    random.seed(_SEEDS[0])
    np.random.seed(_SEEDS[1])
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(arrays)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {shorten(first_line(error))}"
