"""Observers of the training loop: memory probe, copies in an object store, curves, and progress."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ...data.files import INDEX_FILE
from ...data.index import SHARDS
from ...engine.accounting.memory_probe import watched_peak
from ...engine.config.schema import Config
from ...engine.deepspeed_names import CurveWriter, open_writers
from ...engine.engine import SDPEngine
from ...engine.errors import StoreError
from ...engine.files import require_own_file, write_whole
from ...engine.object_store import Store, upload
from ..runs.run_files import CORPUS, SENT
from ..runs.start_files import START
from .process import FILE_ONLY

log = logging.getLogger("sdp")

Line = Mapping[str, Any]  # a line of metrics.jsonl or evaluations.jsonl


class Observer:
    """Watches the training loop on one rank. A subclass overrides the hooks that it needs.

    The trainer calls its observers in order. A hook must not wait for other ranks.
    """

    def on_start(self, start: int, steps: int) -> None:
        """Override this to act before training, when ``start`` of ``steps`` steps are done."""

    def around_step(self, step: int) -> AbstractContextManager[Any]:
        """Override this to return a context around forward, backward and update of ``step``."""
        return nullcontext()

    def on_step(self, line: Line) -> None:
        """Override this to act after an optimizer step, with its ``line`` of metrics.jsonl."""

    def on_evaluation(self, line: Line) -> None:
        """Override this to act after an evaluation, with its ``line`` of evaluations.jsonl."""

    def on_rollback(self, step: int) -> None:
        """Override this to act after the run returned to the checkpoint of ``step``."""

    def on_end(self) -> None:
        """Override this to act after the last step, or after a signal has stopped the loop."""

    def close(self) -> None:
        """Override this to flush and close files. It is called once, even if the run fails."""


PROBED_STEP = 2  # the first step allocates optimizer state; the steps after it allocate the same


class MemoryProbe(Observer):
    """Measures the peak of live tensors in one step, and then has the bytes in ``peak``.

    The probe measures the second step, because the first step also allocates optimizer state. With
    a masking schedule, it measures a later step with backward masking, which needs more memory.
    """

    def __init__(self, engine: SDPEngine):
        self._engine = engine
        schedule = engine.config.masking_schedule
        backward = [start for start in schedule.starts if schedule.at(start) == "backward"]
        self._step = max(PROBED_STEP, backward[0]) if backward else PROBED_STEP
        self.peak: int | None = None

    @staticmethod
    def works_with(engine: SDPEngine) -> bool:
        """Whether the probe sees all memory. On a CPU, it misses what compiled code allocates."""
        return engine.device.type == "cuda" or not engine.config.training.compile

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        if step != self._step:
            yield
            return
        engine = self._engine
        kept = engine.local_training.tensors_on_device()
        with watched_peak(engine.module, engine.optimizer, engine.device, kept=kept) as peak:
            yield
        self.peak = peak()


class RemoteFiles(Observer):
    """Copies the files of a run from ``dump_dir`` to ``url`` in an object store, on rank 0.

    It copies them at every evaluation and with every checkpoint. It does not copy checkpoints,
    because the run writes them to the object store itself.
    """

    def __init__(self, url: str, dump_dir: Path, save_every: int):
        self._store, self._dump_dir, self._save_every = Store(url), dump_dir, save_every

    def on_start(self, start: int, steps: int) -> None:
        index = self._dump_dir / CORPUS / INDEX_FILE
        if index.is_file() and self._store.read(f"{CORPUS}/{INDEX_FILE}") != index.read_bytes():
            upload(index.parent, f"{self._store.url}/{CORPUS}", INDEX_FILE, SHARDS)
        self._copy()

    def on_step(self, line: Line) -> None:
        if self._save_every and line["step"] % self._save_every == 0:
            self._copy()

    def on_evaluation(self, line: Line) -> None:
        self._copy()

    def close(self) -> None:
        self._copy()

    def _copy(self) -> None:
        folder = self._dump_dir
        start = [path.relative_to(folder).as_posix() for path in (folder / START).rglob("*")]
        try:
            for name in (*SENT, *start):
                if (folder / name).is_file():
                    self._store.write(name, (folder / name).read_bytes())
        except (StoreError, OSError) as error:
            log.warning(
                "WARNING: the newest files of the run are only in %s, because they cannot be copied: %s", folder, error
            )


# -- curves for TensorBoard, CSV files and Weights & Biases ----------------------------------------
#
# The sections of the configuration, the names of the curves and the layout of the CSV files are
# DeepSpeed's (deepspeed/monitor). The x axis is the optimizer step.

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
    """Writes the curves of a run to all monitors that the configuration enables."""

    def __init__(self, monitors: Sequence[CurveWriter], *, images: bool = False):
        """``images``: whether the samples are images, so that tokens are not counted."""
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

    An empty ``output_path`` means the folders ``tensorboard`` and ``csv`` in ``dump_dir``. With
    ``resume``, curves continue in the same files and in the same run of Weights & Biases, and
    points of repeated steps are replaced. Raises ConfigError if a package is missing or refuses to
    start, or if a directory cannot be created.
    """
    options: dict[str, Any] = {}
    if config.wandb.enabled:
        name, run_id = dump_dir.resolve().name, _wandb_id(dump_dir, resume=resume)
        options = {"name": name, "dir": str(dump_dir), "config": config.resolved(), "id": run_id, "resume": "allow"}
    return Monitors(open_writers(config, dump_dir, options), images=config.data.name is not None)


