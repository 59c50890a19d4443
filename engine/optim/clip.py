"""Clips gradients, scales losses for float16, and decides which steps are skipped.

The global norm counts every parameter once, however many ranks hold or shard it. A step is a spike
if its loss or its gradient's norm lies more than ``sigma`` standard deviations above the mean of
the last ``window`` steps (OLMo-core, ``SkipStepOptimizer``). A spike stays in the window. So if the
loss stays high, steps are no longer spikes after a while, and training continues.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from ..config.schema import Config, FP16Section
from ..distributed.collectives import local_tensor
from ..errors import NonFiniteError, SpikeError


def squared_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return Σ‖g‖² over this rank's shards of the gradients, as a float64 scalar on ``device``."""
    locals_ = [local_tensor(gradient) for gradient in gradients]
    if not locals_:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(locals_, 2, dtype=torch.float32))
    return norms.double().square().sum().to(device)  # the gradients may be on the host


def clip_(gradients: Sequence[torch.Tensor], norm: float, max_norm: float) -> None:
    """Scale the gradients in place, so that the global norm ``norm`` becomes at most ``max_norm``.

    The formula is that of torch's ``clip_grad_norm_``.
    """
    scale = max_norm / (norm + 1e-6)
    if scale < 1:
        torch._foreach_mul_([local_tensor(gradient) for gradient in gradients], scale)


class LossScaler:
    """Chooses the factor of the loss, so that small gradients do not become 0 in float16.

    A dynamic scale is halved after ``hysteresis`` overflows, and doubled after
    ``loss_scale_window`` steps without an overflow. The names and rules are those of DeepSpeed's
    ``DynamicLossScaler``. Every rank has a scaler. All scalers stay equal, because all
    ranks skip the same steps.
    """

    _SAVED = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

    def __init__(self, section: FP16Section):
        self._section = section
        self.is_dynamic = section.loss_scale == 0
        self.cur_scale = float(2**section.initial_scale_power) if self.is_dynamic else section.loss_scale
        self.cur_iter, self.last_overflow_iter, self.cur_hysteresis = 0, -1, section.hysteresis

    @classmethod
    def of(cls, config: Config) -> LossScaler | None:
        """Return the scaler of a run, or None if the run does not compute in float16."""
        if not config.scales_loss:
            return None
        return cls(config.fp16)

    @property
    def can_be_lowered(self) -> bool:
        """Whether the scale is dynamic and above its minimum, so that it can become lower."""
        return self.is_dynamic and self.cur_scale > self._section.min_loss_scale

    def update(self, *, overflow: bool) -> None:
        """Count a step, with or without overflow, and halve or double a dynamic scale if due."""
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
            stable = self.cur_iter - self.last_overflow_iter - 1
            if stable > 0 and stable % section.loss_scale_window == 0:
                self.cur_hysteresis = section.hysteresis
                self.cur_scale *= 2
        self.cur_iter += 1

    def state_dict(self) -> dict[str, float] | None:
        """Return the scale and its counts for a checkpoint, or None if the scale never changes."""
        return {key: getattr(self, key) for key in self._SAVED} if self.is_dynamic else None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from :meth:`state_dict` or DeepSpeed's state. A fixed scale does not change."""
        for key in self._SAVED if self.is_dynamic else ():
            if state is not None and key in state:
                setattr(self, key, state[key])


log = logging.getLogger("sdp")

_FEWEST_STEPS = 20  # with fewer steps, the standard deviation is too uncertain


