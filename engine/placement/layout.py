"""What every rank agrees on before anything is cut: mesh, units, placement and the full model's parameter table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import nn

from ..config.schema import Config
from ..distributed.mesh import Coordinates, Holders, Mesh
from ..distributed.tensor_parallel import TP, parameter_cuts
from ..errors import ConfigError, ModelError
from ..model_interface import check_hooks, get_random_options
from ..module_paths import parents
from .buckets import Bucket, Refresh, plan_buckets
from .placement import Placement
from .policies import make_placement
from .tensor_info import Cut, TensorInfo
from .units import SHARED, Slice, Unit, find_neuron_units, find_units, unit_of_parameters


@dataclass(frozen=True)
class Layout:
    """Mesh, units, placement and the tables of the full model's parameters and persistent buffers, in the model's order.

    ``aliases``: further names of tied tensors → their canonical (first) name. ``blocks``: paths of the modules that are computed, and
    sharded, as one; the units themselves, unless these are groups of neurons: then ``parameters`` has the slices of a parameter in its
    place, but in the reference, which computes with whole ones. ``keeps_frozen``: a group keeps frozen copies of the
    units that it does not hold (backward masking), instead of skipping them. ``branch_scale``: where units are scaled.
    """

    mesh: Mesh
    units: tuple[Unit, ...]
    placement: Placement
    parameters: dict[str, TensorInfo]
    buffers: dict[str, TensorInfo]
    aliases: dict[str, str]
    blocks: tuple[str, ...]
    keeps_frozen: bool = False
    branch_scale: Literal["none", "train", "eval"] = "none"

    @classmethod
    def of(cls, model: nn.Module, config: Config, mesh: Mesh) -> Layout:
        """Find the units of the full ``model``, place them, and record its tensors and how tensor parallelism cuts them."""
        check_hooks(model)
        section = config.sdp
        explicit = list(section.placement) if isinstance(section.placement, dict) else None
        if section.granularity == "neuron":
            units = find_neuron_units(model, section.neuron_groups)
            blocks = tuple(unit.name for unit in _units_if_any(model))
            _require_inside(units, blocks)
        else:
            required = mesh.sdp > 1 or explicit or section.units != "auto"
            units = find_units(model, section.units, explicit) if required else _units_if_any(model)
            if mesh.sdp > 1 and not units:
                raise ConfigError("sdp.units: [] leaves groups nothing to hold a part of; name modules, or remove it")
            blocks = tuple(unit.name for unit in units)
        placement = make_placement(section, units)
        _require_dense_if_random(model, placement, mesh)
        unit_of = unit_of_parameters(units)
        everyone = tuple(range(mesh.sdp))

        cuts = parameter_cuts(model, mesh.tp) if mesh.tp > 1 else {}
        _require_even(units, cuts, mesh.tp)

        def info(name: str, tensor: torch.Tensor, unit: Unit | None) -> TensorInfo:
            holders, unit_name = (placement.holders[unit.index], unit.name) if unit else (everyone, SHARED)
            return TensorInfo(
                name, tensor.shape, tensor.dtype, tensor.requires_grad, unit_name, holders, cuts.get(name), mesh.tp
            )

        parameters = {name: info(name, p, unit_of.get(name)) for name, p in model.named_parameters()}
        canonical = {id(p): name for name, p in model.named_parameters()}
        every_name = model.named_parameters(remove_duplicate=False)
        aliases = {name: canonical[id(p)] for name, p in every_name if canonical[id(p)] != name}
        persistent = model.state_dict(keep_vars=True)
        buffers = {
            name: info(name, buffer, next((unit for unit in units if name.startswith(f"{unit.name}.")), None))
            for name, buffer in model.named_buffers()
            if name in persistent
        }
        if not section.in_one_process:
            parameters = _with_slices(parameters, units, placement)
        keeps_frozen = section.masking == "backward"
        return cls(
            mesh, tuple(units), placement, parameters, buffers, aliases, blocks, keeps_frozen, section.branch_scale
        )

    def without(self, blocks: Collection[str]) -> Layout:
        """The layout of the model that does not have these blocks. Where they are units, their parameters stay, without holders: they part
        the shared ones on either side of them, which are not reduced together.
        """

        def is_left(name: str) -> bool:
            return not any(path in blocks for path in (name, *parents(name)))

        units, old = [unit for unit in self.units if is_left(unit.name)], self.placement
        placement = replace(
            old,
            units=tuple(old.units[unit.index] for unit in units),
            holders=tuple(old.holders[unit.index] for unit in units),
            costs=tuple(old.costs[unit.index] for unit in units),
            flops=tuple(old.flops[unit.index] for unit in units) if old.flops else (),
            bound=0,
        )
        return replace(
            self,
            units=tuple(replace(unit, index=index) for index, unit in enumerate(units)),
            placement=placement,
            parameters={
                name: info if is_left(info.canonical) else replace(info, holders=())
                for name, info in self.parameters.items()
                if is_left(info.canonical) or (info.unit != SHARED and info.cut is None)
            },
            buffers={name: info for name, info in self.buffers.items() if is_left(name)},
            blocks=tuple(name for name in self.blocks if is_left(name)),
        )

    @property
    def everyone(self) -> Holders:
        return tuple(range(self.mesh.sdp))

    def held(self, group: int) -> Iterator[TensorInfo]:
        """The parameters that ``group`` trains."""
        return (info for info in self.parameters.values() if group in info.holders)

    def slices(self) -> Iterator[tuple[Slice, Holders]]:
        """The parts of whole parameters that have holders of their own; what no slice covers is its parameter's holders'."""
        return (
            (part, self.placement.holders[unit.index])
            for unit in self.units
            for part in unit.slices
            if part.dim is not None
        )

    @cached_property
    def wholes(self) -> dict[str, list[TensorInfo]]:
        """Canonical name → the slices into which the parameter is cut, or it alone; in the model's order."""
        wholes: dict[str, list[TensorInfo]] = {}
        for info in self.parameters.values():
            wholes.setdefault(info.canonical, []).append(info)
        return wholes

    @cached_property
    def members(self) -> dict[str, list[TensorInfo]]:
        """The parameters, or slices, of every unit by its name, and of the shared part."""
        members: dict[str, list[TensorInfo]] = {}
        for info in self.parameters.values():
            members.setdefault(info.unit, []).append(info)
        return members

    def frozen(self, group: int) -> Iterator[TensorInfo]:
        """The parameters of which ``group`` keeps frozen copies in compute precision."""
        return (info for info in self.parameters.values() if self.keeps_frozen and group not in info.holders)

    def block_of(self, unit: Unit) -> str:
        """The block that the unit is, or that its slices lie in."""
        return next(name for name in self.blocks if unit.name == name or unit.name.startswith(f"{name}."))

    @cached_property
    def refreshes(self) -> tuple[Refresh, ...]:
        """What brings all frozen copies up to date, in the order of the units."""
        if not self.keeps_frozen:
            return ()
        refreshes = []
        for unit, holders in zip(self.units, self.placement.holders, strict=True):
            if len(holders) < self.mesh.sdp:
                names = tuple(info.name for info in self.members.get(unit.name, ()))
                deliveries, block = self.placement.deliveries[holders], self.block_of(unit)
                refreshes += [Refresh(delivery.source, delivery.members, block, names) for delivery in deliveries]
        return tuple(refreshes)

    def buckets(self, comes_last: Callable[[str], bool]) -> list[Bucket]:
        """The global list of reductions, in launch order; ``comes_last``: whether a parameter's gradient is made after all others'."""
        trainable = {info.name: info.part.numel() for info in self._in_bucket_order() if info.trainable}
        return plan_buckets(
            trainable,
            lambda name: self.parameters[name].holders,
            lambda name: _together(self.parameters[name]),
            comes_last,
        )

    def _in_bucket_order(self) -> list[TensorInfo]:
        """The parameters in the model's order, but of a branch the slices with the same holders together."""
        order = list(self.parameters.values())
        first: dict[str, int] = {}
        for position, info in enumerate(order):
            first.setdefault(_branch(info), position)
        return sorted(order, key=lambda info: (first[_branch(info)], info.holders if info.cut else ()))  # stable

    def counts_norm(self, info: TensorInfo, at: Coordinates, *, sharded: bool) -> bool:
        """Whether the rank at ``at`` counts its part of this parameter in the global norm: one holder does, and one copy."""
        return info.holders[:1] == (at.sdp,) and (sharded or at.fsdp == 0) and (info.tp_dim is not None or at.tp == 0)


