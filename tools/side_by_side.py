"""``sdp bench CONFIG``: ways to train one model, side by side in one run of the same ranks.

Every rank holds all methods at once and lets them take turns, so that a loaded machine slows all alike; a turn begins with a step that is
not timed (caches, weights under way), then ``--steps`` steps are timed together, and rounds run forwards and backwards in alternation. The
seconds of a turn are those of its slowest rank.

*Exposed communication* is the time of a step minus that of the same step with collectives that return at once (``wire.absent``): on
ranks that share cores it has the processor time of the communication too. *Not overlapped* is the same of a step that waits for every
reduction where it starts (``wire.awaited``). *Bytes sent* are counted by the kernel on the rank's TCP connections, where collectives use
these, *collectives* by the process groups. *Peak memory* is that of the method's live tensors in one step (``memory_probe.py``). A DiLoCo
step has a fiftieth of its outer step, timed alone. *Slowest / mean* is of what ranks compute in a step: on CPUs of the processor's seconds,
since ranks may share cores.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.accounting.clock import clock
from ..engine.accounting.memory_probe import peak_tensor_bytes
from ..engine.batch.size import BatchSize
from ..engine.config.load import load_config
from ..engine.config.schema import Config
from ..engine.distributed.join import join
from ..engine.distributed.mesh import mesh_of
from ..engine.distributed.tensors import local_tensor
from ..engine.environment.detect import Environment, detect
from ..engine.errors import ConfigError, DivergedError
from . import scaling
from .methods import DENSE, OUTER_EVERY, SAME_STEPS, Runner, build, default_methods, is_sdp, variant, why_not
from .networks import Link, enter, hosts, shape
from .processors import stolen, ticks
from .runs.model_inputs import model_and_batch
from .runs.run_config import with_initial_model
from .side_plan import plan_methods
from .side_report import REPORT, Race, Report, write_report
from .wire import absent, awaited, collectives_of_this_process, sent_by_this_process, why_not_counted

WARM_UP = 3  # steps: the first allocates, in the second DDP rebuilds its buckets
LOSS_TOLERANCE = 1e-4  # relative, of the first two steps, between methods that make the same ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what belongs to CONFIG."""
    group = parser.add_argument_group("side by side, with CONFIG")
    group.add_argument("config", metavar="CONFIG", type=Path, nargs="?", help="compare ways to train this model, on several ranks")
    group.add_argument("--set", metavar="SECTION.KEY=VALUE", action="append", default=[], help="override a key of CONFIG; may be repeated")
    group.add_argument("--nproc", metavar="P", type=int, help="ranks to start here (default: sdp.groups)")
    group.add_argument("--workers", metavar="N,…", help="compare once for each of these numbers of ranks, of as many groups, such as 2,4,8")
    group.add_argument("--methods", metavar="A,B,…", help="which, of: ddp … diloco, sdp, sdp-block-forward-0.5 … (default: all)")
    group.add_argument("--rounds", metavar="N", type=int, default=5, help="turns of every method (default: 5)")
    group.add_argument("--steps", metavar="N", type=int, default=2, help="timed steps of a turn (default: 2)")
    group.add_argument(
        "--network", metavar="RATE,…", help="ranks are hosts with links of these rates, such as 100mbit,300mbit,1gbit (root)"
    )
    group.add_argument("--hosts", metavar="NAME", help=argparse.SUPPRESS)  # for the ranks: those that were made
    group.add_argument("--out", metavar="DIR", type=Path, help="where report.md, report.json and plots go (default: runs/bench)")


