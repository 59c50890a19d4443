"""``sdp.runtime``: what scripts import from ``deepspeed.runtime``."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from ..config.deepspeed_keys import SCHEDULES
from ..engine import SDPEngine as DeepSpeedEngine
from ..errors import ConfigError
from ..optim import cycles, schedules
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


class _Schedule(type):
    """The type of schedules that take the arguments of DeepSpeed's classes.

    A call makes a schedule of ``own``, for ``lr_scheduler`` of :func:`sdp.initialize`.
    """

    own: type[Schedule]

    def __call__(cls, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Schedule:
        kind = cls.__name__
        if kind not in _ARGUMENTS:
            raise ConfigError(
                f"{kind}: a schedule of DeepSpeed cannot be the base of another class here; derive from one of torch's "
                "schedules"
            )
        names = _ARGUMENTS[kind]
        if len(args) > len(names):
            raise ConfigError(
                f"{kind}: {len(args)} positional arguments after the optimizer; at most {len(names)} exist"
            )
        return build_scheduler(kind, {**dict(zip(names, args, strict=False)), **kwargs}, optimizer)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.own)


WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest = (
    _Schedule(own.__name__, (), {"own": own})
    for own in (schedules.WarmupLR, schedules.WarmupDecayLR, schedules.WarmupCosineLR, cycles.OneCycle,
                cycles.LRRangeTest)
)  # fmt: skip
# The names of the schedules in a configuration
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
ONE_CYCLE, LR_RANGE_TEST = "OneCycle", "LRRangeTest"
VALID_LR_SCHEDULES = list(SCHEDULES)
# The keys of their settings
LR_SCHEDULE, EDGE_VALUE, MID_VALUE, TOTAL_NUM_STEPS = "lr_schedule", "edge_value", "mid_value", "total_num_steps"
LR_RANGE_TEST_MIN_LR, LR_RANGE_TEST_STEP_SIZE = "lr_range_test_min_lr", "lr_range_test_step_size"
LR_RANGE_TEST_STEP_RATE, LR_RANGE_TEST_STAIRCASE = "lr_range_test_step_rate", "lr_range_test_staircase"
CYCLE_MIN_LR, CYCLE_MAX_LR, DECAY_LR_RATE = "cycle_min_lr", "cycle_max_lr", "decay_lr_rate"
CYCLE_MIN_MOM, CYCLE_MAX_MOM, DECAY_MOM_RATE = "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"
CYCLE_FIRST_STEP_SIZE, CYCLE_SECOND_STEP_SIZE = "cycle_first_step_size", "cycle_second_step_size"
CYCLE_FIRST_STAIR_COUNT, CYCLE_SECOND_STAIR_COUNT = "cycle_first_stair_count", "cycle_second_stair_count"
DECAY_STEP_SIZE = "decay_step_size"
WARMUP_MIN_LR, WARMUP_MAX_LR, WARMUP_NUM_STEPS = "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"
WARMUP_TYPE, WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "warmup_type", "log", "linear"
WARMUP_MIN_RATIO, COS_MIN_RATIO = "warmup_min_ratio", "cos_min_ratio"

__getattr__ = attributes(__name__)
