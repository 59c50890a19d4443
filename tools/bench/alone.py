"""``sdp bench CONFIG --alone``: one rank's share of a run on one device, dense and SDP in turns.

The other ranks do not exist (torch's fake process group: collectives return at once). So memory is
exact, and the speed is an upper bound: that of a network that hides all traffic. In every round,
each of the two is built, warmed up, timed and removed, in alternating order.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from ...engine.accounting.memory_probe import peak_tensor_bytes
from ...engine.config.schema import Config
from ...engine.distributed.collectives import local_tensor
from ...engine.distributed.fake_world import fake_world
from ...engine.distributed.mesh import mesh_of
from ...engine.engine import SDPEngine
from ...engine.environment.detect import detect
from ...engine.errors import ConfigError, LaunchError, NonFiniteError
from ...engine.files import write_whole
from ...engine.initialize import clock, initialize
from ...engine.model_interface import Constant, Init, Normal, get_flops_per_token, get_parameter_init
from ..plan.ways import dense_config
from ..runs.model_inputs import model_and_batch
from ..shared.device_peaks import nominal_flops
from ..shared.table import Table, bytes_row, plain_row, text_row
from ..train.loop.utilisation import flops_per_token
from .measure import WARM_UP, make_batches
from .report import REPORT, make_folder

PRODUCTS, MATRIX = 200, {"cuda": 8192, "cpu": 512}  # of the measured rate of matrix products


@dataclass(frozen=True)
class Share:
    """What one rank's share needs.

    Attributes:
        parameters: The parameters that the rank trains.
        state_bytes: Weights, gradients, optimizer state and frozen copies, as measured.
        predicted_state_bytes: The same by the placement.
        peak_bytes: The most that live tensors need in a step (CUDA: that torch allocated).
        step_seconds: The seconds of each timed step.
        tokens_per_step: Tokens (or images) of the rank in a step.
        flops_per_step: Operations of the model in a step, without recomputation. None if the model
            does not declare them.
    """

    parameters: int
    state_bytes: int
    predicted_state_bytes: int
    peak_bytes: int
    step_seconds: list[float]
    tokens_per_step: int
    flops_per_step: float | None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / statistics.median(self.step_seconds)

    def mfu(self, rate: float | None) -> float | None:
        """Model FLOPs utilisation: the operations a second over ``rate``."""
        if self.flops_per_step is None or rate is None:
            return None
        return self.flops_per_step / statistics.median(self.step_seconds) / rate


def run(args: argparse.Namespace, config: Config) -> int:
    """Measure both shares, print the table, and write the report."""
    if detect() is not None:
        raise LaunchError("sdp bench --alone: measures one device in one process; start it without a launcher")
    if config.sdp.engine != "fsdp2":
        raise ConfigError(f'sdp.engine: "{config.sdp.engine}" is not measured alone; add --set sdp.engine=fsdp2')
    make_folder(args.out)
    world = args.nproc or config.sdp.groups * config.tensor_parallel.autotp_size
    configs = {"SDP": config, "dense": dense_config(config, config.sdp.groups, config.zero_optimization.stage)}
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    sustained = matmul_rate(device, getattr(torch, config.precision))
    rounds: dict[str, list[Share]] = {name: [] for name in configs}
    for number in range(args.rounds):
        for name in list(configs)[:: 1 if number % 2 == 0 else -1]:
            rounds[name].append(measure(configs[name], world, args.steps, device))
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    _report(args, config, world, rounds, sustained, nominal_flops(device, config.precision))
    return 0


def measure(config: Config, world: int, steps: int, device: torch.device) -> Share:
    """Measure the share of rank 0 of ``world`` ranks.

    Raises:
        NonFiniteError: A step was skipped, or the loss is NaN or infinite: what was timed is not
            training.
    """
    with fake_world(0, world), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        engine, now = _engine(config), clock(device, waits=True)
        step, tokens = _stepper(engine, config)
        for _ in range(WARM_UP):
            _require_training(engine, step())
        seconds = []
        for _ in range(steps):
            started = now()
            loss = step()
            seconds.append(now() - started)
            _require_training(engine, loss)
        peak = peak_tensor_bytes(step, engine.module, engine.optimizer, device)
        return Share(
            parameters=sum(parameter.numel() for parameter in engine.parameters_here.values()),
            state_bytes=engine.measured_state_bytes().total,
            predicted_state_bytes=engine.predicted_state_bytes().total,
            peak_bytes=peak,
            step_seconds=seconds,
            tokens_per_step=tokens,
            flops_per_step=_flops_per_step(engine, config, tokens),
        )


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the sustained rate of products of two random square matrices, in FLOP/s."""
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


