"""Finds the units of a model: the parts that a group holds or does not hold.

A unit at block level has whole parameters. A unit at neuron level has a slice of each projection of
its residual branch.

If a model does not state its units, the units are its residual blocks, except for blocks that no
group can skip. Blocks are found in chains: neighbours of one class in a ModuleList, Sequential or
ModuleDict.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..errors import ModelError
from ..model_interface import Branch as Branch  # re-exported
from ..model_interface import get_neuron_branches, get_unit_flops, get_unit_patterns
from ..module_paths import match_patterns, parents, resolve_name

_CONTAINERS = nn.ModuleList | nn.Sequential | nn.ModuleDict

CHANGES_SHAPE = "changes the shape of its input"
MAKES_A_TABLE = "has an embedding that the other blocks of its chain use"


def find_blocks(model: nn.Module) -> set[str]:
    """Find the paths of the residual blocks of a model that does not state its units.

    A chain is a run of neighbouring modules of one class in a container. Blocks of all chains
    count, for example of an encoder and a decoder. A residual block has a norm and at least two
    matrices, so a layer of a block is not a block. Experts never count. Three cases are special:

    - If modules of a chain contain blocks with most of the chain's parameters, these modules are
      stages, and the inner blocks count.
    - If no chain has residual blocks, the longest run of modules with layers counts, and all other
      runs of the same class.
    - If there are no chains, residual blocks that are alone in a container count. The model may
      apply such a block several times, as ALBERT does.

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
            'sdp.units: "auto" finds no ModuleList or Sequential with two or more neighbours of one class; '
            'name the residual blocks by patterns, for example ["encoder.layers.*"]'
        )
    return found


