"""Cuts a model to the part that a group holds, allocates that part, and gives it values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..config.schema import Config
from ..distributed.collectives import local_tensor
from ..errors import ModelError
from ..placement.layout import Layout
from ..placement.tensor_info import Shard, TensorInfo
from .carve import PassThrough, carve, freeze
from .initialisation import Filler, ModuleInit


def allocate(model: nn.Module, layout: Layout, device: torch.device) -> None:
    """Move a model from the meta device to ``device``, without values, and tie parameters again."""
    model.to_empty(device=device)
    restore_ties(model, layout.aliases)


def replace_blocks(
    model: nn.Module, config: Config, layout: Layout, group: int, compute_dtype: torch.dtype
) -> dict[str, PassThrough]:
    """Skip (forward masking) or freeze (backward masking) the blocks that ``group`` does not hold.

    At neuron level, nothing happens. Returns the pass-throughs of skipped blocks, by path.
    """
    if config.sdp.granularity == "neuron":
        return {}
    if layout.keeps_frozen:
        freeze(model, layout.units, layout.placement, group, compute_dtype)
        return {}
    return carve(model, layout.units, layout.placement, group)


def make_float32(model: nn.Module) -> str:
    """Convert bfloat16 and float16 tensors of ``model`` to float32, in place.

    Parameters stay the same objects, so an optimizer still has them. Returns a line for the log,
    which is empty if nothing was converted.
    """
    kinds: dict[torch.dtype, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype in (torch.bfloat16, torch.float16):
            kinds[tensor.dtype] = kinds.get(tensor.dtype, 0) + 1
            tensor.data = tensor.data.float()
    if not kinds:
        return ""
    found = " and ".join(f"{count} in {str(kind).removeprefix('torch.')}" for kind, count in kinds.items())
    return f"weights: the model has tensors in half precision ({found}), which are now float32: master weights"


def require_float32(model: nn.Module) -> None:
    """Raise ModelError if a parameter has a floating-point dtype other than float32."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise ModelError(
                f"parameter {name!r} is {parameter.dtype}; master weights are float32: call model.float() first, and "
                "set bf16.enabled to compute in bfloat16"
            )


def take_values_of_rank_0(model: nn.Module, device: torch.device) -> None:
    """Broadcast rank 0's parameters and buffers to all ranks, one tensor at a time."""
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
    """Put the model on ``device``, and give its parameters their initial values.

    Args:
        model: The model, cut and sharded.
        layout: The layout of the run.
        plan: How the parameters of a model on the meta device are initialised. If None, the model
            has values already, and is only moved.
        device: Where the model goes.
        shard: Which shard this rank has.
        frozen: Names of frozen copies. They get no values, because a holder sends these later.
    """
    if plan is None:
        model.to(device)
        return
    allocate(model, layout, device)
    fill(
        {name: p for name, p in model.named_parameters() if name not in frozen} | dict(model.named_buffers()),
        layout,
        plan,
        shard,
    )


def fill(tensors: Mapping[str, torch.Tensor], layout: Layout, plan: Sequence[ModuleInit], shard: Shard) -> None:
    """Write the initial values of the shards of this rank into ``tensors`` (by name)."""
    names_of: dict[str, list[str]] = {}
    infos = layout.parameters_at(0)  # values do not depend on the group
    for name in tensors:
        names_of.setdefault(infos[name].path if name in infos else name, []).append(name)
    for init in plan:
        if not any(name in names_of for name in init.names):
            continue  # of a unit that is not held
        for path, fill in init.fillers().items():
            for name in names_of.get(path, ()):
                local = local_tensor(tensors[name].detach())
                if local.numel():
                    _fill(local, fill, infos.get(name), shard)


def _fill(local: torch.Tensor, fill: Filler, info: TensorInfo | None, shard: Shard) -> None:
    """Write the rank's elements of the full tensor into ``local``.

    If the tensor is cut along another dimension than the rows, whole rows are in memory for a
    moment.
    """
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


def restore_ties(model: nn.Module, aliases: Mapping[str, str]) -> None:
    """Tie parameters again after ``to_empty``: every alias becomes the canonical tensor."""
    for alias, name in aliases.items():
        parent, _, key = alias.rpartition(".")
        owner, module = model.get_submodule(name.rpartition(".")[0]), model.get_submodule(parent)
        for suffix in ("", ":q", ":s"):  # of the parameter, or of a quantised copy
            parameter = owner._parameters.get(name.rpartition(".")[2] + suffix)
            if parameter is not None:
                module._parameters[key + suffix] = parameter
