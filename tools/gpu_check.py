"""``sdp gpu-check``: what one rank of a dense and of SDP runs needs and does on this GPU, beside the plan, in under 8 minutes.

Every run is one rank's true share of a world of 8 groups whose other ranks exist in name only (torch's fake process group: collectives
return at once): its memory is exact, its speed that of a network which hides everything. What matters most is measured first; rows for
which no time is left are named.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..engine.clock import clock
from ..engine.config import load_config
from ..engine.engine import SDPEngine
from ..engine.environment import detect
from ..engine.errors import ConfigError, LaunchError
from ..engine.initialize import initialize, mesh_of
from ..engine.layout import Layout
from ..engine.memory import PeakMemory
from ..engine.trace import fake_world, trace_step
from ..models.registry import build_model
from .memory_table import Variant, fill_frozen, variants

GROUPS = 8
DENSE = Variant(1.0)
VARIANTS = [DENSE, *variants((0.75, 0.5, 0.375), ("block", "neuron"), ("forward", "backward"))]
CONFIGS = ("llama_1b", "llama_134m", "llama_500m")
SEQUENCE = 2048
MINUTES = 7.5
WARM_UP, STEPS, SECONDS = 4, 20, 8.0  # timed steps, and when to stop earlier
MATMUL = 8192
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 2, "vocab_size": 128}
TINY_SEQUENCE, TINY_STEPS, TINY_MATMUL = 32, 2, 128
# Of the configuration with 1 B: what a share of blocks under forward masking should reach, and the dense model.
MOST_PEAK, LEAST_SPEED, LEAST_MFU = 1.03, 0.94, 0.50


@dataclass(frozen=True)
class Planned:
    """What ``trace_step`` says of a share: bytes, and operations of a step, as executed, recomputation included."""

    state_bytes: int
    peak_memory_bytes: int
    flops: float


@dataclass(frozen=True)
class Share:
    """One rank's share of a run. ``mfu``: the model's operations a second, of the units that it holds and of what all hold, without
    recomputation, over the measured rate of matrix products; of whole units under forward masking alone. ``speed_over_bound``: tokens a
    second over the dense model's times the planned ratio of operations. ``error``: why nothing was measured.
    """

    config: str
    variant: Variant
    parameters: int = 0
    micro_batch: int = 0
    tokens_per_step: int = 0
    state_bytes: int = 0
    peak_memory_bytes: int = 0
    step_seconds: float = 0.0
    tokens_per_second: float = 0.0
    flops_per_step: float | None = None
    mfu: float | None = None
    loss: float = 0.0
    planned: Planned = field(default_factory=lambda: Planned(0, 0, 0.0))
    speed_over_bound: float | None = None
    error: str = ""

    @property
    def peak_over_planned(self) -> float:
        return self.peak_memory_bytes / self.planned.peak_memory_bytes

    def to_json(self) -> dict[str, Any]:
        derived = {} if self.error else {"peak_over_planned": self.peak_over_planned}
        return asdict(self) | {"name": self.variant.name} | derived


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where to run (default: cuda)")
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=CONFIGS, metavar="NAME", help=f"of {', '.join(CONFIGS)}")
    names = [variant.name for variant in VARIANTS]
    parser.add_argument(
        "--variants", nargs="+", choices=names, default=names, metavar="NAME", help=f'such as "{names[0]}" and "{names[1]}" (default: all)'
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, metavar="M", help=f"begin no row after that (default: {MINUTES}; all take longer)"
    )
    parser.add_argument("--tiny", action="store_true", help="models and batches so small that a CPU does; figures mean nothing then")


def run(args: argparse.Namespace) -> int:
    """Measure dense and SDP shares of the ready configurations and print them. Without CUDA it says so, and nothing is checked."""
    started = time.perf_counter()
    found = detect()
    if found is not None and found.world_size > 1:
        raise LaunchError(f"sdp gpu-check measures one rank, but {found.source} started {found.world_size}; start it without a launcher")
    if args.device == "cuda" and not torch.cuda.is_available():
        print("sdp gpu-check: torch finds no CUDA device here; nothing was checked (--device cpu --tiny shows that the command works)")
        _write(args.json, {"skipped": "no CUDA device"})
        return 0
    if args.device == "cpu" and torch.cuda.is_available():
        raise ConfigError("--device cpu: the engine takes the GPU where there is one; hide it with CUDA_VISIBLE_DEVICES=")
    if args.device == "cpu" and not args.tiny:
        raise ConfigError("--device cpu: the models are too large for a CPU; add --tiny")
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    rate = matmul_rate(device, TINY_MATMUL if args.tiny else MATMUL)
    settings = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "groups": GROUPS,
        "sequence_length": TINY_SEQUENCE if args.tiny else SEQUENCE,
        "tiny": args.tiny,
        "bf16_matmul_flops_per_second": rate,
    }
    print(f"{settings['device']}, torch {torch.__version__}; bf16 matrix products: {rate / 1e12:.1f} TFLOP/s", flush=True)
    shares: list[Share] = []
    left: list[str] = []
    for name, variant in rows(args.configs, args.variants):
        if time.perf_counter() - started > 60 * args.minutes:
            left.append(f"{name} {variant.name}")
            continue
        share = _measured(name, variant, device, rate, tiny=args.tiny)
        shares.append(_beside_dense(share, [*shares, share]))
        print(_line(shares[-1]), flush=True)
    goals = goals_of(shares)
    for goal in goals:
        print(goal["text"])
    if left:
        print(f"no time was left, of {args.minutes:g} minutes, for: {', '.join(left)}; --minutes gives them more")
    report = {"settings": settings, "shares": [share.to_json() for share in shares], "goals": goals, "not_run": left}
    _write(args.json, report)
    return 0


def rows(configs: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, Variant]]:
    """Configurations and variants, those first that goals are about: the dense model, blocks under forward masking, 0.5 of the others."""
    chosen = [variant for variant in VARIANTS if variant.name in names]
    first = [v for v in chosen if v == DENSE or (v.granularity, v.masking) == ("block", "forward") or v.capacity == 0.5]
    yield from itertools.product(configs, first)
    yield from itertools.product(configs, [variant for variant in chosen if variant not in first])


def matmul_rate(device: torch.device, size: int) -> float:
    """Floating-point operations a second of a bfloat16 product of two square matrices: the best of ten."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    now, best = clock(device, waits=True), float("inf")
    for _ in range(12):
        started = now()
        torch.mm(left, right)
        best = min(best, now() - started)
    return 2 * size**3 / best


