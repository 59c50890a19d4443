"""``sdp bench``: the engine's time per step against a plain hand-written loop over the same, smaller model.

Two comparisons, each a process group of its own. *One rank*: the engine and the loop train a model that has only the held layers.
*One of N ranks*: the engine carves one rank's share out of the full model in a world whose other ranks exist only in name (torch's
fake process group: collectives return at once), so that everything it does but the wire is timed. Steps are interleaved and
compared in pairs: a loaded or throttled machine slows both sides of a ratio. Speeds hold for the machine they were measured on.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..engine.config import SDPSection
from ..engine.engine import SDPEngine
from ..engine.environment import detect
from ..engine.errors import ConfigError, LaunchError
from ..engine.initialize import init_distributed, initialize
from ..engine.placement import Placement, place
from ..engine.units import find_units
from ..models.registry import build_model

Batch = Mapping[str, Tensor]

PLAIN = "hand-written loop"
MAX_NORM = 0.1  # so small that every step is clipped: both sides then scale every gradient
ADAMW = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
# Same arithmetic but for the rounding of the clipping factor (the engine's is in float64), which AdamW carries on from step to step.
WEIGHT_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Contestant:
    """What is timed: ``step`` makes one whole optimizer step on a micro-batch; ``parameters`` is what it trains (elements)."""

    name: str
    parameters: int
    step: Callable[[Batch], None]


@dataclass(frozen=True)
class Timing:
    """Seconds per step of one contestant, and per round its seconds over those of the hand-written loop."""

    name: str
    parameters: int
    seconds: list[float]
    ratios: list[float]
    median_seconds: float
    median_ratio: float


@dataclass(frozen=True)
class Comparison:
    """Contestants timed in one interleaved run; ``weight_difference``: ‖engine − loop‖ / ‖loop‖ of all weights after all steps."""

    name: str
    timings: list[Timing]
    weight_difference: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--layers", type=int, default=8, metavar="L", help="layers of the full model (default: 8)")
    parser.add_argument("--hidden", type=int, default=384, metavar="D", help="hidden size (default: 384)")
    parser.add_argument("--intermediate", type=int, default=1024, metavar="I", help="feed-forward size (default: 1024)")
    parser.add_argument("--heads", type=int, default=6, metavar="H", help="attention heads (default: 6)")
    parser.add_argument("--vocab-size", type=int, default=4096, metavar="V", help="tokens (default: 4096)")
    parser.add_argument("--sequence", type=int, default=256, metavar="S", help="tokens of a sequence (default: 256)")
    parser.add_argument("--micro-batch", type=int, default=4, metavar="B", help="sequences of a step (default: 4)")
    parser.add_argument("--groups", type=int, default=4, metavar="N", help="SDP groups of which one is timed (default: 4)")
    parser.add_argument("--capacity", type=float, default=0.5, metavar="C", help="held fraction of the layers (default: 0.5)")
    parser.add_argument("--repeats", type=int, default=15, metavar="R", help="timed steps of each side (default: 15)")
    parser.add_argument("--warmup", type=int, default=3, metavar="W", help="steps before them (default: 3)")
    parser.add_argument("--threads", type=int, default=1, metavar="T", help="torch's threads (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write settings and every timing there")


def run(args: argparse.Namespace) -> int:
    """Time both comparisons and print them.

    Raises :class:`ConfigError` for sizes that make no model or placement, :class:`LaunchError` under a launcher of several ranks,
    and RuntimeError if engine and loop do not end with the same weights: then their times compare nothing.
    """
    for name in ("repeats", "warmup", "threads", "micro_batch", "sequence", "groups"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: {getattr(args, name)} is not a positive whole number")
    found = detect()
    if found is not None and found.world_size > 1:
        raise LaunchError(f"sdp bench times one rank, but {found.source} started {found.world_size}; start it without a launcher")
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        placement = _placement(args)
        with _world(1):
            settings = _settings(args)
            _print_settings(settings)
            comparisons = [_one_rank(args, placement)]
        _print_comparison(comparisons[0])
        with _world(args.groups):
            comparisons.append(_one_of_many(args, placement))
        _print_comparison(comparisons[1])
    finally:
        torch.set_num_threads(threads)
    if args.json:
        report = {"settings": settings, "comparisons": [asdict(comparison) for comparison in comparisons]}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


# -- the two comparisons ---------------------------------------------------------------------------------------------------------


def _one_rank(args: argparse.Namespace, placement: Placement) -> Comparison:
    held = _held_layers(placement)
    engine = _engine(args, layers=held, groups=1, capacity=1.0)
    plain = _hand_written_copy(engine, args)
    dense = _on_device(args, args.layers, engine.device)
    contestants = [
        _hand_written(PLAIN, plain),
        _driven("engine", engine),
        _driven("engine, bfloat16 compute (FSDP2)", _engine(args, layers=held, groups=1, capacity=1.0, bf16=True)),
        _hand_written(f"{PLAIN}, all {args.layers} layers", dense),
    ]
    timings = _race(contestants, args, engine.device)
    return Comparison(f"one rank, {held} of {args.layers} layers", timings, _weight_difference(engine, plain))


def _one_of_many(args: argparse.Namespace, placement: Placement) -> Comparison:
    engine = _engine(args, layers=args.layers, groups=args.groups, capacity=args.capacity)
    plain = _hand_written_copy(engine, args)
    # Without peers a sum over the holders is this rank's own gradient. The engine divides it by their number, as every data-parallel
    # loop does; so must the hand-written one, or it would train on other gradients.
    holders = {_name_in_copy(name, placement): len(engine.layout.parameters[name].holders) for name in engine.parameters_here}
    contestants = [_hand_written(PLAIN, plain, holders), _driven(f"engine, rank 0 of {args.groups}", engine)]
    timings = _race(contestants, args, engine.device)
    name = f"one of {args.groups} ranks, {_held_layers(placement)} of {args.layers} layers at capacity {args.capacity:g}, no wire"
    return Comparison(name, timings, _weight_difference(engine, plain))


@contextmanager
def _world(size: int) -> Iterator[None]:
    """A process group of this process alone, or one whose other ranks exist in name only."""
    if size == 1:
        init_distributed()
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


# -- models and loops ------------------------------------------------------------------------------------------------------------


def _model(args: argparse.Namespace, layers: int) -> nn.Module:
    section = {
        "name": "llama",
        "vocab_size": args.vocab_size,
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": args.heads,
        "max_position_embeddings": args.sequence,
    }
    return build_model(section)


def _on_device(args: argparse.Namespace, layers: int, device: torch.device) -> nn.Module:
    """The model with weights of its own, drawn at random."""
    model = _model(args, layers).to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
    return model


def _placement(args: argparse.Namespace) -> Placement:
    return place(SDPSection(groups=args.groups, capacity=args.capacity), find_units(_model(args, args.layers), "auto"))


def _held_layers(placement: Placement) -> int:
    return sum(0 in holders for holders in placement.holders)


def _name_in_copy(name: str, placement: Placement) -> str:
    """A parameter's name in the model of the held layers alone: they move up to where layers before them are not held."""
    held = [unit for unit, holders in zip(placement.units, placement.holders, strict=True) if 0 in holders]
    for index, unit in enumerate(held):
        if name.startswith(f"{unit}."):
            return f"{unit.rpartition('.')[0]}.{index}{name.removeprefix(unit)}"
    return name


def _engine(args: argparse.Namespace, *, layers: int, groups: int, capacity: float, bf16: bool = False) -> SDPEngine:
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_clipping": MAX_NORM,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": 3 if bf16 else 0},
        "sdp": {"groups": groups, "capacity": capacity, "check_interval": 0},
    }
    return initialize(model=_model(args, layers), config=config)[0]


def _driven(name: str, engine: SDPEngine) -> Contestant:
    def step(batch: Batch) -> None:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

    return Contestant(name, sum(parameter.numel() for parameter in engine.parameters_here.values()), step)


def _hand_written_copy(engine: SDPEngine, args: argparse.Namespace) -> nn.Module:
    """A model of the layers that the engine holds and nothing else, with the engine's weights."""
    placement = engine.layout.placement
    model = _model(args, _held_layers(placement)).to_empty(device=engine.device)
    model.load_state_dict({_name_in_copy(name, placement): value.detach() for name, value in engine.parameters_here.items()})
    return model


def _hand_written(name: str, model: nn.Module, holders: Mapping[str, int] | None = None) -> Contestant:
    """The loop that a user would write; ``holders``: by how many ranks a parameter's gradient is averaged, where there are several."""
    parameters = dict(model.named_parameters())
    averaged = [(parameters[key], ranks) for key, ranks in (holders or {}).items()]
    optimizer = torch.optim.AdamW(parameters.values(), **ADAMW, fused=True)

    def step(batch: Batch) -> None:
        loss = model(**batch)
        loss.backward()
        for parameter, ranks in averaged:
            parameter.grad.div_(ranks)
        nn.utils.clip_grad_norm_(parameters.values(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(name, sum(parameter.numel() for parameter in parameters.values()), step)


def _weight_difference(engine: SDPEngine, plain: nn.Module) -> float:
    """‖engine − loop‖ / ‖loop‖ over all weights; raises RuntimeError if it is more than rounding."""
    theirs = dict(plain.named_parameters())
    pairs = [(value, theirs[_name_in_copy(name, engine.layout.placement)]) for name, value in engine.parameters_here.items()]
    with torch.no_grad():
        apart = sum(float((mine - other).double().square().sum()) for mine, other in pairs)
        whole = sum(float(other.double().square().sum()) for _, other in pairs)
    difference = math.sqrt(apart / whole)
    if not difference <= WEIGHT_TOLERANCE:
        raise RuntimeError(f"engine and hand-written loop ended with weights {difference:.1e} apart: they did not do the same work")
    return difference


# -- timing ----------------------------------------------------------------------------------------------------------------------


def _race(contestants: Sequence[Contestant], args: argparse.Namespace, device: torch.device) -> list[Timing]:
    """Step by step in turn on the same batches, every other round in reverse order; the first contestant is the base of ratios."""
    generator = torch.Generator().manual_seed(0)
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for turn in range(args.warmup + args.repeats):
        tokens = torch.randint(args.vocab_size, (args.micro_batch, args.sequence), generator=generator).to(device)
        batch = {"input_ids": tokens, "labels": tokens}
        for contestant in contestants if turn % 2 == 0 else reversed(contestants):
            taken = _seconds(contestant.step, batch, device)
            if turn >= args.warmup:
                seconds[contestant.name].append(taken)
    base = seconds[contestants[0].name]
    return [_timing(contestant, seconds[contestant.name], base) for contestant in contestants]


def _seconds(step: Callable[[Batch], None], batch: Batch, device: torch.device) -> float:
    start = time.perf_counter()
    step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _timing(contestant: Contestant, seconds: list[float], base: list[float]) -> Timing:
    ratios = [mine / plain for mine, plain in zip(seconds, base, strict=True)]
    return Timing(contestant.name, contestant.parameters, seconds, ratios, statistics.median(seconds), statistics.median(ratios))


# -- report ----------------------------------------------------------------------------------------------------------------------


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = {name: getattr(args, name) for name in _sizes(args)}
    return chosen | {
        "dtype": "float32",
        "optimizer": "AdamW, fused",
        "device": torch.cuda.get_device_name() if device == "cuda" else f"cpu ({platform.machine()})",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _sizes(args: argparse.Namespace) -> list[str]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return [name for name in vars(parser.parse_args([])) if name != "json"]


def _print_settings(s: Mapping[str, Any]) -> None:
    print(
        f"LLaMA of {s['layers']} layers, hidden {s['hidden']}, feed-forward {s['intermediate']}, {s['heads']} heads, "
        f"{s['vocab_size']} tokens; batch {s['micro_batch']} × {s['sequence']} tokens, {s['dtype']}, {s['optimizer']}, clipping"
    )
    print(f"{s['device']}, {s['threads']} thread(s), torch {s['torch']}, Python {s['python']}")
    print(f"{s['repeats']} interleaved steps of each side after {s['warmup']}: median, ratio to the hand-written loop (least … most)")


def _print_comparison(comparison: Comparison) -> None:
    print(f"\n{comparison.name}")
    for timing in comparison.timings:
        ratio = f"{timing.median_ratio:.3f} ({min(timing.ratios):.3f} … {max(timing.ratios):.3f})"
        print(f"  {timing.name:<36}{timing.parameters / 1e6:7.2f} M{timing.median_seconds * 1e3:10.2f} ms  {ratio}")
    print(f"  engine and loop end with the same weights (relative difference {comparison.weight_difference:.1e})", flush=True)
