"""What scripts use of DeepSpeed's engine outside the training loop, such as ``engine.monitor``."""

from __future__ import annotations

import csv
import importlib
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

import torch

from .config.schema import Config, MonitorSection, WandbSection
from .errors import ConfigError, shorten
from .files import refuse_link, require_own_file

# Methods of DeepSpeed's engine or of torch's modules that are not offered, with the reason.
REFUSED = {
    "train_batch": "pipelines are not supported; call engine(batch), engine.backward(loss) and engine.step()",
    "eval_batch": "pipelines are not supported; call engine.evaluate(batches)",
    "register_comm_hook": "gradients are averaged among holders, so a hook of torch's DDP does not apply",
    "offload_states": "states cannot be moved in a run; give zero_optimization.offload_optimizer in the configuration",
    "reload_states": "states cannot be moved in a run; give zero_optimization.offload_optimizer in the configuration",
    "allreduce_gradients": "backward() averages the gradients at the accumulation boundary",
    "load_module_state_dict": "a group has only some units of the model; load the weights into the model before "
    "sdp.initialize, or use load_checkpoint",
    "float": "the configuration chooses the model's type, with bf16 or fp16",
    "double": "the configuration chooses the model's type, with bf16 or fp16",
    "compile": "give training.compile in the configuration",
}


def refuse_call(name: str, *_: Any, **__: Any) -> NoReturn:
    """Raise ConfigError, because SDP's engine does not offer this method of DeepSpeed's engine."""
    raise ConfigError(f"engine.{name}: {REFUSED[name]}")


