"""``sdp.checkpointing``: DeepSpeed's activation checkpointing, by torch.utils.checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import checkpoint as of_torch

_settings: dict[str, Any] = {}


def configure(mpu_: Any = None, deepspeed_config: Any = None, **options: Any) -> None:
    """Remember that a script has configured checkpointing. DeepSpeed's options have no effect here.

    Activations are never partitioned or moved to the host. Random numbers are restored in any case.
    """
    _settings.update(options, configured=True)


def is_configured() -> bool:
    """Whether :func:`configure` was called."""
    return bool(_settings)


def reset() -> None:
    """Forget the configuration."""
    _settings.clear()


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` and recompute its activations in backward.

    Random numbers are the same in both passes. All arguments may be of any type.
    """
    return of_torch.checkpoint(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Do nothing."""


def set_num_layers(nlayers: int) -> None:
    """Do nothing."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed this rank's generators."""
    torch.manual_seed(seed)


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed
