"""One row of ``sdp gpu-check``: the engine's real steps on one rank's share.

The row gives step times, peak memory and the kernels that ran.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ...engine.accounting.memory import PeakMemory
from ...engine.distributed.fake_world import fake_world
from ...engine.distributed.tensors import local_tensor
from ...engine.engine import SDPEngine
from ...engine.errors import NonFiniteError
from ...engine.initialize import initialize
from ...engine.model_interface import Constant, Init, Normal, get_flops_per_token, get_parameter_init
from ...models.registry import build_model
from .rows import GROUPS, Job, Planned

WARM_UP = 2  # after the step that compiles; memory and optimizer state no longer change then
LEAST_STEPS, MOST_STEPS, SECONDS = 5, 12, 2.5  # timed steps: at least 5, then more until 2.5 s are over or 12 are done
TINY_STEPS = 2
# With 8192 x 8192 matrices this takes an H100 about 3.5 s, in which its clock settles to a
# sustained rate.
PRODUCTS, MATMUL_BATCHES = 10, 240
ATTENTION, UPDATE = "aten::_scaled_dot_product_", "aten::_fused_adamw_"
FLASH = {
    "cuda": {f"{ATTENTION}flash_attention", f"{ATTENTION}cudnn_attention"},  # cuDNN's is a flash kernel too
    "cpu": {f"{ATTENTION}flash_attention_for_cpu"},
}


class WrongKernelError(RuntimeError):
    """A step ran without a kernel that it was meant to use."""


@dataclass(frozen=True)
class Share:
    """The measurements of one rank's share.

    Attributes:
        peak_memory_bytes: ``torch.cuda.max_memory_allocated`` of the steps after compilation.
        before_bytes: What was in memory before the row began. It is part of the peak.
        requested_bytes: What tensors asked for at the peak, without ``before_bytes``. None on a
            CPU, where the peak is resident memory.
        flops_per_step: Operations of the model, without recomputation: of the units that the rank
            holds and of the shared part. None except for whole units under forward masking.
        kernels: Operators of attention and of the optimizer's update, from a profile of one step.
        graphs: Graphs compiled for this row. An earlier row may have left it some.
    """

    parameters: int
    micro_batch: int
    tokens_per_step: int
    state_bytes: int
    peak_memory_bytes: int
    before_bytes: int
    requested_bytes: int | None
    step_seconds: float
    timed_steps: int
    flops_per_step: float | None
    kernels: tuple[str, ...]
    graphs: int
    loss: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds

    def mfu(self, rate: float) -> float | None:
        """Model FLOPs utilisation: the model's operations a second over ``rate``, that of matrix
        products.
        """
        return None if self.flops_per_step is None else self.flops_per_step / self.step_seconds / rate

    def over_planned(self, planned: Planned) -> float:
        """The peak of allocated memory over the planned peak."""
        return self.peak_memory_bytes / planned.peak_memory_bytes

    def requested_over_planned(self, planned: Planned) -> float | None:
        return None if self.requested_bytes is None else self.requested_bytes / planned.peak_memory_bytes

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


def matmul_rate(device: torch.device, size: int) -> float:
    """Measure the sustained rate of bfloat16 products of two random square matrices, in FLOP/s.

    It is the median of the last third of the batches.
    """
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def products() -> None:
        for _ in range(PRODUCTS):
            torch.mm(left, right)

    seconds = time_calls(products, device, least=MATMUL_BATCHES, most=MATMUL_BATCHES)
    return PRODUCTS * 2 * size**3 / statistics.median(seconds[-MATMUL_BATCHES // 3 :])


def time_calls(
    work: Callable[[], Any], device: torch.device, *, least: int, most: int, seconds: float = math.inf
) -> list[float]:
    """Call ``work`` repeatedly and return the seconds of each call.

    On CUDA the times are those between events. So the host runs ahead of the device as in training.

    Args:
        work: What is timed.
        device: Where it runs.
        least: The least number of calls.
        most: The largest number of calls.
        seconds: After ``least`` calls, no call begins later than this.
    """
    ends, stamps = time.perf_counter() + seconds, []
    stamps.append(_stamp(device))
    while len(stamps) <= most and (len(stamps) <= least or time.perf_counter() < ends):
        work()
        stamps.append(_stamp(device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(stamps)]
    return [after - before for before, after in pairwise(stamps)]


def _stamp(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def measure(job: Job, device: torch.device, *, tiny: bool = False) -> Share:
    """Measure the share of a row's ``job``, in a fake world of its own.

    Raises:
        WrongKernelError: Attention is not a flash kernel, or the update is not fused.
        NonFiniteError: A step was skipped, or the loss is NaN or infinite.
    """
    # By default, torch runs blocks uncompiled once there are too many graphs, and only logs it.
    with fake_world(0, GROUPS), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        return _measured(job, device, tiny=tiny)


def _measured(job: Job, device: torch.device, *, tiny: bool) -> Share:
    memory = _Memory(device)
    compiled = _graphs()
    engine = _engine(job.config)
    step = _stepper(engine, job)
    for _ in range(1 + WARM_UP if not tiny else 1):
        loss = step().item()
        require_training(engine.skipped_steps, loss)  # first, so that a skipped step is not reported as a wrong kernel
    kernels = _operators(step)
    require_kernels(kernels, engine.optimizer.param_groups, device)
    memory.reset()
    most = TINY_STEPS if tiny else MOST_STEPS
    seconds = time_calls(step, device, least=min(LEAST_STEPS, most), most=most, seconds=SECONDS)
    loss = step().item()
    require_training(engine.skipped_steps, loss)
    micro_batch = engine.train_micro_batch_size_per_gpu()
    tokens = micro_batch * job.sequence
    return Share(
        parameters=sum(parameter.numel() for parameter in engine.parameters_here.values()),
        micro_batch=micro_batch,
        tokens_per_step=tokens,
        state_bytes=engine.measured_state_bytes().total,
        peak_memory_bytes=memory.allocated(),
        before_bytes=memory.before,
        requested_bytes=memory.requested(),
        step_seconds=statistics.median(seconds),
        timed_steps=len(seconds),
        flops_per_step=tokens * held_flops_per_token(engine, job.sequence) if _whole_units(engine) else None,
        kernels=tuple(sorted(name for name in kernels if name == UPDATE or _is_attention(name))),
        graphs=_graphs() - compiled,
        loss=loss,
    )


class _Memory:
    """Peaks on ``device`` since :meth:`reset`, and the bytes that were there before this object was
    made.
    """

    def __init__(self, device: torch.device):
        self._device, self._peak = device, PeakMemory(device)
        self.before = self._requested("current") if device.type == "cuda" else 0

    def _requested(self, what: str) -> int:
        return torch.cuda.memory_stats(self._device)[f"requested_bytes.all.{what}"]

    def reset(self) -> None:
        self._peak.reset()

    def allocated(self) -> int:
        return self._peak.read()

    def requested(self) -> int | None:
        return self._requested("peak") - self.before if self._device.type == "cuda" else None


def _engine(config: Mapping[str, Any]) -> SDPEngine:
    """Make an engine whose weights are drawn on the device.

    The engine itself draws on the CPU, which takes longer than the whole measurement.
    """
    model = build_model(config["model"])
    rule = get_parameter_init(model)
    assert rule is not None  # all models of the registry have it
    model.parameter_init = lambda name: Constant(0.0)  # type: ignore[assignment]
    engine = initialize(model=model, config=dict(config))[0]
    draw_weights(engine, rule)
    return engine


@torch.no_grad()
def draw_weights(engine: SDPEngine, rule: Callable[[str], Init]) -> None:
    """Draw all weights from the distributions that the model declares.

    Frozen copies are drawn too, because their holders do not exist here. Weights must be random:
    products of constant matrices need less power and run faster than those of training.
    """
    generator = torch.Generator(engine.device).manual_seed(0)
    for name, parameter in (engine.parameters_here | engine.frozen_here).items():
        init, local = rule(engine.layout.parameters[name].canonical), local_tensor(parameter.detach())
        if isinstance(init, Normal):
            local.normal_(0.0, init.std, generator=generator)
        else:
            assert isinstance(init, Constant)
            local.fill_(init.value)


def _stepper(engine: SDPEngine, job: Job) -> Callable[[], torch.Tensor]:
    """Return a function that makes one training step on random tokens and returns the loss."""
    shape = (engine.train_micro_batch_size_per_gpu(), job.sequence)
    tokens = torch.randint(job.config["model"]["vocab_size"], shape, generator=torch.Generator().manual_seed(0)).to(
        engine.device
    )

    def step() -> torch.Tensor:
        loss = engine.backward(engine({"input_ids": tokens, "labels": tokens}))
        engine.step()
        return loss.detach()

    return step


def _operators(step: Callable[[], Any]) -> set[str]:
    """Run a step and return the names of its operators, including those that compiled code
    calls.
    """
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        step()
    return {event.name for event in recorded.events() or ()}


def _is_attention(name: str) -> bool:
    return name.startswith(ATTENTION) and not name.endswith("_backward")


def require_kernels(
    operators: Collection[str], param_groups: Collection[Mapping[str, Any]], device: torch.device
) -> None:
    """Raise :class:`WrongKernelError` unless attention and the optimizer's update ran as intended.

    Attention that falls back to S x S scores has no operator of its own once it is compiled.

    Args:
        operators: The names of the operators of a step.
        param_groups: The optimizer's parameter groups.
        device: Where the step ran.
    """
    attention = {name for name in operators if _is_attention(name)}
    if not attention or attention - FLASH[device.type]:
        ran = ", ".join(sorted(attention - FLASH[device.type]))
        found = f"attention ran as {ran}" if ran else "attention did not run as one operator"
        raise WrongKernelError(f"{found}; expected {' or '.join(sorted(FLASH[device.type]))}")
    if UPDATE not in operators or not all(group.get("fused") for group in param_groups):
        raise WrongKernelError(f"the optimizer's update did not run as {UPDATE}")


def require_training(skipped: int, loss: float) -> None:
    """Raise :class:`NonFiniteError` if a step was skipped or the loss is NaN or infinite."""
    if skipped or not math.isfinite(loss):
        raise NonFiniteError(f"{skipped} steps were skipped, and the loss is {loss}: what was timed is not training")


def _graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _whole_units(engine: SDPEngine) -> bool:
    return engine.config.sdp.granularity == "block" and not engine.frozen_here


def held_flops_per_token(engine: SDPEngine, sequence: int) -> float:
    """Operations per token of the units that rank 0 holds and of the shared part."""
    flops = get_flops_per_token(engine.module)
    assert flops is not None  # the check runs LLaMA
    costs = flops(sequence)
    placement = engine.layout.placement
    absent = {unit for unit, holders in zip(placement.units, placement.holders, strict=True) if 0 not in holders}
    return sum(cost for unit, cost in costs.items() if unit not in absent)
