"""What a user sees while training runs: a bar on a terminal, plain lines elsewhere.

All of it goes to standard error; standard output is for results.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


class Progress:
    """Shows loss and tokens per second of the last step; on ranks that are not ``enabled`` it shows nothing."""

    def __init__(self, total_steps: int, start: int, enabled: bool, steps_per_print: int):
        self._total, self._every, self._last = total_steps, steps_per_print, start
        self._enabled = enabled
        self._bar: Any = None
        if enabled and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total_steps, initial=start, unit="step", dynamic_ncols=True, file=sys.stderr, smoothing=0.1
            )

    def update(self, step: int, loss: float, tokens_per_second: float, extra: Mapping[str, Any] | None = None) -> None:
        """Optimizer step ``step`` (from 1) is done; ``extra``: more to show, name → number or text."""
        shown = {"loss": f"{loss:.4f}", "tokens/s": f"{tokens_per_second:,.0f}"}
        shown |= {
            name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in (extra or {}).items()
        }
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._last)
        elif self._enabled and (step % self._every == 0 or step == self._total):
            width = len(str(self._total))
            print(
                f"step {step:>{width}}/{self._total}  " + "  ".join(f"{name} {text}" for name, text in shown.items()),
                file=sys.stderr,
                flush=True,
            )
        self._last = step

    def print(self, line: str) -> None:
        """A line of its own; a bar stays below it."""
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        elif self._enabled:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the bar as it is; to be called also when training ends early."""
        if self._bar is not None:
            self._bar.close()


def progress(total_steps: int, start: int, enabled: bool, steps_per_print: int) -> Progress:
    """Progress of a run from step ``start`` to ``total_steps``; a plain line every ``steps_per_print`` steps and at the end."""
    return Progress(total_steps, start, enabled, steps_per_print)
