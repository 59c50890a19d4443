"""The loss scale of float16: fixed, or dynamic by DeepSpeed's rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.schema import Config, FP16Section


class LossScaler:
    """The factor of the losses, which keeps small gradients of float16 from becoming 0.

    A dynamic scale is halved after ``hysteresis`` overflows, and doubled after
    ``loss_scale_window`` steps without one. The names and rules are those of DeepSpeed's
    ``DynamicLossScaler``. Every rank has one, and they stay equal because all ranks skip the same
    steps.
    """

    _SAVED = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

    def __init__(self, section: FP16Section):
        self._section = section
        self.is_dynamic = section.loss_scale == 0
        self.cur_scale = float(2**section.initial_scale_power) if self.is_dynamic else section.loss_scale
        self.cur_iter, self.last_overflow_iter, self.cur_hysteresis = 0, -1, section.hysteresis

    @classmethod
    def of(cls, config: Config) -> LossScaler | None:
        """Return the scaler of a run, or None if it does not compute in float16."""
        if not config.scales_loss:
            return None
        return cls(config.fp16)

    @property
    def can_be_lowered(self) -> bool:
        """Whether a lower scale might avoid an overflow."""
        return self.is_dynamic and self.cur_scale > self._section.min_loss_scale

    def update(self, *, overflow: bool) -> None:
        """Count a step, and change a dynamic scale."""
        if not self.is_dynamic:
            return
        section = self._section
        if overflow:
            if section.hysteresis == 1 or self.cur_hysteresis == 1:
                self.cur_scale = max(self.cur_scale / 2, section.min_loss_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if section.consecutive_hysteresis:
                self.cur_hysteresis = section.hysteresis
            stable = self.cur_iter - self.last_overflow_iter - 1
            if stable > 0 and stable % section.loss_scale_window == 0:
                self.cur_hysteresis = section.hysteresis
                self.cur_scale *= 2
        self.cur_iter += 1

    def state_dict(self) -> dict[str, float] | None:
        """Return scale and counts as JSON. None if the scale never changes."""
        return {key: getattr(self, key) for key in self._SAVED} if self.is_dynamic else None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a result of :meth:`state_dict`, or from that of DeepSpeed.

        A fixed scale stays.
        """
        for key in self._SAVED if self.is_dynamic else ():
            if state is not None and key in state:
                setattr(self, key, state[key])