def refuse_other_place(method: str, asked: Iterable[Any], device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if a call such as ``engine.to`` asks for another device or dtype.

    Args:
        method: The name of the method that was called.
        asked: The arguments of the call. Devices, dtypes and tensors are checked.
        dtype: The dtype in which the model computes.
    """
    for value in asked:
        if isinstance(value, torch.Tensor):
            refuse_other_place(method, (value.device, value.dtype), device, dtype)
        elif isinstance(value, torch.dtype) and value != dtype:
            raise ConfigError(f"engine.{method}: the model computes in {dtype}; choose another type with bf16 or fp16")
        elif isinstance(value, str | int | torch.device) and not isinstance(value, bool):
            other = torch.device(value)
            if other.type != device.type or other.index not in (None, device.index):
                raise ConfigError(f"engine.{method}: the model stays on {device}, but {other} was asked for")


class ThroughputTimer:
    """Measures samples per second, as DeepSpeed's ``engine.tput_timer`` does."""

    def __init__(self) -> None:
        self.epoch_count = 0
        self.global_samples = 0
        self._start = time.perf_counter()

    def update_epoch_count(self) -> None:
        """Add 1 to ``epoch_count``. A script calls this at the end of an epoch."""
        self.epoch_count += 1

    def avg_samples_per_sec(self) -> float:
        """Return the samples per second of all ranks together, since the engine was made."""
        return self.global_samples / (time.perf_counter() - self._start)


class DeepSpeedMonitor:
    """Writes curves such as the loss, as ``engine.monitor`` of DeepSpeed does.

    The sections ``tensorboard``, ``csv_monitor`` and ``wandb`` of the configuration say where
    curves are written. ``writes`` is true on rank 0 only.
    """

    def __init__(self, config: Config, *, writes: bool):
        self._config, self._writes = config, writes
        self.enabled = config.tensorboard.enabled or config.csv_monitor.enabled or config.wandb.enabled

    @cached_property
    def _writers(self) -> list[CurveWriter]:
        return open_writers(self._config)

    def write_step(self, step: int, loss: float, norm: float, rate: float, loss_scale: float | None) -> None:
        """Write loss, gradient norm, learning rate and loss scale of a training step."""
        points = {"Train/Samples/train_loss": loss, "Train/Samples/lr": rate, "Train/grad_norm": norm}
        if loss_scale is not None:
            points["Train/Samples/loss_scale"] = loss_scale
        self.write_events([(name, value, step) for name, value in points.items()])

    def write_events(self, events: Sequence[tuple[str, Any, int]]) -> None:
        """Write points of curves. Each point has the curve's name, a value, and the step."""
        for name, value, step in events if self._writes else ():
            for writer in self._writers:
                writer.write(step, {name: float(value)})


class CurveWriter(Protocol):
    """Writes curves in one format: for TensorBoard, as CSV, or for Weights & Biases."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def rewind(self) -> None:
        """After a rollback, let the next point replace all points of its step and later steps."""
        ...

    def close(self) -> None: ...


def open_writers(
    config: Config, folder: Path | None = None, wandb_options: Mapping[str, Any] = MappingProxyType({})
) -> list[CurveWriter]:
    """Return a writer for each of TensorBoard, CSV and W&B that the configuration enables.

    Args:
        config: The configuration, with sections ``tensorboard``, ``csv_monitor`` and ``wandb``.
        folder: The folder of a run, for curves of sections without ``output_path``. After a resume,
            new points replace older points of the same and later steps. If None, a script writes
            curves: these sections use ``runs/JOB_NAME``, and new points are added to older points.
        wandb_options: Further arguments of ``wandb.init``.

    Raises:
        ConfigError: A package is missing or refuses to start, or a folder cannot be created.
    """
    writers: list[CurveWriter] = []
    if config.tensorboard.enabled:
        path = _folder("tensorboard", config.tensorboard, folder)
        writers.append(_TensorBoard(path, replaces=folder is not None))
    if config.csv_monitor.enabled:
        writers.append(_CSV(_folder("csv_monitor", config.csv_monitor, folder), replaces=folder is not None))
    if config.wandb.enabled:
        writers.append(_WeightsAndBiases(config.wandb, wandb_options))
    return writers


class _TensorBoard:
    """Writes for TensorBoard. The file is opened at the first point."""

    def __init__(self, folder: Path, *, replaces: bool):
        self._folder, self._replaces = folder, replaces
        self._open = _import("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer: Any = None
        self._is_rewound = False

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._writer is None:
            for path in self._folder.glob("events.out.tfevents*"):
                refuse_link(path)
            self._writer = self._open(log_dir=str(self._folder), purge_step=step if self._replaces else None)
        elif self._is_rewound:
            # The mark goes into the same file. TensorBoard reads files in the order of their names,
            # and the names of two files that are opened in one second may be in the wrong order.
            events = importlib.import_module("tensorboard.compat.proto.event_pb2")
            start = events.SessionLog(status=events.SessionLog.START)
            self._writer.file_writer.add_event(events.Event(step=step, session_log=start))
        self._is_rewound = False
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()  # otherwise a process that is killed loses the points of two minutes

    def rewind(self) -> None:
        self._is_rewound = True

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _CSV:
    """Writes one CSV file per curve, such as ``Train_Samples_lr.csv`` with columns step and lr."""

    def __init__(self, folder: Path, *, replaces: bool):
        self._folder, self._replaces = folder, replaces
        self._files: dict[str, tuple[Any, Any]] = {}

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
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
        path = self._folder / (tag.replace("/", "_").replace(" ", "_") + ".csv")
        require_own_file(path)
        earlier: list[list[str]] = []
        if self._replaces and path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                rows = [row for row in csv.reader(file) if len(row) == 2 and row[0].isdecimal()]
                earlier = [row for row in rows if int(row[0]) < step]
        file = path.open("w" if self._replaces else "a", newline="", encoding="utf-8")
        writer = csv.writer(file)
        writer.writerows([["step", tag.rpartition("/")[2]], *earlier] if not file.tell() else [])
        return file, writer


class _WeightsAndBiases:
    """Writes for Weights & Biases.

    The step is logged as a metric, because Weights & Biases drops points with a lower step.
    """

    def __init__(self, section: WandbSection, options: Mapping[str, Any]):
        wandb = _import("wandb", "wandb")
        try:
            self._run = wandb.init(project=section.project, group=section.group, entity=section.team, **options)
            self._run.define_metric("*", step_metric="step")
        except wandb.Error as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(f"wandb: {reason}; set WANDB_MODE=offline, or set wandb.enabled to false") from None

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({"step": step, **scalars})

    def rewind(self) -> None:
        """Do nothing, because Weights & Biases cannot replace points."""

    def close(self) -> None:
        self._run.finish()


def _folder(name: str, section: MonitorSection, folder: Path | None) -> Path:
    """Create a monitor's folder now, so that a wrong path is found before the first step."""
    given = section.output_path or ("runs" if folder is None else "")
    path = Path(given) / section.job_name if given else Path(folder or "") / name.removesuffix("_monitor")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # a NUL in the path raises ValueError
        key = f"{name}.output_path" if given else name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{key}: {shorten(path)} cannot be created ({reason}); choose another directory") from None
    return path


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"{package}: the package {package} is not installed; pip install {package}, or set {package}.enabled to "
            "false"
        ) from None
