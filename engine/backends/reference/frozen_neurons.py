"""Neurons that train in the rows of some groups only: backward masking in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ModelError
from ...placement.units import Slice


class FrozenNeurons:
    """Runs a linear layer so that a neuron gets no gradient from the rows of groups that lack it.

    The output and the gradient of the input are those of the plain layer.

    Args:
        name: the path of the layer.
        layer: is cut along its outputs, with its bias, or along its inputs.
        slices: the slices of its parameters, each with the groups that hold it.
        groups: the number of groups.
        groups_of_rows: returns the group of each row, or None if all neurons train in this call.

    Raises:
        ModelError: the layer is of another type, or is cut in another way.
    """

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        slices: Iterable[tuple[Slice, Sequence[int]]],
        groups: int,
        groups_of_rows: Callable[[], Tensor | None],
    ):
        self._where = f'sdp.engine "vectorized" with backward masking of neurons: {name}'
        if type(layer) is not nn.Linear:
            raise ModelError(f'{self._where} must be an nn.Linear and is a {type(layer).__name__}; use "reference"')
        if "forward" in vars(layer):
            raise ModelError(f'{self._where} has a forward of its own, which would be replaced; use "reference"')
        by_key: dict[str, list[tuple[Slice, Sequence[int]]]] = {}
        for part, holders in slices:
            by_key.setdefault(part.parameter.rpartition(".")[2], []).append((part, holders))
        (self._dim,) = {part.dim for part, _ in by_key["weight"] if part.dim is not None}
        if ("bias" in by_key) != (self._dim == 0 and layer.bias is not None):
            raise ModelError(
                f"{self._where} must be cut along its inputs without its bias, or along its outputs with it; use "
                '"reference"'
            )
        self._layer, self._groups_of_rows = layer, groups_of_rows
        # Whether a group trains a neuron, (groups, neurons).
        shape = (groups, layer.weight.shape[self._dim])
        self._trains = torch.ones(shape, dtype=torch.bool, device=layer.weight.device)
        for part, holders in by_key["weight"]:
            ((first, last),) = part.ranges
            self._trains[[group for group in range(groups) if group not in holders], first:last] = False
        layer.forward = self._forward

    def _forward(self, input: Tensor) -> Tensor:
        groups = self._groups_of_rows()
        if groups is None:
            return F.linear(input, self._layer.weight, self._layer.bias)
        if input.dim() < 2 or input.shape[0] != len(groups):
            raise ModelError(
                f"{self._where} must have the {len(groups)} rows of the batch in the first dimension of its input, "
                f'which has the shape {tuple(input.shape)}; use "reference"'
            )
        trains = self._trains[groups].view(len(groups), *[1] * (input.dim() - 2), -1)
        return _Product.apply(input, self._layer.weight, self._layer.bias, trains, self._dim)


class _Product(torch.autograd.Function):
    """``F.linear`` whose outputs (``dim`` 0) or inputs (1) train in the rows where ``trains`` is
    true.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, trains: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        ctx.save_for_backward(x, weight, trains)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        x, weight, trains = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        own, inputs = (gradient * trains, x) if ctx.dim == 0 else (gradient, x * trains)
        return (
            gradient @ weight if needs_x else None,
            own.flatten(0, -2).T @ inputs.flatten(0, -2) if needs_weight else None,
            own.flatten(0, -2).sum(0) if needs_bias else None,
            None,
            None,
        )
