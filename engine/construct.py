"""From the full model to this rank's part of it: carve, shard, give every parameter its value."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from .activations import checkpoint_activations
from .backends.base import Backend
from .backends.deepspeed_private import is_zero_checkpoint
from .backends.fsdp2 import FSDP2Backend
from .backends.reference import ReferenceBackend
from .backends.vectorized import VectorizedBackend
from .branch_scale import BranchScale
from .clock import clock
from .compile import compile_units
from .config.schema import Config
from .distributed.agreement import Ranks
from .distributed.mesh import Coordinates
from .distributed.process_groups import tensor_group
from .distributed.tensor_collectives import TensorRanks
from .distributed.tensor_parallel import parallelise
from .distributed.tensors import local_tensor
from .distributed.traffic import Traffic
from .errors import ModelError
from .initialisation import Filler, ModuleInit, plan_initialisation
from .neurons import slice_layers
from .placement.layout import Layout
from .placement.tensor_info import Shard, TensorInfo
from .subnetwork import PassThrough, carve, freeze
from .weight_files import WeightFiles, converted, filled_from, fillers_from


def build_backend(model: nn.Module, config: Config, layout: Layout, device: torch.device) -> Backend:
    """Cut ``model`` in place for this rank. A model on the meta device is initialised from ``training.seed``, or has the values of the
    files in ``training.init_from``; one with weights keeps rank 0's. Raises :class:`ModelError` for a model of which only some
    parameters have values, and for files of another model.
    """
    plan = values_to_give(model, config, layout)
    if config.sdp.in_one_process:
        compute_dtype = getattr(torch, config.precision)
        give_values(model, layout, plan, device, Shard())
        kind = VectorizedBackend if config.sdp.engine == "vectorized" else ReferenceBackend
        backend = kind(model, layout, device, compute_dtype=compute_dtype)
        # After the backend has copied the blocks' skeletons.
        checkpoint_activations(model, layout.blocks, config.activation_checkpointing.mode)
        return backend
    if plan is None:
        take_values_of_rank_0(model, device)
    native = build_native(model, config, layout, device)
    give_values(model, layout, plan, device, native.shard, {info.name for info in layout.frozen(native.at.sdp)})
    native.clock = clock(device, waits=config.wall_clock_breakdown)
    native.ready()
    return native


def build_native(
    model: nn.Module, config: Config, layout: Layout, device: torch.device, absent: Sequence[Sequence[str]] = ()
) -> FSDP2Backend:
    """Make ``model`` this rank's part, in place. One on the meta device has no values yet; call ``ready()`` once it has.

    ``absent``: blocks, those together that are alike, which the whole run goes without, as if the model did not have them.
    """
    at = layout.mesh.coordinates(dist.get_rank())
    traffic = Traffic()
    compute_dtype = getattr(torch, config.precision)
    tensor_ranks = _tensor_ranks(layout, at, traffic)
    sliced = config.sdp.granularity == "neuron"
    # Tensor parallelism cuts slices, but blocks that are skipped must be its before they are put aside.
    stand_ins = cut(model, config, layout, at.sdp, compute_dtype) if sliced else {}
    if tensor_ranks is not None:
        parallelise(model, {info.name: info.tp_dim for info in layout.parameters.values()}, tensor_ranks)
    for alike in absent:
        nothing = PassThrough(alike[0], model.get_submodule(alike[0]))
        for name in alike:
            model.set_submodule(name, nothing)
    layout = layout.without({name for alike in absent for name in alike}) if absent else layout
    stand_ins = stand_ins if sliced else cut(model, config, layout, at.sdp, compute_dtype)
    scale = BranchScale(layout)
    scale.install(model)  # before forward passes are replaced, whose signatures it reads
    run = [name for name in layout.blocks if name not in stand_ins]
    checkpoint_activations(model, run, config.activation_checkpointing.mode)
    if config.training.compile:
        compile_units(model, run, device, sliced=sliced)
    return FSDP2Backend(
        model,
        layout,
        stand_ins,
        device,
        stage=config.zero_optimization.stage,
        compute_dtype=compute_dtype,
        traffic=traffic,
        tensor_ranks=tensor_ranks,
        scale=scale,
    )


def allocate(model: nn.Module, layout: Layout, device: torch.device) -> None:
    """Put a model of the meta device on ``device``, without values, and tie again what is tied."""
    model.to_empty(device=device)
    _restore_ties(model, layout.aliases)


def values_to_give(model: nn.Module, config: Config, layout: Layout) -> list[ModuleInit] | None:
    """How parameters get values; None: they have some. Raises :class:`ModelError`."""
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta and len(on_meta) < len(layout.wholes):
        raise ModelError(f"parameter {on_meta[0]!r} is on the meta device but others have values; build the model wholly on one of the two")
    plan = plan_initialisation(model, config.training.seed) if on_meta else None
    if config.training.init_from is not None:
        if plan is None:
            raise ModelError("training.init_from: the model has weights already; build it on the meta device, or remove this key")
        alone = config.sdp.in_one_process or not dist.is_initialized() or dist.get_world_size() == 1
        directory = Path(config.training.init_from)
        files = converted(directory, Ranks(alone)) if is_zero_checkpoint(directory) else WeightFiles(directory)
        plan = filled_from(plan, fillers_from(files, directory, model, layout))
    _require_float32(model)
    return plan


def cut(model: nn.Module, config: Config, layout: Layout, group: int, compute_dtype: torch.dtype) -> dict[str, PassThrough]:
    """Cut ``model`` in place to what ``group`` holds, or freeze the rest; the stand-ins of units that are skipped, by name."""
    if config.sdp.granularity == "neuron":
        slice_layers(model, layout, group, compute_dtype)
    elif layout.keeps_frozen:
        freeze(model, layout.units, layout.placement, group, compute_dtype)
    else:
        return carve(model, layout.units, layout.placement, group)
    return {}


def _tensor_ranks(layout: Layout, at: Coordinates, traffic: Traffic) -> TensorRanks | None:
    group = tensor_group(layout.mesh)
    return TensorRanks(group, layout.mesh.tp, at.tp, traffic) if group is not None else None


def _require_float32(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise ModelError(
                f"parameter {name!r} is {parameter.dtype}; master weights are float32: call model.float() first, and set "
                "bf16.enabled to compute in bfloat16"
            )


def take_values_of_rank_0(model: nn.Module, device: torch.device) -> None:
    """Parameters and buffers of every rank become rank 0's, one at a time."""
    for tensor in (*model.parameters(), *model.buffers()):
        value = tensor.detach().to(device).contiguous()
        dist.broadcast(value, src=0)
        tensor.detach().copy_(value)


