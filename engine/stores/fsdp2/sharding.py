"""Applies FSDP2 to a rank's model: which modules are sharded on their own, and how."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from ...distributed.traffic import Traffic
from .collectives import CountingAllGather, CountingReduceScatter, parameter_groups
from .passes import ModuleUses, refuse_hidden_results, refuse_inference_mode, refuse_whole_state


def shard(
    model: nn.Module,
    names: Iterable[str],
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    reshards: bool,
    offload: OffloadPolicy,
    traffic: Traffic,
) -> list[ModuleUses]:
    """Shard the modules ``names`` of ``model``, each on its own, and then what is left.

    Returns what watches the uses of each module.

    Args:
        model: The rank's model.
        names: Paths of the modules.
        mesh: The ranks that share a parameter.
        compute_dtype: The dtype in which parameters are gathered.
        reshards: Whether parameters are freed between forward and backward.
        offload: Where shards live.
        traffic: Counts the bytes that FSDP2 sends.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype, reduce_dtype=torch.float32
    )
    settings: dict[str, Any] = {"mp_policy": policy, "offload_policy": offload}
    apply = partial(fully_shard, mesh=mesh, reshard_after_forward=reshards, **settings)
    for parameter in model.parameters():  # FSDP2 refuses parameters that are not contiguous
        parameter.data = parameter.data.contiguous()
    uses: list[ModuleUses] = []
    for name in [*names, ""]:
        module = model.get_submodule(name)
        apply(module)
        assert isinstance(module, FSDPModule)
        module.set_custom_all_gather(CountingAllGather(traffic))
        module.set_custom_reduce_scatter(CountingReduceScatter(traffic))
        uses.append(ModuleUses(module, name, parameter_groups(module), sharded=mesh.size() > 1))
        refuse_hidden_results(module, name)
    refuse_inference_mode(model)
    refuse_whole_state(model)
    return uses