def _measured(name: str, variant: Variant, device: torch.device, rate: float, *, tiny: bool) -> Share:
    """A run of its own; what it leaves in memory is gone afterwards."""
    config, sequence = _config(name, variant, tiny=tiny)
    planned = _planned(config, sequence)
    try:
        with fake_world(0, GROUPS):
            share = _share(name, variant, config, sequence, device, tiny=tiny)
    except torch.OutOfMemoryError as error:
        return Share(name, variant, planned=planned, error=str(error).partition(".")[0])
    finally:
        torch.compiler.reset()  # graphs of the models before would count against the limit of recompilations
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    mfu = None if share.flops_per_step is None else share.flops_per_step / share.step_seconds / rate
    return replace(share, planned=planned, mfu=mfu)


def _share(name: str, variant: Variant, config: Mapping[str, Any], sequence: int, device: torch.device, *, tiny: bool) -> Share:
    memory = PeakMemory(device)
    memory.reset()
    engine = initialize(model=build_model(config["model"]), config=dict(config))[0]
    step = _stepper(engine, config["model"]["vocab_size"], sequence)
    loss = 0.0
    for _ in range(2 if tiny else WARM_UP):
        loss = step()
    seconds = _timed_steps(step, clock(device, waits=True), TINY_STEPS if tiny else STEPS)
    tokens = engine.train_micro_batch_size_per_gpu() * sequence
    return Share(
        config=name,
        variant=variant,
        parameters=sum(parameter.numel() for parameter in engine.parameters_here.values()),
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        tokens_per_step=tokens,
        state_bytes=engine.measured_state_bytes().total,
        peak_memory_bytes=memory.read(),
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        flops_per_step=tokens * held_flops_per_token(engine, sequence) if _whole_units(engine) else None,
        loss=loss,
    )


