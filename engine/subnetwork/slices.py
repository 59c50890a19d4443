"""Slices of a parameter that a rank has, and products with several of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input, conv2d_weight

Settings = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Stride, padding and dilation of a convolution."""


@dataclass
class Slices:
    """The present slices of a module's parameter ``key``, which are its parameters ``KEY:0``,
    ``KEY:1`` …

    Attributes:
        key: The parameter's name in its module.
        dim: The dimension along which it is cut.
        ranges: The half-open range of indices in the full parameter, by slice.
        held: The slices that the group trains.
        frozen: Frozen copies, whose gradients are not computed.
        parts: How many times the neurons occur along ``dim`` (3 for queries, keys, values). Slices
            of one part have consecutive numbers.
        guests: More slices, present while the full model is evaluated.
        factors: Multipliers for the inputs of a slice (``dim`` 1); 1 by default.
    """

    key: str
    dim: int
    ranges: Mapping[int, tuple[int, int]]
    held: Sequence[int]
    frozen: Sequence[int] = ()
    parts: int = 1
    guests: dict[int, Tensor] = field(default_factory=dict)
    factors: dict[int, float] = field(default_factory=dict)

    @property
    def order(self) -> list[int]:
        """The present slices, in the order in which they are joined."""
        return [*self.held, *self.frozen, *sorted(self.guests)]

    def register(self, module: nn.Module, full: nn.Parameter, dtype: torch.dtype = torch.float32) -> None:
        """Make the slices of ``full`` parameters of ``module``. Frozen ones get ``dtype``."""
        for index in (*self.held, *self.frozen):
            first, last = self.ranges[index]
            part = full.detach().narrow(self.dim, first, last - first)
            part = part.to(dtype if index in self.frozen else full.dtype).clone(memory_format=torch.contiguous_format)
            module.register_parameter(
                f"{self.key}:{index}", nn.Parameter(part, full.requires_grad and index not in self.frozen)
            )

    def tensors(self, module: nn.Module) -> list[Tensor]:
        """The tensors of the present slices, in order."""
        own = [module.get_parameter(f"{self.key}:{index}") for index in (*self.held, *self.frozen)]
        return [*own, *(self.guests[index] for index in sorted(self.guests))]

    def where(self, device: torch.device) -> Tensor:
        """Indices of the present slices in the full parameter, in order."""
        ranges = [torch.arange(*self.ranges[index], device=device) for index in self.order]
        return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.long, device=device)

    def scaled(self, x: Tensor, axis: int, weights: Sequence[Tensor]) -> Tensor:
        """Multiply ``x``, whose ``axis`` is the input of the present ``weights``, by their
        factors.
        """
        if all(factor == 1.0 for factor in self.factors.values()) or not weights:
            return x
        parts = [
            x.new_full((w.shape[self.dim],), self.factors.get(index, 1.0))
            for index, w in zip(self.order, weights, strict=True)
        ]
        return x * torch.cat(parts).view([-1 if dim == axis % x.dim() else 1 for dim in range(x.dim())])

    def in_parts(self, y: Tensor, axis: int) -> Tensor:
        """Sort ``y``, whose ``axis`` is the output of the slices, by part; the order within a part
        stays.
        """
        order, each = self.order, len(self.ranges) // self.parts
        by_part = sorted(range(len(order)), key=lambda position: order[position] // each)  # stable
        if by_part == list(range(len(order))) or self.parts == 1:
            return y
        pieces = y.split([self.ranges[index][1] - self.ranges[index][0] for index in order], axis)
        return torch.cat([pieces[position] for position in by_part], axis)

    def __str__(self) -> str:
        kinds = {"": self.held, ", frozen: ": self.frozen}
        names = [
            kind + (", ".join(f"{self.key}:{index}" for index in indices)) for kind, indices in kinds.items() if indices
        ]
        return f"slices along {self.dim}: {''.join(names) or 'none'}"


def multiply(x: Tensor, weight: Tensor, convolution: Settings | None) -> Tensor:
    """A matrix product (features in the last dimension) or a convolution (channels in dimension
    1).
    """
    return F.linear(x, weight) if convolution is None else F.conv2d(x, weight, None, *convolution)


def multiply_slices(x: Tensor, convolution: Settings | None, slices: Slices, weights: Sequence[Tensor]) -> Tensor:
    """:func:`multiply` with the present slices ``weights``, joined."""
    if len(weights) == 1 or not torch.is_grad_enabled():
        # For one weight, torch's own gradient keeps no more memory and avoids Python.
        return multiply(x, _joined(weights, slices.dim), convolution)
    return _Product.apply(x, convolution, slices.dim, len(slices.held), *weights)


class _Product(torch.autograd.Function):
    """A product with several slices, of which the first ``held`` are trained.

    Forward and backward each join the slices for a moment, so no joined copy is kept in between.
    One product gives the output and one gives the gradient of ``x``. The weights' gradient is a
    product over the trained columns only, and only those are saved for backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, convolution: Settings | None, dim: int, held: int, *weights: Tensor) -> Tensor:
        ctx.convolution, ctx.dim, ctx.held, ctx.shape = convolution, dim, held, x.shape
        ctx.axis = -1 if convolution is None else 1
        ctx.width = sum(weight.shape[dim] for weight in weights[:held])
        kept = x if held else None
        if dim == 1 and 0 < held < len(weights):
            kept = x.narrow(ctx.axis, 0, ctx.width).contiguous()
        ctx.save_for_backward(kept, *weights)
        return multiply(x, _joined(weights, dim), convolution)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        kept, *weights = ctx.saved_tensors
        of_x = None
        if ctx.needs_input_grad[0]:
            joined = _joined(weights, ctx.dim)
            convolution = ctx.convolution
            of_x = gradient @ joined if convolution is None else conv2d_input(ctx.shape, joined, gradient, *convolution)
        of_weights: list[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[4:]):
            own = gradient.narrow(ctx.axis, 0, ctx.width) if ctx.dim == 0 else gradient
            if ctx.convolution is None:
                whole = own.flatten(0, -2).T @ kept.flatten(0, -2)
            else:
                shape = [ctx.width if axis == ctx.dim else size for axis, size in enumerate(weights[0].shape)]
                whole = conv2d_weight(kept, shape, own, *ctx.convolution)  # type: ignore[arg-type]
            of_weights[: ctx.held] = whole.split([weight.shape[ctx.dim] for weight in weights[: ctx.held]], ctx.dim)
        return of_x, None, None, None, *of_weights


def _joined(weights: Sequence[Tensor], dim: int) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights), dim)
