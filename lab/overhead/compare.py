"""``python -m lab.overhead``: the engine's seconds per step against those of a hand-written loop.

There are three comparisons, each with its own process group:

- *One rank*: the engine and the loop train a model that has only the layers that one group holds.
- *One of N ranks, by layers*: the engine cuts the share of one rank out of the full model. Only
  this rank exists (torch's fake process group: collectives return at once), so everything is timed
  except the network.
- *One of N ranks, by neurons*: the same with groups of neurons. The loop's layers are narrower.

With ``--deepspeed`` there is a fourth one: one group under DeepSpeed against DeepSpeed alone.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sdp.engine.config.schema import SDPSection
from sdp.engine.distributed.fake_world import fake_world
from sdp.engine.distributed.join import join
from sdp.engine.environment.detect import alone_if_unlaunched, detect
from sdp.engine.errors import ConfigError, LaunchError
from sdp.engine.initialize import initialize
from sdp.engine.placement.placement import Placement
from sdp.engine.placement.policies import make_placement
from sdp.engine.placement.units import find_neuron_units, find_units
from sdp.engine.stores.deepspeed.private import forget_process_groups, load

from .contestants import (
    ADAMW,
    MAX_NORM,
    batches,
    build_engine,
    build_llama,
    build_random_model,
    copy_held_layers,
    copy_narrower,
    count_held_layers,
    drive,
    name_in_copy,
    weight_difference,
    weights_of,
    write_by_hand,
)
from .options import PlainOptions
from .race import Batch, Contestant, Timing, race

PLAIN, DEEPSPEED = "hand-written loop", "DeepSpeed alone"
AIM, DEEPSPEED_AIM = 1.05, 1.03  # the engine's seconds over those of the loop, and of DeepSpeed, at most
DEEPSPEED_STAGES = (0, 2)


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison. The first contestant is the engine's opponent.

    Attributes:
        name: What was compared.
        aim: The largest ratio of the second contestant's seconds to those of the first.
        timings: A timing for each contestant.
        weight_difference: ‖engine − first‖ / ‖first‖ over all weights, after all steps.
    """

    name: str
    aim: float
    timings: list[Timing]
    weight_difference: float

    @property
    def reached(self) -> bool:
        return self.timings[1].median_ratio <= self.aim