def _require_inside(units: Sequence[Unit], blocks: Sequence[str]) -> None:
    for unit in units:
        if not any(unit.name.startswith(f"{block}.") for block in blocks):
            raise ModelError(
                f'{unit.name}: lies in none of the blocks that "auto" finds ({", ".join(blocks) or "there are none"}); branches of neurons '
                "must lie in the model's blocks (unit_patterns())"
            )


def _require_dense_if_random(model: nn.Module, placement: Placement, mesh: Mesh) -> None:
    """A model that states options with random draws (``random_options()``) is trained whole in every group, by whole matrices.

    Every rank draws its own numbers. Tensor-parallel ranks need the same ones for what all of them have; and groups that lack units draw
    fewer, so that what is measured of dropout would depend on the placement.
    """
    options = draws_of(model)
    if not options:
        return
    if any(len(holders) < mesh.sdp for holders in placement.holders):
        raise ConfigError(
            f"{options[0]}: a control of dense training, where all groups hold all units; set sdp.capacity 1, or remove it"
        )
    if mesh.tp > 1:
        raise ConfigError(f"{options[0]}: tensor-parallel ranks would draw different numbers; set {TP} 1, or remove it")


def draws_of(model: nn.Module) -> list[str]:
    """The options by which ``model`` draws random numbers in training, if it states any."""
    return get_random_options(model)


