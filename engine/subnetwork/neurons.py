"""Layers that have only some groups of hidden neurons: slices of the full model's parameters.

:func:`slice_layers` replaces the layers of each residual branch
(:class:`~.model_interface.Branch`). A branch lists its parameters, and for each parameter the
dimension along which the neurons lie.

The slices of every layer are in one order: first slices that the group holds, then frozen copies,
then guests, which are present only while the full model is evaluated. All layers of a branch have
slices of the same units, so a layer's output is in the order that the next layer expects.
Tensor-parallel ranks each have an equal part of every slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input, conv2d_weight
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import ModelError
from ..placement.layout import Layout
from ..placement.tensor_info import TensorInfo

Settings = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Stride, padding and dilation of a convolution."""


@dataclass
class Slices:
    """The slices of a module's parameter that this rank has: the parameters ``KEY:0``, ``KEY:1`` …

    Attributes:
        key: The parameter's name in its module.
        dim: The dimension along which the parameter is cut.
        ranges: Number of each slice → its half-open range of indices in the full parameter.
        held: The numbers of the slices that the group trains.
        frozen: The numbers of the slices that are frozen copies, without gradients.
        parts: How often each neuron occurs along ``dim`` (3 times for queries, keys, values).
            Slices of the same kind, such as keys, have consecutive numbers.
        guests: Number → tensor of the slices of other groups, while the full model is evaluated.
        factors: Number → multiplier of the inputs of a slice (``dim`` 1); 1 by default.
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
        """The numbers of the present slices, in the order in which the layer joins them."""
        return [*self.held, *self.frozen, *sorted(self.guests)]

    def register(self, module: nn.Module, full: nn.Parameter, dtype: torch.dtype = torch.float32) -> None:
        """Add the present slices of ``full`` to ``module``. Frozen copies get ``dtype``."""
        for index in (*self.held, *self.frozen):
            first, last = self.ranges[index]
            part = full.detach().narrow(self.dim, first, last - first)
            part = part.to(dtype if index in self.frozen else full.dtype).clone(memory_format=torch.contiguous_format)
            module.register_parameter(
                f"{self.key}:{index}", nn.Parameter(part, full.requires_grad and index not in self.frozen)
            )

    def tensors(self, module: nn.Module) -> list[Tensor]:
        """Return the tensors of the present slices, in the order of :attr:`order`."""
        present = [getattr(module, f"{self.key}:{index}") for index in (*self.held, *self.frozen)]
        return [*present, *(self.guests[index] for index in sorted(self.guests))]

    def where(self, device: torch.device) -> Tensor:
        """Return the present slices' indices in the full parameter, sorted as in :attr:`order`."""
        ranges = [torch.arange(*self.ranges[index], device=device) for index in self.order]
        return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.long, device=device)

    def scaled(self, x: Tensor, axis: int, weights: Sequence[Tensor]) -> Tensor:
        """Multiply the inputs ``x`` of each slice by the slice's factor (``sdp.branch_scale``).

        ``axis`` is the dimension of ``x`` with the inputs. ``weights`` are the present slices.
        """
        if all(factor == 1.0 for factor in self.factors.values()) or not weights:
            return x
        parts = [
            x.new_full((w.shape[self.dim],), self.factors.get(index, 1.0))
            for index, w in zip(self.order, weights, strict=True)
        ]
        return x * torch.cat(parts).view([-1 if dim == axis % x.dim() else 1 for dim in range(x.dim())])

    def in_parts(self, y: Tensor, axis: int) -> Tensor:
        """Sort the outputs ``y`` along ``axis``: all queries first, then all keys, then all values.

        If ``parts`` is 1, there is nothing to sort, and ``y`` is returned unchanged.
        """
        order, size = self.order, len(self.ranges) // self.parts
        by_part = sorted(range(len(order)), key=lambda position: order[position] // size)  # stable
        if by_part == list(range(len(order))) or self.parts == 1:
            return y
        pieces = y.split([self.ranges[index][1] - self.ranges[index][0] for index in order], axis)
        return torch.cat([pieces[position] for position in by_part], axis)


def multiply(x: Tensor, weight: Tensor, convolution: Settings | None) -> Tensor:
    """Return ``x`` times the matrix ``weight``, or the convolution of ``x`` with ``weight``.

    ``convolution`` has the settings of a convolution. If it is None, features are in the last
    dimension of ``x``.
    """
    return F.linear(x, weight) if convolution is None else F.conv2d(x, weight, None, *convolution)


def multiply_slices(x: Tensor, convolution: Settings | None, slices: Slices, weights: Sequence[Tensor]) -> Tensor:
    """Return :func:`multiply` of ``x`` and the joined present slices ``weights``.

    Backward joins the slices again, so no joined copy is kept in memory.
    """
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
            narrowed = gradient.narrow(ctx.axis, 0, ctx.width) if ctx.dim == 0 else gradient
            if ctx.convolution is None:
                whole = narrowed.flatten(0, -2).T @ kept.flatten(0, -2)
            else:
                shape = [ctx.width if axis == ctx.dim else size for axis, size in enumerate(weights[0].shape)]
                whole = conv2d_weight(kept, shape, narrowed, *ctx.convolution)  # type: ignore[arg-type]
            of_weights[: ctx.held] = whole.split([weight.shape[ctx.dim] for weight in weights[: ctx.held]], ctx.dim)
        return of_x, None, None, None, *of_weights


def _joined(weights: Sequence[Tensor], dim: int) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights), dim)


