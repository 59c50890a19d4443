"""Shows the progress of training: a bar on a terminal, plain lines elsewhere.

All of it goes to standard error, because standard output is for results. The log file gets the
plain lines.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from .observer import Line, Observer
from .process import FILE_ONLY

log = logging.getLogger("sdp")


class Progress(Observer):
    """Shows the loss, the speed and the learning rate of the newest step.

    Without a terminal it prints a line every ``steps_per_print`` steps, and one for the last step.
    A terminal of unknown width gets these lines, too. If standard error is gone, as after a lost
    connection, nothing is shown any more, and the run goes on.
    """

    def __init__(self, steps_per_print: int, counted: str = "tokens", evaluated: str = "full model"):
        """``counted``: what the speed counts. ``evaluated``: what the held-out loss belongs to."""
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
        """Log ``text``, and print it on a line of its own, unless a bar shows the same. A bar stays
        below it.
        """
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
