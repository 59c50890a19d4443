"""``sdp bench CONFIG --alone``: measures one rank's share of a run, on a single device.

SDP and the dense model are measured in turns. The other ranks do not exist: torch's fake process
group lets collectives return at once. So memory is that of a real run, and the speed is an upper
bound, because communication takes no time.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...engine.config.schema import Config
from ...engine.distributed.collectives import local_tensor
from ...engine.distributed.fake_world import fake_world
from ...engine.engine import SDPEngine
from ...engine.environment.detect import detect
from ...engine.errors import ConfigError, LaunchError, NonFiniteError
from ...engine.files import write_whole
from ...engine.initialize import clock, initialize
from ...engine.model_interface import Constant, Init, Normal, get_flops_per_token, get_parameter_init
from ..plan.ways import dense_config
from ..runs.model_inputs import model_and_batch
from ..shared.table import Table, bytes_row, plain_row, text_row
from ..train.loop.meter import flops_per_token, nominal_flops
from .measure import begin, make_batches, turn
from .methods import of_engine
from .report import REPORT, make_folder, settings_of

PRODUCTS, MATRIX = 200, {"cuda": 8192, "cpu": 512}  # of the measured rate of matrix products


def run(args: argparse.Namespace, config: Config) -> int:
    """Measure rank 0's share of SDP and of the dense model, print a table, and write the report."""
    if detect() is not None:
        raise LaunchError("sdp bench --alone: measures one device in one process; start it without a launcher")
    if config.sdp.engine != "fsdp2":
        raise ConfigError(f'sdp.engine: "{config.sdp.engine}" cannot run with --alone; add --set sdp.engine=fsdp2')
    make_folder(args.out)
    world = args.nproc or config.sdp.groups * config.tensor_parallel.autotp_size
    configs = {"SDP": config, "dense": dense_config(config, config.sdp.groups, config.zero_optimization.stage)}
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    sustained = matmul_rate(device, getattr(torch, config.precision))
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in configs}
    for number in range(args.rounds):
        for name in list(configs)[:: 1 if number % 2 == 0 else -1]:
            rounds[name].append(measure(name, configs[name], world, args.steps, device))
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    settings = settings_of(args, config, world, device)
    _report(args.out, settings, rounds, sustained, nominal_flops(device, config.precision))
    return 0


