"""Warns where a rank's module would silently be taken for the full model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

log = logging.getLogger("sdp")


class Evaluation:
    """Knows who runs the module in evaluation mode.

    Attributes:
        is_running: Whether the engine itself evaluates now.
        is_replaced: Whether a pass in evaluation mode runs the full model instead.
    """

    def __init__(self) -> None:
        self.is_running = False
        self.is_replaced = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which the engine evaluates."""
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False


def warn_of_partial_pass(module: nn.Module, evaluation: Evaluation, is_partial: Callable[[], bool]) -> None:
    """Make a forward pass in evaluation mode warn once that it runs a subnetwork, if it does.

    This covers ``engine(batch)`` after ``engine.eval()``, and ``module.generate(...)``. The passes
    of ``engine.evaluate`` do not warn.
    """

    def warn(module: nn.Module, _: Any) -> None:
        if is_partial() and not (module.training or evaluation.is_running or evaluation.is_replaced):
            handle.remove()
            log.warning(
                "the model runs in evaluation mode, but this rank has only the subnetwork of its group; "
                "engine.evaluate(BATCHES) gives the loss of the full model, engine.full_model() and "
                "engine.generate() run it"
            )

    handle = module.register_forward_pre_hook(warn)


def warn_of_partial_state(module: nn.Module, is_partial: Callable[[], bool]) -> None:
    """Make ``module.state_dict()`` warn once that it lacks the blocks of other groups, if it
    does.
    """
    module.register_state_dict_pre_hook(_make_warning(is_partial))


def _make_warning(is_partial: Callable[[], bool]) -> Callable[[nn.Module, str, bool], None]:
    warned = False

    def warn(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        nonlocal warned
        if not is_partial():
            return
        if not warned:
            log.warning(
                "module.state_dict() has only the subnetwork of this rank's group; engine.full_state_dict() and "
                "engine.save_pretrained(DIR) give the whole model"
            )
        warned = True

    return warn
