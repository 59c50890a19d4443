"""Learning-rate schedules (three of DeepSpeed, and WSD), and rates that depend on the holders.

DeepSpeed's schedules have the values of DeepSpeed 0.19.8 at every step, also at the first ones. The
rate that is set on construction is used in the first optimizer step. The first ``step()`` sets the
rate of iteration 0, which is used in the second optimizer step.

``sdp.lr_scale`` scales a unit's rate by its number of holders. The mean of k gradients has a k-th
of the noise of one gradient, so units with many holders can take larger steps. A unit with k of N
groups as holders gets the rate times (k / k̄)^p. k̄ is the mean number of holders, weighted by
parameters. The shared part keeps its rate. Decoupled weight decay is not scaled. The optimizer sees
the scaled rates only during its step. Schedules, checkpoints and logs have the rates of the
configuration.
"""

from __future__ import annotations

import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..config.named_params import (
    WarmupCosineLRParams,
    WarmupDecayLRParams,
    WarmupLRParams,
    WarmupParams,
    WSDParams,
    read_scheduler_params,
)
from ..config.schema import Config
from ..distributed.mesh import Holders
from ..errors import CheckpointError, ConfigError, quote
from ..placement.placement import Placement
from ..placement.units import SHARED

log = logging.getLogger(__name__)


class Schedule(ABC):
    """A learning-rate schedule. It sets the rate of each parameter group, first on construction.

    It has the methods of DeepSpeed's schedulers. It reads the base rates from ``optimizer`` on
    construction, so build it before a checkpoint is loaded. Its own state is one integer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.last_batch_iteration = -1

    @abstractmethod
    def rates_at(self, iteration: int) -> list[float]:
        """Return the rate of each parameter group after the ``step()`` with this number.

        The first ``step()`` has number 0. -1 means before the first ``step()``.
        """

    def get_lr(self) -> list[float]:
        """Return the rate of each parameter group at the current iteration."""
        return self.rates_at(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Return the rates that are set now, one for each parameter group."""
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or to ``last_batch_iteration``, and set its rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._set_rates()

    def state_dict(self) -> dict[str, int]:
        """Return the state that a restart needs in addition to the configuration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the iteration in ``state``, and set the rates of this iteration.

        Raises:
            CheckpointError: ``state`` does not have a valid ``last_batch_iteration``.
        """
        iteration = state.get("last_batch_iteration")
        if type(iteration) is not int or not -1 <= iteration < 2**63:
            raise CheckpointError(f"scheduler state: last_batch_iteration {quote(iteration)} is not an integer from -1")
        self.last_batch_iteration = iteration
        self._set_rates()

    def _set_rates(self) -> None:
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], torch.Tensor):  # compiled or captured steps read this tensor
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _per_group(self, rates: float | list[float], key: str) -> list[float]:
        if not isinstance(rates, list):
            return [rates] * len(self.base_lrs)
        if len(rates) != len(self.base_lrs):
            raise ConfigError(
                f"scheduler.params.{key}: {len(rates)} rates for {len(self.base_lrs)} parameter groups; "
                "give one number, or one for each group"
            )
        return list(rates)


class _Warmup(Schedule):
    def __init__(self, optimizer: Optimizer, params: WarmupParams) -> None:
        super().__init__(optimizer)
        self._steps = max(2, params.warmup_num_steps)  # DeepSpeed's minimum: with 1 step it would divide by log(1) = 0
        self._type = params.warmup_type
        self._inverse_log = 1.0 / math.log(self._steps)

    def _warmup_fraction(self, iteration: int) -> float:
        if self._type == "log":
            return self._inverse_log * math.log(iteration + 1)
        return iteration / self._steps

    def _warn_if_all_warmup(self, total: int) -> None:
        if total < self._steps:
            log.warning(
                "scheduler.params: total_num_steps %d is less than warmup_num_steps %d; the maximum is never reached",
                *(total, self._steps),
            )