def give_values(
    model: nn.Module,
    layout: Layout,
    plan: Sequence[ModuleInit] | None,
    device: torch.device,
    shard: Shard,
    frozen: Collection[str] = (),
) -> None:
    """Put the model on ``device``; where it was on the meta device, allocate and fill this rank's shards alone. ``frozen`` copies get no
    values: they come from a holder.
    """
    if plan is None:
        model.to(device)
        return
    allocate(model, layout, device)
    tensors = {name: p for name, p in model.named_parameters() if name not in frozen} | dict(model.named_buffers())
    here: dict[str, list[str]] = {}
    for name in tensors:
        here.setdefault(layout.parameters[name].canonical if name in layout.parameters else name, []).append(name)
    for init in plan:
        if not any(name in here for name in init.names):
            continue  # of a unit that is not held
        for canonical, fill in init.fillers().items():
            for name in here.get(canonical, ()):
                local = local_tensor(tensors[name].detach())
                if local.numel():
                    _fill(local, fill, layout.parameters.get(name), shard)


def _fill(local: torch.Tensor, fill: Filler, info: TensorInfo | None, shard: Shard) -> None:
    """Give ``local`` its elements of the whole; of one cut across its rows, all columns of these are made for a moment."""
    if info is None:  # a buffer
        fill(local, 0)
        return
    offset = info.offset(shard)
    dim = info.cut.dim if info.cut else info.tp_dim
    if not dim:  # whole rows
        fill(local, offset[0] if offset else 0)
        return
    rows = local.new_empty((local.shape[0], *info.full_shape[1:]))
    fill(rows, offset[0])
    local.copy_(rows.narrow(dim, offset[dim], local.shape[dim]))


def _restore_ties(model: nn.Module, aliases: Mapping[str, str]) -> None:
    """``to_empty`` unties: give every further name of a tied parameter the canonical one's tensor again."""
    for alias, name in aliases.items():
        parent, _, key = alias.rpartition(".")
        setattr(model.get_submodule(parent), key, model.get_parameter(name))