def train_scalars(line: Line) -> dict[str, float]:
    """Return the values of a line of metrics.jsonl, by the names of their curves."""
    return {tag: line[key] for key, tag in TRAIN_TAGS.items() if line.get(key) is not None}


def evaluation_scalars(line: Line) -> dict[str, float]:
    """Return the values of a line of evaluations.jsonl, by the names of their curves."""
    losses = line.get("subnetwork_losses") or []
    values = {**line, "subnetwork_loss_mean": sum(losses) / len(losses) if losses else None}
    return {tag: values[key] for key, tag in EVAL_TAGS.items() if values.get(key) is not None}


def _wandb_id(dump_dir: Path, *, resume: bool) -> str:
    """Return the id of this run in Weights & Biases. A file keeps it for a resume."""
    path = dump_dir / WANDB_ID
    require_own_file(path)
    if resume and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    dump_dir.mkdir(parents=True, exist_ok=True)
    chosen = secrets.token_hex(8)
    write_whole(path, f"{chosen}\n")
    return chosen


# -- progress: a bar on a terminal, plain lines elsewhere ------------------------------------------
#
# It goes to standard error, because standard output is for results. The log file gets the lines.


class Progress(Observer):
    """Shows the loss, the speed and the learning rate of the newest step on the terminal.

    A terminal shows a bar. Without a terminal, or if its width is unknown, there is a line every
    ``steps_per_print`` steps and for the last step. If standard error is closed, for example after
    a lost connection, the run continues without output.
    """

    def __init__(self, steps_per_print: int, counted: str = "tokens", evaluated: str = "full model"):
        """``counted``: what the speed counts. ``evaluated``: the model of the held-out loss."""
        self._every, self._counted, self._evaluated = steps_per_print, counted, evaluated
        self._stream: TextIO | None = sys.stderr
        self._steps = self._shown = 0
        self._bar: Any = None

    def on_start(self, start: int, steps: int) -> None:
        self._steps, self._shown = steps, start
        if self._stream is not None and self._stream.isatty() and _has_width(self._stream):
            from tqdm import tqdm

            bar = partial(tqdm, unit="step", dynamic_ncols=True, file=self._stream, smoothing=0.1)
            self._bar = self._try(lambda: bar(total=steps, initial=start))

    def on_step(self, line: Line) -> None:
        step = line["step"]
        texts = {"loss": f"{line['loss']:.4f}", f"{self._counted}/s": f"{line['tokens_per_second']:,.0f}"}
        if "mfu" in line:
            texts["MFU"] = f"{line['mfu']:.1%} ({line['flops_per_second'] / 1e12:,.0f} TFLOP/s a device)"
        texts |= {key: _format(line[key]) for key in ("grad_norm", "lr")}
        if self._bar is not None:
            self._bar.set_postfix(texts, refresh=False)
            self._update(step)
        if step % self._every == 0 or step == self._steps:
            width = len(str(self._steps))
            shown = "  ".join(f"{name} {text}" for name, text in texts.items())
            self._print(f"step {step:>{width}}/{self._steps}  {shown}", in_bar=True)
        self._shown = step

    def on_rollback(self, step: int) -> None:
        self._update(step)
        self._shown = step

    def _update(self, step: int) -> None:
        if self._bar is not None:
            self._try(lambda: self._bar.update(step - self._shown))

    def on_evaluation(self, line: Line) -> None:
        accuracy = f", accuracy {line['accuracy']:.2%}" if "accuracy" in line else ""
        losses = line["subnetwork_losses"]
        self._print(
            f"step {line['step']}: held-out loss {line['loss']:.4f}{accuracy} ({self._evaluated}),"
            f" {sum(losses) / len(losses):.4f} (mean of the groups' own subnetworks)"
        )

    def _print(self, text: str, *, in_bar: bool = False) -> None:
        """Log ``text``, and print it in a line of its own, unless a bar shows the same."""
        log.info("%s", text, extra=FILE_ONLY)
        if self._bar is not None:
            if not in_bar:
                self._try(lambda: self._bar.write(text, file=self._stream))
        elif self._stream is not None:
            self._try(lambda: print(text, file=self._stream, flush=True))

    def _try(self, show: Callable[[], Any]) -> Any:
        try:
            return show()
        except OSError:
            self._stream = self._bar = None
            return None

    def on_end(self) -> None:
        self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._try(self._bar.close)


def _has_width(terminal: TextIO) -> bool:
    """Whether a terminal has columns. A serial console and some containers say that it has 0."""
    try:
        return os.get_terminal_size(terminal.fileno()).columns > 0
    except (OSError, ValueError):
        return True


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
