"""``sdp.runtime``: what scripts import from ``deepspeed.runtime``."""

from __future__ import annotations

from ..config.deepspeed_keys import SCHEDULES
from ..engine import SDPEngine as DeepSpeedEngine
from .namespace import attributes, refusing
from .utils import RepeatingLoader, see_memory_usage

__all__ = ["DeepSpeedEngine", "RepeatingLoader", "see_memory_usage"]
__path__: list[str] = []

_SCHEDULES = "give the section scheduler in the configuration, or a torch scheduler as lr_scheduler"
WarmupLR = refusing("runtime.lr_schedules.WarmupLR", _SCHEDULES)
WarmupDecayLR = refusing("runtime.lr_schedules.WarmupDecayLR", _SCHEDULES)
WarmupCosineLR = refusing("runtime.lr_schedules.WarmupCosineLR", _SCHEDULES)
OneCycle = refusing("runtime.lr_schedules.OneCycle", _SCHEDULES)
LRRangeTest = refusing("runtime.lr_schedules.LRRangeTest", _SCHEDULES)
VALID_LR_SCHEDULES = list(SCHEDULES)

__getattr__ = attributes(__name__)
