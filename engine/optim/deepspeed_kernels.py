"""Replaces an optimizer of DeepSpeed by torch's.

DeepSpeed's kernels read the memory of whole tensors. Given a shard of FSDP2, they end the process.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ConfigError

_ADAMS = ("FusedAdam", "DeepSpeedCPUAdam")


def with_torch_kernels(given: Any) -> Any:
    """Return torch's Adam or AdamW in place of DeepSpeed's, and anything else as it is.

    Both optimizers have the same parameter groups from then on, so a schedule of ``given`` sets the
    rates of the result.

    Raises:
        ConfigError: It is another optimizer of DeepSpeed, or has settings that torch's does not.
    """
    kind = type(given)
    if not isinstance(given, torch.optim.Optimizer) or not kind.__module__.startswith("deepspeed."):
        return given
    if kind.__name__ not in _ADAMS:
        raise ConfigError(
            f"optimizer: DeepSpeed's {kind.__name__} does not take sharded parameters; use an optimizer of torch, or "
            'sdp.engine "deepspeed"'
        )
    if not all(group["bias_correction"] for group in given.param_groups):
        raise ConfigError(
            f"optimizer: {kind.__name__} with bias_correction false does not take sharded parameters; use true, or "
            'sdp.engine "deepspeed"'
        )
    adam: Any = given
    decoupled = bool(adam.adam_w_mode)
    settings = {key: adam.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}
    made = torch.optim.Adam(adam.param_groups, **settings, decoupled_weight_decay=decoupled)
    adam.param_groups = made.param_groups
    adam._opt_called = True  # torch's schedules warn of an optimizer that has not stepped
    return made
