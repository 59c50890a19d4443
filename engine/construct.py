"""From the full model to this rank's part of it: carve, shard, give every parameter its value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from .accounting.clock import clock
from .backend import Backend
from .backends.deepspeed.zero_checkpoint import converted, is_zero_checkpoint
from .backends.fsdp2.backend import FSDP2Backend
from .backends.reference.backend import ReferenceBackend
from .backends.reference.vectorized import VectorizedBackend
from .config.schema import Config
from .distributed.agreement import Ranks
from .distributed.mesh import Coordinates
from .distributed.process_groups import tensor_group
from .distributed.tensor_collectives import TensorRanks
from .distributed.tensor_parallel import parallelise
from .distributed.traffic import Traffic
from .errors import ModelError
from .placement.layout import Layout
from .placement.tensor_info import Shard
from .subnetwork.activations import checkpoint_activations
from .subnetwork.branch_scale import BranchScale
from .subnetwork.carve import PassThrough
from .subnetwork.compile import compile_units
from .subnetwork.initialisation import ModuleInit, plan_initialisation
from .subnetwork.materialise import cut, give_values, require_float32, take_values_of_rank_0
from .subnetwork.weight_files import WeightFiles, filled_from, fillers_from


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


def values_to_give(model: nn.Module, config: Config, layout: Layout) -> list[ModuleInit] | None:
    """How parameters get values; None: they have some. Raises :class:`ModelError`."""
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta and len(on_meta) < len(layout.wholes):
        raise ModelError(
            f"parameter {on_meta[0]!r} is on the meta device but others have values; build the model wholly on one of the two"
        )
    plan = plan_initialisation(model, config.training.seed) if on_meta else None
    if config.training.init_from is not None:
        if plan is None:
            raise ModelError(
                "training.init_from: the model has weights already; build it on the meta device, or remove this key"
            )
        alone = config.sdp.in_one_process or not dist.is_initialized() or dist.get_world_size() == 1
        directory = Path(config.training.init_from)
        files = converted(directory, Ranks(alone)) if is_zero_checkpoint(directory) else WeightFiles(directory)
        plan = filled_from(plan, fillers_from(files, directory, model, layout))
    require_float32(model)
    return plan


def _tensor_ranks(layout: Layout, at: Coordinates, traffic: Traffic) -> TensorRanks | None:
    group = tensor_group(layout.mesh)
    return TensorRanks(group, layout.mesh.tp, at.tp, traffic) if group is not None else None
