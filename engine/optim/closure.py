"""Calls the closure that torch's ``Optimizer.step`` accepts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def call_closure(closure: Callable[[], Any] | None) -> Any:
    """Call ``closure`` with gradients enabled, and return its result. None returns None."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
