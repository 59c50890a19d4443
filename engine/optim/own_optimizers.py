"""Optimizers of DeepSpeed that torch does not have: Lion, LAMB, and Adam without bias correction.

They step on plain tensors and on the local shards of DTensors. Their state has the shape of the
parameter and is float32, except for LAMB's step count.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..distributed.tensors import local_tensor
from .closure import call_closure
from .param_groups import Parameters

Tensors = tuple[Tensor, ...] | list[Tensor]


class _ForeachOptimizer(Optimizer):
    """Calls :meth:`update` for the parameters of each group that have a gradient.

    ``moments`` names the tensors of a parameter's state.
    """

    moments: tuple[str, ...]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient.

        A ``closure`` is called before the update, and its result is returned.
        """
        loss = call_closure(closure)
        for group in self.param_groups:
            with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in with_gradient:
                for moment in self.moments if not self.state[parameter] else ():
                    self.state[parameter][moment] = torch.zeros_like(parameter, dtype=torch.float32)
            if with_gradient:
                self.update(group, with_gradient)
        return loss

    @abstractmethod
    def update(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        """Take a step with the ``parameters`` of ``group``."""

    def _locals(self, parameters: list[nn.Parameter], moment: str) -> list[Tensor]:
        return [local_tensor(self.state[parameter][moment]) for parameter in parameters]


class Lion(_ForeachOptimizer):
    """Lion: a step of the same length in every direction (Chen et al., arXiv 2302.06675).

    DeepSpeed's kernel adds the learning rate to an element whose gradients were all 0. This class
    leaves it as it is, as in the paper.
    """

    moments = ("exp_avg",)

    def __init__(
        self,
        parameters: Parameters,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        weights, gradients, averages = (
            _step_tensors(parameters),
            _gradients(parameters),
            self._locals(parameters, "exp_avg"),
        )
        beta1, beta2 = group["betas"]
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        directions = torch._foreach_mul(averages, beta1)
        torch._foreach_add_(directions, gradients, alpha=1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_add_(weights, directions, alpha=-group["lr"])
        torch._foreach_mul_(averages, beta2)
        torch._foreach_add_(averages, gradients, alpha=1 - beta2)


class UncorrectedAdam(_ForeachOptimizer):
    """Adam without bias correction, as DeepSpeed's FusedAdam with ``bias_correction`` false.

    ``decoupled``: whether weights decay as in AdamW, or through the gradient.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        parameters: Parameters,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = True,
    ):
        self.decoupled = decoupled
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        weights, gradients = _step_tensors(parameters), _gradients(parameters)
        if group["weight_decay"] and not self.decoupled:
            gradients = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
        averages, squares = self._locals(parameters, "exp_avg"), self._locals(parameters, "exp_avg_sq")
        denominators = _update_moments(averages, squares, gradients, group)
        if self.decoupled:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_addcdiv_(weights, averages, denominators, -group["lr"])


class Lamb(_ForeachOptimizer):
    """LAMB with DeepSpeed's settings and formulas (You et al., arXiv 1904.00962).

    The step of a parameter is multiplied by the ratio of the norms of the parameter and of the
    step, which is kept between ``min_coeff`` and ``max_coeff``. The norms are those of whole
    parameters. Ranks that shard parameters add up the squares of their norms in one message.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        parameters: Parameters,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        bias_correction: bool = True,
    ):
        self._eps_inside_sqrt, self._corrects = eps_inside_sqrt, bias_correction
        super().__init__(
            parameters,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "max_coeff": max_coeff,
                "min_coeff": min_coeff,
            },
        )

    def update(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        weights = _step_tensors(parameters)
        averages, squares = self._locals(parameters, "exp_avg"), self._locals(parameters, "exp_avg_sq")
        inside = self._eps_inside_sqrt
        denominators = _update_moments(averages, squares, _gradients(parameters), group, eps_inside_sqrt=inside)
        steps = torch._foreach_div(averages, denominators)
        torch._foreach_add_(steps, weights, alpha=group["weight_decay"])
        lengths, step_lengths = _norms_of_whole(parameters, weights, steps)
        ratios = (lengths / step_lengths).clamp(group["min_coeff"], group["max_coeff"])
        ratios = torch.where((lengths > 0) & (step_lengths > 0), ratios, 1.0)
        rates = [group["lr"] * self._count_step(parameter, group["betas"]) for parameter in parameters]
        torch._foreach_mul_(steps, list(ratios.to(weights[0].dtype).unbind()))
        torch._foreach_mul_(steps, [-rate for rate in rates])
        torch._foreach_add_(weights, steps)

    def _count_step(self, parameter: nn.Parameter, betas: tuple[float, float]) -> float:
        """Count a step of ``parameter``, and return the factor that corrects the bias of its
        moments.
        """
        count = self.state[parameter].setdefault("step", torch.tensor(0.0))
        count += 1
        if not self._corrects:
            return 1.0
        return (1 - betas[1] ** count.item()) ** 0.5 / (1 - betas[0] ** count.item())


def _step_tensors(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [local_tensor(parameter.detach()) for parameter in parameters]


def _gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _update_moments(
    averages: list[Tensor],
    squares: list[Tensor],
    gradients: Tensors,
    group: dict[str, Any],
    *,
    eps_inside_sqrt: bool = False,
) -> Tensors:
    """Update Adam's moments in place, and return the denominators of the step."""
    beta1, beta2 = group["betas"]
    torch._foreach_mul_(averages, beta1)
    torch._foreach_add_(averages, gradients, alpha=1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    if eps_inside_sqrt:
        return torch._foreach_sqrt(torch._foreach_add(squares, group["eps"]))
    denominators = torch._foreach_sqrt(squares)
    torch._foreach_add_(denominators, group["eps"])
    return denominators


def _norms_of_whole(parameters: list[nn.Parameter], weights: Tensors, steps: Tensors) -> tuple[Tensor, Tensor]:
    """Return the norms of whole parameters and of their whole steps.

    Collective where they are sharded.
    """
    both = [torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)) for tensors in (weights, steps)]
    squares = torch.stack(both).double().square()
    shared: dict[DeviceMesh, list[int]] = defaultdict(list)
    for index, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1:
            shared[parameter.device_mesh].append(index)
    for mesh, indices in shared.items():
        part = squares[:, indices].to(mesh.device_type)  # shards may be on the host, and NCCL cannot send from there
        dist.all_reduce(part, group=mesh.get_group())
        squares[:, indices] = part.to(squares.device)
    lengths, step_lengths = squares.sqrt().unbind()
    return lengths, step_lengths
