"""``sdp bench``: without CONFIG the engine's time per step against a plain hand-written loop; with one ``side_by_side.py``.

Three comparisons, each with a process group of its own. *One rank*: engine and loop train a model that has only the held layers.
*One of N ranks*: the engine carves one rank's share out of the full model, in a world whose other ranks exist in name only (torch's
fake process group: collectives return at once), so that all it does but the wire is timed; once by layers, and once by groups of neurons,
where the loop's model has plain narrower layers. With ``--deepspeed`` also one group under DeepSpeed against DeepSpeed alone.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...engine.backends.deepspeed.private import forget_process_groups, load
from ...engine.config.schema import SDPSection
from ...engine.distributed.join import join
from ...engine.environment.detect import alone_if_unlaunched
from ...engine.errors import ConfigError
from ...engine.initialize import initialize
from ...engine.placement.placement import Placement
from ...engine.placement.policies import place
from ...engine.placement.units import find_neuron_units
from .contestants import (
    ADAMW,
    MAX_NORM,
    batches,
    driven,
    engine_of,
    hand_written,
    hand_written_copy,
    held_layers,
    llama_of,
    name_in_copy,
    narrower_copy,
    random_model,
    weight_difference,
    weights_of,
)
from .race import Batch, Contestant, Timing, race

PLAIN, DEEPSPEED = "hand-written loop", "DeepSpeed alone"
AIM, DEEPSPEED_AIM = 1.05, 1.03  # the engine's seconds over the loop's, and over DeepSpeed's, at most
DEEPSPEED_STAGES = (0, 2)

_NUMBERS = {
    "layers": (8, "layers of the full model"),
    "hidden": (384, "hidden size"),
    "intermediate": (1024, "feed-forward size"),
    "heads": (6, "attention heads"),
    "vocab_size": (4096, "tokens of the vocabulary"),
    "sequence": (256, "tokens of a sequence"),
    "micro_batch": (4, "sequences of a step"),
    "groups": (4, "SDP groups, of which one is timed"),
    "neuron_groups": (4, "groups of neurons of a branch"),
    "repeats": (15, "timed steps of each side"),
    "warmup": (3, "steps before them"),
    "threads": (1, "torch's threads"),
}


@dataclass(frozen=True)
class Comparison:
    """Contestants timed in one run; ``weight_difference``: ‖engine − first‖ / ‖first‖ over all weights after all steps. ``aim``: the
    second's seconds over the first's, at most.
    """

    name: str
    aim: float
    timings: list[Timing]
    weight_difference: float

    @property
    def reached(self) -> bool:
        return self.timings[1].median_ratio <= self.aim


def add_plain_arguments(parser: argparse._ActionsContainer) -> None:
    """Those of the comparison without CONFIG."""
    for name, (default, text) in _NUMBERS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--compile", action="store_true", help="time the engine with compiled units (training.compile) too"
    )
    parser.add_argument(
        "--deepspeed", action="store_true", help="time one group under DeepSpeed against DeepSpeed alone too"
    )
    parser.add_argument(
        "--capacity",
        type=float,
        default=0.5,
        metavar="C",
        help="held fraction of the layers, or neurons (default: 0.5)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write settings and every timing there")


def _require_writable(path: Path | None) -> None:
    """Before anything is measured."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written ({error.strerror})") from None


def _require_neurons(args: argparse.Namespace) -> None:
    """A hand-written narrower model has something of every branch."""
    units = find_neuron_units(llama_of(args, args.layers), args.neuron_groups)
    placed = place(SDPSection(groups=args.groups, capacity=args.capacity, profile="uniform"), units)
    branches = {unit.name.rpartition(".neurons.")[0]: False for unit in units}
    for unit in units:
        branches[unit.name.rpartition(".neurons.")[0]] |= placed.holds(0, unit.index)
    empty = [branch for branch, held in branches.items() if not held]
    if empty:
        raise ConfigError(
            f"--capacity: {args.capacity:g} leaves rank 0 nothing of {empty[0]}; choose a higher one, or more heads"
        )


# -- the comparisons -------------------------------------------------------------------------------------------------------------


def _one_rank(args: argparse.Namespace, placement: Placement) -> Comparison:
    held = held_layers(placement)
    engine = engine_of(args, layers=held, groups=1, capacity=1.0)
    plain = hand_written_copy(engine, args)
    contestants = [
        hand_written(PLAIN, plain),
        driven("engine", engine),
        driven("engine, bfloat16 compute (FSDP2)", engine_of(args, layers=held, groups=1, capacity=1.0, bf16=True)),
        hand_written(f"{PLAIN}, all {args.layers} layers", random_model(args, engine.device)),
    ]
    if args.compile:
        contestants.append(
            driven("engine, compiled units", engine_of(args, layers=held, groups=1, capacity=1.0, compiled=True))
        )
    timings = race(contestants, batches(args, engine.device), args.warmup, engine.device)
    return Comparison(
        f"one rank, {held} of {args.layers} layers",
        AIM,
        timings,
        weight_difference(engine.parameters_here, weights_of(engine, plain)),
    )


