"""Builds the FSDP2 store of a rank: cuts and shards the full model, and sets initial values."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .config.schema import Config
from .distributed.collectives import TensorRanks, Traffic
from .distributed.process_groups import tensor_group
from .distributed.tensor_parallel import parallelise
from .errors import ModelError
from .placement.layout import Layout
from .placement.tensor_info import Shard
from .stores.fsdp2.store import Fsdp2Store
from .subnetwork.branch_scale import BranchScale
from .subnetwork.copies import copy_cheaply
from .subnetwork.execution import autocast_forward, checkpoint_activations, compile_units
from .subnetwork.initialisation import ModuleInit, WeightFiles, filled_from, fillers_from, plan_initialisation
from .subnetwork.materialise import fill, give_values, replace_blocks, require_float32, take_values_of_rank_0
from .subnetwork.neurons import slice_layers


def build_store(
    model: nn.Module, config: Config, layout: Layout, device: torch.device, plan: Sequence[ModuleInit] | None
) -> Fsdp2Store:
    """Cut ``model`` in place to this rank's part, give it values, and return a store. Collective.

    Frozen copies have no values yet. They get values later, from holders.

    Args:
        model: the full model, with weights or on the meta device.
        plan: the initial values, from :func:`values_to_give`. If None, all ranks get the weights of
            rank 0.
    """
    if "deepspeed" in sys.modules:
        from .stores.deepspeed.private import restore_linear  # an earlier engine may have replaced it

        restore_linear()
    skeleton = _skeleton(model, layout, plan, device) if config.masking_schedule.ends else None
    if plan is None:
        take_values_of_rank_0(model, device)
    store = shard_model(model, config, layout, device, skeleton=skeleton)
    home, frozen = store.home, {info.name for info in layout.frozen(store.context.at.sdp)}
    give_values(model, layout, plan, home.device, store.shard, frozen)
    if home.offloads:
        home.keep_buffers_on_device(model)
    store.ready()
    return store


def _skeleton(model: nn.Module, layout: Layout, plan: Sequence[ModuleInit] | None, device: torch.device) -> nn.Module:
    """Copy the uncut ``model`` without parameters, and with the initial values of its buffers."""
    buffers = {
        name: torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device, copy=True)
        for name, buffer in model.named_buffers()
    }
    fill(buffers, layout, plan or (), Shard())
    known: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in model.parameters()
    }
    known |= {id(buffer): buffers[name] for name, buffer in model.named_buffers()}
    return copy.deepcopy(model, known)


def shard_model(
    model: nn.Module,
    config: Config,
    layout: Layout,
    device: torch.device,
    *,
    skeleton: nn.Module | None = None,
    prepare: Callable[[nn.Module, Layout], Layout] | None = None,
) -> Fsdp2Store:
    """Cut ``model`` in place to this rank's part, and return its store, which is not ready yet.

    The caller must call ``ready()`` of the store. If ``model`` is on the meta device, the caller
    first gives values to the parameters.

    Args:
        model: the full model, with weights or on the meta device.
        skeleton: the uncut model without weights, from which a masking schedule builds blocks when
            a phase begins.
        prepare: called after neurons and matrices are cut. It may change the model further, and
            returns the layout of the result. ``sdp plan`` uses it to leave out repeated blocks.
    """
    traffic, scale, group = Traffic(), BranchScale(layout), tensor_group(layout.mesh)
    at = layout.mesh.coordinates(dist.get_rank())
    tensor_ranks = TensorRanks(group, layout.mesh.tp, at.tp, traffic) if group is not None else None
    layout = _cut(model, config, layout, device, tensor_ranks, scale, prepare)
    # The whole forward pass runs under autocast, so this comes after the signatures were read.
    autocast_forward(model, config, device)

    def rebuild(layout: Layout) -> nn.Module:
        rebuilt = copy.deepcopy(skeleton)
        assert rebuilt is not None
        _cut(rebuilt, config, layout, device, tensor_ranks, scale)
        return rebuilt

    # FSDP2 shards what is left.
    return Fsdp2Store(
        model, layout, config, device, tensor_ranks=tensor_ranks, traffic=traffic, scale=scale, rebuild=rebuild
    )


def _cut(
    model: nn.Module,
    config: Config,
    layout: Layout,
    device: torch.device,
    tensor_ranks: TensorRanks | None,
    scale: BranchScale,
    prepare: Callable[[nn.Module, Layout], Layout] | None = None,
) -> Layout:
    """Cut ``model`` in place to this rank's part. Returns the layout of the result."""
    group, compute_dtype = layout.mesh.coordinates(dist.get_rank()).sdp, getattr(torch, config.precision)
    # 1. Slice neurons. Tensor parallelism splits the slices, so they must exist before it.
    slice_layers(model, layout, group, compute_dtype)
    # 2. Tensor parallelism. It must see every block, because the skeleton of a skipped block is
    # split too.
    if tensor_ranks is not None:
        parallelise(model, {path: info.tp_dim for path, info in layout.parameters_at(group).items()}, tensor_ranks)
    if prepare is not None:
        layout = prepare(model, layout)
    # 3. Replace the blocks that this group lacks. Skipped blocks keep split blocks as skeletons.
    replaced = replace_blocks(model, config, layout, group, compute_dtype)
    # 4. Scale branches. This reads the signatures of forward passes, which the next steps replace.
    scale.use(layout)
    scale.install(model)
    # 5. Activation checkpointing, on the blocks that this group runs. Compiled blocks must contain
    # it.
    run = [name for name in layout.blocks if name not in replaced]
    checkpoint_activations(model, run, config.activation_checkpointing.mode)
    # 6. Quantised frozen copies. Recomputing a block also converts its copies again.
    copy_cheaply(model, layout, group, config.sdp.copies, compute_dtype)
    # 7. Compile block by block. FSDP2's hooks must stay outside the compiled graphs.
    if config.training.compile:
        sliced = config.sdp.granularity == "neuron"
        compile_units(model, run, device, sliced=sliced, phases=len(config.sdp.maskings))
    return layout


