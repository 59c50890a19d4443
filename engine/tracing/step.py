"""Traces one rank's training step: the memory it needs, what it computes and what it sends.

The engine itself runs the step, on fake tensors and a fake process group. Nothing is allocated and
nothing is sent, so a rank of any model in any world can be traced on any machine. Operators, hooks,
FSDP2's gathers and recomputation are those of a real step. torch's FakeTensorMode computes shapes
instead of values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule

from ..accounting.memory import StateBytes, predict_state_bytes
from ..batch.call import loss_of, tensors_in
from ..batch.size import BatchSize
from ..config.schema import Config
from ..construct import shard_model
from ..distributed.collectives import Among, Collective, local_tensor
from ..distributed.fake_world import fake_world
from ..engine import SDPEngine
from ..errors import LaunchError
from ..optim.muon import arrange as arrange_muon
from ..optim.optimizer_state import materialise_state
from ..optim.optimizers import make_optimizer
from ..placement.layout import Layout
from ..stores.fsdp2.sharding import unreduced_gradients
from ..subnetwork.carve import PassThrough
from ..subnetwork.materialise import allocate
from ..sync.outer import fragments_of
from .ledger import ACTIVATIONS, COMMUNICATION, GRADIENTS, Ledger, Window
from .operators import Device, operators_of
from .repetition import describe_blocks, kinds_of, left_out

CPU = torch.device("cpu")
MICRO_BATCHES = 2  # the most that are traced; all later ones are like the second


@dataclass(frozen=True)
class StepTrace:
    """The memory, operations and messages of one rank's step.

    Bytes are those that tensors ask for, as ``memory_probe.py`` counts them. Libraries' workspaces,
    the communication library's buffers and the allocator's rounding are not included.

    Attributes:
        rank: The rank.
        state: Bytes of weights, gradients and optimizer state, predicted from the layout.
        at_peak: Live bytes at the peak, by kind (:data:`~sdp.engine.tracing.ledger.KINDS`).
        activations: The most bytes of activations at once, which may not be at the peak.
        communication: The most bytes of communication at once, which may not be at the peak.
        combined: Bytes of activations and communication when their sum is largest.
        flops: Floating-point operations of the step as executed, including recomputation.
        collectives: What the rank sends in the step, except between groups. With local steps, the
            step averages no weights.
        blocks: The number of blocks that the step runs.
        traced_blocks: The number of blocks that were traced. It is lower if many blocks repeat a
            pattern: then the cost of one repetition is multiplied.
    """

    rank: int
    state: StateBytes
    at_peak: Mapping[str, int]
    activations: int
    communication: int
    combined: Mapping[str, int]
    flops: float
    collectives: tuple[Collective, ...]
    blocks: int
    traced_blocks: int

    @property
    def peak(self) -> int:
        return sum(self.at_peak.values())


def trace_step(
    build: Callable[[], nn.Module],
    config: Config,
    layout: Layout,
    batch: Callable[[int], Any],
    group: int,
    *,
    whole: bool = False,
    autocast: torch.dtype | None = None,
    device: Device = "cpu",
) -> StepTrace:
    """Trace the step of the first rank of ``group``, whose shards are the largest in the group.

    Compiled blocks (``training.compile``) are traced as if they were not compiled.

    Args:
        build: Makes the full model on the meta device.
        config: The configuration. It must be in float32 if ``autocast`` is given.
        layout: The layout of the full model.
        batch: Makes a micro-batch of a given number of samples on the CPU, in fake mode.
        group: The SDP group.
        whole: Whether to run every block, even if a pattern of blocks repeats often.
        autocast: The precision of torch's autocast in the forward pass, with its rules for a CPU,
            or None for no autocast.
        device: The kind of device whose operators run.

    Raises:
        LaunchError: This process has a process group already.
    """
    if dist.is_initialized():
        raise LaunchError(
            "a plan makes its own process group, but this process has one already; plan without a launcher"
        )
    config = config.model_copy(update={"training": config.training.model_copy(update={"compile": False})})
    plain, config = config, _with_an_average(config)
    runs, skipped = kinds_of(describe_blocks(build(), layout, group))
    repeated = [] if whole else left_out(runs, layout.blocks)
    middles = {name for repetitions in repeated for names in repetitions for name in names}

    def run(present: Sequence[str] = ()) -> _Run:
        absent = [[name for name in names if name in middles and name not in present] for names in runs]
        return _run(build(), config, layout, [*filter(None, absent), *skipped], middles, batch, group, autocast)

    # Trace one more repetition of each pattern, between the first ones and the last ones. Every
    # repetition that is left out adds as much as this one.
    with operators_of(device):
        base, longer = run(), [(run(repetitions[0]), len(repetitions)) for repetitions in repeated]
    trace = _extrapolated(base, longer, layout.mesh.rank(group), sum(map(len, runs)))
    return _with_averages_under_way(trace, layout, plain)


def _with_an_average(config: Config) -> Config:
    """Return a configuration in which every local step averages all weights."""
    training = config.training.model_copy(update={"loss_weighting": None})  # there are no labels to count
    config, sync = config.model_copy(update={"training": training}), config.sdp.sync
    if sync is None:
        return config
    every = {"every": 1, "fragments": 1, "overlap": 0, "start_after": 0}
    section = config.sdp.model_copy(update={"sync": sync.model_copy(update=every)})
    return config.model_copy(update={"sdp": section})


def _with_averages_under_way(trace: StepTrace, layout: Layout, config: Config) -> StepTrace:
    sync, shards = config.sdp.sync, layout.mesh.shards(config.zero_optimization.stage)
    if sync is None or not sync.overlap:
        return trace
    fragment_of, most = fragments_of(layout, sync.fragments), Counter[int]()
    for info in layout.held(layout.mesh.coordinates(trace.rank).sdp):
        most[fragment_of[info.name]] += info.shard_numel(shards, 0) * 4
    both = 2 * max(most.values(), default=0)
    return replace(trace, at_peak={**trace.at_peak, "outer": trace.at_peak.get("outer", 0) + both})


@dataclass(frozen=True)
class _Run:
    """The result of one traced step.

    ``sent`` has the bytes that the real step sends, as whole buffers. ``flops`` are those of the
    traced step. ``steps`` is the number of micro-batches of the real step divided by that of the
    traced step.
    """

    state: StateBytes
    windows: Mapping[str, Window]
    flops: float
    sent: Counter[Among]
    steps: float
    blocks: int


def _extrapolated(base: _Run, longer: Sequence[tuple[_Run, int]], rank: int, blocks: int) -> StepTrace:
    windows = dict(base.windows)
    flops, sent = base.flops, Counter(base.sent)
    for run, times in longer:
        windows = {name: window.plus(run.windows[name], base.windows[name], times) for name, window in windows.items()}
        flops += times * (run.flops - base.flops)
        for key in run.sent:
            sent[key] += times * (run.sent[key] - base.sent[key])
    return StepTrace(
        rank=rank,
        state=base.state,
        at_peak=max((window.at_peak for window in windows.values()), key=lambda peak: peak.total()),
        activations=max(window.most[ACTIVATIONS] for window in windows.values()),
        communication=max(window.most[COMMUNICATION] for window in windows.values()),
        combined=max((window.combined for window in windows.values()), key=lambda both: both.total()),
        flops=flops * base.steps,
        collectives=tuple(Collective(*key, nbytes) for key, nbytes in sent.items() if key[0] != "between groups"),
        blocks=blocks,
        traced_blocks=base.blocks,
    )


def _run(
    model: nn.Module,
    config: Config,
    full: Layout,
    absent: list[list[str]],
    middles: set[str],
    batch: Callable[[int], Any],
    group: int,
    autocast: torch.dtype | None,
) -> _Run:
    """Trace the step without the blocks ``absent``.

    The other blocks of ``middles`` share one window, which belongs to no block.
    """
    size, rank = BatchSize.resolve(config, full.mesh), full.mesh.rank(group)
    accumulation = min(size.accumulation, MICRO_BATCHES)
    with fake_world(rank, full.mesh.world_size):
        store = shard_model(model, config, full, CPU, prepare=partial(_without_blocks, absent))
        layout, context = store.layout, store.context
        with FakeTensorMode(allow_non_fake_inputs=True):
            allocate(model, layout, CPU)
            store.ready()
            trained = [parameter for parameter in store.parameters.values() if parameter.requires_grad]
            optimizer, _ = make_optimizer(config.optimizer, None, [{"params": trained}], CPU, grouped=True)
            arrange_muon(optimizer, layout, store.parameters, context.tensor_ranks, context.traffic)
            materialise_state(optimizer)
            store.optimizer = optimizer
            engine = SDPEngine(store, config, replace(size, accumulation=accumulation), optimizer, None)
            if (local := engine.local_training.local) is not None:
                materialise_state(local.outer.optimizer)
            ledger, sent = watched_step(engine, layout.blocks, middles, batch, autocast)
    return _Run(
        state=predict_state_bytes(full, rank, optimizer, config),
        windows=ledger.windows,
        flops=ledger.flops,
        sent=_of_all_micro_batches(sent, size.accumulation),
        steps=size.accumulation / accumulation,
        blocks=len(layout.blocks),
    )


def _without_blocks(absent: Sequence[Sequence[str]], model: nn.Module, layout: Layout) -> Layout:
    """Remove the blocks ``absent`` (lists of identical blocks). Return the layout without them."""
    if not absent:
        return layout
    for identical in absent:
        nothing = PassThrough(identical[0], model.get_submodule(identical[0]))
        for name in identical:
            model.set_submodule(name, nothing)
    return layout.without({name for identical in absent for name in identical})


def watched_step(
    engine: SDPEngine,
    blocks: Sequence[str],
    middles: set[str],
    batch: Callable[[int], Any],
    autocast: torch.dtype | None = None,
) -> tuple[Ledger, list[Counter[Among]]]:
    """Run forward, backward and update of ``engine``, and count memory, operations and messages.

    A new window of the step begins with the forward and with the backward pass of each block. The
    tensors are on the CPU, and may be fake.

    Args:
        engine: The engine whose step runs.
        blocks: The names of the blocks.
        middles: The names of blocks that share one window.
        batch: Makes a micro-batch of a given number of samples.
        autocast: The precision of torch's autocast in the forward pass, or None for no autocast.

    Returns:
        The ledger with the windows, and the bytes that the rank sent in each micro-batch and in the
        update. Bytes are those of whole buffers. Averages of weights (local steps) are left out.
    """
    ledger = Ledger(CPU)
    ledger.know((local_tensor(p.detach()) for p in engine.parameters_here.values()), "parameters")
    ledger.know((local_tensor(p.detach()) for p in engine.frozen_here.values()), "frozen")
    ledger.know(engine.module.buffers(), "buffers")
    ledger.know(engine.local_training.tensors_on_device(), "outer")
    states = (
        value
        for state in engine.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    ledger.know((local_tensor(state) for state in states), "optimizer")

    def is_gradient(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            ledger.know([local_tensor(parameter.grad)], GRADIENTS)

    for parameter in engine.parameters_here.values():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(is_gradient)
    for name in blocks:
        _mark(engine.module.get_submodule(name), "" if name in middles else name, ledger)
    sent: list[Counter[Among]] = []
    average = engine.local_training.after_step

    def note_sent() -> None:
        sent.append(engine.traffic.buffers.copy())
        engine.traffic.reset()

    def after_step(step: int, schedule: Any) -> int:
        note_sent()
        return average(step, schedule)

    engine.local_training.after_step = after_step  # type: ignore[method-assign]
    engine.traffic.reset()
    with ledger:
        for _ in range(engine.gradient_accumulation_steps()):
            ledger.enter_window("forward")
            with torch.autocast(CPU.type, autocast, enabled=autocast is not None):
                loss = loss_of(engine(batch(engine.train_micro_batch_size_per_gpu())))
            engine.backward(loss)
            sharded = [module for module in engine.module.modules() if isinstance(module, FSDPModule)]
            ledger.know((kept for module in sharded for kept in unreduced_gradients(module)), GRADIENTS)
            ledger.enter_window("update")
            note_sent()
            engine.step()
    note_sent()
    return ledger, sent[: engine.gradient_accumulation_steps() + 1]


def _of_all_micro_batches(sent: Sequence[Counter[Among]], count: int) -> Counter[Among]:
    """Return the bytes that a step of ``count`` micro-batches sends, with the update.

    ``sent`` has the bytes of the first and the last micro-batch, and of the update. A micro-batch
    between them sends what both send: it gathers no weights that are still there, and reduces no
    gradients that the last one reduces.
    """
    *micro_batches, _ = sent
    total = Counter[Among]()
    for counts in sent:
        total.update(counts)
    for key, nbytes in (micro_batches[0] & micro_batches[-1]).items():
        total[key] += nbytes * (count - len(micro_batches))
    return total


def _mark(block: nn.Module, name: str, ledger: Ledger) -> None:
    """Make the ledger enter a window in each pass of ``block``.

    Window "forward NAME" starts when the block is called. Window "backward NAME" starts when its
    output has a gradient. All blocks with an empty name share their windows.
    """

    def called(*_: Any) -> None:
        ledger.enter_window(f"forward {name}")

    def returned(_: nn.Module, __: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: ledger.enter_window(f"backward {name}"))

    block.register_forward_pre_hook(called, prepend=True)
    block.register_forward_hook(returned)
