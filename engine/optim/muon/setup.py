"""Builds Muon from the configuration, and tells it which parameters of a layout are matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...config.named_params import MuonParams
from ...config.schema import NamedParams
from ...config.section import parse_section
from ...distributed.tensor_collectives import TensorRanks
from ...distributed.traffic import Traffic
from ...errors import ConfigError
from ...placement.layout import Layout
from ...placement.tensor_info import TensorInfo
from .algorithm import Matrix, Muon


def build_muon(
    name: str, params: Mapping[str, Any], parameters: list[Any], device: torch.device
) -> tuple[Optimizer, str]:
    """Build Muon from ``optimizer.params``, and a line that says so. Raises ConfigError."""
    settings = parse_section(MuonParams, params, "optimizer.params")
    if settings.adam_lr and not settings.lr:
        raise ConfigError("optimizer.params.lr: 0, but adam_lr is not; the schedule scales both by the same factor")
    chosen = settings.model_dump(exclude={"betas", "ns_dtype", "state_dtype"})
    optimizer = Muon(
        parameters,
        **chosen,
        betas=(settings.betas[0], settings.betas[1]),
        ns_dtype=getattr(torch, settings.ns_dtype),
        state_dtype=getattr(torch, settings.state_dtype),
    )
    return optimizer, f"{name}: our own for sharded matrices, with torch.optim.Muon's formulas; AdamW for the rest"


def is_matrix(info: TensorInfo, layout: Layout) -> bool:
    """Whether Muon steps on a parameter: a matrix, or a slice of one, inside a block.

    Embeddings and heads are outside the blocks. The placement does not matter.
    """
    return len(info.full_shape) == 2 and any(info.canonical.startswith(f"{block}.") for block in layout.blocks)


def arrange(
    optimizer: Optimizer,
    layout: Layout,
    parameters: Mapping[str, nn.Parameter],
    tensor_ranks: TensorRanks | None,
    traffic: Traffic,
) -> None:
    """Tell a :class:`Muon` which parameters are matrices. A no-op for other optimizers.

    Args:
        optimizer: This rank's optimizer.
        layout: The layout of the run.
        parameters: This rank's parameters, by the names in ``layout``.
        tensor_ranks: The ranks among which matrices are cut, or None.
        traffic: Counts the gathers.
    """
    if not isinstance(optimizer, Muon):
        return
    matrices = {
        parameter: Matrix(info.tp_dim, tensor_ranks)
        for name, parameter in parameters.items()
        if is_matrix(info := layout.parameters[name], layout)
    }
    optimizer.arrange(matrices, traffic)


def gathered_bytes(section: NamedParams | None, layout: Layout) -> Callable[[TensorInfo], int] | None:
    """Return the function that gives the bytes per element that Muon gathers, or None for other
    optimizers.
    """
    if section is None or section.type.lower() != "muon":
        return None
    size = 4 if section.params.get("ns_dtype") == "float32" else 2
    return lambda info: size if is_matrix(info, layout) else 0


def planned_gathers(optimizer: Optimizer, layout: Layout, group: int, shards: int) -> Traffic:
    """Return the bytes of a step's gathers inside ``group``.

    None are planned for other optimizers.
    """
    planned = Traffic()
    if isinstance(optimizer, Muon):
        for info in layout.held(group):
            if info.trainable and is_matrix(info, layout):
                nbytes = info.padded_shard_numel(shards) * shards * optimizer.ns_dtype.itemsize
                planned.record("inside groups", "all_gather", nbytes, shards)
    return planned
