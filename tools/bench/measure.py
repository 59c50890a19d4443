"""Measures methods (DDP, FSDP2, SDP …) in turn on the same ranks.

The methods take turns, so that a busy machine slows all of them. A turn is one step that is not
timed, then ``steps`` timed steps. A turn's time is that of the slowest rank. Every second round has
the methods in reverse order. With local steps, a turn consists of whole rounds of local steps.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.accounting.memory_probe import peak_tensor_bytes
from ...engine.batch.size import BatchSize
from ...engine.config.schema import Config
from ...engine.distributed.collectives import local_tensor
from ...engine.distributed.mesh import mesh_of
from ...engine.errors import NonFiniteError
from ...engine.initialize import clock
from ...engine.model_interface import get_config
from ..runs.model_inputs import model_and_batch
from .methods import DENSE, Runner, build

WARM_UP = 3  # steps: the first one compiles and allocates, and DDP rebuilds its buckets in the second
LOSS_TOLERANCE = 1e-4  # relative, for the first two steps of methods that must agree


def measure(
    configs: Mapping[str, Config], config: Config, device: torch.device, rounds: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Build every method on all ranks, and time the methods in turn. Collective.

    Args:
        configs: The configuration of each method.
        config: The configuration that all methods share. It determines the batch.
        device: Where this rank computes.
        rounds: The number of turns of every method.
        steps: The number of timed steps in a turn.

    Returns:
        For each method its figures by name, the same on all ranks: the losses of its first steps,
        the largest number of parameters and bytes on any rank, and the seconds of a step in each
        round.
    """
    batches = make_batches(config, device)
    runners: dict[str, Runner] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name, settings in configs.items():
        _say(f"building {name}")
        runners[name], facts[name] = begin(partial(build, name, settings, device), batches, device)
    require_same_losses(facts)
    for name, seconds in take_turns(runners, batches, device, rounds, steps).items():
        facts[name]["seconds"] = seconds
    return facts


def take_turns(
    runners: Mapping[str, Runner], batches: list[Any], device: torch.device, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Time every method once in every round. Collective.

    Returns:
        For each method, the seconds of a step in each round.

    Raises:
        NonFiniteError: The loss or the weights of a method became NaN or infinite. Every rank
            raises it.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(rounds):
        _say(f"round {number + 1} of {rounds}")
        for name in list(runners)[:: 1 if number % 2 == 0 else -1]:
            seconds[name] += _largest([turn(name, runners[name], batches, steps, device)])
    return seconds


def turn(name: str, runner: Runner, batches: list[Any], steps: int, device: torch.device) -> float:
    """Take one turn of a method, and return the seconds of a step on this rank. Collective."""
    steps = -(-steps // runner.round) * runner.round  # whole rounds, so that turns have the same averages
    loss, now = runner.step(batches), clock(device, waits=True)
    runner.settle()
    dist.barrier()
    started = now()
    for _ in range(steps):
        loss = runner.step(batches)
    seconds = (now() - started) / steps
    runner.settle()
    weights = [local_tensor(weight.detach()) for group in runner.optimizer.param_groups for weight in group["params"]]
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in (loss, *weights))
    # Collective: without it, the other ranks would wait for a rank that has ended.
    if _largest([float(not finite)]) != [0.0]:
        raise NonFiniteError(
            f"{name}: the loss or the weights are NaN or infinite after a turn, so its seconds mean nothing; lower "
            "optimizer.params.lr, or set gradient_clipping"
        )
    return seconds


def make_batches(config: Config, device: torch.device) -> list[Any]:
    """Make the random micro-batches of this rank. All steps of all methods train on them."""
    size = BatchSize.resolve(config, mesh_of(config, dist.get_world_size()))
    build_model, zeros = model_and_batch(config)
    limit: int = getattr(get_config(build_model()), "vocab_size", 1)  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(dist.get_rank())

    def micro_batch() -> Any:
        batch = zeros(size.micro)
        filled = {key: _random(tensor, limit, generator).to(device) for key, tensor in batch.items()}
        return filled | ({"labels": filled["input_ids"]} if "input_ids" in filled else {})

    return [micro_batch() for _ in range(size.accumulation)]


def _random(like: Tensor, limit: int, generator: torch.Generator) -> Tensor:
    if like.is_floating_point():
        return torch.rand(like.shape, generator=generator)
    return torch.randint(limit, like.shape, generator=generator)


def begin(make: Callable[[], Runner], batches: list[Any], device: torch.device) -> tuple[Runner, dict[str, Any]]:
    """Build a method, run its first steps, and measure its memory and traffic. Collective.

    Returns:
        The method and its figures by name: the losses of the first steps, and the largest number
        of parameters and peak bytes on any rank. For SDP and DiLoCo there are also the bytes of
        state, real and planned, and the bytes sent between groups in a step.
    """
    others = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    runner = make()
    losses = [_mean(runner.step(batches)) for _ in range(WARM_UP)]
    for _ in range(2 * runner.round - WARM_UP if runner.round > 1 else 0):  # averages allocate in the first round
        runner.step(batches)

    def step() -> None:
        for _ in range(runner.round):
            runner.step(batches)
        runner.settle()

    peak = peak_tensor_bytes(step, runner.module, runner.optimizer, device, kept=runner.kept()) - others
    facts: dict[str, Any] = {"parameters": runner.parameters, "peak_bytes": peak}
    if (engine := runner.engine) is not None:
        engine.traffic.reset()
        for _ in range(runner.round):
            runner.step(batches)
        sent = engine.traffic.by_kind().items()
        between = sum(nbytes for kind, nbytes in sent if kind.startswith("between groups"))
        facts |= {
            "state_bytes": engine.measured_state_bytes().total,
            "planned_state_bytes": engine.predicted_state_bytes().total,
            "between_groups_bytes": round(between / runner.round),
        }
    return runner, {"losses": losses} | {key: int(_largest([value])[0]) for key, value in facts.items()}


def _largest(values: Sequence[float]) -> list[float]:
    totals = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(totals, op=dist.ReduceOp.MAX)
    return totals.tolist()


def _mean(loss: Tensor) -> float:
    total = loss.double().cpu()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def require_same_losses(facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise RuntimeError if DDP, FSDP2 and HSDP differ in their first losses.

    These methods should compute the same. Otherwise, a comparison of their times means nothing.
    """
    same = {name: found["losses"][:2] for name, found in facts.items() if name in DENSE and name != "diloco"}
    for name, losses in same.items():
        first, expected = next(iter(same.items()))
        if any(
            not math.isclose(mine, theirs, rel_tol=LOSS_TOLERANCE)
            for mine, theirs in zip(losses, expected, strict=True)
        ):
            raise RuntimeError(
                f"{name} has losses {losses} in its first steps, and {first} has {expected}: they did not compute "
                "the same"
            )


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"sdp bench: {text}", file=sys.stderr, flush=True)
