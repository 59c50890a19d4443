"""``sdp.runtime``: what scripts import from ``deepspeed.runtime``."""

from __future__ import annotations

from .namespace import refusing
from .utils import RepeatingLoader, see_memory_usage

__all__ = ["RepeatingLoader", "see_memory_usage"]
__path__: list[str] = []

_SCHEDULES = "give the section scheduler in the configuration, or a torch scheduler as lr_scheduler"
WarmupLR = refusing("runtime.lr_schedules.WarmupLR", _SCHEDULES)
WarmupDecayLR = refusing("runtime.lr_schedules.WarmupDecayLR", _SCHEDULES)
WarmupCosineLR = refusing("runtime.lr_schedules.WarmupCosineLR", _SCHEDULES)
OneCycle = refusing("runtime.lr_schedules.OneCycle", _SCHEDULES)
LRRangeTest = refusing("runtime.lr_schedules.LRRangeTest", _SCHEDULES)