def find_unskippable(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Return the blocks among ``names`` that no group can skip, with the reason for each.

    A block that changes the shape of its input cannot be skipped. The shape of the input is not
    known yet, so it counts as changed if convolutions of the block have a stride or change the
    number of channels, and no neighbour has parameters of the same shapes. If only some blocks of a
    chain have an embedding, these cannot be skipped, because the other blocks may use the
    embedding's output. In T5, all blocks use the position bias that the first block computes.
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
    """A search for the chains of modules for which ``is_block`` is true.

    ``lone``: whether a module that is alone in its container counts, if another chain has modules
    of the same class.
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
    """Yield the runs of neighbours of one class in a container. An only child is a run, too."""
    if isinstance(module, _CONTAINERS):
        children = list(module.named_children())
        for _, run in groupby(children, key=lambda named: type(named[1])):
            named = list(run)
            if len(named) > 1 or len(children) == 1:
                yield named


def _longest_run(model: nn.Module) -> list[str]:
    """Return the (first) longest run of neighbours of one class that have layers."""
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
    parameters = list(module.parameters(recurse=False))
    is_leaf = next(module.children(), None) is None
    return is_leaf and (
        "norm" in type(module).__name__.lower() or (bool(parameters) and all(p.dim() < 2 for p in parameters))
    )


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


SHARED = "shared"


@dataclass(frozen=True)
class Slice:
    """The elements of one parameter that belong to a unit: a slice, or the whole parameter.

    Attributes:
        parameter: the canonical name of the parameter.
        dim: the dimension that is sliced. None means the whole parameter.
        ranges: half-open index ranges along ``dim``.
        index: the number of this slice among the slices of the parameter, in the order of their
            indices.
    """

    parameter: str
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    index: int = 0

    def of(self, tensor: Tensor) -> Tensor:
        """Return this slice of ``tensor``, which has the parameter's shape, as a view."""
        assert self.dim is not None
        ((first, last),) = self.ranges
        return tensor.narrow(self.dim, first, last - first)


@dataclass(frozen=True)
class Unit:
    """A part of the model that a group holds or does not hold: a block, or a group of neurons.

    Attributes:
        index: position among the units, which are in the model's order.
        name: the path of the module, with ``prefix`` before it.
        slices: the parameters, or slices of parameters, of the unit.
        numel: number of parameters (elements).
        flops: FLOPs of a forward pass of one sample, from the model's ``unit_flops()``. 0 if the
            model does not state them.
        buffers: the slices of persistent buffers that belong to a group of neurons.
        neurons: number of neurons in a group of neurons. 0 for a block.
        prefix: with ``sdp.paths``, ``paths.P.`` for a unit that only path P has. Otherwise empty.
    """

    index: int
    name: str
    slices: tuple[Slice, ...]
    numel: int
    flops: int = 0
    buffers: tuple[Slice, ...] = ()
    neurons: int = 0
    prefix: str = ""

    @property
    def path(self) -> str:
        """The path of the unit's module in a group's model."""
        return self.name.removeprefix(self.prefix)

    @property
    def is_block(self) -> bool:
        """Whether the unit has whole parameters. Otherwise it is a group of neurons."""
        return all(part.dim is None for part in self.slices)


def goes_into_sum(parameter: str, dim: int | None) -> bool:
    """Return whether ``parameter`` is the weight of the layer that adds up a branch's neurons.

    Only this layer is sliced along its inputs (``dim`` 1).
    """
    return dim == 1 and parameter.endswith(".weight")


def find_neuron_units(model: nn.Module, groups: int) -> list[Unit]:
    """Divide each residual branch of ``model`` into ``groups`` units of neighbouring neurons.

    The model states its branches in ``neuron_branches()``. A branch with fewer neurons than
    ``groups`` is divided into single neurons.

    Raises:
        ModelError: the model states no branches, or the branches do not fit its parameters.
    """
    branches = get_neuron_branches(model)
    if branches is None:
        raise ModelError(
            f'sdp.granularity: "neuron" needs a model that states its residual branches (neuron_branches()), and '
            f'{type(model).__name__} does not; use "block", or add them as docs/your_model.md shows'
        )
    parameters = dict(model.named_parameters())
    units: list[Unit] = []
    for branch in branches:
        count = min(groups, branch.neurons)
        for group in range(count):
            first, last = branch.neurons * group // count, branch.neurons * (group + 1) // count
            slices, numel = [], 0
            for name, dim in branch.parameters:
                parts = 3 if name in branch.three_parts else 1
                if name not in parameters or parameters[name].shape[dim] % (branch.neurons * parts):
                    raise ModelError(
                        f"{branch.name}: its parameter {name!r} is not cut into {branch.neurons} neurons along "
                        f"dimension {dim}"
                    )
                part = parameters[name].shape[dim] // parts
                share = part // branch.neurons
                ranges = [(start + first * share, start + last * share) for start in range(0, parts * part, part)]
                slices += [Slice(name, dim, (held,), index * count + group) for index, held in enumerate(ranges)]
                numel += (last - first) * share * parts * (parameters[name].numel() // parameters[name].shape[dim])
            buffers = tuple(Slice(name, 0, ((first, last),), group) for name in branch.buffers)
            flops = branch.flops * (last - first) // branch.neurons
            units.append(
                Unit(len(units), f"{branch.name}.neurons.{group}", tuple(slices), numel, flops, buffers, last - first)
            )
    return units


def find_units(model: nn.Module, patterns: str | Sequence[str], explicit: Iterable[str] | None = None) -> list[Unit]:
    """Find the units of ``model`` at block level, in the order of its modules.

    If ``patterns`` is ``"auto"``, the units are the modules that ``explicit`` names. Without
    ``explicit``, the model's ``unit_patterns()`` name them. A model without this hook is searched
    (:func:`find_blocks`).

    Args:
        model: the full model.
        patterns: module paths in which ``*`` matches one path component, or ``"auto"``.
        explicit: the units that ``sdp.placement`` names, if it is stated by hand.

    Raises:
        ModelError: a pattern matches nothing, units nest, or weights are tied across units.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    modules.pop("")
    if patterns != "auto":
        names = match_patterns(modules, [patterns] if isinstance(patterns, str) else patterns)
    elif explicit is not None:
        names = {resolve_name(name, modules) for name in explicit}
    elif (stated := get_unit_patterns(model)) is not None:
        names = match_patterns(modules, stated)
    else:
        names = find_blocks(model)
    ordered = [name for name in modules if name in names]
    _refuse_nested(ordered)
    _refuse_two_places(modules, ordered)
    return _units(model, modules, ordered)


def add_ends(model: nn.Module, blocks: Sequence[Unit]) -> list[Unit]:
    """Return ``blocks``, and further units for the embeddings before and the head after the blocks.

    Every layer with a matrix that is before or after the blocks becomes a unit. If the head is tied
    to an embedding, the embedding's unit has the common weight.
    """
    modules = dict(model.named_modules())
    order = {path: index for index, path in enumerate(modules)}
    places = [order[unit.name] for unit in blocks]
    inside = {f"{unit.name}." for unit in blocks}
    last = max(index for path, index in order.items() if path.startswith(tuple(inside)) or index in places)
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    units = list(blocks)
    for path, module in modules.items():
        if min(places) <= order[path] <= last:
            continue
        own = [p for key, p in module.named_parameters(recurse=False) if canonical[id(p)] == f"{path}.{key}"]
        if path and _is_callable(module) and any(parameter.dim() > 1 for parameter in own):
            slices = tuple(Slice(canonical[id(parameter)]) for parameter in own)
            units.append(Unit(0, path, slices, sum(parameter.numel() for parameter in own)))
    units.sort(key=lambda unit: order[unit.name])
    return [replace(unit, index=index) for index, unit in enumerate(units)]


def _refuse_nested(names: Sequence[str]) -> None:
    chosen = set(names)
    nested = [
        f"{name!r} lies inside the unit {outer!r}" for name in names for outer in parents(name) if outer in chosen
    ]
    if nested:
        raise ModelError(f"sdp.units: {', '.join(nested)}; units must not nest, keep one of them")


def _refuse_two_places(modules: Mapping[str, nn.Module], names: Sequence[str]) -> None:
    places: dict[int, list[str]] = {}
    for path, module in modules.items():
        places.setdefault(id(module), []).append(path)
    several = dict.fromkeys(tuple(places[id(modules[name])]) for name in names if len(places[id(modules[name])]) > 1)
    if several:
        others = [name for name in names if len(places[id(modules[name])]) == 1]
        raise ModelError(
            f"sdp.units: {'; '.join(' and '.join(paths) + ' are one module' for paths in several)}, and a unit has "
            f"only one place; let all groups share this module: set sdp.units to {json.dumps(others)}"
        )


def _units(model: nn.Module, modules: Mapping[str, nn.Module], names: Sequence[str]) -> list[Unit]:
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    owner: dict[int, str] = {}
    flops = get_unit_flops(model)
    units = []
    tied: dict[tuple[str, str], str] = {}
    for index, name in enumerate(names):
        parameters = list(modules[name].parameters())
        for parameter in parameters:
            first = owner.setdefault(id(parameter), name)
            if first != name or not canonical[id(parameter)].startswith(f"{name}."):
                other = first if first != name else canonical[id(parameter)]
                tied.setdefault((name, other), canonical[id(parameter)])
        slices = tuple(Slice(canonical[id(parameter)]) for parameter in parameters)
        units.append(Unit(index, name, slices, sum(parameter.numel() for parameter in parameters), flops.get(name, 0)))
    if tied:
        pairs = "; ".join(
            f"{name}: its parameter {parameter!r} is tied to {other!r}" for (name, other), parameter in tied.items()
        )
        raise ModelError(
            f"{pairs}; a tied weight cannot be in a unit; leave that module out of sdp.units, so that all groups "
            "share it"
        )
    outside = {id(p) for path, m in modules.items() if not _inside(path, names) for p in m.parameters(recurse=False)}
    leaving = {owner[key]: canonical[key] for key in owner if key in outside}
    if leaving:
        pairs = "; ".join(
            f"{name}: its parameter {parameter!r} is tied to a module outside the unit"
            for name, parameter in leaving.items()
        )
        raise ModelError(f"{pairs}; leave the unit out of sdp.units, so that all groups share it")
    return units


def _inside(path: str, names: Iterable[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in names)


def unit_of_parameters(units: Iterable[Unit]) -> dict[str, Unit]:
    """Map the name of each parameter that lies completely in one unit to this unit."""
    return {part.parameter: unit for unit in units for part in unit.slices if part.dim is None}