def _one_of_many(args: argparse.Namespace, placement: Placement) -> Comparison:
    engine = engine_of(args, layers=args.layers, groups=args.groups, capacity=args.capacity)
    plain = hand_written_copy(engine, args)
    # Without peers the sum over holders is this rank's own gradient. The engine divides it by their number, as every data-parallel
    # loop does, so the hand-written one must too, or it would train on other gradients.
    holders = {
        name_in_copy(name, placement): len(engine.layout.parameters[name].holders) for name in engine.parameters_here
    }
    contestants = [hand_written(PLAIN, plain, holders), driven(f"engine, rank 0 of {args.groups}", engine)]
    timings = race(contestants, batches(args, engine.device), args.warmup, engine.device)
    name = f"one of {args.groups} ranks, {held_layers(placement)} of {args.layers} layers at capacity {args.capacity:g}, without a wire"
    return Comparison(name, AIM, timings, weight_difference(engine.parameters_here, weights_of(engine, plain)))


def _one_of_many_by_neurons(args: argparse.Namespace, _: Placement) -> Comparison:
    engine = engine_of(
        args, layers=args.layers, groups=args.groups, capacity=args.capacity, neuron_groups=args.neuron_groups
    )
    plain, weights, holders = narrower_copy(engine, args)
    contestants = [hand_written(PLAIN, plain, holders), driven(f"engine, rank 0 of {args.groups}", engine)]
    timings = race(contestants, batches(args, engine.device), args.warmup, engine.device)
    fraction = engine.layout.placement.held_fraction(0)
    name = f"one of {args.groups} ranks, {fraction:.0%} of the branches' neurons, without a wire; the loop's layers are plain and narrower"
    return Comparison(name, AIM, timings, weight_difference(engine.parameters_here, weights))


def _under_deepspeed(args: argparse.Namespace, stage: int) -> Comparison:
    """With one group nothing is installed: DeepSpeed's own engine, by its own call and through ours."""
    package = load()
    forget_process_groups()
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_clipping": MAX_NORM,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},  # else it compiles one
        "zero_optimization": {"stage": stage},
    }
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = [random_model(args, device) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    with alone_if_unlaunched():
        plain = package.initialize(model=models[0], model_parameters=models[0].parameters(), config=config)[0]
    section = {"engine": "deepspeed", "check_interval": 0}
    ours = initialize(model=models[1], config={**config, "sdp": section}, model_parameters=models[1].parameters())[0]

    def contestant(name: str, engine: Any) -> Contestant:
        def step(batch: Batch) -> None:
            engine.backward(engine(**batch))
            engine.step()

        return Contestant(name, sum(parameter.numel() for parameter in engine.module.parameters()), step)

    contestants = [contestant(DEEPSPEED, plain), contestant("sdp, one group", ours)]
    timings = race(contestants, batches(args, device), args.warmup, device)
    weights = {name: value.detach() for name, value in plain.module.named_parameters()}
    name = f"one group under DeepSpeed, ZeRO stage {stage}"
    return Comparison(name, DEEPSPEED_AIM, timings, weight_difference(dict(ours.module.named_parameters()), weights))


@contextmanager
def _world(size: int) -> Iterator[None]:
    """A process group of this process alone, or one whose other ranks exist in name only."""
    if size == 1:
        join()
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # this import registers the backend

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- report ----------------------------------------------------------------------------------------------------------------------


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in (*_NUMBERS, "capacity")} | {
        "dtype": "float32",
        "optimizer": "AdamW, fused",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu ({platform.machine()})",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _print_settings(s: Mapping[str, Any]) -> None:
    print(
        f"LLaMA of {s['layers']} layers, hidden {s['hidden']}, feed-forward {s['intermediate']}, {s['heads']} heads, "
        f"vocabulary {s['vocab_size']}; batch {s['micro_batch']} × {s['sequence']} tokens; {s['dtype']}, {s['optimizer']}, clipped"
    )
    print(f"{s['device']}, threads: {s['threads']}, torch {s['torch']}, Python {s['python']}")
    print(
        f"median of {s['repeats']} interleaved steps each, after {s['warmup']}; ratio to the first (least … most)",
        flush=True,
    )


def _print_comparison(comparison: Comparison) -> None:
    print(f"\n{comparison.name}")
    for timing in comparison.timings:
        ratio = f"{timing.median_ratio:.3f} ({min(timing.ratios):.3f} … {max(timing.ratios):.3f})"
        print(
            f"  {timing.name:<36}{timing.parameters / 1e6:7.2f} M parameters{timing.median_seconds * 1e3:10.2f} ms  {ratio}"
        )
    same = f"the first two end with the same weights (relative difference {comparison.weight_difference:.1e})"
    reached = "reached" if comparison.reached else "NOT reached"
    print(f"  aim: at most {comparison.aim:.2f}: {reached}; {same}", flush=True)
