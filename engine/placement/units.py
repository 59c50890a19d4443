"""Find the units of a model: the parts that a placement gives to groups.

A unit is a list of (canonical parameter, dimension, index ranges). A block unit has whole
parameters. A group of hidden neurons has a slice of each projection of its branch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..errors import ModelError
from ..model_interface import Branch as Branch  # re-exported
from ..model_interface import get_neuron_branches, get_unit_flops, get_unit_patterns
from ..module_paths import match_patterns, parents, resolve_name
from .chains import find_blocks

SHARED = "shared"


@dataclass(frozen=True)
class Slice:
    """A slice of a canonical parameter, or the whole parameter.

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
        """The view of ``tensor``, which has the shape of the parameter, at the one range of this
        slice.
        """
        assert self.dim is not None
        ((first, last),) = self.ranges
        return tensor.narrow(self.dim, first, last - first)


@dataclass(frozen=True)
class Unit:
    """A part of the model that a group holds or does not hold.

    Attributes:
        index: position in the model's order.
        name: the path of the module.
        slices: the parameters, or slices of parameters, of the unit.
        numel: number of parameters (elements).
        flops: FLOPs of a forward pass of one sample. 0 if the model does not state them
            (``unit_flops()``: unit name → FLOPs).
        buffers: parts of persistent buffers that belong to a group of neurons.
        neurons: number of neurons in a group of neurons. 0 for a block.
    """

    index: int
    name: str
    slices: tuple[Slice, ...]
    numel: int
    flops: int = 0
    buffers: tuple[Slice, ...] = ()
    neurons: int = 0

    @property
    def is_block(self) -> bool:
        """Whether the unit is a module with all of its parameters."""
        return all(part.dim is None for part in self.slices)


def goes_into_sum(parameter: str, dim: int | None) -> bool:
    """Whether slices of ``parameter`` along ``dim`` feed hidden neurons into their branch's sum.

    This is true for the weight of a layer that is sliced along its inputs.
    """
    return dim == 1 and parameter.endswith(".weight")


def find_neuron_units(model: nn.Module, groups: int) -> list[Unit]:
    """Slice each branch that ``model`` states into ``groups`` groups of neurons.

    The model states its branches in ``neuron_branches()``. The neurons of a group are neighbours. A
    branch with fewer neurons than ``groups`` is sliced into single neurons.

    Raises:
        ModelError: the model states no branches, or the branches do not fit its parameters.
    """
    branches = get_neuron_branches(model)
    if branches is None:
        raise ModelError(
            f'sdp.granularity: "neuron" needs a model that states its residual branches (neuron_branches()), and '
            f'{type(model).__name__} does not; use "block"'
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
    """Find the block units of ``model``, in the order of its modules.

    ``"auto"`` uses the first of these that exists: the units that an ``explicit`` placement names;
    the units that the model states (``unit_patterns()``); the blocks of all chains in the model
    (see :func:`find_blocks`).

    Args:
        model: the full model.
        patterns: module paths in which ``*`` matches one path component, or ``"auto"``.
        explicit: the names of the units in an explicit placement, if there is one.

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
            f"sdp.units: {'; '.join(' and '.join(paths) + ' are one module' for paths in several)}, and a unit has one "
            f"place; so that all groups share the module, set sdp.units to the others: {json.dumps(others)}"
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
        pairs = "; ".join(f"{name}: its parameter {of!r} is tied to {other!r}" for (name, other), of in tied.items())
        raise ModelError(
            f"{pairs}; a tied weight cannot lie in a unit, leave that module out of sdp.units so that it is shared by "
            "all groups"
        )
    outside = {id(p) for path, m in modules.items() if not _inside(path, names) for p in m.parameters(recurse=False)}
    leaving = {owner[of]: canonical[of] for of in owner if of in outside}
    if leaving:
        pairs = "; ".join(
            f"{name}: its parameter {of!r} is tied to a module outside the unit" for name, of in leaving.items()
        )
        raise ModelError(f"{pairs}; leave the unit out of sdp.units so that it is shared by all groups")
    return units


def _inside(path: str, names: Iterable[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in names)


def unit_of_parameters(units: Iterable[Unit]) -> dict[str, Unit]:
    """Map each canonical parameter to the unit that has the whole of it.

    Other parameters are absent.
    """
    return {part.parameter: unit for unit in units for part in unit.slices if part.dim is None}