def values_to_give(model: nn.Module, config: Config, layout: Layout) -> list[ModuleInit] | None:
    """Plan how the parameters get their initial values, or return None if the model has weights.

    Raises ModelError if only some parameters have values. Raises it also if ``training.init_from``
    is set for a model that has weights already, or if its files are those of another model.
    """
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta and len(on_meta) < len(layout.by_path):
        raise ModelError(
            f"parameter {on_meta[0]!r} is on the meta device but other parameters have values; build the whole model "
            "on the meta device, or the whole model with values"
        )
    plan = plan_initialisation(model, config.training.seed) if on_meta else None
    if config.training.init_from is not None:
        if plan is None:
            raise ModelError(
                "training.init_from: the model has weights already; build it on the meta device, or remove this key"
            )
        directory = Path(config.training.init_from)
        plan = filled_from(plan, fillers_from(WeightFiles(directory), directory, model, layout))
    require_float32(model)
    return plan


def first_weights(model: nn.Module, config: Config, layout: Layout) -> dict[str, torch.Tensor]:
    """Return the full model's weights, by name, with which a run of this configuration starts.

    These weights do not depend on the numbers of groups and ranks.
    """
    found, names = dict[str, torch.Tensor](), dict[str, list[str]]()
    for name, infos in layout.wholes.items():
        found[name] = torch.empty(infos[0].full_shape)
        names.setdefault(infos[0].path, []).append(name)
    plan = values_to_give(model, config, layout)
    for path, parameter in model.named_parameters() if plan is None else ():  # the model has weights already
        for name in names[path]:
            found[name].copy_(parameter.detach())
    for init in plan or ():
        for path, filler in init.fillers().items():
            for name in names.get(path, ()):
                filler(found[name], 0)
    return found