def measure(name: str, config: Config, world: int, steps: int, device: torch.device) -> dict[str, Any]:
    """Train the share of rank 0 of ``world`` ranks for some steps, and measure it.

    Returns:
        The figures by name: parameters of the rank's group, bytes of state and of the peak, seconds
        of a step, and the tokens (or images) and operations of a step. The operations do not
        include recomputation. They are None if the model does not declare them.

    Raises:
        NonFiniteError: A step was skipped, or the loss is NaN or infinite.
    """
    with fake_world(0, world), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        batches = make_batches(config, device)
        # No average of local steps is timed: the other ranks do not exist.
        runner, facts = begin(lambda: replace(of_engine(_engine(config)), round=1), batches, device)
        seconds, engine = turn(name, runner, batches, steps, device), runner.engine
        assert engine is not None
        if engine.skipped_steps:
            raise NonFiniteError(
                f"{name}: {engine.skipped_steps} steps were skipped, so the time is not that of training; lower "
                "optimizer.params.lr"
            )
        tokens = engine.train_micro_batch_size_per_gpu() * len(batches) * config.data.tokens_per_sample
        flops = _flops_per_step(engine, config, tokens)
        del facts["losses"]  # means over ranks that do not exist
        return facts | {"seconds": seconds, "tokens_per_step": tokens, "flops_per_step": flops}


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s that the device sustains in products of large random matrices."""
    size = MATRIX[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(PRODUCTS // 2):
        torch.mm(left, right)
    now = clock(device, waits=True)
    started = now()
    for _ in range(PRODUCTS):
        torch.mm(left, right)
    return PRODUCTS * 2 * size**3 / (now() - started)


def _engine(config: Config) -> SDPEngine:
    """Make an engine whose weights are drawn on the device.

    The engine itself draws on the CPU, which takes longer than the measurement of a large model.
    """
    with torch.device("meta"):
        model = model_and_batch(config)[0]()
    rule = get_parameter_init(model)
    if rule is None:
        return initialize(model=model_and_batch(config)[0](), config=config)[0]
    model.parameter_init = lambda name: Constant(0.0)  # type: ignore[assignment]
    engine = initialize(model=model, config=config)[0]
    _draw_weights(engine, rule)
    return engine


@torch.no_grad()
def _draw_weights(engine: SDPEngine, rule: Callable[[str], Init]) -> None:
    """Draw all weights, because products of constant matrices run faster than those of training.

    Frozen copies are drawn too, because their holders do not exist here.
    """
    generator = torch.Generator(engine.device).manual_seed(0)
    for name, parameter in (engine.parameters_here | engine.frozen_here).items():
        init, local = rule(engine.layout.parameters[name].canonical), local_tensor(parameter.detach())
        if isinstance(init, Normal):
            local.normal_(0.0, init.std, generator=generator)
        else:
            assert isinstance(init, Constant)
            local.fill_(init.value)


def _flops_per_step(engine: SDPEngine, config: Config, tokens: int) -> float | None:
    flops = get_flops_per_token(engine.module)
    if flops is None or config.data.name is not None:
        return None
    layout = engine.layout
    costs = flops(config.data.sequence_length)
    return tokens * flops_per_token(costs, layout.placement, 0, keeps_frozen=layout.keeps_frozen) / layout.mesh.tp


def _joined(rounds: list[dict[str, Any]], rates: Mapping[str, float | None]) -> dict[str, Any]:
    """Join the rounds of one share: all seconds, the largest peak, and the speeds.

    ``rates`` has operations per second. The share of each rate that is reached is an MFU.
    """
    seconds, peaks = ([facts[key] for facts in rounds] for key in ("seconds", "peak_bytes"))
    share, median = rounds[0] | {"seconds": seconds, "peak_bytes": max(peaks)}, statistics.median(seconds)
    flops = share["flops_per_step"]
    mfu = {name: flops / median / rate if flops and rate else None for name, rate in rates.items()}
    return share | {"step_seconds": median, "tokens_per_second": share["tokens_per_step"] / median} | mfu


def _report(
    folder: Path,
    settings: dict[str, Any],
    rounds: dict[str, list[dict[str, Any]]],
    sustained: float,
    nominal: float | None,
) -> None:
    """Print the table, and write the report whole or not at all."""
    unit = "tokens/s" if settings["tokens_per_sample"] > 1 else "images/s"
    rates = {"mfu": nominal, "mfu_of_sustained": sustained}
    shares = {name: _joined(of_rounds, rates) for name, of_rounds in rounds.items()}
    ours, dense = shares["SDP"], shares["dense"]
    ratios = [theirs / mine for mine, theirs in zip(ours["seconds"], dense["seconds"], strict=True)]

    def column(key: str, scale: float = 1) -> list[Any]:
        return [share[key] and share[key] / scale for share in shares.values()]

    state = ["equal" if s["state_bytes"] == s["planned_state_bytes"] else "NOT equal" for s in shares.values()]
    rows = [
        plain_row("M parameters", column("parameters", 1e6), ",.2f", dense["parameters"] / 1e6),
        bytes_row("state", column("state_bytes"), dense["state_bytes"]),
        text_row("    counted against predicted", state),
        bytes_row("peak memory", column("peak_bytes"), dense["peak_bytes"]),
        plain_row("seconds of a step", column("step_seconds"), ".4f"),
        plain_row(unit, column("tokens_per_second"), ",.0f", dense["tokens_per_second"]),
        plain_row("speed over dense, by round", [statistics.median(ratios), 1.0], ".2f"),
        plain_row("MFU, of the data sheet's dense peak", column("mfu"), ".1%"),
        plain_row("    of measured matrix products", column("mfu_of_sustained"), ".1%"),
    ]
    settings |= {"nominal_flops_per_second": nominal, "matmul_flops_per_second": sustained}
    share = f"rank 0 of {settings['world']}, alone on {settings['device']}"
    print(f"{share}; collectives return at once, so speeds are upper bounds")
    print(Table(list(shares), rows).without_empty().without_last_ratios().text(), flush=True)
    content = {"settings": settings, "shares": shares, "speed_over_dense": ratios}
    write_whole(folder / REPORT, json.dumps(content, indent=2) + "\n")
