"""Groups of hidden neurons of a branch, on a rank: slices of its projections as parameters of their own, one matrix product over them.

A branch (``units.Branch``) names its parameters and the dimension of each along which its neurons lie; :func:`slice_linears` replaces
the layers that have them. Whatever the kind of a layer, its slices lie in one order: those that the group holds, then those of which
it has copies. All layers of a branch have slices of the same indices, so what one puts out is in the order that the next takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import ModelError
from .layout import Layout, TensorInfo


class SlicedLinear(nn.Module):
    """A linear layer of which slices along ``dim`` of its weight are parameters, ``weight:0``, ``weight:1`` …: those in ``cuts``.

    Sliced along its outputs (``dim`` 0) it returns those of the slices that are there, side by side; along its inputs (1) it takes them
    so. ``frozen``: indices of slices that are copies in ``dtype``, of which no gradient is computed. ``guests``: further slices by index,
    for as long as the full model is evaluated. ``factors``: by which the inputs of a slice are multiplied (``dim`` 1), 1 where not stated.
    """

    def __init__(
        self,
        linear: nn.Linear,
        dim: int,
        cuts: dict[int, tuple[int, int]],
        frozen: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.dim, self.out_features, self.training = dim, linear.out_features, linear.training
        weight = linear.weight.detach()
        for index, (first, last) in cuts.items():
            part = weight.narrow(dim, first, last - first).to(dtype if index in frozen else weight.dtype)
            part = nn.Parameter(part.clone(memory_format=torch.contiguous_format), linear.weight.requires_grad and index not in frozen)
            self.register_parameter(f"weight:{index}", part)
        self.held = [f"weight:{index}" for index in cuts if index not in frozen]
        self.frozen = [f"weight:{index}" for index in cuts if index in frozen]
        self.bias = linear.bias
        self.guests: dict[int, Tensor] = {}
        self.factors: dict[int, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (…, inputs that are there) → (…, outputs that are there)."""
        weights = [self.get_parameter(name) for name in (*self.held, *self.frozen)]
        weights += [guest for _, guest in sorted(self.guests.items())]
        if any(factor != 1.0 for factor in self.factors.values()):
            x = x * self._along_inputs(weights, x)
        if weights and not torch.is_grad_enabled():
            y = F.linear(x, _joined(weights, self.dim))
        elif weights:
            y = _Product.apply(x, self.dim, len(self.held), *weights)
        else:  # nothing, as a function of ``x``: what comes before has a gradient of zeros, and FSDP2 reduces it as on other ranks
            y = F.linear(x, x.new_zeros((0, x.shape[-1]) if self.dim == 0 else (self.out_features, 0)))
        return y if self.bias is None else y + self.bias

    def _along_inputs(self, weights: Sequence[Tensor], like: Tensor) -> Tensor:
        """The factors of all inputs that are there."""
        indices = [*(int(name.rpartition(":")[2]) for name in (*self.held, *self.frozen)), *sorted(self.guests)]
        parts = [like.new_full((weight.shape[1],), self.factors.get(index, 1.0)) for index, weight in zip(indices, weights, strict=True)]
        return torch.cat(parts) if parts else like.new_empty(0)

    def extra_repr(self) -> str:
        return f"slices along {self.dim}: {', '.join(self.held) or 'none'}" + f", frozen: {', '.join(self.frozen)}" * bool(self.frozen)


class _Product(torch.autograd.Function):
    """``F.linear`` with slices laid side by side, of which the first ``held`` ones are trained.

    They are joined for a moment, in forward and again in backward: no copy stays between. One product computes the outputs of all and one
    the gradient of ``x``; the weights' gradient is a product over the columns that are trained alone, and so is what is kept for it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, held: int, *weights: Tensor) -> Tensor:
        ctx.dim, ctx.held = dim, held
        ctx.width = sum(weight.shape[dim] for weight in weights[:held])
        kept = x if held else None
        if dim == 1 and 0 < held < len(weights):
            kept = x.narrow(-1, 0, ctx.width).contiguous()
        ctx.save_for_backward(kept, *weights)
        return F.linear(x, _joined(weights, dim))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        kept, *weights = ctx.saved_tensors
        of_x = gradient @ _joined(weights, ctx.dim) if ctx.needs_input_grad[0] else None
        of_weights: list[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[3:]):
            own = gradient.narrow(-1, 0, ctx.width) if ctx.dim == 0 else gradient
            whole = own.flatten(0, -2).T @ kept.flatten(0, -2)
            of_weights[: ctx.held] = whole.split([weight.shape[ctx.dim] for weight in weights[: ctx.held]], ctx.dim)
        return of_x, None, None, *of_weights


def _joined(weights: Sequence[Tensor], dim: int) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights), dim)


def slice_linears(model: nn.Module, layout: Layout, group: int, dtype: torch.dtype = torch.float32) -> None:
    """Replace, in place, every linear layer that is cut into slices by those that ``group`` has: those that it holds and, under backward
    masking, the others as frozen copies in ``dtype``. Raises :class:`ModelError`.
    """
    copies = {info.name for info in layout.frozen(group)}
    for name, slices in layout.wholes.items():
        if slices[0].cut is None:
            continue
        path, _, leaf = name.rpartition(".")
        linear = model.get_submodule(path)
        dim = slices[0].cut.dim
        if type(linear) is not nn.Linear or leaf != "weight" or (dim == 0 and linear.bias is not None):
            raise ModelError(f'{path}: sdp.granularity "neuron" cuts linear layers, those of hidden units without bias; use "block"')
        cuts = _cuts(info for info in slices if group in info.holders or info.name in copies)
        frozen = [_index(info) for info in slices if info.name in copies]
        model.set_submodule(path, SlicedLinear(linear, dim, cuts, frozen, dtype))


def _cuts(slices: Iterable[TensorInfo]) -> dict[int, tuple[int, int]]:
    cuts = {}
    for info in slices:
        assert info.cut is not None
        cuts[_index(info)] = (info.cut.start, info.cut.start + info.shape[info.cut.dim])
    return cuts


def _index(info: TensorInfo) -> int:
    return int(info.name.rpartition(":")[2])
