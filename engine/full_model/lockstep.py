"""Runs several forward passes in lockstep.

Each pass stops before a unit, and all continue once every pass has arrived there. This works for
any model, however its forward is written. Each pass has a thread of its own, but only one thread
runs at a time, so results do not depend on scheduling.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class _Aborted(BaseException):
    """Ends the waiting passes after another pass failed."""


class _Pass(Generic[T]):
    def __init__(self) -> None:
        self.go, self.stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.at: str | None = None
        self.result: T | None = None
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None


class Lockstep(Generic[T]):
    """Runs passes. A pass calls :meth:`stop` with a unit's name before it runs the unit."""

    def __init__(self, device: torch.device, before_turn: Callable[[], None]):
        """``before_turn`` is called in the main thread each time before a pass continues."""
        self._device, self._before_turn = device, before_turn
        self._current: _Pass[T] | None = None
        self._aborted = False

    def stop(self, unit: str) -> None:
        """Wait, inside a pass, until all passes have reached ``unit``.

        A no-op outside of :meth:`run`.
        """
        current = self._current
        if current is None:
            return
        current.at = unit
        current.stopped.release()
        current.go.acquire()
        if self._aborted:
            raise _Aborted

    def run(self, passes: Sequence[Callable[[], T]], at_unit: Callable[[str], None]) -> list[T]:
        """Run the passes and return their results, in order.

        ``at_unit`` is called in this thread each time all passes have stopped before a unit.
        """
        states = [self._start(work) for work in passes]
        try:
            while True:
                for state in states:
                    self._resume(state)
                stops = {state.at for state in states}
                if stops == {None}:
                    return [state.result for state in states]  # type: ignore[misc]
                if len(stops) > 1:
                    raise RuntimeError(
                        f"batches took different paths through the model (stopped before {sorted(map(str, stops))})"
                    )
                at_unit(stops.pop())  # type: ignore[arg-type]
        finally:
            self._end(states)

    def _start(self, work: Callable[[], T]) -> _Pass[T]:
        state: _Pass[T] = _Pass()
        # Each thread has its own grad mode, device and stream.
        grad_enabled, on_cuda = torch.is_grad_enabled(), self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device) if on_cuda else None

        def body() -> None:
            state.go.acquire()
            try:
                if not self._aborted:
                    # torch.cuda.stream(None) is a no-op.
                    with torch.set_grad_enabled(grad_enabled), torch.cuda.stream(stream):
                        state.result = work()
            except BaseException as error:
                state.error = error
            state.at = None
            state.stopped.release()

        state.thread = threading.Thread(target=body, name="sdp-evaluation", daemon=True)
        state.thread.start()
        return state

    def _resume(self, state: _Pass[T]) -> None:
        self._before_turn()
        self._current = state
        state.go.release()
        state.stopped.acquire()
        self._current = None
        if state.error is not None:
            raise state.error

    def _end(self, states: Sequence[_Pass[T]]) -> None:
        self._aborted = True
        for state in states:
            state.go.release()
            assert state.thread is not None
            state.thread.join()
        self._aborted = False
