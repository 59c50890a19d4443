"""``sdp.runtime``: what scripts import from ``deepspeed.runtime``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from ..config.deepspeed_keys import SCHEDULES
from ..engine import SDPEngine as DeepSpeedEngine
from ..errors import ConfigError
from ..optim.schedule import Schedule
from ..optim.schedules import build_scheduler
from .namespace import attributes
from .utils import RepeatingLoader, see_memory_usage

__all__ = ["DeepSpeedEngine", "RepeatingLoader", "see_memory_usage"]
__path__: list[str] = []

# The positional arguments of DeepSpeed's schedules, after the optimizer.
_WARMUP = ("warmup_num_steps", "warmup_type", "last_batch_iteration")
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", *_WARMUP),
    "WarmupDecayLR": ("total_num_steps", "warmup_min_lr", "warmup_max_lr", *_WARMUP),
    "WarmupCosineLR": (
        "total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type",
        "last_batch_iteration",
    ),
    "OneCycle": (
        "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size",
        "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum", "cycle_min_mom",
        "cycle_max_mom", "decay_mom_rate", "last_batch_iteration",
    ),
    "LRRangeTest": (
        "lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase",
        "last_batch_iteration",
    ),
}  # fmt: skip


def _schedule(kind: str) -> Callable[..., Schedule]:
    """Return a function that makes a schedule from the arguments of DeepSpeed's class."""

    def make(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Schedule:
        names = _ARGUMENTS[kind]
        if len(args) > len(names):
            raise ConfigError(
                f"{kind}: {len(args)} positional arguments after the optimizer; at most {len(names)} exist"
            )
        return build_scheduler(kind, {**dict(zip(names, args, strict=False)), **kwargs}, optimizer)

    make.__name__ = make.__qualname__ = kind
    make.__doc__ = f"Make the schedule {kind} of ``optimizer``, for ``lr_scheduler`` of ``sdp.initialize``."
    return make


WarmupLR, WarmupDecayLR, WarmupCosineLR = map(_schedule, ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"))
OneCycle, LRRangeTest = map(_schedule, ("OneCycle", "LRRangeTest"))
# The names of the schedules in a configuration
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
ONE_CYCLE, LR_RANGE_TEST = "OneCycle", "LRRangeTest"
VALID_LR_SCHEDULES = list(SCHEDULES)

__getattr__ = attributes(__name__)
