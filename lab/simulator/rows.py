"""Changes a model so that a unit computes, or trains, only the rows of groups that hold the unit.

A batch has the rows of all groups. Under forward masking, a unit is absent from the rows of groups
that lack it. Under backward masking it computes all rows, and the rows of groups that lack it give
its weights no gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from sdp.engine.distributed.mesh import Holders
from sdp.engine.errors import ModelError
from sdp.engine.placement.layout import Layout
from sdp.engine.placement.units import Slice
from sdp.engine.subnetwork.carve import PassThrough
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten


class Rows:
    """To which groups the rows of the current batch belong. All changed units of a model read it.

    Attributes:
        groups: The group of each row. If None, the full model computes all rows.
        keeps_frozen: Whether the masking is backward.
        copy: Under backward masking, returns the frozen copy of a block's weight.
    """

    groups: Tensor | None = None
    keeps_frozen = False
    copy: Callable[[Tensor], Tensor] = staticmethod(lambda weight: weight)


def mask(model: nn.Module, layout: Layout, rows: Rows) -> None:
    """Change all units of ``model`` that some group lacks, so that each pass follows ``rows``.

    Raises:
        ModelError: A unit is no block, and its neurons are not those of linear layers.
    """
    count = layout.mesh.sdp
    layers: dict[str, list[tuple[Slice, Sequence[int]]]] = {}
    for unit, holders in zip(layout.units, layout.placement.holders, strict=True):
        if len(holders) == count:
            continue
        if unit.is_block:
            BlockRows(unit.name, model.get_submodule(unit.name), holders, rows)
        for part in () if unit.is_block else unit.slices:
            layers.setdefault(part.parameter.rpartition(".")[0], []).append((part, holders))
    for name, slices in layers.items():
        NeuronRows(name, model.get_submodule(name), slices, count, rows)


class BlockRows:
    """Runs a block with the rows of its holders. The other rows skip it, or run its frozen copy.

    An argument that has one entry for each row, in its first dimension, is cut. A table of
    positions may by chance have as many entries as there are rows. It is recognised when a pass has
    another number of rows, because its length stays.
    """

    def __init__(self, name: str, block: nn.Module, holders: Sequence[int], rows: Rows):
        skeleton = copy.deepcopy(block)
        if hasattr(block.forward, "_torchdynamo_orig_callable"):
            del skeleton.forward  # is compiled, with the weights of ``block``
        self._skipped, self._plain = PassThrough(name, skeleton), _Plain(block)
        self._holders, self._rows = torch.tensor(holders), rows
        # By the number of arguments, then by the number of rows: the lengths of the arguments.
        self._lengths: dict[int, dict[int, list[int]]] = {}
        block.forward = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        groups = self._rows.groups
        if groups is None:
            return self._plain(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        seen = self._lengths.setdefault(len(leaves), {})
        seen[len(groups)] = [_length(leaf) for leaf in leaves]
        held = torch.isin(groups, self._holders.to(groups.device))
        if held.all():
            return self._plain(*args, **kwargs)
        others = self._frozen if self._rows.keeps_frozen else self._skipped
        if not held.any():
            return others(*args, **kwargs)
        has_rows = [all(count == lengths[index] for count, lengths in seen.items()) for index in range(len(leaves))]
        outputs, places = [], [held.nonzero().flatten(), (~held).nonzero().flatten()]
        for run, place in zip((self._plain, others), places, strict=True):
            taken = [
                leaf.index_select(0, place) if is_cut else leaf for leaf, is_cut in zip(leaves, has_rows, strict=True)
            ]
            own_args, own_kwargs = tree_unflatten(taken, structure)
            outputs.append(run(*own_args, **own_kwargs))
        return _join(outputs, torch.cat(places).argsort())

    def _frozen(self, *args: Any, **kwargs: Any) -> Any:
        weights = {name: self._rows.copy(parameter.detach()) for name, parameter in self._plain.named_parameters()}
        return functional_call(self._plain, weights, args, kwargs)


def _length(leaf: Any) -> int:
    return leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else -1


class _Plain(nn.Module):
    """A block with the ``forward`` that it has now. Its hooks run once for all rows."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block, self._forward = block, block.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


