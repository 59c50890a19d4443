"""Groups of hidden neurons of a branch, on a rank: slices of its projections as parameters of their own, one matrix product over them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import ModelError
from .layout import Layout, TensorInfo


class SlicedLinear(nn.Module):
    """A linear layer of which slices along ``dim`` of its weight are parameters, ``weight:0``, ``weight:1`` …: those that are held.

    Sliced along its outputs (``dim`` 0) it returns those of the slices that are there, side by side; along its inputs (1) it takes them
    so. ``guests``: further slices by index, for as long as the full model is evaluated; a slice's place follows from its index.
    """

    def __init__(self, linear: nn.Linear, dim: int, cuts: dict[int, tuple[int, int]]):
        super().__init__()
        self.dim, self.out_features, self.training = dim, linear.out_features, linear.training
        weight = linear.weight.detach()
        for index, (first, last) in cuts.items():
            part = weight.narrow(dim, first, last - first).clone(memory_format=torch.contiguous_format)
            self.register_parameter(f"weight:{index}", nn.Parameter(part, linear.weight.requires_grad))
        self.bias = linear.bias
        self.guests: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (…, inputs that are there) → (…, outputs that are there)."""
        own = {int(name.partition(":")[2]): value for name, value in self._parameters.items() if ":" in name and value is not None}
        weights = [weight for _, weight in sorted({**own, **self.guests}.items())]
        if weights:
            y = _Product.apply(x, self.dim, *weights)
        else:  # nothing, as a function of ``x``: what comes before has a gradient of zeros, and FSDP2 reduces it as on other ranks
            y = F.linear(x, x.new_zeros((0, x.shape[-1]) if self.dim == 0 else (self.out_features, 0)))
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"slices along {self.dim}: {', '.join(name for name in self._parameters if ':' in name) or 'none'}"


class _Product(torch.autograd.Function):
    """``F.linear`` with slices laid side by side. They are joined for a moment, in forward and again in backward: no copy stays between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, *weights: Tensor) -> Tensor:
        ctx.dim = dim
        ctx.save_for_backward(x, *weights)
        return F.linear(x, _joined(weights, dim))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        x, *weights = ctx.saved_tensors
        of_x = gradient @ _joined(weights, ctx.dim) if ctx.needs_input_grad[0] else None
        of_weights: Iterable[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[2:]):
            whole = gradient.flatten(0, -2).T @ x.flatten(0, -2)
            of_weights = whole.split([weight.shape[ctx.dim] for weight in weights], ctx.dim)
        return of_x, None, *of_weights


def _joined(weights: Iterable[Tensor], dim: int) -> Tensor:
    weights = list(weights)
    return weights[0] if len(weights) == 1 else torch.cat(weights, dim)


def slice_linears(model: nn.Module, layout: Layout, group: int) -> None:
    """Replace, in place, every linear layer that is cut into slices by those that ``group`` holds. Raises :class:`ModelError`."""
    for name, slices in layout.wholes.items():
        if slices[0].cut is None:
            continue
        path, _, leaf = name.rpartition(".")
        linear = model.get_submodule(path)
        dim = slices[0].cut.dim
        if type(linear) is not nn.Linear or leaf != "weight" or (dim == 0 and linear.bias is not None):
            raise ModelError(f'{path}: sdp.granularity "neuron" cuts linear layers, those of hidden units without bias; use "block"')
        model.set_submodule(path, SlicedLinear(linear, dim, _cuts(info for info in slices if group in info.holders)))


def _cuts(slices: Iterable[TensorInfo]) -> dict[int, tuple[int, int]]:
    cuts = {}
    for info in slices:
        assert info.cut is not None
        cuts[int(info.name.rpartition(":")[2])] = (info.cut.start, info.cut.start + info.shape[info.cut.dim])
    return cuts