def _require_even(units: Sequence[Unit], cuts: Mapping[str, int | None], ranks: int) -> None:
    """Every group of neurons can be cut among tensor-parallel ``ranks`` as the branch is: each has an equal number of whole neurons."""
    for unit in units if ranks > 1 else ():
        for part in unit.slices:
            if part.dim is not None and part.dim != cuts[part.parameter]:
                raise ModelError(
                    f"{part.parameter}: neurons lie along dimension {part.dim}, and tensor_parallel_plan() does not cut it there; cut "
                    f'it so, set {TP} to 1, or use sdp.granularity "block"'
                )
        if unit.neurons % ranks:
            raise ModelError(
                f"{unit.name}: {unit.neurons} neurons (of attention: key/value heads) cannot be cut evenly among {TP} = {ranks} ranks; "
                f"choose sdp.neuron_groups so that every group has a multiple of {ranks}"
            )


def _branch(info: TensorInfo) -> str:
    """The branch that a slice is of; of a whole parameter its own name."""
    return info.unit.rpartition(".neurons.")[0] if info.cut else info.name


def _together(info: TensorInfo) -> str:
    """What a parameter's gradient may travel with: its unit; of a slice, those of its branch that have the same holders."""
    return f"{_branch(info)} {info.holders}" if info.cut else info.unit


def _with_slices(
    parameters: Mapping[str, TensorInfo], units: Sequence[Unit], placement: Placement
) -> dict[str, TensorInfo]:
    """``parameters`` with slices, ``NAME:0``, ``NAME:1`` …, in the place of each that is cut into them."""
    slices: dict[str, list[tuple[Unit, Slice]]] = {}
    for unit in units:
        for part in unit.slices:
            if part.dim is not None:
                slices.setdefault(part.parameter, []).append((unit, part))
    table: dict[str, TensorInfo] = {}
    for name, info in parameters.items():
        if name not in slices:
            table[name] = info
        for unit, part in sorted(slices.get(name, ()), key=lambda of_unit: of_unit[1].index):
            assert part.dim is not None
            ((first, last),) = part.ranges
            shape = torch.Size(last - first if axis == part.dim else size for axis, size in enumerate(info.shape))
            cut = Cut(name, info.shape, part.dim, first)
            key = f"{name}:{part.index}"
            table[key] = replace(
                info, name=key, shape=shape, unit=unit.name, holders=placement.holders[unit.index], cut=cut
            )
    return table


def _units_if_any(model: nn.Module) -> list[Unit]:
    """Units of a dense run, where they only decide how FSDP2 groups parameters: none is no mistake."""
    try:
        return find_units(model, "auto")
    except ModelError:
        return []