def _planned(file: Mapping[str, Any], sequence: int) -> Planned:
    """Of rank 0, from its step on fake tensors."""
    config = load_config(dict(file))
    with torch.device("meta"):
        layout = Layout.of(build_model(config.model), config, mesh_of(config, GROUPS))

    def batch(samples: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(samples, sequence, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids.clone()}

    build = partial(build_model, config.model)
    trace = trace_step(build, config, layout, batch, 0)
    return Planned(trace.state.total, trace.peak, trace.flops)


def _config(name: str, variant: Variant, *, tiny: bool) -> tuple[dict[str, Any], int]:
    """The ready configuration, compiled, one micro-batch a step; and its sequence length."""
    path = Path(__file__).parent.parent / "configs" / f"{name}.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["sdp"] |= {"groups": GROUPS, "capacity": variant.capacity, "check_interval": 0}
    if variant.granularity:
        config["sdp"] |= {"granularity": variant.granularity, "masking": variant.masking}
    config |= {"gradient_accumulation_steps": 1, "training": {"compile": True}}
    config.pop("data")
    if tiny:
        config["model"] |= TINY
        config["train_micro_batch_size_per_gpu"] = 2
    return config, TINY_SEQUENCE if tiny else SEQUENCE


def _stepper(engine: SDPEngine, vocabulary: int, sequence: int) -> Callable[[], float]:
    """A step on random tokens; it returns the loss."""
    shape = (engine.train_micro_batch_size_per_gpu(), sequence)
    tokens = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(engine.device)

    fill_frozen(engine)

    def step() -> float:
        loss = engine({"input_ids": tokens, "labels": tokens})
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def _timed_steps(step: Callable[[], float], now: Callable[[], float], count: int) -> float:
    """Median seconds of ``count`` steps, or of as many as fit into the time."""
    seconds: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(seconds) < count and (time.perf_counter() < end or not seconds):
        started = now()
        step()
        seconds.append(now() - started)
    return statistics.median(seconds)


def _whole_units(engine: SDPEngine) -> bool:
    return engine.config.sdp.granularity == "block" and not engine.frozen_here


def held_flops_per_token(engine: SDPEngine, sequence: int) -> float:
    """Of the units that rank 0 holds, and of what all ranks hold."""
    costs: Mapping[str, float] = engine.module.flops_per_token(sequence)  # type: ignore[operator]
    placement = engine.layout.placement
    absent = {unit for unit, holders in zip(placement.units, placement.holders, strict=True) if 0 not in holders}
    return sum(cost for unit, cost in costs.items() if unit not in absent)


def _beside_dense(share: Share, shares: Sequence[Share]) -> Share:
    """With its speed over that of the dense model of its configuration, by the planned ratio of operations."""
    dense = next((other for other in shares if other.config == share.config and other.variant == DENSE and not other.error), None)
    if dense is None or share.error:
        return share
    return replace(share, speed_over_bound=share.tokens_per_second / dense.tokens_per_second * share.planned.flops / dense.planned.flops)


def goals_of(shares: Sequence[Share]) -> list[dict[str, Any]]:
    """What was aimed at: ``text``, ``value``, and whether it is ``reached``; of what was measured."""
    goals = []

    def goal(share: Share, what: str, value: float, limit: float, *, most: bool) -> None:
        reached = value <= limit if most else value >= limit
        bound = f"at {'most' if most else 'least'} {limit:g}"
        text = f"{share.config} {share.variant.name}: {what} {value:.3f}, aim {bound}: {'reached' if reached else 'NOT reached'}"
        goals.append({"text": text, "value": value, "reached": reached})

    for share in shares:
        if share.error:
            continue
        if share.config == CONFIGS[0] and share.variant == DENSE and share.mfu is not None:
            goal(share, "MFU", share.mfu, LEAST_MFU, most=False)
        if (share.variant.granularity, share.variant.masking) == ("block", "forward"):
            goal(share, "peak memory over planned", share.peak_over_planned, MOST_PEAK, most=True)
            if share.speed_over_bound is not None:
                goal(share, "tokens/s over the bound of operations", share.speed_over_bound, LEAST_SPEED, most=False)
    return goals


def _line(share: Share) -> str:
    name = f"{share.config:<12}{share.variant.name:<22}"
    if share.error:
        return f"{name}{share.error}"
    mfu = "" if share.mfu is None else f"  MFU {share.mfu:5.1%}"
    bound = "" if share.speed_over_bound is None else f"  {share.speed_over_bound:.3f} of the bound"
    return (
        f"{name}{share.parameters / 1e6:8.1f} M parameters  state {share.state_bytes / 2**30:6.2f} GiB  "
        f"peak {share.peak_memory_bytes / 2**30:6.2f} GiB ({share.peak_over_planned:.3f} of planned)  "
        f"{share.tokens_per_second:10,.0f} tokens/s{mfu}{bound}"
    )


def _write(path: Path | None, report: Mapping[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
