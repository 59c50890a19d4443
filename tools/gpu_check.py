"""``sdp gpu-check``: what one rank of a dense and of an SDP run needs and does on this GPU, in a few minutes.

Every run is one rank's true share of a world of 8 groups whose other ranks exist in name only (torch's fake process group: collectives
return at once): its memory is exact, its speed that of a network which hides everything.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..engine.clock import clock
from ..engine.engine import SDPEngine
from ..engine.environment import detect
from ..engine.errors import ConfigError, LaunchError
from ..engine.initialize import initialize
from ..engine.memory import PeakMemory
from ..models.registry import build_model

GROUPS = 8
CAPACITIES = (1.0, 0.5)  # dense, SDP
CONFIGS = ("llama_134m", "llama_1b")
SEQUENCE = 2048
WARM_UP, STEPS, SECONDS = 4, 20, 45.0  # timed steps, and when to stop earlier; four runs and their compilation stay below 8 minutes
MATMUL = 8192
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 2, "vocab_size": 128}
TINY_SEQUENCE, TINY_STEPS, TINY_MATMUL = 32, 3, 128


@dataclass(frozen=True)
class Share:
    """One rank's share of a run. ``flops_per_step``: of the units that it holds and the rest; ``mfu``: those per second over the
    measured rate of matrix products; ``error``: why nothing was measured.
    """

    config: str
    capacity: float
    parameters: int = 0
    micro_batch: int = 0
    tokens_per_step: int = 0
    state_bytes: int = 0
    peak_memory_bytes: int = 0
    step_seconds: float = 0.0
    tokens_per_second: float = 0.0
    flops_per_step: float = 0.0
    mfu: float = 0.0
    loss: float = 0.0
    error: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where to run (default: cuda)")
    parser.add_argument("--tiny", action="store_true", help="models and batches so small that a CPU does; figures mean nothing then")


def run(args: argparse.Namespace) -> int:
    """Measure dense and SDP shares of the ready configurations and print them. Without CUDA it says so, and nothing is checked."""
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
    shares = []
    for name in CONFIGS:
        for capacity in CAPACITIES:
            shares.append(_measured(name, capacity, device, rate, tiny=args.tiny))
            _print(shares[-1])
    _write(args.json, {"settings": settings, "shares": [asdict(share) for share in shares], "ratios": _ratios(shares)})
    return 0


def matmul_rate(device: torch.device, size: int) -> float:
    """Floating-point operations a second of a bfloat16 product of two square matrices: the best of ten."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    now, best = clock(device, waits=True), float("inf")
    for _ in range(12):
        started = now()
        torch.mm(left, right)
        best = min(best, now() - started)
    return 2 * size**3 / best


def _measured(name: str, capacity: float, device: torch.device, rate: float, *, tiny: bool) -> Share:
    """A run of its own; what it leaves in memory is gone afterwards."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # this import registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=GROUPS)
    try:
        return _share(name, capacity, device, rate, tiny=tiny)
    except torch.OutOfMemoryError as error:
        return Share(name, capacity, error=str(error).partition(".")[0])
    finally:
        dist.destroy_process_group()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _share(name: str, capacity: float, device: torch.device, rate: float, *, tiny: bool) -> Share:
    memory = PeakMemory(device)
    memory.reset()
    config, sequence = _config(name, capacity, tiny=tiny)
    engine = initialize(model=build_model(config["model"]), config=config)[0]
    step = _stepper(engine, config["model"]["vocab_size"], sequence)
    loss = 0.0
    for _ in range(2 if tiny else WARM_UP):
        loss = step()
    seconds = _timed_steps(step, clock(device, waits=True), TINY_STEPS if tiny else STEPS)
    tokens = engine.train_micro_batch_size_per_gpu() * sequence
    flops = tokens * held_flops_per_token(engine, sequence)
    return Share(
        config=name,
        capacity=capacity,
        parameters=sum(parameter.numel() for parameter in engine.parameters_here.values()),
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        tokens_per_step=tokens,
        state_bytes=engine.measured_state_bytes().total,
        peak_memory_bytes=memory.read(),
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        flops_per_step=flops,
        mfu=flops / seconds / rate,
        loss=loss,
    )


def _config(name: str, capacity: float, *, tiny: bool) -> tuple[dict[str, Any], int]:
    """The ready configuration, compiled, one micro-batch a step; and its sequence length."""
    path = Path(__file__).parent.parent / "configs" / f"{name}.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["sdp"] |= {"groups": GROUPS, "capacity": capacity, "check_interval": 0}
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


def held_flops_per_token(engine: SDPEngine, sequence: int) -> float:
    """Of the units that rank 0 holds, and of what all ranks hold."""
    costs: Mapping[str, float] = engine.module.flops_per_token(sequence)  # type: ignore[operator]
    placement = engine.layout.placement
    absent = {unit for unit, holders in zip(placement.units, placement.holders, strict=True) if 0 not in holders}
    return sum(cost for unit, cost in costs.items() if unit not in absent)


def _ratios(shares: list[Share]) -> dict[str, dict[str, float]]:
    """SDP over dense, by configuration."""
    ratios = {}
    for dense, part in zip(shares[::2], shares[1::2], strict=True):
        if not (dense.error or part.error):
            ratios[dense.config] = {
                "peak_memory_bytes": part.peak_memory_bytes / dense.peak_memory_bytes,
                "state_bytes": part.state_bytes / dense.state_bytes,
                "tokens_per_second": part.tokens_per_second / dense.tokens_per_second,
            }
    return ratios


def _print(share: Share) -> None:
    name = f"{share.config}  C = {share.capacity:g}"
    if share.error:
        print(f"{name}  {share.error}", flush=True)
        return
    print(
        f"{name}  {share.parameters / 1e6:8.1f} M parameters  state {share.state_bytes / 2**30:6.2f} GiB  "
        f"peak {share.peak_memory_bytes / 2**30:6.2f} GiB  {share.tokens_per_second:10,.0f} tokens/s  MFU {share.mfu:5.1%}",
        flush=True,
    )


def _write(path: Path | None, report: Mapping[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
