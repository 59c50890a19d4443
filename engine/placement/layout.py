"""The layout of a run: which groups hold which tensors of the model, and how tensors are cut."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Literal

import torch
from torch import nn

from ..config.method import CopiesSection, Masking, PathsSection
from ..config.schema import Config
from ..distributed.mesh import Holders, Mesh
from ..distributed.tensor_parallel import parameter_cuts
from ..errors import ConfigError, ModelError
from ..model_interface import check_hooks, get_unit_patterns
from ..module_paths import match_patterns, parents
from .placement import Bucket, Placement, Refresh, plan_buckets
from .policies import make_placement, warn_of_large_share, warn_of_left_out
from .requirements import require_a_block_in_each_group, require_even, require_inside, require_whole_tensors_if_random
from .tensor_info import Cut, TensorInfo
from .units import SHARED, Slice, Unit, add_ends, find_neuron_units, find_units, find_unskippable, unit_of_parameters


@dataclass(frozen=True)
class Layout:
    """Which groups hold which tensor of the full model, and how a group's ranks cut the tensor.

    Every rank computes the same layout before it cuts the model. ``parameters`` and ``buffers`` are
    in the model's order. At neuron level, ``parameters`` lists slices of a parameter instead of the
    parameter.

    A tensor has a canonical name, and a path in the module of each group that holds the tensor.
    Name and path are equal, unless groups have different tensors at the same path (``sdp.paths``).

    Attributes:
        buffers: the persistent buffers of the full model.
        aliases: every further name of a tied tensor → the canonical (first) name.
        blocks: paths of the residual blocks, also at neuron level. A block is sharded as a whole.
        keeps_frozen: True under backward masking: a group keeps frozen copies of units that it does
            not hold. False under forward masking: a group skips them. With a masking schedule, True
            if any phase has backward masking; :meth:`in_phase` returns the layout of a phase.
        branch_scale: the setting ``sdp.branch_scale``. Only forward masking scales units.
        not_units: path of each block that ``sdp.units`` "auto" left out because no group could skip
            it → the reason.
        paths: the number of paths. Group g trains path g mod ``paths``. If each path P has its own
            tensor at the path NAME in the module, the tensor's name is ``paths.P.NAME``.
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
    not_units: dict[str, str] = field(default_factory=dict)
    paths: int = 1
    copies: CopiesSection = field(default_factory=CopiesSection)

    @classmethod
    def of(cls, model: nn.Module, config: Config, mesh: Mesh) -> Layout:
        """Make the layout of a run: find the units of ``model``, and choose their holders."""
        check_hooks(model)
        section = config.sdp
        explicit = list(section.placement) if isinstance(section.placement, dict) else None
        not_units: dict[str, str] = {}
        guessed = section.units == "auto" and explicit is None and get_unit_patterns(model) is None
        if section.granularity == "neuron":
            units = find_neuron_units(model, section.neuron_groups)
            blocks = tuple(unit.name for unit in _units_if_any(model))
            require_inside(units, blocks)
        else:
            required = (mesh.sdp > 1 and section.paths is None) or explicit or section.units != "auto"
            units = find_units(model, section.units, explicit) if required else _units_if_any(model)
            if mesh.sdp > 1 and "forward" in section.maskings and guessed and section.paths is None:
                not_units = find_unskippable(model, [unit.name for unit in units])
                units = _without(units, not_units)
            if mesh.sdp > 1 and not units and section.paths is None:
                raise ConfigError("sdp.units: with [] there is no unit to place; name modules, or remove the key")
            blocks = tuple(unit.name for unit in units)
            if section.placement == "contiguous" and section.units == "auto" and section.maskings == ("backward",):
                units = add_ends(model, units)
        placement = make_placement(section, units)
        if guessed and section.granularity == "block" and "forward" in section.maskings:
            require_a_block_in_each_group(placement, mesh)
        require_whole_tensors_if_random(model, mesh)
        unit_of = unit_of_parameters(units)
        everyone = tuple(range(mesh.sdp))

        cuts = parameter_cuts(model, mesh.tp) if mesh.tp > 1 else {}
        require_even(units, cuts, mesh.tp)

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
        parameters = _with_slices(parameters, units, placement)
        keeps_frozen = "backward" in section.maskings
        scale = section.branch_scale
        layout = cls(
            mesh, tuple(units), placement, parameters, buffers, aliases, blocks, keeps_frozen, scale, not_units,
            copies=section.copies,
        )  # fmt: skip
        return layout if section.paths is None else layout._with_paths(section.paths)

    def _with_paths(self, section: PathsSection) -> Layout:
        """Return the layout with several paths, made from this layout of one path.

        Raises:
            ModelError: a pattern matches no unit, or a unit has a tensor under two names.
        """
        count = section.count
        units = {unit.name: unit for unit in self.units}
        matched = match_patterns(units, section.own, "sdp.paths.own") if section.own else set[str]()
        tied = next((pair for pair in self.aliases.items() if self.parameters[pair[1]].unit in matched), None)
        if tied is not None:
            raise ModelError(f"sdp.paths.own: {tied[0]!r} is tied to {tied[1]!r} inside a unit; do not list this unit")
        if count == 1:
            return self
        of_paths = [(f"paths.{path}.", tuple(range(path, self.mesh.sdp, count))) for path in range(count)]
        shared = [("", self.everyone)]
        found = [
            (replace(unit, name=prefix + unit.name, slices=_prefixed(unit.slices, prefix), prefix=prefix), holders)
            for unit in self.units
            for prefix, holders in (of_paths if unit.name in matched else shared)
        ]

        def tensors(table: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
            several = {}
            for unit, infos in groupby(table.values(), lambda info: info.unit):
                members = list(infos)
                for prefix, holders in of_paths if unit in matched else ():
                    for info in members:
                        name = prefix + info.name
                        several[name] = replace(info, name=name, unit=prefix + unit, holders=holders, prefix=prefix)
                several |= {info.name: info for info in members if unit not in matched}
            return several

        flops = tuple(unit.flops for unit, _ in found) if self.placement.flops else ()
        return replace(
            self,
            units=tuple(replace(unit, index=index) for index, (unit, _) in enumerate(found)),
            placement=Placement(
                self.mesh.sdp,
                tuple(unit.name for unit, _ in found),
                tuple(holders for _, holders in found),
                tuple(unit.numel for unit, _ in found),
                flops,
            ),
            parameters=tensors(self.parameters),
            buffers=tensors(self.buffers),
            paths=count,
        )

    @property
    def masking(self) -> Masking:
        """The masking of this layout: "forward" or "backward"."""
        return "backward" if self.keeps_frozen else "forward"

    def in_phase(self, masking: Masking) -> Layout:
        """Return the layout for those phases of a masking schedule whose masking is ``masking``."""
        return self if masking == self.masking else replace(self, keeps_frozen=masking == "backward")

    def without(self, blocks: Collection[str]) -> Layout:
        """Return the layout for the model without these blocks, so that a trace runs fewer blocks.

        If a removed block is a unit, its parameters stay in ``parameters``, but have no holders. So
        shared parameters before and after the block stay in separate buckets, as in the full model.
        """

        def is_left(name: str) -> bool:
            return not any(path in blocks for path in (name, *parents(name)))

        units, old = [unit for unit in self.units if is_left(unit.path)], self.placement
        placement = replace(
            old,
            units=tuple(old.units[unit.index] for unit in units),
            holders=tuple(old.holders[unit.index] for unit in units),
            costs=tuple(old.costs[unit.index] for unit in units),
            flops=tuple(old.flops[unit.index] for unit in units) if old.flops else (),
        )
        return replace(
            self,
            units=tuple(replace(unit, index=index) for index, unit in enumerate(units)),
            placement=placement,
            parameters={
                name: info if is_left(info.path) else replace(info, holders=())
                for name, info in self.parameters.items()
                if is_left(info.path) or (info.unit != SHARED and info.cut is None)
            },
            buffers={name: info for name, info in self.buffers.items() if is_left(info.path)},
            blocks=tuple(name for name in self.blocks if is_left(name)),
        )

    @property
    def everyone(self) -> Holders:
        return tuple(range(self.mesh.sdp))

    def path_of(self, group: int) -> int:
        """Return the number of the path (``sdp.paths``) that ``group`` trains."""
        return group % self.paths

    def held(self, group: int) -> Iterator[TensorInfo]:
        """Yield the parameters that ``group`` trains."""
        return (info for info in self.parameters.values() if group in info.holders)

    def parameters_at(self, group: int) -> dict[str, TensorInfo]:
        """Map each path in the module of ``group`` to the parameter, or slice, at this path.

        If ``group`` holds no tensor at a path, the map has the first tensor that any group has at
        this path. All tensors at one path have the same shape and are cut in the same way.
        """
        return _by_path(self.parameters.values(), group)

    def buffers_at(self, group: int) -> dict[str, TensorInfo]:
        """Map each path in the module of ``group`` to the persistent buffer at this path."""
        return _by_path(self.buffers.values(), group)

    @cached_property
    def wholes(self) -> dict[str, list[TensorInfo]]:
        """By parameter name, in model order: the parameter's slices, or itself if unsliced."""
        wholes: dict[str, list[TensorInfo]] = {}
        for info in self.parameters.values():
            wholes.setdefault(info.canonical, []).append(info)
        return wholes

    @cached_property
    def by_path(self) -> dict[str, list[TensorInfo]]:
        """By path in the uncut module, in model order: the parameters or slices at this path."""
        found: dict[str, list[TensorInfo]] = {}
        for info in self.parameters.values():
            found.setdefault(info.path, []).append(info)
        return found

    @cached_property
    def members(self) -> dict[str, list[TensorInfo]]:
        """By unit name, or ``"shared"`` for the shared part: all its parameters or slices."""
        members: dict[str, list[TensorInfo]] = {}
        for info in self.parameters.values():
            members.setdefault(info.unit, []).append(info)
        return members

    def frozen(self, group: int) -> Iterator[TensorInfo]:
        """Yield the parameters of which ``group`` keeps frozen copies."""
        return (info for info in self.parameters.values() if self.keeps_frozen and group not in info.holders)

    def block_of(self, unit: Unit) -> str:
        """Return the path of the block that is the unit or contains it, or "" if there is none."""
        return next((name for name in self.blocks if unit.path == name or unit.path.startswith(f"{name}.")), "")

    def warnings(self) -> list[str]:
        """Return warnings about unskippable blocks, and about a group that holds most of the model.

        With several paths, the list is empty, because the configuration names the shared units.
        """
        if self.paths > 1:
            return []
        numels = {name: slices[0].full_shape.numel() for name, slices in self.wholes.items()}
        return warn_of_left_out(self.not_units) + warn_of_large_share(numels, self.units, self.placement)

    @cached_property
    def refreshes(self) -> tuple[Refresh, ...]:
        """The messages that bring new weights to all frozen copies, in the order of the units."""
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
        """Return the gradient buckets of all groups, in the order in which their averages start.

        ``comes_last(NAME)``: whether backward makes the gradient of this parameter at its very end.
        """
        trainable = {info.name: info.tp_shape.numel() for info in self._in_bucket_order() if info.trainable}
        return plan_buckets(
            trainable,
            lambda name: self.parameters[name].holders,
            lambda name: _together(self.parameters[name]),
            comes_last,
        )

    def _in_bucket_order(self) -> list[TensorInfo]:
        """Return the parameters in the model's order, with a branch's slices sorted by holders."""
        order = list(self.parameters.values())
        first: dict[str, int] = {}
        for position, info in enumerate(order):
            first.setdefault(_branch(info), position)
        return sorted(order, key=lambda info: (first[_branch(info)], info.holders if info.cut else ()))  # stable


def _by_path(infos: Iterable[TensorInfo], group: int) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for info in infos:
        path = info.name.removeprefix(info.prefix)
        if path not in found or group in info.holders:
            found[path] = info
    return found


def _branch(info: TensorInfo) -> str:
    """Return the branch of a slice, or the name of a parameter that is not sliced."""
    return info.unit.rpartition(".neurons.")[0] if info.cut else info.name


def _together(info: TensorInfo) -> str:
    """Return a text that is equal for parameters whose gradients may be averaged in one message.

    These are whole parameters of one unit, or slices of one branch with the same holders.
    """
    return f"{_branch(info)} {info.holders}" if info.cut else info.unit


def _with_slices(
    parameters: Mapping[str, TensorInfo], units: Sequence[Unit], placement: Placement
) -> dict[str, TensorInfo]:
    """Replace each parameter that is sliced by its slices ``NAME:0``, ``NAME:1`` and so on."""
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


def _prefixed(slices: Sequence[Slice], prefix: str) -> tuple[Slice, ...]:
    return tuple(replace(part, parameter=prefix + part.parameter) for part in slices)


def _without(units: Sequence[Unit], names: Mapping[str, str]) -> list[Unit]:
    left = [unit for unit in units if unit.name not in names]
    if not left:
        reasons = "; ".join(f"{name} {reason}" for name, reason in names.items())
        raise ModelError(
            f'sdp.units: "auto" finds no block that a group could skip: {reasons}; name other blocks in '
            'sdp.units, or use sdp.masking "backward"'
        )
    return [replace(unit, index=index) for index, unit in enumerate(left)]


def _units_if_any(model: nn.Module) -> list[Unit]:
    """Find the units of a dense run, or return an empty list.

    In a dense run, units only decide how FSDP2 groups parameters, so a model needs no units.
    """
    try:
        return find_units(model, "auto")
    except ModelError:
        return []
