"""Checks the user's model before it is cut, and removes wrappers that hide its parameters."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..errors import ModelError
from ..placement.layout import Layout


def compiled_in_place(model: nn.Module) -> nn.Module:
    """Unwrap each module that ``torch.compile`` has wrapped, and compile the module in place.

    So parameters have the same names as without ``torch.compile``. Returns the unwrapped ``model``.
    """
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            parent._modules[name] = _unwrapped(child)
    return _unwrapped(model)


def _unwrapped(module: Any) -> Any:
    if isinstance(module, OptimizedModule):
        inner: Any = module._orig_mod
        inner._compiled_call_impl = module.dynamo_ctx(inner._call_impl)  # as nn.Module.compile does
        return inner
    return module


def check_given_model(model: nn.Module) -> None:
    """Raise ModelError if SDP cannot train a module or a parameter of ``model``.

    Examples are sparse gradients, complex parameters, and parameters that are sharded already.
    """
    for path, module in model.named_modules():
        where = path or "the model"
        if isinstance(module, DataParallel | DistributedDataParallel):
            raise ModelError(
                f"sdp.initialize: {where} is wrapped in {type(module).__name__}, which would average gradients a "
                "second time; pass the module that it wraps (its attribute module)"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ModelError(
                f"sdp.initialize: {where} has sparse gradients, which are not averaged; create it with sparse=False"
            )
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ModelError(
                f"sdp.initialize: parameter {name!r} is complex ({parameter.dtype}), and only real ones can be "
                "trained; keep real and imaginary parts as two parameters"
            )
        if isinstance(parameter, DTensor):
            raise ModelError(
                f"sdp.initialize: parameter {name!r} is sharded already; leave fully_shard and tensor parallelism out, "
                "and set zero_optimization.stage or tensor_parallel.autotp_size"
            )
        if not getattr(parameter, "allreduce", True):
            raise ModelError(
                f"sdp.initialize: parameter {name!r} belongs to DeepSpeed's MoE layer, whose experts differ between "
                "ranks, and SDP would average them; use experts of the model itself, which train as other blocks do"
            )


def refuse_shapes(layout: Layout) -> None:
    """Raise ModelError for a parameter without dimensions or elements: it cannot be sharded.

    Every rank checks all parameters of the full model, so that all ranks raise.
    """
    for name, info in layout.parameters.items():
        if 0 in info.shape:
            raise ModelError(f"parameter {name!r} of shape {tuple(info.shape)} has no elements to shard; remove it")
        if not info.shape:
            raise ModelError(
                f"parameter {name!r} has no dimension that could be sharded; give it the shape (1,), or set "
                "sdp.engine"
                ' to "fsdp2", zero_optimization.stage to 0 and bf16.enabled to false'
            )
