"""Neurons that train in the rows of some groups only: backward masking in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
        linear: a layer that is cut along its outputs, with its bias, or along its inputs.
        slices: the slices of its parameters, each with the groups that hold it.
        groups: the number of groups.
        groups_of_rows: returns the group of each row, or None if all neurons train in this call.

    Raises:
        ModelError: the layer is of another type, or is cut in another way.
    """

    def __init__(
        self,
        name: str,
        linear: nn.Module,
        slices: Sequence[tuple[Slice, Sequence[int]]],
        groups: int,
        groups_of_rows: Callable[[], Tensor | None],
    ):
        dims = {part.parameter.rpartition(".")[2]: part.dim for part, _ in slices if part.dim is not None}
        expected = [{"weight": 1}, {"weight": 0} | dict.fromkeys(("bias",) if _has_bias(linear) else (), 0)]
        if type(linear) is not nn.Linear or dims not in expected:
            raise ModelError(
                f'{name}: sdp.engine "vectorized" with sdp.granularity "neuron" and backward masking needs linear '
                "layers that are cut by outputs with their bias, or by inputs, and this "
                f'{type(linear).__name__} is cut in {", ".join(sorted(dims))}; use "reference"'
            )
        self._name, self._linear, self._groups_of_rows = name, linear, groups_of_rows
        self._dim, self._has_own_bias = dims["weight"], "bias" in dims
        size = linear.weight.shape[dims["weight"]]
        # Whether a group trains a neuron, (groups, neurons).
        self._trains = torch.ones(groups, size, dtype=torch.bool, device=linear.weight.device)
        for part, holders in slices:
            ((first, last),) = part.ranges
            self._trains[[group for group in range(groups) if group not in holders], first:last] = False
        self._fewer = -1  # the length of the input's first dimension, in a call with fewer rows
        self._is_cut_off = False
        linear.forward = self._forward

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are cut."""
        return [self._linear.get_parameter(key) for key in (["weight", "bias"] if self._has_own_bias else ["weight"])]

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """A context in which the layer gives its cut parameters no gradient at all."""
        self._is_cut_off = True
        try:
            yield
        finally:
            self._is_cut_off = False

    def _forward(self, input: Tensor) -> Tensor:
        weight, bias, groups = self._linear.weight, self._linear.bias, self._groups_of_rows()
        if self._is_cut_off:
            return F.linear(input, weight.detach(), bias.detach() if self._has_own_bias else bias)
        if groups is None:
            self._fewer = input.shape[0]
            return F.linear(input, weight, bias)
        if input.dim() < 2 or input.shape[0] != len(groups) or input.shape[0] == self._fewer:
            raise ModelError(
                f'sdp.engine "vectorized": {self._name} has an input of shape {tuple(input.shape)}, whose first '
                f'dimension is not the {len(groups)} rows of the batch; use "reference"'
            )
        trains = self._trains[groups].view(len(groups), *[1] * (input.dim() - 2), -1)
        return _Product.apply(input, weight, bias, trains, self._dim)


def _has_bias(linear: nn.Module) -> bool:
    return getattr(linear, "bias", None) is not None


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