def run(options: PlainOptions) -> int:
    """Time the comparisons and print them.

    Raises:
        ConfigError: The sizes make no valid model or placement.
        LaunchError: A launcher started several ranks.
        RuntimeError: Engine and loop end with different weights, so their times compare nothing.
    """
    found = detect()
    if found is not None and found.world_size > 1:
        raise LaunchError(
            f"lab.overhead times one rank, but {found.source} started {found.world_size}; start it without a launcher"
        )
    section = SDPSection(groups=options.groups, capacity=options.capacity, profile="uniform")
    placement = make_placement(section, find_units(build_llama(options, options.layers), "auto"))
    _require_neurons(options)
    _require_writable(options.json)
    settings, comparisons = _settings(options), []
    _print_settings(settings)
    with _threads(options.threads):
        for world, compare in (
            (1, _compare_one_rank),
            (options.groups, _compare_one_of_many),
            (options.groups, _compare_by_neurons),
        ):
            with _world(world):
                comparisons.append(compare(options, placement))
            _print_comparison(comparisons[-1])
        for stage in DEEPSPEED_STAGES if options.deepspeed else ():
            with _world(1):
                comparisons.append(_compare_under_deepspeed(options, stage))
            _print_comparison(comparisons[-1])
    if options.json:
        report = {"settings": settings, "comparisons": [asdict(one) | {"reached": one.reached} for one in comparisons]}
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _require_writable(path: Path | None) -> None:
    """Raise :class:`ConfigError` before anything is measured if the report cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written ({error.strerror})") from None


def _require_neurons(options: PlainOptions) -> None:
    """Raise :class:`ConfigError` if rank 0 has a branch without neurons: a loop cannot train
    that.
    """
    units = find_neuron_units(build_llama(options, options.layers), options.neuron_groups)
    placed = make_placement(SDPSection(groups=options.groups, capacity=options.capacity, profile="uniform"), units)
    branches = {unit.name.rpartition(".neurons.")[0]: False for unit in units}
    for unit in units:
        branches[unit.name.rpartition(".neurons.")[0]] |= placed.holds(0, unit.index)
    empty = [branch for branch, held in branches.items() if not held]
    if empty:
        raise ConfigError(
            f"--capacity: {options.capacity:g} leaves rank 0 nothing of {empty[0]}; choose a higher one, or more heads"
        )


def _compare_one_rank(options: PlainOptions, placement: Placement) -> Comparison:
    held = count_held_layers(placement)
    engine = build_engine(options, layers=held, groups=1, capacity=1.0)
    plain = copy_held_layers(engine, options)
    in_bf16 = build_engine(options, layers=held, groups=1, capacity=1.0, bf16=True)
    contestants = [
        write_by_hand(PLAIN, plain),
        drive("engine", engine),
        drive("engine, bfloat16 compute (FSDP2)", in_bf16),
        write_by_hand(f"{PLAIN}, all {options.layers} layers", build_random_model(options, engine.device)),
    ]
    if options.compile:
        compiled = build_engine(options, layers=held, groups=1, capacity=1.0, compiled=True)
        contestants.append(drive("engine, compiled units", compiled))
    timings = race(contestants, batches(options, engine.device), options.warmup, engine.device)
    difference = weight_difference(engine.parameters_here, weights_of(engine, plain))
    return Comparison(f"one rank, {held} of {options.layers} layers", AIM, timings, difference)


def _compare_one_of_many(options: PlainOptions, placement: Placement) -> Comparison:
    engine = build_engine(options, layers=options.layers, groups=options.groups, capacity=options.capacity)
    plain = copy_held_layers(engine, options)
    # Without peers, the sum over holders is this rank's own gradient. The engine divides it by the
    # number of holders, as every data-parallel loop does. The hand-written loop must do the same,
    # to train on equal gradients.
    holders = {
        name_in_copy(name, placement): len(engine.layout.parameters[name].holders) for name in engine.parameters_here
    }
    contestants = [write_by_hand(PLAIN, plain, holders), drive(f"engine, rank 0 of {options.groups}", engine)]
    timings = race(contestants, batches(options, engine.device), options.warmup, engine.device)
    name = (
        f"one of {options.groups} ranks, {count_held_layers(placement)} of {options.layers} layers at capacity "
        f"{options.capacity:g}, without a network"
    )
    return Comparison(name, AIM, timings, weight_difference(engine.parameters_here, weights_of(engine, plain)))


def _compare_by_neurons(options: PlainOptions, _: Placement) -> Comparison:
    engine = build_engine(
        options,
        layers=options.layers,
        groups=options.groups,
        capacity=options.capacity,
        neuron_groups=options.neuron_groups,
    )
    plain, weights, holders = copy_narrower(engine, options)
    contestants = [write_by_hand(PLAIN, plain, holders), drive(f"engine, rank 0 of {options.groups}", engine)]
    timings = race(contestants, batches(options, engine.device), options.warmup, engine.device)
    name = (
        f"one of {options.groups} ranks, {engine.layout.placement.held_fraction(0):.0%} of the branches' neurons, "
        "without a network; the loop's layers are plain and narrower"
    )
    return Comparison(name, AIM, timings, weight_difference(engine.parameters_here, weights))


def _compare_under_deepspeed(options: PlainOptions, stage: int) -> Comparison:
    """Compare DeepSpeed's engine, started by its own call, with the same through
    ``sdp.initialize``.

    With one group, SDP changes nothing in DeepSpeed's engine.
    """
    package = load()
    forget_process_groups()
    config = {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_clipping": MAX_NORM,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},  # DeepSpeed's own must be compiled
        "zero_optimization": {"stage": stage},
    }
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = [build_random_model(options, device) for _ in range(2)]
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
    timings = race(contestants, batches(options, device), options.warmup, device)
    weights = {name: value.detach() for name, value in plain.module.named_parameters()}
    name = f"one group under DeepSpeed, ZeRO stage {stage}"
    return Comparison(name, DEEPSPEED_AIM, timings, weight_difference(dict(ours.module.named_parameters()), weights))


@contextmanager
def _world(size: int) -> Iterator[None]:
    """A process group of this process alone, or one in which only this rank exists."""
    if size > 1:
        with fake_world(0, size):
            yield
        return
    join()
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


def _settings(options: PlainOptions) -> dict[str, Any]:
    return options.numbers | {
        "capacity": options.capacity,
        "dtype": "float32",
        "optimizer": "AdamW, fused",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu ({platform.machine()})",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _print_settings(s: Mapping[str, Any]) -> None:
    print(
        f"LLaMA of {s['layers']} layers, hidden {s['hidden']}, feed-forward {s['intermediate']}, {s['heads']} heads, "
        f"vocabulary {s['vocab_size']}; batch {s['micro_batch']} × {s['sequence']} tokens; {s['dtype']}, "
        f"{s['optimizer']}, clipped"
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
            f"  {timing.name:<36}{timing.parameters / 1e6:7.2f} M parameters{timing.median_seconds * 1e3:10.2f} ms  "
            f"{ratio}"
        )
    same = f"the first two end with the same weights (relative difference {comparison.weight_difference:.1e})"
    reached = "reached" if comparison.reached else "NOT reached"
    print(f"  aim: at most {comparison.aim:.2f}: {reached}; {same}", flush=True)
