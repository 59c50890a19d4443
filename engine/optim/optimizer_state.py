"""What an optimizer keeps of a parameter, as a checkpoint has it: tensors as they are, and step counts that are plain numbers.

torch's optimizers count steps in tensors. DeepSpeed's FusedAdam and DeepSpeedCPUAdam count in an ``int`` of the parameter's state, Apex's
and FusedLion in one of the parameter group. A checkpoint has each as torch's, ``optimizer/NAME/step``, so that a run goes on under any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import CheckpointError

COUNT = "step"


class OptimizerState:
    """The state of ``optimizer`` as tensors; what a checkpoint filled into those of numbers is put back by :meth:`write_back`.

    Of a parameter group the count alone: most other numbers there are settings, which the configuration gives. What an optimizer counts
    there under another name is not kept.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        self._tensors: dict[tuple[str, str], torch.Tensor] = {}
        self._numbers: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def of(
        self, parameter: torch.Tensor, canonical: str, group: dict[str, Any] | None = None
    ) -> dict[str, torch.Tensor]:
        """By key. Slices of one parameter, ``canonical``, have one count; ``group``: where the optimizer does not list ``parameter``.

        Raises :class:`CheckpointError` for state that is neither tensor nor number.
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
                    f"the optimizer's {key!r} of {canonical} is a {type(value).__name__}; a checkpoint keeps tensors and numbers: use an "
                    "optimizer whose state is made of these"
                )
        if state and COUNT not in state and isinstance(group.get(COUNT), int | float):
            found[COUNT] = self._number(group, COUNT, canonical, group[COUNT])
        return found

    def _of_group(self, key: str, value: float, group: Mapping[str, Any]) -> float:
        """FusedAdam launches a kernel for a group and raises the count of its last parameter alone, for all."""
        others = (self._optimizer.state.get(parameter, {}).get(key, 0) for parameter in group.get("params", ()))
        return max([value, *others]) if key == COUNT else value

    def _number(self, holder: dict[str, Any], key: str, canonical: str, value: float) -> torch.Tensor:
        kind = torch.float32 if key == COUNT else torch.float64  # counts as torch's
        tensor = self._tensors.setdefault((canonical, key), torch.tensor(float(value), dtype=kind, device="cpu"))
        self._numbers.append((holder, key, tensor))
        return tensor

    def write_back(self) -> None:
        """Give the optimizer what the tensors of its numbers hold."""
        for holder, key, tensor in self._numbers:
            holder[key] = type(holder[key])(tensor.item())


def clear(optimizer: Optimizer) -> None:
    """As before the first step."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group.pop(COUNT, None)
        if COUNT in optimizer.defaults:
            group[COUNT] = optimizer.defaults[COUNT]


def materialise_state(optimizer: Optimizer) -> None:
    """Give every parameter the optimizer state that its first step would make, without changing any weight or gradient."""
    rates = [group["lr"] for group in optimizer.param_groups]
    gradients = {parameter: parameter.grad for group in optimizer.param_groups for parameter in group["params"]}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
