"""Refuses what a script does with its optimizer where the engine must do it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigError

_FLAG = "_is_stepped_by_the_engine"


def refuse_steps_of_script(optimizer: Optimizer) -> None:
    """Make ``optimizer.step()`` raise ConfigError outside :func:`stepped_by_engine`.

    Without gradients nothing would happen, so such a call is no error. Scripts that keep
    ``optimizer.step()`` after ``engine.step()`` make one.
    """

    def check(optimizer: Optimizer, *_: Any) -> None:
        gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
        if any(gradient is not None for gradient in gradients):
            refuse_outside_engine(optimizer)

    optimizer.register_step_pre_hook(check)


def refuse_outside_engine(optimizer: Optimizer) -> None:
    """Raise ConfigError outside :func:`stepped_by_engine`."""
    if not getattr(optimizer, _FLAG, False):
        raise ConfigError(
            "optimizer.step: call engine.backward(loss) and engine.step() instead of loss.backward() and "
            "optimizer.step(); only the engine averages gradients between groups, clips, skips steps that are not "
            "finite, and advances the schedule"
        )


@contextmanager
def stepped_by_engine(optimizer: Optimizer) -> Iterator[None]:
    """A context in which ``optimizer.step()`` is allowed."""
    vars(optimizer)[_FLAG] = True
    try:
        yield
    finally:
        vars(optimizer)[_FLAG] = False


class OptimizedParameters:
    """Finds parameters that a script expects to train and that never move.

    Args:
        trained: this rank's parameters that were trainable in ``sdp.initialize``, by name.
        frozen: this rank's other parameters, by name.
        optimizer: the optimizer.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter], frozen: Mapping[str, nn.Parameter], optimizer: Optimizer):
        self._optimizer, self._groups = optimizer, len(optimizer.param_groups)
        self._frozen = dict(frozen)
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self.missing = [name for name, parameter in trained.items() if id(parameter) not in known]

    def unfrozen(self) -> list[str]:
        """Return the names of parameters that were unfrozen since the last call, or in the script.

        Raises:
            ConfigError: The script has added a parameter group.
        """
        if len(self._optimizer.param_groups) != self._groups:
            raise ConfigError(
                "optimizer.add_param_group: parameter groups cannot change after sdp.initialize, which decides what "
                "is averaged between groups; give all of them to sdp.initialize"
            )
        names = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        for name in names:
            del self._frozen[name]
        return names


def shortened(names: Iterable[str], most: int = 3) -> str:
    """Return the first names, and how many more there are, as text."""
    names = list(names)
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
