"""Finds the residual blocks of a model that does not state its units, and those that no group can
skip.

A chain is a run of blocks of one class in a ModuleList, Sequential or ModuleDict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from ..errors import ModelError
from ..module_paths import parents

_CONTAINERS = nn.ModuleList | nn.Sequential | nn.ModuleDict

CHANGES_SHAPE = "changes the shape of its input"
MAKES_A_TABLE = "has an embedding that the other blocks of its chain use"


def find_blocks(model: nn.Module) -> set[str]:
    """Find the blocks of all chains in ``model``, for example of an encoder and a decoder.

    Chains may nest. If the blocks inside a chain's modules have most of its parameters, the modules
    are stages, and the inner blocks count. A residual block has a norm and at least two matrices.
    So layers of a block are not blocks. Experts never count. If the model has no such blocks, the
    longest run of modules that have layers counts, and all runs of the same class.

    If there are no chains, residual blocks that are alone in a container count. The model may apply
    such a block several times, as ALBERT does.

    Raises:
        ModelError: the model has no blocks.
    """
    found = _Search(_is_residual).run(model)
    longest = _longest_run(model)
    if longest and not any(_nested(name, found) for name in longest):
        if not found:
            kind = type(model.get_submodule(longest[0]))
            others = _Search(lambda module: type(module) is kind and _has_layers(module), lone=False).run(model)
            found = {*longest, *(name for name in others if not _nested(name, longest))}
        elif _has_two_matrices(model.get_submodule(longest[0])):
            found = {*found, *longest}
    if len(found) < 2:
        found = _lone_blocks(model)
    if not found:
        raise ModelError(
            'sdp.units: "auto" finds no ModuleList or Sequential with two or more blocks of one class in a row; '
            'name the residual blocks by patterns, for example ["encoder.layers.*"]'
        )
    return found


def find_unskippable(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Find blocks of ``names`` that cannot be skipped. Returns the reason by name.

    A block is found by its modules, because the shapes of the inputs are not known yet. A
    convolution shows that a block changes the shape, unless the block equals a neighbour: equal
    blocks in a row keep the shape. An embedding that only some blocks of a chain have is a table
    that the other blocks use, such as the position bias of T5.
    """
    found: dict[str, str] = {}
    for _, run in groupby(names, key=lambda name: name.rpartition(".")[0]):
        chain = list(run)
        blocks = [model.get_submodule(name) for name in chain]
        shapes = [[(name, p.shape) for name, p in block.named_parameters()] for block in blocks]
        tables = [any(isinstance(module, nn.Embedding) for module in block.modules()) for block in blocks]
        for index, (name, block) in enumerate(zip(chain, blocks, strict=True)):
            neighbours = [shapes[other] for other in (index - 1, index + 1) if 0 <= other < len(chain)]
            if _changes_shape(block) and shapes[index] not in neighbours:
                found[name] = CHANGES_SHAPE
            elif tables[index] and not all(tables):
                found[name] = MAKES_A_TABLE
    return found


class _Search:
    """A search for the chains of modules that ``is_block`` selects.

    ``lone`` says whether a module counts that is alone in its container. It counts only if its
    class is in another chain, too.
    """

    def __init__(self, is_block: Callable[[nn.Module], bool], *, lone: bool = True):
        self._is_block, self._lone = is_block, lone
        self._in_chains = Counter[type]()

    def run(self, model: nn.Module) -> set[str]:
        modules = list(model.modules())
        self._in_chains.update(type(child) for m in modules for run in _runs(m) for _, child in run)
        return {path for path, _ in self._find("", model, set())}

    def _find(self, path: str, module: nn.Module, seen: set[int]) -> list[tuple[str, nn.Module]]:
        seen.add(id(module))
        below: dict[str, list[tuple[str, nn.Module]]] = {}
        for key, child in module.named_children():
            skip = id(child) in seen or "expert" in key.lower()
            below[key] = [] if skip else self._find(f"{path}.{key}".lstrip("."), child, seen)
        for run in _runs(module):
            blocks = [(key, child) for key, child in run if _is_callable(child) and self._is_block(child)]
            inside = [named for key, _ in blocks for named in below[key]]
            if self._is_chain(run, blocks) and 2 * _size(inside) <= _size(blocks):
                below |= {key: [(f"{path}.{key}".lstrip("."), child)] for key, child in blocks}
        return [named for found in below.values() for named in found]

    def _is_chain(self, run: Sequence[tuple[str, nn.Module]], blocks: Sequence[tuple[str, nn.Module]]) -> bool:
        if len(run) == 1 and blocks:
            kind = type(blocks[0][1])
            return self._lone and kind is not nn.Sequential and self._in_chains[kind] > 1
        return len(blocks) > 1


def _runs(module: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """Yield runs of at least two neighbours of one class, or the only child, of a container."""
    if isinstance(module, _CONTAINERS):
        children = list(module.named_children())
        for _, run in groupby(children, key=lambda named: type(named[1])):
            named = list(run)
            if len(named) > 1 or len(children) == 1:
                yield named


def _longest_run(model: nn.Module) -> list[str]:
    """Return the longest run of neighbours of one class that have layers. The first of equals."""
    best: list[str] = []
    for name, module in model.named_modules():
        for run in _runs(module):
            blocks = [f"{name}.{key}".lstrip(".") for key, child in run if _is_callable(child) and _has_layers(child)]
            best = max(best, blocks, key=len)
    return best if len(best) > 1 else []


def _is_residual(module: nn.Module) -> bool:
    return _has_layers(module) and _has_two_matrices(module) and any(map(_is_norm, module.modules()))


def _lone_blocks(model: nn.Module) -> set[str]:
    """Return residual blocks that are alone in their containers, the inner ones if they nest."""
    alone = {
        f"{name}.{key}".lstrip(".")
        for name, container in model.named_modules()
        if isinstance(container, _CONTAINERS) and len(container) == 1
        for key, child in container.named_children()
        if _is_callable(child) and _is_residual(child)
    }
    return {name for name in alone if not any(name in parents(other) for other in alone)}


def _has_layers(module: nn.Module) -> bool:
    return any(next(child.parameters(), None) is not None for child in module.children())


def _has_two_matrices(module: nn.Module) -> bool:
    return sum(parameter.dim() > 1 for parameter in module.parameters()) > 1


def _is_norm(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    is_leaf = next(module.children(), None) is None
    return is_leaf and ("norm" in type(module).__name__.lower() or (bool(own) and all(p.dim() < 2 for p in own)))


def _is_callable(module: nn.Module) -> bool:
    """Whether the module has a ``forward``. ModuleList and ModuleDict have none."""
    forward: Any = type(module).forward
    return forward is not nn.Module.forward


def _size(named: Sequence[tuple[str, nn.Module]]) -> int:
    return sum(parameter.numel() for _, module in named for parameter in module.parameters())


def _nested(name: str, others: Collection[str]) -> bool:
    """Whether ``name`` equals one of ``others``, contains it or lies inside it."""
    return any(other == name or other in parents(name) or name in parents(other) for other in others)


def _changes_shape(block: nn.Module) -> bool:
    convolutions = [module for module in block.modules() if isinstance(module, _ConvNd)]
    if not convolutions:
        return False
    strided = any(stride != 1 for module in convolutions for stride in module.stride)
    return strided or convolutions[0].in_channels != convolutions[-1].out_channels