def _join(outputs: Sequence[Any], order: Tensor) -> Any:
    first, structure = tree_flatten(outputs[0])
    second, _ = tree_flatten(outputs[1])
    joined = [
        torch.cat([mine, other]).index_select(0, order) if isinstance(mine, Tensor) else mine
        for mine, other in zip(first, second, strict=True)
    ]
    return tree_unflatten(joined, structure)


class NeuronRows:
    """Runs a linear layer some of whose neurons are absent, or frozen, in the rows of some groups.

    The neurons are outputs of the layer, with its bias, or inputs. Absent inputs are replaced by
    zeros, so the layers before need no change.

    Raises:
        ModelError: The layer is of another type, or is cut in another way.
    """

    def __init__(
        self, name: str, layer: nn.Module, slices: Iterable[tuple[Slice, Sequence[int]]], groups: int, rows: Rows
    ):
        weights = [(part, holders) for part, holders in slices if part.parameter.endswith(".weight")]
        if type(layer) is not nn.Linear or not weights:
            raise ModelError(
                f"{name}: the simulator masks neurons of nn.Linear, and this is a {type(layer).__name__}; "
                "train without it"
            )
        dims = {part.dim for part, _ in weights}
        cuts_bias = any(part.parameter.endswith(".bias") for part, _ in slices)
        if cuts_bias != (dims == {0} and layer.bias is not None):
            raise ModelError(f"{name}: its bias must be cut if its outputs are, and not if its inputs are")
        (self._dim,) = dims
        self._name, self._layer, self._rows = name, layer, rows
        shape = (groups, layer.weight.shape[self._dim or 0])
        self._held = torch.ones(shape, dtype=torch.bool, device=layer.weight.device)
        for part, holders in weights:
            ((first, last),) = part.ranges
            self._held[[group for group in range(groups) if group not in holders], first:last] = False
        layer.forward = self._forward

    def _forward(self, input: Tensor) -> Tensor:
        groups, weight, bias = self._rows.groups, self._layer.weight, self._layer.bias
        if groups is None:
            return F.linear(input, weight, bias)
        if input.dim() < 2 or input.shape[0] != len(groups):
            raise ModelError(
                f"{self._name}: its input has the shape {tuple(input.shape)}, and the simulator needs the "
                f"{len(groups)} rows of the batch in the first dimension; train without it"
            )
        held = self._held[groups].view(len(groups), *[1] * (input.dim() - 2), -1)
        if self._rows.keeps_frozen:
            return _Product.apply(input, weight, bias, held, self._dim)
        return F.linear(input * held if self._dim else input, weight, bias)


class _Product(torch.autograd.Function):
    """``F.linear`` whose outputs (``dim`` 0) or inputs (1) train where ``held`` is true.

    The output and the gradient of the input are those of the plain layer.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, held: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        ctx.save_for_backward(x, weight, held)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        x, weight, held = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        own, inputs = (gradient * held, x) if ctx.dim == 0 else (gradient, x * held)
        return (
            gradient @ weight if needs_x else None,
            own.flatten(0, -2).T @ inputs.flatten(0, -2) if needs_weight else None,
            own.flatten(0, -2).sum(0) if needs_bias else None,
            None,
            None,
        )


def per_unit(
    model: nn.Module, layout: Layout, value: Callable[[str, Holders], float], shared: float
) -> dict[str, float | Tensor]:
    """Return a number for each parameter of ``model``, which depends on the parameter's unit.

    If slices of a parameter belong to several units, its value is a tensor that broadcasts to the
    parameter.

    Args:
        model: The full model.
        layout: Its units and their holders.
        value: Returns the number of a unit from the unit's name and holders.
        shared: The number for parameters of no unit.
    """
    parameters = dict(model.named_parameters())
    found: dict[str, float | Tensor] = dict.fromkeys(parameters, shared)
    for unit, holders in zip(layout.units, layout.placement.holders, strict=True):
        for part in unit.slices:
            if part.dim is None:
                found[part.parameter] = value(unit.name, holders)
                continue
            whole, parameter = found[part.parameter], parameters[part.parameter]
            if not isinstance(whole, Tensor):
                shape = [size if dim == part.dim else 1 for dim, size in enumerate(parameter.shape)]
                whole = found[part.parameter] = parameter.new_full(shape, whole)
            part.of(whole).fill_(value(unit.name, holders))
    return found