class SpikeDetector:
    """Finds steps whose loss or gradient norm is a spike. All ranks decide in the same way.

    A spike lies far above the mean of the last steps. A step with a NaN or infinite value is not a
    spike: all groups skip it anyway if its gradient is not finite. Nor does it count in the mean.

    Attributes:
        skipped: The number of steps that were skipped because of a spike.
        rollbacks: How often the run returned to a checkpoint because of a spike.
    """

    def __init__(self, policy: Literal["none", "skip", "rollback", "stop"], sigma: float, window: int):
        self._policy, self._sigma = policy, sigma
        # Half a window is enough to begin with, but a small window must be full.
        self._needed = min(window, max(_FEWEST_STEPS, window // 2))
        self._history = {name: deque[float](maxlen=window) for name in ("loss", "grad_norm")}
        self.skipped = 0
        self.rollbacks = 0

    def check(self, step: int, loss: float, norm: float, before_error: Callable[[], None]) -> bool:
        """Decide before the update of a step whether the update is skipped because of a spike.

        Args:
            step: The number of the step.
            loss: The loss of the step.
            norm: The norm of the gradient before clipping.
            before_error: Called before SpikeError is raised, to drop the gradients.

        Returns:
            Whether the update must be left out.

        Raises:
            SpikeError: The step is a spike, and the policy is "rollback" or "stop".
        """
        spike = self.judge(loss, norm) if self._policy != "none" else None
        if spike is None:
            return False
        if self._policy != "skip":
            before_error()
            raise SpikeError(f"step {step}: {spike} (training.on_spike {self._policy})")
        self.skipped += 1
        log.warning("step %d was skipped by all groups: %s", step, spike)
        return True

    def judge(self, loss: float, norm: float) -> str | None:
        """Return a description if the step is a spike, else None, and remember the step."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return None
        found = [
            text
            for name, value, label in (("loss", loss, "the loss"), ("grad_norm", norm, "the gradient's norm"))
            if (text := self._describe(self._history[name], value, label)) is not None
        ]
        self._history["loss"].append(loss)
        self._history["grad_norm"].append(norm)
        return " and ".join(found) or None

    def _describe(self, before: deque[float], value: float, label: str) -> str | None:
        if len(before) < self._needed:
            return None
        mean, deviation = statistics.fmean(before), statistics.stdev(before)
        if value - mean <= self._sigma * deviation:
            return None
        return (
            f"{label} {value:.4g} is more than {self._sigma:g} standard deviations above its mean over the last "
            f"{len(before)} steps ({mean:.4g} ± {deviation:.2g})"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the remembered steps and the counts as JSON, or {} if spikes are ignored."""
        if self._policy == "none":
            return {}
        history = {name: list(values) for name, values in self._history.items()}
        return {**history, "skipped": self.skipped, "rollbacks": self.rollbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the steps and the counts in ``state``. If it is empty, start again."""
        for name, values in self._history.items():
            values.clear()
            values.extend(state.get(name, ()))
        self.skipped, self.rollbacks = state.get("skipped", 0), state.get("rollbacks", 0)


class LastSteps:
    """Remembers the loss and norm of the last step, and counts skipped steps.

    Too many consecutive skipped steps are an error. A skipped step does not count for this limit if
    a dynamic loss scale can still be lowered. With local steps (``sdp.sync``), a group gets the
    results of other groups later. So reading the loss or the norm may wait for these results.

    Args:
        local: the local steps of the run (:class:`~sdp.engine.local_steps.LocalTraining`).
        groups: the number of groups.
        max_skips: how many consecutive steps may be skipped.
    """

    def __init__(self, local: Any, groups: int, max_skips: int):
        self._local, self._groups = local, groups
        self._loss: float | None = None
        self._norm: float | None = None
        self._skipped = self._in_a_row = self._excused = 0
        self._max_skips = max_skips

    @property
    def loss(self) -> float | None:
        newest = self._local.newest()
        return newest.loss if newest is not None else self._loss

    @property
    def norm(self) -> float | None:
        newest = self._local.newest()
        return newest.norm if newest is not None else self._norm

    @property
    def was_skipped(self) -> bool:
        newest = self._local.newest()
        return newest.skipped > 0 if newest is not None else self._in_a_row > 0

    def skipped_until(self, step: int | None = None) -> int:
        """Count the skipped steps: all so far, or those up to ``step``, a recent local step."""
        return self._skipped + self._local.skipped_steps(step)

    def start_at(self, skipped: int) -> None:
        """Set how many steps were skipped before a resume. Consecutive skips count from 0 again."""
        self._skipped, self._in_a_row, self._excused = skipped, 0, 0

    def note(self, loss: float, norm: float, *, skipped: bool, counts: bool, excused: bool) -> None:
        """Record the result of a step that all groups took together.

        Args:
            loss: the mean loss of all ranks.
            norm: the norm of the full model's gradient.
            skipped: whether all groups skipped the step.
            counts: whether a skipped step adds to the number of consecutive skipped steps.
            excused: whether a skipped step does not count for the limit ``max_skips``.
        """
        self._loss, self._norm = loss, norm
        self._skipped += skipped
        self._count(skipped and counts, excused=excused)

    def _count(self, skipped: bool, *, excused: bool = False) -> None:
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        self._excused = self._excused + excused if skipped else 0

    def report_skips(self, step: int, loss_scale: float | None, groups: str = "all groups") -> None:
        """Warn if the last step, ``step``, was skipped. ``groups`` is a text that names the groups.

        Raises:
            NonFiniteError: More consecutive steps than allowed were skipped.
        """
        if not self._in_a_row:
            return
        counted = self._in_a_row - self._excused
        if counted > self._max_skips:
            at_scale = "" if loss_scale is None else f" and loss scale {loss_scale:g}"
            raise NonFiniteError(
                f"the gradient's norm is {self._norm} at step {step}{at_scale}, for the {counted}. time in a row "
                f"(training.max_skips {self._max_skips}); the weights are those after step {step - self._in_a_row}: "
                "lower the learning rate, or resume from an earlier checkpoint"
            )
        scale = "" if loss_scale is None else f", the loss scale is now {loss_scale:g}"
        log.warning(
            "step %d was skipped by %s: the gradient's norm is %s%s (%d in a row, training.max_skips %d)",
            *(step, groups, self._norm, scale, counted, self._max_skips),
        )

    def note_local_steps(self) -> list[tuple[int, Any]]:
        """Record the local steps whose loss and norm have arrived at all ranks, and return them.

        Raises:
            NonFiniteError: Groups have skipped too many consecutive steps.
        """
        known = list(self._local.arrived())
        for step, update in known:
            self._loss, self._norm = update.loss, update.norm
            self._skipped += update.skipped > 0
            self._count(update.skipped > 0)
            self.report_skips(step, None, f"{update.skipped} of {self._groups} groups")
        return known
