"""Curves for TensorBoard, CSV files and Weights & Biases.

The sections of the configuration are DeepSpeed's ``tensorboard``, ``csv_monitor`` and ``wandb``.
The names of the curves and the layout of the CSV files are DeepSpeed's too (deepspeed/monitor).
The x axis is the optimizer step.
"""

from __future__ import annotations

import csv
import importlib
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ...engine.config.schema import Config, MonitorSection
from ...engine.errors import ConfigError, shorten
from ..shared.files import refuse_link, require_own_file, write_whole
from .observer import Line, Observer

WANDB_ID = "wandb-id.txt"  # in the dump directory

# The key of a line in metrics.jsonl or evaluations.jsonl → the name of its curve.
TRAIN_TAGS = {
    "loss": "Train/Samples/train_loss",
    "lr": "Train/Samples/lr",
    "loss_scale": "Train/Samples/loss_scale",
    "grad_norm": "Train/grad_norm",
    "tokens_per_second": "Train/tokens_per_second",
    "samples_per_second": "Train/samples_per_second",
    "step_seconds": "Train/step_seconds",
    "mfu": "Train/mfu",
    "peak_memory_bytes": "Train/peak_memory_bytes",
    "comm_bytes": "Train/comm_bytes",
}
EVAL_TAGS = {"loss": "Eval/loss", "accuracy": "Eval/accuracy", "subnetwork_loss_mean": "Eval/subnetwork_loss_mean"}


class Monitor(Protocol):
    """Writes the curves in the form that one program reads."""

    def write(self, step: int, scalars: dict[str, float]) -> None: ...

    def rewind(self) -> None:
        """The next point replaces those from its step on."""
        ...

    def close(self) -> None: ...


class Monitors(Observer):
    """All monitors that the configuration enables."""

    def __init__(self, monitors: Sequence[Monitor], *, images: bool = False):
        """``images``: whether there are images and no tokens to count."""
        self._monitors, self._images = monitors, images

    def on_step(self, line: Line) -> None:
        self.write(line["step"], train_scalars({**line, "tokens_per_second": None} if self._images else line))

    def on_rollback(self, step: int) -> None:
        for monitor in self._monitors:
            monitor.rewind()

    def on_evaluation(self, line: Line) -> None:
        self.write(line["step"], evaluation_scalars(line))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Add one point at ``step`` to every curve in ``scalars`` (tag → value)."""
        for monitor in self._monitors:
            monitor.write(step, scalars)

    def close(self) -> None:
        for monitor in self._monitors:
            monitor.close()


def open_monitors(config: Config, dump_dir: Path, *, resume: bool = False) -> Monitors:
    """Open the monitors that the configuration enables. Call this on rank 0 only.

    An empty ``output_path`` means ``tensorboard`` and ``csv`` in ``dump_dir``. When a run is
    resumed (``resume``), its curves continue in the same files and in the same run of Weights &
    Biases. New points replace older ones from the first step on that it writes. Raises ConfigError
    if a package is missing or refuses to start, or if a directory cannot be created.
    """
    monitors: list[Monitor] = []
    if config.tensorboard.enabled:
        monitors.append(_TensorBoard(_directory("tensorboard", config.tensorboard, dump_dir)))
    if config.csv_monitor.enabled:
        monitors.append(_CSV(_directory("csv_monitor", config.csv_monitor, dump_dir)))
    if config.wandb.enabled:
        monitors.append(_WeightsAndBiases(config, dump_dir, resume=resume))
    return Monitors(monitors, images=config.data.name is not None)


def train_scalars(line: Line) -> dict[str, float]:
    """Return the points of the curves for a line of metrics.jsonl."""
    return {tag: line[key] for key, tag in TRAIN_TAGS.items() if line.get(key) is not None}


def evaluation_scalars(line: Line) -> dict[str, float]:
    """Return the points of the curves for a line of evaluations.jsonl."""
    losses = line.get("subnetwork_losses") or []
    values = {**line, "subnetwork_loss_mean": sum(losses) / len(losses) if losses else None}
    scores = {
        f"Eval/tasks/{task}/{measure}": value
        for task, measures in (line.get("tasks") or {}).items()
        for measure, value in measures.items()
        if value is not None and measure != "samples"
    }
    return {tag: values[key] for key, tag in EVAL_TAGS.items() if values.get(key) is not None} | scores


class _TensorBoard:
    """Opens its file at the first point.

    From this point on, it replaces the points of an earlier process.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._open = _import("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer: Any = None

    def write(self, step: int, scalars: dict[str, float]) -> None:
        if self._writer is None:
            for path in self._directory.glob("events.out.tfevents*"):
                refuse_link(path)
            self._writer = self._open(log_dir=str(self._directory), purge_step=step)
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()  # otherwise a process that is killed loses the points of two minutes

    def rewind(self) -> None:
        self.close()
        self._writer = None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _CSV:
    """One file per curve, such as ``Train_Samples_lr.csv``.

    The header is "step" and the last part of the tag.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._files: dict[str, tuple[Any, Any]] = {}

    def write(self, step: int, scalars: dict[str, float]) -> None:
        for tag, value in scalars.items():
            if tag not in self._files:
                self._files[tag] = self._start(tag, step)
            file, writer = self._files[tag]
            writer.writerow([step, value])
            file.flush()

    def rewind(self) -> None:
        self.close()
        self._files.clear()

    def close(self) -> None:
        for file, _ in self._files.values():
            file.close()

    def _start(self, tag: str, step: int) -> tuple[Any, Any]:
        path = self._directory / (tag.replace("/", "_").replace(" ", "_") + ".csv")
        require_own_file(path)
        earlier: list[list[str]] = []
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                earlier = [
                    row for row in csv.reader(file) if len(row) == 2 and row[0].isdecimal() and int(row[0]) < step
                ]
        file = path.open("w", newline="", encoding="utf-8")
        writer = csv.writer(file)
        writer.writerows([["step", tag.rpartition("/")[2]], *earlier])
        return file, writer


class _WeightsAndBiases:
    """A run of Weights & Biases. ``WANDB_MODE=offline`` keeps it on this machine.

    The id of the run is in a file of the dump directory, so that a resumed run continues it. Steps
    are values of their own: Weights & Biases would drop points of steps that are made again.
    """

    def __init__(self, config: Config, dump_dir: Path, *, resume: bool):
        section, wandb = config.wandb, _import("wandb", "wandb")
        try:
            self._run = wandb.init(
                project=section.project,
                group=section.group,
                entity=section.team,
                name=dump_dir.resolve().name,
                dir=str(dump_dir),
                config=config.resolved(),
                id=_wandb_id(dump_dir, resume=resume),
                resume="allow",
            )
            self._run.define_metric("*", step_metric="step")
        except wandb.Error as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(f"wandb: {reason}; set WANDB_MODE=offline, or set wandb.enabled to false") from None

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log({"step": step, **scalars})

    def rewind(self) -> None:
        """A no-op: a run of Weights & Biases cannot go back."""

    def close(self) -> None:
        self._run.finish()


def _wandb_id(dump_dir: Path, *, resume: bool) -> str:
    """Return the id of the run of Weights & Biases. A run that is not resumed gets a new one."""
    path = dump_dir / WANDB_ID
    require_own_file(path)
    if resume and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    dump_dir.mkdir(parents=True, exist_ok=True)
    chosen = secrets.token_hex(8)
    write_whole(path, f"{chosen}\n")
    return chosen


def _directory(name: str, section: MonitorSection, dump_dir: Path) -> Path:
    """Create a monitor's directory now, so that a wrong path is found before the first step."""
    given = section.output_path
    directory = Path(given) / section.job_name if given else dump_dir / name.removesuffix("_monitor")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # a NUL in the path raises ValueError
        key = f"{name}.output_path" if given else name
        reason = getattr(error, "strerror", None) or error
        message = f"{key}: {shorten(directory)} cannot be created ({reason}); choose another directory"
        raise ConfigError(message) from None
    return directory


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        message = (
            f"{package}: the package {package} is not installed; pip install {package}, or set {package}.enabled to "
            "false"
        )
        raise ConfigError(message) from None
