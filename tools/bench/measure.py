"""Measures methods in turns on the same ranks."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
from .methods import SAME_STEPS
from .options import BenchOptions
from .runners import Runner, build
from .wire import absent, collectives_of_this_process

WARM_UP = 3  # steps: the first one allocates, and DDP rebuilds its buckets in the second
LOSS_TOLERANCE = 1e-4  # relative, for the first two steps of methods that must agree


def measure(
    configs: Mapping[str, Config], options: BenchOptions, config: Config, device: torch.device
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Build every method, and let them take turns. Collective.

    Args:
        configs: The configuration of each method.
        options: Rounds and steps.
        config: The configuration that all methods share, which says the batch.
        device: Where this rank computes.

    Returns:
        Facts about each method, and what :func:`take_turns` returns, the same on all ranks.
    """
    batches = make_batches(config, device)
    runners: dict[str, Runner] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name, settings in configs.items():
        _say(f"building {name}")
        runners[name], facts[name] = build_method(name, settings, batches, device)
    require_same_losses(facts)
    return facts, take_turns(runners, batches, options, device)


def take_turns(
    runners: Mapping[str, Runner], batches: list[Any], options: BenchOptions, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Time every method in every round. Collective.

    Returns:
        By method: the seconds of a step in each round, by mode (see ``_MODES``); how much longer
        the slowest rank computes than the mean; and the collectives of one step.

    Raises:
        NonFiniteError: The loss or the weights of a method became NaN or infinite. Every rank
            raises it.
    """
    turns: dict[str, dict[str, list[_Turn]]] = {name: {} for name in runners}
    for number in range(options.rounds):
        _say(f"round {number + 1} of {options.rounds}")
        for name in list(runners)[:: 1 if number % 2 == 0 else -1]:
            for mode, around in _MODES.items():
                turn = _turn(runners[name], batches, options.steps, device, around)
                _require_finite(name, turn.finite)
                turns[name].setdefault(mode, []).append(turn)
    return {name: _of_all_ranks(turns_of_mode) for name, turns_of_mode in turns.items()}


def _of_all_ranks(turns: Mapping[str, Sequence[_Turn]]) -> dict[str, Any]:
    """Combine the turns of all ranks. Collective."""
    busy = [turn.busy for turn in turns["compute_seconds"]]
    means = torch.tensor(busy, dtype=torch.float64)
    dist.all_reduce(means)
    means /= dist.get_world_size()
    return {mode: _largest([turn.seconds for turn in turns_of_mode]) for mode, turns_of_mode in turns.items()} | {
        "collectives": statistics.median(_largest([turn.collectives for turn in turns["seconds"]])),
        "slowest_over_mean": [most / mean for most, mean in zip(_largest(busy), means.tolist(), strict=True)],
    }


@dataclass(frozen=True)
class _Turn:
    """One method's turn on this rank. All figures are those of one step.

    Attributes:
        seconds: Wall-clock seconds.
        busy: Seconds in which the processor or the device worked.
        collectives: Number of collectives.
        finite: Whether loss and weights are finite afterwards.
    """

    seconds: float
    busy: float
    collectives: float
    finite: bool


_MODES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "seconds": nullcontext,
    "compute_seconds": absent,
}


def _turn(
    runner: Runner,
    batches: list[Any],
    steps: int,
    device: torch.device,
    around: Callable[[], AbstractContextManager[None]],
) -> _Turn:
    steps = -(-steps // runner.round) * runner.round  # whole rounds: any such number of steps has the same averages
    with around():
        loss = runner.step(batches)
        runner.settle()
        dist.barrier()
        calls = collectives_of_this_process()
        now = clock(device, waits=True)
        started, started_work = now(), time.process_time()
        for _ in range(steps):
            loss = runner.step(batches)
        seconds, work = (now() - started) / steps, (time.process_time() - started_work) / steps
        runner.settle()
        calls_after = collectives_of_this_process()
    dist.barrier()
    weights = [local_tensor(weight.detach()) for group in runner.optimizer.param_groups for weight in group["params"]]
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in (loss, *weights))
    busy = seconds if device.type == "cuda" else work
    return _Turn(seconds, busy, (calls_after - calls) / steps, finite)


def _require_finite(name: str, finite: bool) -> None:
    """Raise :class:`NonFiniteError` on all ranks if one of them has NaN or Inf. Collective.

    Without the collective, the other ranks would wait for a rank that has ended.
    """
    if _largest([float(not finite)]) != [0.0]:
        raise NonFiniteError(
            f"{name}: the loss or the weights are NaN or infinite after a turn, so its seconds compare nothing. Ranks "
            "train on their own in steps that send nothing: lower optimizer.params.lr, or set gradient_clipping"
        )


def make_batches(config: Config, device: torch.device) -> list[Any]:
    """Make the micro-batches of every step of this rank.

    They are random, but the same in every run and for every method.
    """
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


def build_method(name: str, config: Config, batches: list[Any], device: torch.device) -> tuple[Runner, dict[str, Any]]:
    """Build a method and run its first steps. Collective.

    Returns:
        The method, and what is known about it: losses, and the parameters and bytes of the rank
        that has the most.
    """
    others = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    runner = build(name, config, device)
    losses = [_mean(runner.step(batches)) for _ in range(WARM_UP)]
    for _ in range(2 * runner.round - WARM_UP if runner.round > 1 else 0):  # averages allocate in the first round
        runner.step(batches)

    def step() -> None:
        for _ in range(runner.round):
            runner.step(batches)
        runner.settle()

    peak = peak_tensor_bytes(step, runner.module, runner.optimizer, device, kept=runner.kept()) - others
    facts: dict[str, Any] = {"losses": losses, "parameters": runner.parameters, "peak_bytes": peak}
    if runner.counted is not None:
        facts |= runner.counted(batches)
    return runner, {key: value if key == "losses" else int(_largest([value])[0]) for key, value in facts.items()}


def _largest(values: Sequence[float]) -> list[float]:
    """Return the largest of each value over all ranks. Collective."""
    totals = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(totals, op=dist.ReduceOp.MAX)
    return totals.tolist()


def _mean(loss: Tensor) -> float:
    total = loss.double().cpu()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def require_same_losses(facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise RuntimeError if methods that must make the same steps have different losses.

    Their times would compare nothing.
    """
    same = {name: found["losses"][:2] for name, found in facts.items() if name in SAME_STEPS}
    for name, losses in same.items():
        first, expected = next(iter(same.items()))
        if any(
            not math.isclose(mine, theirs, rel_tol=LOSS_TOLERANCE)
            for mine, theirs in zip(losses, expected, strict=True)
        ):
            raise RuntimeError(
                f"{name} has losses {losses} in its first steps, and {first} has {expected}: they did not do the same "
                "work"
            )


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"sdp bench: {text}", file=sys.stderr, flush=True)
