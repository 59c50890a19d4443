"""Measures batch norm's running statistics of the full model.

Under forward masking, a rank tracks the statistics of its own subnetwork. Its activations lack what
the blocks of other groups add, so these statistics are wrong for the full model. They are measured
again by a pass of the full model over some training batches (Wu and Johnson, arXiv 2105.07576,
section 3). The result is the mean and variance of each channel over all of these batches and all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import ModelError
from ..subnetwork.neurons import SlicedBatchNorm

Statistics = dict[str, torch.Tensor]  # canonical name of a buffer → its value


def tracks_statistics(buffers: Iterable[str]) -> bool:
    """Whether these names of buffers include batch-norm statistics."""
    return any(name.endswith("running_mean") for name in buffers)


def batch_statistics(
    modules: Iterable[tuple[str, nn.Module]],
    run: Callable[[], object],
    reduce: Callable[[torch.Tensor], None],
    device: torch.device,
) -> Statistics:
    """Measure means and variances of the inputs of all batch norms.

    Every rank must run every batch norm equally often.

    Args:
        modules: Pairs of canonical name and module. Only batch norms are measured.
        run: Runs the passes.
        reduce: Sums float64 values over all ranks in place.
        device: The device of the sums.

    Raises:
        ModelError: A batch norm did not run.
    """
    norms = {name: module for name, module in modules if isinstance(module, _BatchNorm) and module.track_running_stats}
    moments = {
        name: torch.zeros(3, module.num_features, dtype=torch.float64, device=device) for name, module in norms.items()
    }
    with _recording(norms, moments), torch.no_grad():
        run()
    statistics: Statistics = {}
    for name in sorted(moments):
        reduce(moments[name])
        count, mean, square = moments[name]
        if not count.all():
            raise ModelError(f"{name}: did not run in a pass of the full model, so its statistics cannot be measured")
        mean, square = mean / count, square / count
        statistics[f"{name}.running_mean"] = mean
        statistics[f"{name}.running_var"] = (square - mean**2).clamp(min=0)
    return statistics


def _record_into(total: torch.Tensor) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    def record(norm: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        inputs = args[0].detach().float()
        dims = [dim for dim in range(inputs.dim()) if dim != 1]
        mean = inputs.mean(dims).double()
        found = torch.stack([torch.ones_like(mean), mean, inputs.var(dims, correction=0).double() + mean**2])
        if isinstance(norm, SlicedBatchNorm):
            total.index_add_(1, norm.where(total.device), found)
        else:
            total.add_(found)

    return record


@contextmanager
def _recording(norms: Mapping[str, _BatchNorm], moments: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Make the norms use batch statistics inside the context, and add these to ``moments``.

    The norms' own running statistics do not change.
    """
    handles = [norm.register_forward_pre_hook(_record_into(moments[name])) for name, norm in norms.items()]
    before = {name: norm.training for name, norm in norms.items()}
    for norm in norms.values():
        norm.training, norm.track_running_stats = True, False
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for name, norm in norms.items():
            norm.training, norm.track_running_stats = before[name], True


@contextmanager
def with_statistics(module: nn.Module, statistics: Statistics) -> Iterator[None]:
    """Give those buffers of ``module`` that ``statistics`` names their values inside the
    context.
    """
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in statistics}
    own = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    try:
        for name, buffer in buffers.items():
            buffer.data.copy_(statistics[name])
        yield
    finally:
        for name, buffer in buffers.items():
            buffer.data.copy_(own[name])  # ``data`` hides this from autograd: a backward pass may still follow
