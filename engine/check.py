"""Trains a few steps to check that given settings train a model correctly on this machine.

The holders of each unit must have equal weights after every step. If every group holds the whole
model, the weights are also compared with those of a plain torch loop over the batches of all ranks.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import clip_grad_norm_

from .batch.call import Redirected, call_model, count_targets, loss_of
from .distributed.agreement import gather_json
from .engine import SDPEngine
from .errors import ConfigError
from .full_model.evaluation import exchange_batches
from .model_interface import get_random_options

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.2}  # relative to the norm of a step's changes


@dataclass(frozen=True)
class Checked:
    """The result of :func:`check`, equal on all ranks.

    Attributes:
        steps: the number of steps that were taken.
        difference: the norm of the difference from plain torch's weights, divided by the norm of
            the change that the steps made. None if weights were not compared.
        norm_difference: the largest relative difference of a step's gradient norm from plain
            torch's. It shows a wrong scale of the gradient, which does not change Adam's steps.
            None if weights were not compared.
        why_not: why the weights were not compared. Empty if they were.
        worst: the parameter that differs most, relative to the change of this parameter.
    """

    steps: int
    difference: float | None
    norm_difference: float | None = None
    why_not: str = ""
    worst: str = ""


def check(engine: SDPEngine, batches: Iterable[Any]) -> Checked:
    """Train some steps, and check that the resulting weights are right. Collective.

    Each step takes ``gradient_accumulation_steps`` of this rank's ``batches``. Holders of a unit
    must have equal weights. If every group holds the whole model, weights are also compared with
    plain torch, for which rank 0 needs memory for a second model.

    Raises:
        HolderMismatchError: Two holders of a unit have different weights or optimizer state.
        ConfigError: There are too few batches for one step.
    """
    micro, given = engine.gradient_accumulation_steps(), list(batches)
    if len(given) < micro:
        raise ConfigError(f"check: a step needs {micro} batches on each rank, but {len(given)} were given")
    why_not = _why_not_compared(engine)
    plain = None
    if not why_not:
        with engine.full_model() as whole:
            plain = None if engine.global_rank else _Plain(engine, copy.deepcopy(whole))
    steps = len(given) // micro
    for step in range(steps):
        mine = given[step * micro : (step + 1) * micro]
        counts = [float(count_targets(engine.module, batch)) for batch in mine]
        everything = [] if why_not else exchange_batches(mine, counts, like=mine[0])
        rates = [float(group["lr"]) for group in engine.store.optimizer.param_groups]
        engine.module.train()
        for batch in mine:
            engine.backward(engine(batch))
            engine.step()
        if plain is not None:
            plain.step(everything, rates, engine.get_global_grad_norm() or 0.0)
        engine.check_holders()
    state = None if why_not else engine.full_state_dict()
    found = ("", None) if plain is None or state is None else plain.compare(state)
    (worst, difference, norm_difference), *_ = gather_json([*found, plain and plain.norm_difference])
    return Checked(steps, difference, norm_difference, why_not, worst)


def _why_not_compared(engine: SDPEngine) -> str:
    layout, config = engine.layout, engine.config
    optimizer = type(engine.store.optimizer)
    if layout.paths > 1 or config.sdp.granularity == "neuron" or config.sdp.sync is not None:
        return "plain torch has no paths, slices of neurons or local steps"
    if any(len(info.holders) < layout.mesh.sdp for info in layout.parameters.values()):
        return "groups hold only some units, and plain torch trains all of them; only capacity 1.0 can be compared"
    if not optimizer.__module__.startswith("torch.optim") or optimizer.__name__ == "Muon":
        return f"{optimizer.__name__} is not an optimizer of torch"
    if layout.mesh.tp > 1:
        return "tensor-parallel ranks divide the rows of a batch, and plain torch does not"
    drops = [f"{name}.p {part.p:g}" for name, part in engine.module.named_modules() if isinstance(part, _DropoutNd)]
    if random := get_random_options(engine.module) or [text for text in drops if not text.endswith(" 0")]:
        return f"plain torch draws other random numbers; weights can be compared only without {random[0]}"
    return ""


class _Plain:
    """The same model, trained by torch alone on the batches of all ranks."""

    def __init__(self, engine: SDPEngine, model: nn.Module):
        self._engine, self._model = engine, model.to("cpu", torch.float32).train()
        self._named, self.norm_difference = dict(self._model.named_parameters()), 0.0
        for name, parameter in self._named.items():
            parameter.requires_grad_(engine.layout.parameters[name].trainable)
        self._before = {name: parameter.detach().clone() for name, parameter in self._named.items()}
        optimizer = engine.store.optimizer
        names: list[list[str]] = [[] for _ in optimizer.param_groups]
        for one in engine.store.stepped.values():
            if one.group is not None:
                names[one.group] += one.names
        make: Any = type(optimizer)
        settings = set(inspect.signature(make).parameters) - {"params", "fused", "foreach"}
        groups = [
            {key: value for key, value in group.items() if key in settings}
            | {"params": [self._named[n] for n in members]}
            for group, members in zip(optimizer.param_groups, names, strict=True)
        ]
        self._optimizer = make(
            groups, **{key: optimizer.defaults[key] for key in settings if key in optimizer.defaults}
        )

    def step(self, batches: Sequence[tuple[Any, float]], rates: Sequence[float], norm: float) -> None:
        """Take a step with the batches of all ranks, weighted by labels, and compare ``norm``."""
        by_tokens = self._engine.config.training.loss_weighting == "tokens"
        weights = [count if by_tokens else 1.0 for _, count in batches]
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._optimizer.zero_grad()
        for (batch, _), weight in zip(batches, weights, strict=True):
            if weight:
                (loss_of(self._forward(batch)).float() * (weight / sum(weights))).backward()
        limit = self._engine.config.gradient_clipping or float("inf")
        ours = float(clip_grad_norm_([p for p in self._named.values() if p.grad is not None], limit))
        self.norm_difference = max(self.norm_difference, abs(norm - ours) / (ours or 1e-30))
        self._optimizer.step()

    def _forward(self, batch: Any) -> Any:
        dtype = getattr(torch, self._engine.config.precision)
        if dtype == torch.float32:
            return call_model(self._model, batch)
        cast = {name: p.to(dtype) if p.is_floating_point() else p for name, p in self._named.items()}
        redirected = Redirected(self._model, lambda *args, **kwargs: functional_call(self._model, cast, args, kwargs))
        return call_model(redirected, batch)

    def compare(self, state: Mapping[str, torch.Tensor]) -> tuple[str, float]:
        """Return the parameter that differs most, and the relative difference of all together."""
        differences, changes = dict[str, float](), dict[str, float]()
        for name, parameter in self._named.items():
            differences[name] = float((state[name].float() - parameter.detach()).norm())
            changes[name] = float((parameter.detach() - self._before[name]).norm())
        worst = max(differences, key=lambda name: differences[name] / (changes[name] or 1e-30))
        total = sum(value**2 for value in changes.values()) ** 0.5
        return worst, sum(value**2 for value in differences.values()) ** 0.5 / (total or 1e-30)