def _stepper(engine: SDPEngine, config: Config) -> tuple[Callable[[], torch.Tensor], int]:
    """Return a function that makes a training step on random data and returns the loss, and the
    tokens (or images) of a step.
    """
    batches = make_batches(config, engine.device)

    def step() -> torch.Tensor:
        losses = []
        for batch in batches:
            losses.append(engine.backward(engine(batch)).detach())
            engine.step()
        return losses[-1]

    return step, engine.train_micro_batch_size_per_gpu() * len(batches) * config.data.tokens_per_sample


def _require_training(engine: SDPEngine, loss: torch.Tensor) -> None:
    if engine.skipped_steps or not math.isfinite(loss.item()):
        raise NonFiniteError(
            f"{engine.skipped_steps} steps were skipped, and the loss is {loss.item()}: what was timed is not "
            "training; lower optimizer.params.lr"
        )


def _flops_per_step(engine: SDPEngine, config: Config, tokens: int) -> float | None:
    flops = get_flops_per_token(engine.module)
    if flops is None or config.data.name is not None:
        return None
    layout = engine.layout
    costs = flops(config.data.sequence_length)
    return tokens * flops_per_token(costs, layout.placement, 0, keeps_frozen=layout.keeps_frozen) / layout.mesh.tp


def _joined(rounds: list[Share]) -> Share:
    """Return one share with the steps of all rounds and the largest peak."""
    seconds = [second for share in rounds for second in share.step_seconds]
    peak = max(share.peak_bytes for share in rounds)
    return Share(**{**asdict(rounds[0]), "step_seconds": seconds, "peak_bytes": peak})


def _report(
    args: argparse.Namespace,
    config: Config,
    world: int,
    rounds: dict[str, list[Share]],
    sustained: float,
    nominal: float | None,
) -> None:
    """Print the table, and write the report whole or not at all."""
    unit = "tokens/s" if config.data.name is None else "images/s"
    shares = {name: _joined(of_rounds) for name, of_rounds in rounds.items()}
    pairs = zip(rounds["SDP"], rounds["dense"], strict=True)
    ratios = [ours.tokens_per_second / other.tokens_per_second for ours, other in pairs]
    measured, dense_share = list(shares.values()), shares["dense"]
    state = ["equal" if share.state_bytes == share.predicted_state_bytes else "NOT equal" for share in measured]
    rows = [
        plain_row("M parameters", [s.parameters / 1e6 for s in measured], ",.2f", dense_share.parameters / 1e6),
        bytes_row("state", [s.state_bytes for s in measured], dense_share.state_bytes),
        text_row("    counted against predicted", state),
        bytes_row("peak memory", [s.peak_bytes for s in measured], dense_share.peak_bytes),
        plain_row("seconds of a step", [statistics.median(s.step_seconds) for s in measured], ".4f"),
        plain_row(unit, [s.tokens_per_second for s in measured], ",.0f", dense_share.tokens_per_second),
        plain_row("speed over dense, by round", [statistics.median(ratios), 1.0], ".2f"),
        plain_row("MFU, of the data sheet's dense peak", [s.mfu(nominal) for s in measured], ".1%"),
        plain_row("    of measured matrix products", [s.mfu(sustained) for s in measured], ".1%"),
    ]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu ({platform.machine()})"
    settings = {
        "config": str(args.config), "model": config.model, "sdp": config.sdp.model_dump(mode="json"), "world": world,
        "mesh": str(mesh_of(config, world)), "device": device, "torch": torch.__version__,
        "precision": config.precision, "nominal_flops_per_second": nominal,
        "matmul_flops_per_second": sustained, "rounds": args.rounds, "steps": args.steps,
    }  # fmt: skip
    print(f"rank 0 of {world}, alone on {device}; collectives return at once, so speeds are upper bounds")
    print(Table(list(shares), rows).without_empty().without_last_ratios().text(), flush=True)
    figures = {
        name: asdict(share)
        | {
            "tokens_per_second": share.tokens_per_second,
            "mfu": share.mfu(nominal),
            "mfu_of_sustained": share.mfu(sustained),
        }
        for name, share in shares.items()
    }
    content = {"settings": settings, "shares": figures, "speed_over_dense": ratios}
    write_whole(args.out / REPORT, json.dumps(content, indent=2) + "\n")
