"""Scales the learning rate of a unit by its number of holders (``sdp.lr_scale``).

The mean of k gradients has a k-th of the noise of one, so units with many holders can take larger
steps. A unit with k of N groups as holders gets the rate times (k / k̄)^p. k̄ is the mean number of
holders, weighted by parameters. The shared part keeps its rate. Decoupled weight decay is not
scaled.

The optimizer sees the scaled rates only during its step. Schedules, checkpoints and logs have the
rates of the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..distributed.mesh import Holders
from ..placement.placement import Placement
from ..placement.units import SHARED

ADAM_LIKE, SGD_LIKE = 0.5, 1.0
DECOUPLED = ("AdamW", "Lion", "Adafactor", "Muon")  # classes of torch and DeepSpeed that have no flag for it


def exponent_of(setting: str | float, *, is_sgd: bool) -> float:
    """Return p for a value of ``sdp.lr_scale``. "auto" is 1 for SGD and 0.5 for Adam-like
    optimizers.
    """
    if setting == "none":
        return 0.0
    if setting == "auto":
        return SGD_LIKE if is_sgd else ADAM_LIKE
    return float(setting)


class HolderScale:
    """The factor of a unit's learning rate, (k / k̄)^p.

    Args:
        placement: the holders of the units, and the units' numbers of parameters.
        exponent: p.
    """

    def __init__(self, placement: Placement, exponent: float):
        total = sum(placement.costs)
        pairs = zip(placement.holders, placement.costs, strict=True)
        self.mean = sum(len(holders) * cost for holders, cost in pairs) / total if total else 1.0
        self._counts = sorted({len(holders) for holders in placement.holders})
        self._exponent = exponent

    def of(self, unit: str, holders: Holders) -> float:
        """Return the factor for a unit with these holders. It is 1 for the shared part."""
        return 1.0 if unit == SHARED else self._with(len(holders))

    def describe(self) -> str:
        """Return the range of the factors as text: "0.82 (2 holders) to 1.15 (4 holders)"."""
        ends = dict.fromkeys((self._counts[0], self._counts[-1]))
        return " to ".join(f"{self._with(k):.2f} ({k} holder{'s' * (k > 1)})" for k in ends)

    def _with(self, count: int) -> float:
        return (count / self.mean) ** self._exponent


def describe_rates(setting: str | float, optimizer: str | None, placement: Placement) -> str | None:
    """Return the range of the factors as text, or None if the rates are not scaled.

    Args:
        setting: ``sdp.lr_scale``.
        optimizer: ``optimizer.type``. None: the configuration names none.
        placement: the planned holders.
    """
    exponent = exponent_of(setting, is_sgd=(optimizer or "").lower() == "sgd")
    return HolderScale(placement, exponent).describe() if exponent and placement.units else None


class ScaledRates:
    """Gives an optimizer scaled rates during each step.

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
        """Replace each parameter group by one for each factor."""
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
        """Restore the parameter groups."""
        assert self._whole is not None
        for part in optimizer.param_groups:
            if "step" in part:  # some optimizers count steps in the group
                part["of"]["step"] = part["step"]
        optimizer.param_groups, self._whole = self._whole, None


def scale_rates(
    optimizer: Optimizer, setting: str | float, placement: Placement, tensors: Mapping[int, tuple[str, Holders]]
) -> HolderScale | None:
    """Give each unit a learning rate by its number of holders.

    Args:
        optimizer: the optimizer.
        setting: ``sdp.lr_scale``.
        placement: the holders of the units.
        tensors: the unit and the holders of each tensor of the optimizer, by its ``id``.

    Returns:
        The factors. None if rates are not scaled.
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