class SlicedLinear(nn.Module):
    """A linear layer that has only some slices of its weight.

    Slices lie along the outputs (``dim`` 0, the bias is sliced, too) or the inputs (``dim`` 1).
    """

    def __init__(self, linear: nn.Linear, slices: Mapping[str, Slices], dtype: torch.dtype = torch.float32):
        super().__init__()
        self.slices, self.out_features, self.training = dict(slices), linear.out_features, linear.training
        self.bias = None if "bias" in slices else linear.bias
        for key, part in slices.items():
            part.register(self, linear.get_parameter(key), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (…, inputs of the present slices) to (…, outputs of the present slices)."""
        slices = self.slices["weight"]
        weights = slices.tensors(self)
        if not weights:
            # An empty result that depends on x, so that earlier layers get zero gradients. FSDP2
            # reduces them as on other ranks.
            y = F.linear(x, x.new_zeros((0, x.shape[-1]) if slices.dim == 0 else (self.out_features, 0)))
            return y if self.bias is None else y + self.bias
        y = multiply_slices(slices.scaled(x, -1, weights), None, slices, weights)
        bias = torch.cat(self.slices["bias"].tensors(self)) if "bias" in self.slices else self.bias
        y = y if bias is None else y + bias
        return slices.in_parts(y, -1) if slices.dim == 0 else y


class SlicedConv2d(nn.Module):
    """A convolution without bias that has only some slices of its weight.

    Slices lie along the output channels (``dim`` 0) or the input channels (``dim`` 1).
    """

    def __init__(self, convolution: nn.Conv2d, slices: Mapping[str, Slices], dtype: torch.dtype = torch.float32):
        super().__init__()
        self.slices, self.weight_shape, self.training = dict(slices), convolution.weight.shape, convolution.training
        padding: Any = convolution.padding
        self._settings: Settings = (tuple(convolution.stride), tuple(padding), tuple(convolution.dilation))
        slices["weight"].register(self, convolution.get_parameter("weight"), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (B, present input channels, H, W) to (B, present output channels, H', W')."""
        slices = self.slices["weight"]
        weights = slices.tensors(self)
        if weights:
            x = slices.scaled(x, 1, weights) if slices.dim == 1 else x
            return multiply_slices(x, self._settings, slices, weights)
        outputs, inputs, *kernel = self.weight_shape  # an empty result that depends on x, as above
        if slices.dim == 0:
            return multiply(x, x.new_zeros((1, inputs, *kernel)), self._settings).narrow(1, 0, 0)
        return multiply(F.pad(x, (0, 0, 0, 0, 0, 1)), x.new_zeros((outputs, 1, *kernel)), self._settings)


class SlicedBatchNorm(_BatchNorm):
    """A batch norm of only those channels that the rank has.

    The running statistics have all channels of the full model. Statistics of channels that the rank
    does not have never change.
    """

    def __init__(self, norm: _BatchNorm, slices: Mapping[str, Slices], dtype: torch.dtype = torch.float32):
        super().__init__(norm.num_features, norm.eps, norm.momentum, affine=False, track_running_stats=False)
        if norm.momentum is None:
            raise ModelError(
                "batch norm with momentum None cannot be cut into neurons; give it a momentum, or use "
                'sdp.granularity "block"'
            )
        self.slices, self.training, self.track_running_stats = dict(slices), norm.training, norm.track_running_stats
        for name, buffer in norm.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        for key in ("weight", "bias"):
            slices[key].register(self, norm.get_parameter(key), dtype)

    def where(self, device: torch.device) -> Tensor:
        """Return the full model's indices of the present channels, in the order of the inputs."""
        return self.slices["weight"].where(device)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` (B, present channels, …)."""
        where = self.where(input.device)
        tracks = self.training and self.track_running_stats
        if tracks:
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        if not len(where):
            return input
        # Without running statistics, those of the batch are used.
        used = self.running_mean is not None and (not self.training or tracks)
        mean, variance = (self.running_mean[where], self.running_var[where]) if used else (None, None)  # type: ignore[index]
        weight, bias = (torch.cat(self.slices[key].tensors(self)).float() for key in ("weight", "bias"))
        assert self.momentum is not None
        output = F.batch_norm(input, mean, variance, weight, bias, self.training or not used, self.momentum, self.eps)
        if tracks:
            self.running_mean[where], self.running_var[where] = mean, variance  # type: ignore[index, assignment]
        return output


def slice_layers(model: nn.Module, layout: Layout, group: int, dtype: torch.dtype = torch.float32) -> None:
    """Replace every layer of a residual branch, in place, by a layer with the slices of ``group``.

    The new layer has the slices that the group holds. Under backward masking, it also has frozen
    copies of all other slices, in ``dtype``. Raises ModelError for a layer that cannot be sliced.
    """
    copies = {info.name for info in layout.frozen(group)}
    modules: dict[str, dict[str, Slices]] = {}
    for name, infos in layout.wholes.items():
        if infos[0].cut is not None:
            path, _, key = name.rpartition(".")
            modules.setdefault(path, {})[key] = _slices(key, infos, group, copies)
    for path, slices in modules.items():
        _slice(model, path, slices, dtype)


def _slices(key: str, infos: Sequence[TensorInfo], group: int, copies: set[str]) -> Slices:
    ranges, held, frozen, dim = {}, [], [], 0
    for info in infos:
        assert info.cut is not None
        index, dim = int(info.name.rpartition(":")[2]), info.cut.dim
        ranges[index] = (info.cut.start, info.cut.start + info.shape[dim])
        held += [index] * (group in info.holders)
        frozen += [index] * (info.name in copies)
    parts = len(infos) // len({info.unit for info in infos})
    return Slices(key, dim, ranges, sorted(held), sorted(frozen), parts)


def _slice(model: nn.Module, path: str, slices: Mapping[str, Slices], dtype: torch.dtype) -> None:
    module, dims = model.get_submodule(path), {key: part.dim for key, part in slices.items()}
    whole = [key for key, _ in module.named_parameters(recurse=False) if key not in dims]
    if type(module) is nn.Linear and (
        dims in ({"weight": 0, "bias": 0}, {"weight": 1}) or (dims == {"weight": 0} and not whole)
    ):
        model.set_submodule(path, SlicedLinear(module, slices, dtype))
    elif type(module) is nn.Conv2d and dims in ({"weight": 0}, {"weight": 1}) and not whole and _is_plain(module):
        model.set_submodule(path, SlicedConv2d(module, slices, dtype))
    elif isinstance(module, _BatchNorm) and dims == {"weight": 0, "bias": 0}:
        model.set_submodule(path, SlicedBatchNorm(module, slices, dtype))
    elif isinstance(module, nn.Linear | nn.Conv2d | _BatchNorm):
        raise ModelError(
            f'{path}: sdp.granularity "neuron" cannot cut {", ".join(dims)} of this {type(module).__name__}; only '
            "linear layers (outputs with their bias, or inputs), convolutions without bias and groups, and batch norms "
            'can be cut; use "block"'
        )
    else:
        _slice_in_place(module, slices, dtype)


def _is_plain(convolution: nn.Conv2d) -> bool:
    return convolution.groups == 1 and convolution.padding_mode == "zeros" and not isinstance(convolution.padding, str)


def _property_of_slices(key: str) -> property:
    """A property that reads the present slices of ``key``, joined."""

    def joined(module: Any) -> Tensor:
        slices: Slices = module.slices[key]
        tensors = slices.tensors(module)
        if tensors:
            return torch.cat(tensors, slices.dim)
        shape = [0 if axis == slices.dim else size for axis, size in enumerate(module.whole_shapes[key])]
        return torch.empty(shape, device=next(chain(module.parameters(), module.buffers())).device)

    return property(joined)


def _slice_in_place(module: Any, slices: Mapping[str, Slices], dtype: torch.dtype) -> None:
    """Slice the parameters of another kind of module, without replacing the module.

    The module reads the joined slices under the parameters' names.
    """
    module.slices, module.whole_shapes = dict(slices), {key: module.get_parameter(key).shape for key in slices}
    for key, part in slices.items():
        full = module.get_parameter(key)
        delattr(module, key)
        part.register(module, full, dtype)
    kind = type(module)
    module.__class__ = type(f"Sliced{kind.__name__}", (kind,), {key: _property_of_slices(key) for key in slices})