class WarmupLR(_Warmup):
    """Raises the rate from a minimum to a maximum, and then keeps the maximum."""

    def __init__(self, optimizer: Optimizer, params: WarmupLRParams) -> None:
        super().__init__(optimizer, params)
        self._minimum = self._per_group(params.warmup_min_lr, "warmup_min_lr")
        maximum = self.base_lrs if params.warmup_max_lr is None else params.warmup_max_lr
        self._maximum = self._per_group(maximum, "warmup_max_lr")
        self._set_rates()

    def rates_at(self, iteration: int) -> list[float]:
        if iteration < 0:
            return list(self._minimum)
        fraction = self._warmup_fraction(iteration) if iteration < self._steps else self._after_warmup(iteration)
        return [low + (high - low) * fraction for low, high in zip(self._minimum, self._maximum, strict=True)]

    def _after_warmup(self, iteration: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Raises the rate like :class:`WarmupLR`, then lowers it linearly to the minimum.

    The minimum is reached at ``total_num_steps``.
    """

    def __init__(self, optimizer: Optimizer, params: WarmupDecayLRParams) -> None:
        self._total = params.total_num_steps
        super().__init__(optimizer, params)
        self._warn_if_all_warmup(self._total)

    def _after_warmup(self, iteration: int) -> float:
        return max(0.0, (self._total - iteration) / max(1.0, self._total - self._steps))


class WarmupCosineLR(_Warmup):
    """Raises the rate to the optimizer's rate, then lowers it to ``cos_min_ratio`` of this rate.

    The decay has the shape of half a cosine.
    """

    def __init__(self, optimizer: Optimizer, params: WarmupCosineLRParams) -> None:
        super().__init__(optimizer, params)
        self._params = params
        self._warn_if_all_warmup(params.total_num_steps)
        self._set_rates()

    def rates_at(self, iteration: int) -> list[float]:
        return [rate * self._ratio(iteration) for rate in self.base_lrs]

    def _ratio(self, iteration: int) -> float:
        if iteration < 0:
            return 0.0  # DeepSpeed's first optimizer step has rate 0, whatever warmup_min_ratio is
        if iteration < self._steps:
            low = self._params.warmup_min_ratio
            return low + self._warmup_fraction(iteration) * (1.0 - low)
        low = self._params.cos_min_ratio
        decay_steps = max(1, self._params.total_num_steps - self._steps)
        progress = min(1.0, (iteration - self._steps + 1) / decay_steps)
        return max(0.0, low + (1.0 - low) * ((1 + math.cos(math.pi * progress)) / 2))


class WSD(Schedule):
    """Warm-up, a constant rate, and a decay in the last ``decay_num_steps`` of ``total_num_steps``.

    The three phases are from Hu et al. (MiniCPM, arXiv 2404.06395). The shapes of the decay are
    from Hägele et al. (arXiv 2405.18392), where 1 - sqrt did best. Unlike DeepSpeed's schedules,
    this one spends no optimizer step at rate 0. In warm-up, step t (from 0) has (t + 1) /
    warmup_num_steps of the rate. The first step of the decay has the full rate.
    """

    def __init__(self, optimizer: Optimizer, params: WSDParams) -> None:
        super().__init__(optimizer)
        self._params = params
        self._set_rates()

    def rates_at(self, iteration: int) -> list[float]:
        return [rate * self._ratio(iteration + 1) for rate in self.base_lrs]

    def _ratio(self, step: int) -> float:
        params = self._params
        if step < params.warmup_num_steps:
            return (step + 1) / params.warmup_num_steps
        decayed = step - (params.total_num_steps - params.decay_num_steps)
        progress = min(1.0, max(0.0, decayed / params.decay_num_steps))
        shapes = {
            "linear": 1.0 - progress,
            "cosine": (1.0 + math.cos(math.pi * progress)) / 2,
            "1-sqrt": 1.0 - math.sqrt(progress),
        }
        return params.min_lr_ratio + (1.0 - params.min_lr_ratio) * shapes[params.decay_type]


_SCHEDULES: Mapping[str, type[Schedule]] = {
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
    "WSD": WSD,
}


def build_scheduler(type: str, params: Mapping[str, Any], optimizer: Optimizer) -> Schedule:
    """Build the schedule of the ``scheduler`` section, and set the optimizer's first rates.

    Raises:
        ConfigError: The type or a key is unknown, or a value has the wrong type or is "auto".
    """
    unresolved = next((key for key, value in params.items() if value == "auto"), None)
    if unresolved is not None:
        raise ConfigError(
            f'scheduler.params.{unresolved}: "auto" needs a number of steps; set this key or training.steps, or pass '
            "the script's arguments, which must have max_steps, to sdp.initialize as args"
        )
    settings = read_scheduler_params(type, params)
    return _SCHEDULES[type](optimizer, settings)  # type: ignore[call-arg]


def keep_shared_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a scheduler's ``state`` that is the same on all ranks, to save it.

    Lists with a value per parameter group, such as ``base_lrs``, are left out, because parameter
    groups may differ between ranks. Lists with states of nested schedulers are kept.
    """
    kept = {key: value for key, value in state.items() if not isinstance(value, list | tuple) or _of_schedulers(value)}
    return {
        key: [keep_shared_state(item) for item in value] if isinstance(value, list | tuple) else value
        for key, value in kept.items()
    }


def adapt_state(saved: Any, ours: Any) -> Any:
    """Complete a ``saved`` state for a scheduler that now has the state ``ours``.

    Keys that ``saved`` does not have, and lists with another length, are taken from ``ours``.
    """
    if isinstance(ours, Counter):  # milestones are settings, and JSON turned their numbers into strings
        return ours
    if isinstance(saved, Mapping) and isinstance(ours, Mapping):
        return {
            **ours,
            **{key: adapt_state(value, ours[key]) if key in ours else value for key, value in saved.items()},
        }
    if isinstance(saved, list | tuple) and isinstance(ours, list | tuple):
        return [adapt_state(*pair) for pair in zip(saved, ours, strict=True)] if len(saved) == len(ours) else ours
    return saved


def of_another_kind(saved: Any, ours: Any) -> bool:
    """Return whether the states of two schedulers, ``saved`` and ``ours``, have no common key."""
    return isinstance(saved, Mapping) and isinstance(ours, Mapping) and bool(saved) and not saved.keys() & ours.keys()


def _of_schedulers(values: list[Any] | tuple[Any, ...]) -> bool:
    return bool(values) and all(isinstance(value, Mapping) for value in values)


def check_steps(scheduler: Any) -> None:
    """Raise ConfigError if a script's scheduler cannot be stepped by the engine.

    The engine calls ``step()`` without arguments. Some schedulers need an argument, such as a loss.
    """
    if scheduler is None or isinstance(scheduler, Schedule):
        return
    parameters = inspect.signature(scheduler.step).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        raise ConfigError(
            f"lr_scheduler: {type(scheduler).__name__}.step needs {needed[0]}, which engine.step() does not have; "
            "leave lr_scheduler out of sdp.initialize, and step the scheduler in the script"
        )


def scheduler_of(config: Config, given: Any, optimizer: Optimizer) -> Any:
    if given is not None:
        return given if hasattr(given, "step") and not isinstance(given, type) else given(optimizer)
    if config.scheduler is None:
        return None
    return build_scheduler(config.scheduler.type, config.scheduler.params, optimizer)


ADAM_LIKE, SGD_LIKE = 0.5, 1.0
DECOUPLED = ("AdamW", "Lion", "Adafactor", "Muon")  # classes of torch and DeepSpeed without a flag for decoupled decay


def exponent_of(setting: str | float, *, is_sgd: bool) -> float:
    """Return the exponent p that the value ``setting`` of ``sdp.lr_scale`` means.

    "auto" is 1 for SGD and 0.5 for Adam-like optimizers. "none" is 0.
    """
    if setting == "none":
        return 0.0
    if setting == "auto":
        return SGD_LIKE if is_sgd else ADAM_LIKE
    return float(setting)


class HolderScale:
    """Factors of the units' learning rates: (holders / mean holders)^p, with p = ``exponent``."""

    def __init__(self, placement: Placement, exponent: float):
        total = sum(placement.costs)
        pairs = zip(placement.holders, placement.costs, strict=True)
        self.mean = sum(len(holders) * cost for holders, cost in pairs) / total if total else 1.0
        self._counts = sorted({len(holders) for holders in placement.holders})
        self._exponent = exponent

    def of(self, unit: str, holders: Holders) -> float:
        """Return the learning-rate factor of a unit with these holders. The shared part has 1."""
        return 1.0 if unit == SHARED else self._with(len(holders))

    def describe(self) -> str:
        """Return the range of the factors as text: "0.82 (2 holders) to 1.15 (4 holders)"."""
        ends = dict.fromkeys((self._counts[0], self._counts[-1]))
        return " to ".join(f"{self._with(k):.2f} ({k} holder{'s' * (k > 1)})" for k in ends)

    def _with(self, count: int) -> float:
        return (count / self.mean) ** self._exponent


def describe_rates(setting: str | float, optimizer: str | None, placement: Placement) -> str | None:
    """Return the range of the factors by which ``sdp.lr_scale`` scales learning rates, as text.

    The result is None if rates are not scaled. ``setting`` is ``sdp.lr_scale``, and ``optimizer``
    is ``optimizer.type``, if the configuration has one.
    """
    exponent = exponent_of(setting, is_sgd=(optimizer or "").lower() == "sgd")
    return HolderScale(placement, exponent).describe() if exponent and placement.units else None


class ScaledRates:
    """Multiplies the learning rate of each parameter by a factor, only while the optimizer steps.

    Args:
        optimizer: The optimizer, which gets hooks.
        scale_of: Returns the factor of a parameter.
    """

    def __init__(self, optimizer: Optimizer, scale_of: Callable[[Tensor], float]):
        self._scale_of = scale_of
        self._whole: list[dict[str, Any]] | None = None
        optimizer.register_step_pre_hook(self._split)
        optimizer.register_step_post_hook(self._join)

    def _split(self, optimizer: Optimizer, *_: Any) -> None:
        """Replace each parameter group by several groups, one for each factor."""
        if self._whole is not None:  # the step before failed
            optimizer.param_groups = self._whole
        self._whole, split = optimizer.param_groups, []
        for group in self._whole:
            by_factor: dict[float, list[Tensor]] = {}
            for parameter in group["params"]:
                by_factor.setdefault(self._scale_of(parameter), []).append(parameter)
            for factor, parameters in by_factor.items():
                changed = {"params": parameters, "lr": group["lr"] * factor}
                if is_decoupled(optimizer, group):
                    changed["weight_decay"] = group["weight_decay"] / factor if factor else 0.0
                split.append({**group, **changed, "of": group})
        optimizer.param_groups = split

    def _join(self, optimizer: Optimizer, *_: Any) -> None:
        assert self._whole is not None
        for part in optimizer.param_groups:
            if "step" in part:  # some optimizers count steps in the group
                part["of"]["step"] = part["step"]
        optimizer.param_groups, self._whole = self._whole, None


def scale_rates(
    optimizer: Optimizer, setting: str | float, placement: Placement, tensors: Mapping[int, tuple[str, Holders]]
) -> HolderScale | None:
    """Make ``optimizer`` scale each unit's learning rate by the unit's number of holders.

    Args:
        optimizer: the optimizer.
        setting: ``sdp.lr_scale``.
        placement: the holders of the units.
        tensors: the unit and the holders of each tensor of the optimizer, by its ``id``.

    Returns:
        The factors, or None if rates are not scaled.
    """
    exponent = exponent_of(setting, is_sgd=isinstance(optimizer, torch.optim.SGD))
    if not exponent or not placement.units:
        return None
    scale = HolderScale(placement, exponent)
    factors = {key: scale.of(unit, holders) for key, (unit, holders) in tensors.items()}
    ScaledRates(optimizer, lambda parameter: factors.get(id(parameter), 1.0))
    return scale


def is_decoupled(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether weight decay shrinks the weights directly, and not through the gradient."""
    if not group.get("weight_decay"):
        return False
    of_optimizer = getattr(optimizer, "decoupled", getattr(optimizer, "adam_w_mode", None))
    known = group.get("decoupled_weight_decay", of_optimizer)
    return bool(known) if known is not None else type(optimizer).__name__ in DECOUPLED