def run(args: argparse.Namespace) -> int:
    """Start the ranks where no launcher did; each measures, rank 0 reports. Raises an :class:`SDPError` for what cannot be compared."""
    place = detect()
    if args.workers is not None:
        if place is not None:
            raise ConfigError(f"{scaling.OPTION}: starts ranks itself; start it without a launcher")
        return scaling.run(args, _out(args), run, partial(_checked, place=None, speaks=False))
    config, world, names = _checked(args, place, speaks=place is None or place.rank == 0)
    if place is None or place.rank == 0:
        _make_room(_out(args))
    if place is None:
        from ..launcher.local import start_local

        # As a user's own processes: without the settings of glibc that make resident memory honest, and memory slower.
        argv = [*args.argv, "--nproc", str(world), "--methods", ",".join(names)]
        with hosts(world) if args.network is not None else nullcontext() as made:
            return start_local(argv + (["--hosts", made] if made else []), world, _out(args) / "logs", on_cpu=False)
    if args.network is not None and not args.hosts:
        raise ConfigError("--network: makes hosts and starts ranks on them itself; start it without a launcher")
    logging.getLogger("sdp").setLevel(logging.ERROR)  # what a run would say of each method's configuration
    warnings.simplefilter("ignore", FutureWarning)  # torch's deprecated names, called by torch and DeepSpeed
    plans = plan_methods(names, config, world) if place.rank == 0 else {}
    if args.hosts:
        enter(args.hosts, place.rank)
    device = join()
    layers = _from_rank_0({name: plan.config.model.get("num_hidden_layers") for name, plan in plans.items()})
    facts, races = measure({name: variant(name, config, layers[name]) for name in names}, args, config, device)
    dist.destroy_process_group()
    if place.rank == 0:
        write_report(_out(args), Report(_settings(args, config, world, device), plans, facts, races))
        print(f"sdp bench: the report and its plots are in {_out(args)}", file=sys.stderr, flush=True)
    return 0


def _checked(args: argparse.Namespace, place: Environment | None, *, speaks: bool) -> tuple[Config, int, list[str]]:
    """Of the comparison: configuration, ranks, and the methods in order. Raises an :class:`SDPError` for what cannot be compared; starts
    nothing.
    """
    config = _config(args)
    _links(args)
    world = place.world_size if place is not None else args.nproc or config.sdp.groups
    names = _names(args, config, world, speaks=speaks)
    if place is None:
        from ..launcher.degrees import visible_devices

        devices = visible_devices()
        if 0 < devices < world:
            raise ConfigError(f"{world} ranks: {devices} devices are visible; use fewer, or CUDA_VISIBLE_DEVICES= for the CPU")
    if place is None or place.rank == 0:
        _require_no_report(_out(args))
    return config, world, names


def _require_no_report(folder: Path) -> None:
    if (folder / REPORT).exists():
        raise ConfigError(f"--out {folder}: holds the report of an earlier run; name another directory, or move that away")


