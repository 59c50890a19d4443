"""Parts of DeepSpeed's engine that scripts use beside the training loop."""

from __future__ import annotations

import csv
import importlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from .config.schema import Config, MonitorSection
from .errors import ConfigError

# Methods of DeepSpeed's engine or of torch's modules that are not offered, with the reason.
REFUSED = {
    "train_batch": "pipelines are not supported; call engine(batch), engine.backward(loss) and engine.step()",
    "eval_batch": "pipelines are not supported; call engine.evaluate(batches)",
    "register_comm_hook": "gradients are averaged among holders, so a hook of torch's DDP does not apply",
    "offload_states": "states stay where they are; give zero_optimization.offload_optimizer in the configuration",
    "reload_states": "states stay where they are; give zero_optimization.offload_optimizer in the configuration",
    "allreduce_gradients": "backward() averages the gradients at the accumulation boundary",
    "load_module_state_dict": "groups hold parts of the model; give the weights to sdp.initialize, or use "
    "load_checkpoint",
    "float": "the configuration chooses the model's type, with bf16 or fp16",
    "double": "the configuration chooses the model's type, with bf16 or fp16",
    "compile": "give training.compile in the configuration",
}


def refuse_call(name: str, *_: Any, **__: Any) -> NoReturn:
    """Raise ConfigError: the engine does not have this method of DeepSpeed."""
    raise ConfigError(f"engine.{name}: {REFUSED[name]}")


def refuse_other_place(method: str, asked: Iterable[Any], device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if a script asks for another device or type than the engine's.

    Args:
        method: The engine's method.
        asked: Devices, types, and tensors that have both. Other values have no effect.
        device: The device of the engine.
        dtype: The type that the model computes in.
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
    """The part of DeepSpeed's ``engine.tput_timer`` that scripts use."""

    def __init__(self) -> None:
        self.epoch_count = 0
        self.global_samples = 0
        self._start = time.perf_counter()

    def update_epoch_count(self) -> None:
        """Count one epoch more."""
        self.epoch_count += 1

    def avg_samples_per_sec(self) -> float:
        """Samples of all ranks per second since the engine was made."""
        return self.global_samples / (time.perf_counter() - self._start)


class DeepSpeedMonitor:
    """``engine.monitor``: writes a script's curves, as DeepSpeed's monitor does.

    The sections ``tensorboard``, ``csv_monitor`` and ``wandb`` of the configuration say where.
    """

    def __init__(self, config: Config, *, writes: bool):
        """``writes``: whether this rank writes. Only rank 0 does."""
        self._writes = writes
        self._tensorboard, self._csv, self._wandb = config.tensorboard, config.csv_monitor, config.wandb
        self._writer: Any = None
        self._run: Any = None  # of Weights & Biases
        self.enabled = config.tensorboard.enabled or config.csv_monitor.enabled or config.wandb.enabled

    def write_step(self, step: int, loss: float, norm: float, rate: float, loss_scale: float | None) -> None:
        """Write the points of a training step."""
        points = {"Train/Samples/train_loss": loss, "Train/Samples/lr": rate, "Train/grad_norm": norm}
        if loss_scale is not None:
            points["Train/Samples/loss_scale"] = loss_scale
        self.write_events([(name, value, step) for name, value in points.items()])

    def write_events(self, events: Sequence[tuple[str, Any, int]]) -> None:
        """Write points of curves: the curve's name, the value, and its place on the x axis."""
        for name, value, step in events if self._writes else ():
            if self._tensorboard.enabled:
                if self._writer is None:
                    from torch.utils.tensorboard import SummaryWriter  # takes a second to import

                    self._writer = SummaryWriter(str(_folder(self._tensorboard)))
                self._writer.add_scalar(name, value, step)
                self._writer.flush()
            if self._csv.enabled:
                self._write_row(name, value, step)
            if self._wandb.enabled:
                if self._run is None:
                    self._run = self._start_run()
                self._run.log({"step": step, name: float(value)})

    def _start_run(self) -> Any:
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError:
            raise ConfigError("wandb: the package is not installed; pip install wandb, or set enabled false") from None
        wandb_run = wandb.init(project=self._wandb.project, group=self._wandb.group, entity=self._wandb.team)
        wandb_run.define_metric("*", step_metric="step")
        return wandb_run

    def _write_row(self, name: str, value: Any, step: int) -> None:
        folder = _folder(self._csv)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{name.replace('/', '_')}.csv"
        is_new = not file.exists()
        with file.open("a", newline="", encoding="utf-8") as stream:
            rows = csv.writer(stream)
            if is_new:
                rows.writerow(["step", name.rsplit("/", 1)[-1]])
            rows.writerow([step, float(value)])


def _folder(section: MonitorSection) -> Path:
    return Path(section.output_path or "runs") / section.job_name
