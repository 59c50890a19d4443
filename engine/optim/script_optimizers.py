"""Checks of a script's optimizer.

Only the engine may call the optimizer's ``step``. Parameters that the optimizer does not train
cause a warning. Optimizers that need whole matrices, such as Adafactor and LARS, are recognised.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..distributed.collectives import local_tensor
from ..errors import ConfigError
from ..placement.layout import Layout

log = logging.getLogger("sdp")

_FLAG = "_is_stepped_by_the_engine"
_SHAPE, _CUT, _STEPS = (6, 4), 10, 3


def refuse_steps_of_script(optimizer: Optimizer) -> None:
    """Make ``optimizer.step()`` raise ConfigError if the script calls it, and not the engine.

    A call without gradients is no error, because it has no effect. Scripts that keep
    ``optimizer.step()`` after ``engine.step()`` make such calls.
    """

    def check(optimizer: Optimizer, *_: Any) -> None:
        gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
        if any(gradient is not None for gradient in gradients):
            refuse_outside_engine(optimizer)

    optimizer.register_step_pre_hook(check)


def refuse_outside_engine(optimizer: Optimizer) -> None:
    """Raise ConfigError unless the engine steps ``optimizer`` now (:func:`stepped_by_engine`)."""
    if not getattr(optimizer, _FLAG, False):
        raise ConfigError(
            "optimizer.step: call engine.backward(loss) and engine.step() instead of loss.backward() and "
            "optimizer.step(); only the engine averages gradients between groups, clips, skips steps that are not "
            "finite, and advances the schedule"
        )


@contextmanager
def stepped_by_engine(optimizer: Optimizer) -> Iterator[None]:
    """A context in which the engine calls ``optimizer.step()``, so the call is allowed."""
    vars(optimizer)[_FLAG] = True
    try:
        yield
    finally:
        vars(optimizer)[_FLAG] = False


class OptimizedParameters:
    """Warns of parameters that a script wants to train, but that the optimizer never changes.

    Args:
        parameters: this rank's parameters by name.
        known: the names of the parameters that the optimizer has.
        layout: the layout of the run. Only the first holder of a parameter warns.
        optimizer: the optimizer.
        rank: this rank.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        known: Collection[str],
        layout: Layout,
        optimizer: Optimizer,
        rank: int,
    ):
        self._optimizer, self._groups, self._layout, self._rank = optimizer, len(optimizer.param_groups), layout, rank
        infos = layout.parameters
        self._frozen = {name: p for name, p in parameters.items() if not infos[name].trainable}
        missing = [name for name in parameters if infos[name].trainable and name not in known]
        self._warn(missing, "require a gradient, and the optimizer does not have them")

    def warn_of_unfrozen(self) -> None:
        """Warn of parameters that the script has unfrozen since the last call.

        Raises:
            ConfigError: The script has added a parameter group.
        """
        if len(self._optimizer.param_groups) != self._groups:
            raise ConfigError(
                "optimizer.add_param_group: parameter groups cannot change after sdp.initialize, which decides what "
                "is averaged between groups; give all groups to sdp.initialize"
            )
        names = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        for name in names:
            del self._frozen[name]
        self._warn(names, "were frozen in sdp.initialize and are not trained, though the script unfroze them")

    def _warn(self, names: list[str], what: str) -> None:
        mesh, infos = self._layout.mesh, self._layout.parameters
        mine = [name for name in names if mesh.rank(infos[name].holders[0]) == self._rank]
        if mine:
            log.warning(
                "%s: these parameters %s, so their values will not change; unfreeze them before sdp.initialize, and "
                "give them "
                "to the optimizer", shortened(mine), what
            )  # fmt: skip


def shortened(names: Iterable[str], most: int = 3) -> str:
    """Return the first ``most`` names as text, and the number of all other names."""
    names = list(names)
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


# -- whole matrices --------------------------------------------------------------------------------


def needs_whole_matrices(optimizer: Optimizer) -> bool:
    """Return whether a step on a matrix depends on the whole matrix, as with Adafactor.

    If so, shards of a matrix would step differently. To find out, a copy of the optimizer steps on
    a small matrix, and another copy on two parts of it. The result is False if the optimizer cannot
    be copied.
    """
    try:
        return any(_moves_otherwise(optimizer, group) for group in optimizer.param_groups)
    except Exception:  # any constructor, and any kernel
        return False


def _moves_otherwise(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    device = next((p.device for g in optimizer.param_groups for p in g["params"]), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    values, *gradients = (torch.randn(_SHAPE, generator=generator).to(device) for _ in range(1 + _STEPS))
    whole = _stepped(optimizer, group, [values.clone()], [[gradient] for gradient in gradients])
    flat = values.flatten()
    parts = [[part.clone() for part in gradient.flatten().tensor_split([_CUT])] for gradient in gradients]
    cut = _stepped(optimizer, group, [part.clone() for part in flat.tensor_split([_CUT])], parts)
    return not torch.allclose(whole[0].flatten(), torch.cat(cut), rtol=1e-4, atol=1e-6)


def _stepped(
    optimizer: Optimizer, group: Mapping[str, Any], values: list[torch.Tensor], gradients: list[list[torch.Tensor]]
) -> list[torch.Tensor]:
    """Return ``values`` after steps with each of the ``gradients``."""
    parameters = [nn.Parameter(value) for value in values]
    options = {key: value for key, value in group.items() if key in optimizer.defaults}
    copy: Any = type(optimizer)([{**options, "params": parameters}], **optimizer.defaults)
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        for one in copy.param_groups:
            one["lr"] = 0.01  # a schedule may start at 0
        with stepped_by_engine(copy):
            copy.step()
    return [parameter.detach() for parameter in parameters]


@contextmanager
def on_local_tensors(optimizer: Optimizer) -> Iterator[None]:
    """A context in which the optimizer has plain tensors in place of DTensors with one shard."""
    kept = [(group, group["params"]) for group in optimizer.param_groups]
    plain = {p: _plain(p) for _, parameters in kept for p in parameters if isinstance(p, DTensor)}
    for group, parameters in kept:
        group["params"] = [plain.get(parameter, parameter) for parameter in parameters]
    for sharded, local in plain.items():
        if sharded in optimizer.state:
            optimizer.state[local] = optimizer.state.pop(sharded)
    try:
        yield
    finally:
        for group, parameters in kept:
            group["params"] = parameters
        for sharded, local in plain.items():
            if local in optimizer.state:
                optimizer.state[sharded] = optimizer.state.pop(local)


def _plain(parameter: torch.Tensor) -> nn.Parameter:
    local = nn.Parameter(local_tensor(parameter.detach()))
    local.grad = None if parameter.grad is None else local_tensor(parameter.grad)
    return local
