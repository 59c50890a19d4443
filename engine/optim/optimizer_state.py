"""An optimizer's state per parameter, in the form that a checkpoint stores.

Tensors are stored unchanged. Step counts that are plain numbers become tensors. torch's optimizers
count steps in tensors. DeepSpeed's FusedAdam and DeepSpeedCPUAdam count in an ``int`` of the
parameter's state. Apex's optimizers and FusedLion count in an ``int`` of the parameter group. A
checkpoint stores every count in torch's form, as ``optimizer/NAME/step``. So a run can continue
with any of these optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import CheckpointError
from .script_optimizers import stepped_by_engine

COUNT = "step"


class OptimizerState:
    """Presents the state of ``optimizer`` as tensors, which a checkpoint can save and fill.

    After a checkpoint has filled these tensors, :meth:`write_back` copies plain numbers back to the
    optimizer. Of a parameter group, only the count "step" is saved, because most other numbers
    there are settings. A count with another name is lost.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        self._tensors: dict[tuple[str, str], torch.Tensor] = {}
        self._numbers: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def of(
        self, parameter: torch.Tensor, canonical: str, group: dict[str, Any] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the state of ``parameter`` as tensors, by key, such as "exp_avg".

        Args:
            parameter: A parameter, or a slice of one.
            canonical: The parameter's canonical name. All slices of one parameter share one step
                count.
            group: The parameter group, if the optimizer does not list ``parameter``.

        Raises:
            CheckpointError: A value of the state is neither a tensor nor a number.
        """
        state = self._optimizer.state.get(parameter, {})
        group = group if group is not None else self._groups.get(id(parameter), {})
        found: dict[str, torch.Tensor] = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[key] = value
            elif isinstance(value, int | float):
                found[key] = self._number(state, key, canonical, self._of_group(key, value, group))
            elif value is not None:
                raise CheckpointError(
                    f"the optimizer's {key!r} of {canonical} is a {type(value).__name__}; a checkpoint can store "
                    "only tensors and numbers; use an optimizer whose state has only these"
                )
        if state and COUNT not in state and isinstance(group.get(COUNT), int | float):
            found[COUNT] = self._number(group, COUNT, canonical, group[COUNT])
        return found

    def _of_group(self, key: str, value: float, group: Mapping[str, Any]) -> float:
        """Return the step count of the whole ``group``.

        DeepSpeed's FusedAdam launches one kernel per group, and raises only the count of the last
        parameter. Values under other keys are returned unchanged.
        """
        others = (self._optimizer.state.get(parameter, {}).get(key, 0) for parameter in group.get("params", ()))
        return max([value, *others]) if key == COUNT else value

    def _number(self, holder: dict[str, Any], key: str, canonical: str, value: float) -> torch.Tensor:
        kind = torch.float32 if key == COUNT else torch.float64  # torch's dtype for step counts
        tensor = self._tensors.setdefault((canonical, key), torch.tensor(float(value), dtype=kind, device="cpu"))
        self._numbers.append((holder, key, tensor))
        return tensor

    def write_back(self) -> None:
        """Copy loaded numbers, such as step counts, from their tensors to the optimizer."""
        for holder, key, tensor in self._numbers:
            holder[key] = type(holder[key])(tensor.item())


def call_closure(closure: Callable[[], Any] | None) -> Any:
    """Call ``closure`` with gradients enabled, and return its result; without one, return None."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def clear(optimizer: Optimizer) -> None:
    """Remove the optimizer's state, so that it is as before the first step."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group.pop(COUNT, None)
        if COUNT in optimizer.defaults:
            group[COUNT] = optimizer.defaults[COUNT]


def materialise_state(optimizer: Optimizer) -> None:
    """Create the optimizer state of every parameter, so that a checkpoint can be loaded into it.

    The state is as after a first step with zero gradients. No weight and no gradient changes.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    gradients = {parameter: parameter.grad for group in optimizer.param_groups for parameter in group["params"]}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in gradients:
        parameter.grad = torch.zeros_like(parameter)
    try:
        with stepped_by_engine(optimizer):
            optimizer.step()
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
