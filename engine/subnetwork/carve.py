"""Carve a group's subnetwork out of a model: blocks that are not held become parameterless pass-throughs at the same index."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import ModelError
from ..placement.placement import Placement
from ..placement.units import Unit

_REMEDY = 'leave it out of sdp.units, list it in sdp.protect, or use sdp.masking "backward"'


def signature_of(block: nn.Module) -> inspect.Signature:
    """Of the block's ``forward``."""
    return inspect.signature(block.forward)


def hidden_state(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """The tensor that a block adds to: what the first parameter of its ``forward`` that is given a tensor was given.

    Raises :class:`ModelError`, naming the block, where that cannot be told.
    """
    bound = signature.bind(*args, **kwargs)
    tensors = [value for value in bound.args if isinstance(value, torch.Tensor)]
    named = {key: value for key, value in bound.kwargs.items() if isinstance(value, torch.Tensor)}
    in_order = [named[key] for key in bound.arguments if key in named]  # keyword-only parameters; the rest is **kwargs
    if tensors or in_order or len(named) == 1:
        return [*tensors, *in_order, *named.values()][0]
    if named:
        raise ModelError(
            f"{name}: its forward does not say which of {', '.join(named)} is the hidden state; name it as a parameter of "
            "forward, or leave the block out of sdp.units"
        )
    raise ModelError(f"{name}: was called without a tensor, so it cannot be skipped; leave it out of sdp.units")


class PassThrough(nn.Module):
    """Stands where a block is not held and returns its input in the block's own output structure: the skip connection alone.

    It keeps the block's skeleton on the meta device (no memory, not part of the module tree): to learn the structure that the block
    returns, and to run the block as a guest when the full model is evaluated. Attributes are the block's own, its children and
    parameters too (to be looked at: on the meta device they have shapes and dtypes, and no values).
    """

    def __init__(self, name: str, block: nn.Module):
        super().__init__()
        self.name = name
        self._hidden = (block.to(device="meta"),)  # in a tuple, so that it does not become a child module
        self._structure: tuple[Any, int] | None = None
        self.training = block.training

    def train(self, mode: bool = True) -> PassThrough:
        """As any module's; the skeleton, which runs as a guest, follows."""
        self.skeleton.train(mode)
        return super().train(mode)

    @property
    def skeleton(self) -> nn.Module:
        """The block on the meta device."""
        return self._hidden[0]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_hidden"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = hidden_state(self.name, signature_of(self.skeleton), args, kwargs)
        if self._structure is None:
            self._structure = self._learn_structure(hidden, args, kwargs)
        spec, position = self._structure
        leaves: list[Any] = [None] * spec.num_leaves
        leaves[position] = hidden
        return tree_unflatten(leaves, spec)

    def _learn_structure(self, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """Run the skeleton: the tree that the block returns, and which leaf of it is the hidden state."""
        try:
            output = self._run(self.skeleton, "meta", args, kwargs)
        except (
            Exception
        ) as on_meta:  # it reads values, or an operation knows no meta device: once, with zeros, in the host's memory
            block = copy.deepcopy(self.skeleton).to_empty(device="cpu")
            for tensor in (*block.parameters(), *block.buffers()):
                tensor.detach().zero_()
            try:
                output = self._run(block, "cpu", args, kwargs)
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                raise ModelError(
                    f"{self.name}: what it returns cannot be learned by running it on zeros ({reason[:200]}), so it cannot be skipped; "
                    f"{_REMEDY}"
                ) from on_meta
        leaves, spec = tree_flatten(output)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if not tensors or leaves[tensors[0]].shape != hidden.shape:
            found = f"{tuple(leaves[tensors[0]].shape)} from {tuple(hidden.shape)}" if tensors else "no tensor"
            raise ModelError(f"{self.name}: returns {found}, so it cannot be skipped; {_REMEDY}")
        if any(leaf is not None for i, leaf in enumerate(leaves) if i != tensors[0]):
            raise ModelError(f"{self.name}: returns more than its hidden state, so it cannot be skipped; {_REMEDY}")
        return spec, tensors[0]

    @staticmethod
    def _run(block: nn.Module, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = next((p.dtype for p in block.parameters() if p.is_floating_point()), None)
        with _CopiesAreZeros(device, dtype):  # whatever holds tensors, such as a cache that the block writes to
            args, kwargs = copy.deepcopy((args, kwargs))
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return block(*args, **kwargs)


class _CopiesAreZeros(TorchFunctionMode):
    """While inside, ``copy.deepcopy`` of a tensor gives zeros of its shape on ``device``, floating ones in ``dtype``."""

    def __init__(self, device: str, dtype: torch.dtype | None):
        super().__init__()
        self._device, self._dtype = device, dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor = args[0]
        return torch.zeros_like(tensor, device=self._device, dtype=self._dtype if tensor.is_floating_point() else None)


def carve(model: nn.Module, units: Sequence[Unit], placement: Placement, group: int) -> dict[str, PassThrough]:
    """Replace, in place, every unit that ``group`` does not hold; what it held in memory is freed. Returns the stand-ins by unit name."""
    stand_ins = {}
    for unit in units:
        if not placement.holds(group, unit.index):
            stand_ins[unit.name] = PassThrough(unit.name, model.get_submodule(unit.name))
            model.set_submodule(unit.name, stand_ins[unit.name])
    return stand_ins


def freeze(model: nn.Module, units: Sequence[Unit], placement: Placement, group: int, dtype: torch.dtype) -> None:
    """Make every unit that ``group`` does not hold, in place, a copy in ``dtype`` that is not trained: no gradient of it is computed."""
    for unit in units:
        if not placement.holds(group, unit.index):
            for parameter in model.get_submodule(unit.name).parameters():
                parameter.requires_grad_(False)
                parameter.data = parameter.data.to(
                    dtype if parameter.is_floating_point() else parameter.dtype
                ).contiguous()


def frozen_view(block: nn.Module) -> nn.Module:
    """A copy of ``block`` whose parameters are not trained and lie in the memory of the block's own; buffers are the block's own."""
    views: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach(), requires_grad=False) for parameter in block.parameters()
    }
    return copy.deepcopy(block, views | {id(buffer): buffer for buffer in block.buffers()})


@contextmanager
def masked(model: nn.Module, stand_ins: Mapping[str, nn.Module]) -> Iterator[None]:
    """While inside, the modules named by ``stand_ins`` are replaced by them: the subnetwork of one group, cut out of the full model."""
    originals = {name: model.get_submodule(name) for name in stand_ins}
    try:
        for name, stand_in in stand_ins.items():
            model.set_submodule(name, stand_in)
        yield
    finally:
        for name, module in originals.items():
            model.set_submodule(name, module)