def _make_room(folder: Path) -> None:
    """For the report, before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be made ({error.strerror})") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {folder}: cannot be written")


def _config(args: argparse.Namespace) -> Config:
    config = with_initial_model(load_config(args.config, args.set))
    for name in ("rounds", "steps", "nproc"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}: {value} is not a positive whole number")
    if config.bf16.enabled:
        raise ConfigError("bf16.enabled: methods are compared in float32, in which they all compute alike; add --set bf16.enabled=false")
    if config.tensor_parallel.autotp_size > 1:
        raise ConfigError(
            "tensor_parallel.autotp_size: other methods have no tensor parallelism here; add --set tensor_parallel.autotp_size=1"
        )
    if config.sdp.engine != "fsdp2":
        raise ConfigError(f'sdp.engine: "{config.sdp.engine}" is not compared; add --set sdp.engine=fsdp2')
    if config.sdp.groups == 1:
        raise ConfigError("sdp.groups: 1 group has nothing of SDP to compare; add --set sdp.groups=4")
    return config.model_copy(update={"scheduler": None})


def _names(args: argparse.Namespace, config: Config, world: int, *, speaks: bool) -> list[str]:
    """Of the methods, in order; those that cannot be run are left out unless they were asked for, and a rank that ``speaks`` says so."""
    asked = None if args.methods is None else list(dict.fromkeys(args.methods.split(",")))
    if asked is not None and "" in asked:
        raise ConfigError(f'--methods "{args.methods}": a name is empty; write some of {", ".join(DENSE)}, sdp, or leave the option out')
    names, reasons = [], {}
    for name in default_methods(config) if asked is None else asked:
        reason = why_not(name, config, world)
        if reason is None:
            names.append(name)
        elif asked is not None:
            raise ConfigError(f"--methods {name}: {reason}")
        else:
            reasons[name] = reason
    if asked is None and not any(map(is_sdp, names)):
        raise ConfigError(f"{world} ranks leave nothing of SDP to compare: {next(why for name, why in reasons.items() if is_sdp(name))}")
    for name, reason in reasons.items() if speaks else ():
        print(f"sdp bench: {name} is left out: {reason}", file=sys.stderr)
    return names


def _links(args: argparse.Namespace) -> list[Link]:
    return [] if args.network is None else [Link.parse(rate) for rate in args.network.split(",")]


def _out(args: argparse.Namespace) -> Path:
    return args.out or Path("runs/bench")


def _settings(args: argparse.Namespace, config: Config, world: int, device: torch.device) -> dict[str, Any]:
    batch = BatchSize.resolve(config, mesh_of(config, world))
    return {
        "config": str(args.config),
        "model": config.model,
        "world": world,
        "groups": config.sdp.groups,
        "batch": asdict(batch),
        "tokens_per_sample": config.data.tokens_per_sample,
        "activation_checkpointing": config.activation_checkpointing.mode,
        "compile": config.training.compile,
        "rounds": args.rounds,
        "steps_per_turn": args.steps,
        "dtype": "float32",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _from_rank_0(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


# -- measuring -------------------------------------------------------------------------------------------------------------------


def measure(
    configs: Mapping[str, Config], args: argparse.Namespace, config: Config, device: torch.device
) -> tuple[dict[str, dict[str, Any]], list[Race]]:
    """What was measured of every method, the same on all ranks. Collective."""
    batches = _batches(config, device)
    runners: dict[str, Runner] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name, own in configs.items():
        _say(f"building {name}")
        runners[name], facts[name] = _built(name, own, batches, device)
    _require_same_losses(facts)
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, why_not_counted(device))
    uncounted = next(filter(None, reasons), None)
    races = []
    for link in _links(args) or [None]:
        if link is not None:
            _say(f"links of {link.rate}")
            if dist.get_rank() == 0:
                shape(args.hosts, dist.get_world_size(), link)
        before = ticks()
        turns = _race(runners, batches, args, device)
        share = stolen(before, ticks())
        (elsewhere,) = _largest([-1.0 if share is None else share])
        if uncounted is not None:
            turns = {name: own | {"sent_bytes": None} for name, own in turns.items()}
        races.append(Race(link and link.rate, link and link.bytes_per_second, turns, uncounted, None if elsewhere < 0 else elsewhere))
    return facts, races


def _race(runners: Mapping[str, Runner], batches: list[Any], args: argparse.Namespace, device: torch.device) -> dict[str, dict[str, Any]]:
    """By method: seconds of a step in every round, by ``_MODES``, how much longer its slowest rank computes than the mean one, and, of the
    rank that has most, bytes sent and collectives in one step. Collective.

    Raises :class:`DivergedError` on every rank where a method's loss or weights are no numbers.
    """
    turns: dict[str, dict[str, list[_Turn]]] = {name: {} for name in runners}
    for number in range(args.rounds):
        _say(f"round {number + 1} of {args.rounds}")
        for name in list(runners)[:: 1 if number % 2 == 0 else -1]:
            for mode, around in _MODES.items():
                if mode != "not_overlapped_seconds" or is_sdp(name):
                    turn = _turn(runners[name], batches, args.steps, device, around)
                    _require_finite(name, turn.finite)
                    turns[name].setdefault(mode, []).append(turn)
    return {name: _of_all_ranks(own) for name, own in turns.items()}


def _of_all_ranks(turns: Mapping[str, Sequence[_Turn]]) -> dict[str, Any]:
    """Collective."""
    busy = [turn.busy for turn in turns["compute_seconds"]]
    means = torch.tensor(busy, dtype=torch.float64)
    dist.all_reduce(means)
    means /= dist.get_world_size()
    return {mode: _largest([turn.seconds for turn in own]) for mode, own in turns.items()} | {
        "sent_bytes": statistics.median(_largest([turn.sent for turn in turns["seconds"]])),
        "collectives": statistics.median(_largest([turn.collectives for turn in turns["seconds"]])),
        "slowest_over_mean": [most / mean for most, mean in zip(_largest(busy), means.tolist(), strict=True)],
    }


@dataclass(frozen=True)
class _Turn:
    """Of one step of this rank: seconds, seconds in which its processor or device worked, bytes sent, collectives; ``finite``: whether loss
    and weights are numbers afterwards.
    """

    seconds: float
    busy: float
    sent: float
    collectives: float
    finite: bool


_MODES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "seconds": nullcontext,
    "compute_seconds": absent,
    "not_overlapped_seconds": awaited,
}


def _turn(
    runner: Runner, batches: list[Any], steps: int, device: torch.device, around: Callable[[], AbstractContextManager[None]]
) -> _Turn:
    dist.barrier()
    before, calls = sent_by_this_process(), collectives_of_this_process()
    with around():
        loss = runner.step(batches)
        now = clock(device, waits=True)
        started, started_work = now(), time.process_time()
        for _ in range(steps):
            loss = runner.step(batches)
        seconds, work = (now() - started) / steps, (time.process_time() - started_work) / steps
        runner.settle()
        between, calls_between = sent_by_this_process(), collectives_of_this_process()
        if runner.outer is not None:
            dist.barrier()
            started = now()
            runner.outer()
            seconds += (now() - started) / OUTER_EVERY
    calls_after = collectives_of_this_process() - (1 if runner.outer is not None else 0)  # less the barrier
    dist.barrier()
    after = sent_by_this_process()
    weights = [local_tensor(weight.detach()) for group in runner.optimizer.param_groups for weight in group["params"]]
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in (loss, *weights))

    def of_a_step(first: float, inner: float, last: float) -> float:
        return (inner - first) / (steps + 1) + (last - inner) / OUTER_EVERY if runner.outer else (last - first) / (steps + 1)

    # Bytes that the kernel does not count are nobody's: see ``why_not_counted``.
    sent = 0.0 if before is None or between is None or after is None else of_a_step(before, between, after)
    busy = seconds if device.type == "cuda" else work
    return _Turn(seconds, busy, sent, of_a_step(calls, calls_between, calls_after), finite)


def _require_finite(name: str, finite: bool) -> None:
    """Collective, so that no rank waits for one that has ended."""
    if _largest([float(not finite)]) != [0.0]:
        raise DivergedError(
            f"{name}: loss or weights are no numbers after a turn, so its seconds compare nothing; in steps that send nothing each rank "
            "goes its own way: lower optimizer.params.lr, or set gradient_clipping"
        )


def _batches(config: Config, device: torch.device) -> list[Any]:
    """The micro-batches of every step of this rank, of random numbers: the same in every run and for every method."""
    size = BatchSize.resolve(config, mesh_of(config, dist.get_world_size()))
    build_model, zeros = model_and_batch(config)
    limit: int = getattr(build_model().config, "vocab_size", 1)  # type: ignore[union-attr]
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


def _built(name: str, config: Config, batches: list[Any], device: torch.device) -> tuple[Runner, dict[str, Any]]:
    """The method after its first steps, and what is known of it then: losses, parameters and bytes of the rank that has most."""
    others = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    runner = build(name, config, device)
    losses = [_mean(runner.step(batches)) for _ in range(WARM_UP)]

    def step() -> None:
        runner.step(batches)
        runner.settle()
        if runner.outer is not None:
            runner.outer()

    if runner.outer is not None:
        runner.outer()  # allocates
    peak = peak_tensor_bytes(step, runner.module, runner.optimizer, device, kept=runner.kept()) - others
    facts: dict[str, Any] = {"losses": losses, "parameters": runner.parameters, "peak_bytes": peak}
    if runner.counted is not None:
        facts |= runner.counted(batches)
    return runner, {key: value if key == "losses" else int(_largest([value])[0]) for key, value in facts.items()}


def _largest(values: Sequence[float]) -> list[float]:
    """Of all ranks, one by one. Collective."""
    totals = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(totals, op=dist.ReduceOp.MAX)
    return totals.tolist()


def _mean(loss: Tensor) -> float:
    total = loss.double().cpu()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _require_same_losses(facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises RuntimeError where methods that make the same steps do not: then their times compare nothing."""
    same = {name: found["losses"][:2] for name, found in facts.items() if name in SAME_STEPS}
    for name, losses in same.items():
        first, expected = next(iter(same.items()))
        if any(not math.isclose(mine, theirs, rel_tol=LOSS_TOLERANCE) for mine, theirs in zip(losses, expected, strict=True)):
            raise RuntimeError(f"{name} has losses {losses} in its first steps and {first} {expected}: they did not do the same work")


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"sdp bench: {text}", file=sys.stderr, flush=True)
