"""Curves for TensorBoard, CSV files and Weights & Biases.

The sections of the configuration are DeepSpeed's ``tensorboard``, ``csv_monitor`` and ``wandb``.
The names of the curves and the layout of the CSV files are DeepSpeed's too (deepspeed/monitor).
The x axis is the optimizer step.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...engine.config.schema import Config
from ...engine.deepspeed_names import CurveWriter, open_writers
from ...engine.files import require_own_file, write_whole
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


class Monitors(Observer):
    """All monitors that the configuration enables."""

    def __init__(self, monitors: Sequence[CurveWriter], *, images: bool = False):
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
    options: dict[str, Any] = {}
    if config.wandb.enabled:
        name, run_id = dump_dir.resolve().name, _wandb_id(dump_dir, resume=resume)
        options = {"name": name, "dir": str(dump_dir), "config": config.resolved(), "id": run_id, "resume": "allow"}
    return Monitors(open_writers(config, dump_dir, options), images=config.data.name is not None)


def train_scalars(line: Line) -> dict[str, float]:
    """Return the points of the curves for a line of metrics.jsonl."""
    return {tag: line[key] for key, tag in TRAIN_TAGS.items() if line.get(key) is not None}


def evaluation_scalars(line: Line) -> dict[str, float]:
    """Return the points of the curves for a line of evaluations.jsonl."""
    losses = line.get("subnetwork_losses") or []
    values = {**line, "subnetwork_loss_mean": sum(losses) / len(losses) if losses else None}
    return {tag: values[key] for key, tag in EVAL_TAGS.items() if values.get(key) is not None}


def _wandb_id(dump_dir: Path, *, resume: bool) -> str:
    """Return the id of the run of Weights & Biases. A run that is not resumed gets a new one.

    The id is in a file of the dump directory, so that a resumed run continues it.
    """
    path = dump_dir / WANDB_ID
    require_own_file(path)
    if resume and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    dump_dir.mkdir(parents=True, exist_ok=True)
    chosen = secrets.token_hex(8)
    write_whole(path, f"{chosen}\n")
    return chosen
