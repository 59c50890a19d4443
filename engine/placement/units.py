"""Find the units of a model: the parts that a placement gives to groups.

A unit is a list of (canonical parameter, dimension, index ranges). A block unit has whole
parameters. A group of hidden neurons has a slice of each projection of its branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from ..errors import ModelError
from ..model_interface import Branch as Branch  # re-exported
from ..model_interface import get_neuron_branches, get_unit_flops, get_unit_patterns
from ..module_paths import match_patterns, resolve_name

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
                        f"{branch.name}: its parameter {name!r} is not cut into {branch.neurons} neurons along dimension {dim}"
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
    the units that the model states (``unit_patterns()``); the longest run of blocks of one class in
    a ModuleList or Sequential.

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
        names = _longest_chain(model)
    ordered = [name for name in modules if name in names]
    _refuse_nested(ordered)
    return _units(model, modules, ordered)


def _longest_chain(model: nn.Module) -> set[str]:
    """Find the longest run of neighbours of one class in a ModuleList or Sequential.

    Only modules that have children with parameters count, because a residual block is more than one
    layer.
    """
    best: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            for _, run in groupby(module.named_children(), key=lambda named: type(named[1])):
                blocks = [f"{name}.{key}" if name else key for key, child in run if _has_layers(child)]
                best = max(best, blocks, key=len)  # the first of equals
    if len(best) < 2:
        raise ModelError(
            'sdp.units: "auto" finds no ModuleList or Sequential with two or more blocks of one class in a row; '
            'name the residual blocks by patterns, for example ["encoder.layers.*"]'
        )
    return set(best)


def _has_layers(module: nn.Module) -> bool:
    return any(next(child.parameters(), None) is not None for child in module.children())


def _refuse_nested(names: Sequence[str]) -> None:
    chosen = set(names)
    for name in names:
        parts = name.split(".")
        for cut in range(1, len(parts)):
            outer = ".".join(parts[:cut])
            if outer in chosen:
                raise ModelError(
                    f"sdp.units: {name!r} lies inside the unit {outer!r}; units must not nest, keep one of them"
                )


def _units(model: nn.Module, modules: Mapping[str, nn.Module], names: Sequence[str]) -> list[Unit]:
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    owner: dict[int, str] = {}
    flops = get_unit_flops(model)
    units = []
    for index, name in enumerate(names):
        parameters = list(modules[name].parameters())
        for parameter in parameters:
            first = owner.setdefault(id(parameter), name)
            if first != name or not canonical[id(parameter)].startswith(f"{name}."):
                other = first if first != name else canonical[id(parameter)]
                raise ModelError(
                    f"{name}: its parameter {canonical[id(parameter)]!r} is tied to {other!r}; a tied weight cannot lie in a unit, "
                    "leave that module out of sdp.units so that it is shared by all groups"
                )
        slices = tuple(Slice(canonical[id(parameter)]) for parameter in parameters)
        units.append(Unit(index, name, slices, sum(parameter.numel() for parameter in parameters), flops.get(name, 0)))
    outside = {id(p) for path, m in modules.items() if not _inside(path, names) for p in m.parameters(recurse=False)}
    for parameter_id in outside & set(owner):
        raise ModelError(
            f"{owner[parameter_id]}: its parameter {canonical[parameter_id]!r} is tied to a module outside the unit; "
            "leave the unit out of sdp.units so that it is shared by all groups"
        )
    return units


def _inside(path: str, names: Iterable[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in names)


def unit_of_parameters(units: Iterable[Unit]) -> dict[str, Unit]:
    """Map each canonical parameter to the unit that has the whole of it.

    Other parameters are absent.
    """
    return {part.parameter: unit for unit in units for part in unit.slices if part.dim is None}
