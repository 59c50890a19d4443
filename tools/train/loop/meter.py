"""Measures seconds, peak memory and sent bytes of steps, and makes the lines of metrics.jsonl."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, get_args

import torch

from ....engine.accounting.memory import PeakMemory
from ....engine.batch.mixture import MixtureSampler
from ....engine.config.method import Masking
from ....engine.distributed.collectives import Kind, Scope
from ....engine.distributed.heartbeat import Heartbeat
from ....engine.engine import SDPEngine
from ....engine.initialize import clock
from ....engine.model_interface import get_flops_per_token
from ....engine.placement.placement import Placement

TIMED = ("data", "forward", "backward", "optimizer")

_KINDS = [f"{scope}/{kind}" for scope in get_args(Scope) for kind in get_args(Kind)]
_ROW_BYTES = 8 * (3 + len(_KINDS))  # of a step's message: signal, peak and bytes sent


@dataclass
class StepFacts:
    """The measurements of one rank in one step.

    ``seconds`` maps keys of metrics.jsonl, such as "forward_seconds", to seconds of the step.
    """

    learning_rate: float
    peak_memory_bytes: int
    comm: dict[str, int]
    seconds: dict[str, float] = field(default_factory=dict)


class StepMeter:
    """Measures each step from :meth:`begin` to :meth:`end`.

    It also reports to the heartbeat what the rank is doing, so that a hanging rank can be found.
    """

    def __init__(self, engine: SDPEngine, beat: Heartbeat):
        config = engine.config
        self._engine, self._beat = engine, beat
        self._memory = PeakMemory(engine.device)
        # On CUDA the seconds of a part can only be measured by waiting for the device.
        # wall_clock_breakdown asks for that.
        self.times_each = engine.device.type != "cuda" or config.wall_clock_breakdown
        self._clock = clock(engine.device, waits=config.wall_clock_breakdown)
        self._is_first = True
        self._seconds: dict[str, float] = {}
        self._learning_rate = self._started = 0.0
        sync = config.sdp.sync
        # With local steps, the steps of a round send different things, so the mean is reported.
        self._sent: deque[dict[str, int]] = deque(maxlen=1 if sync is None else sync.every)

    def begin(self) -> None:
        engine = self._engine
        self._memory.reset()
        engine.traffic.reset()
        self._learning_rate = engine.get_lr()[0]
        self._seconds = {f"{part}_seconds": 0.0 for part in (*TIMED, "exposed_reduction")}
        self._started = time.perf_counter()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """A context that measures one activity of a step, such as "forward".

        Time that is spent waiting for averages counts separately. Profiles show ``name``.
        """
        engine, training = self._engine, self._engine.config.training
        # The first step also compiles, allocates and connects.
        seconds = training.start_timeout if self._is_first else training.step_timeout
        self._beat.at(engine.global_steps + 1, name, seconds)
        started, waited = self._clock(), engine.exposed_reduction_seconds
        with torch.profiler.record_function(name):
            yield
        exposed = engine.exposed_reduction_seconds - waited
        self._seconds[f"{name}_seconds"] += self._clock() - started - exposed
        self._seconds["exposed_reduction_seconds"] += exposed

    def end(self) -> StepFacts:
        """Finish the step and return its measurements."""
        engine = self._engine
        self._is_first = False
        # The message that StepLines sends for this step.
        engine.traffic.record("control", "all_reduce", _ROW_BYTES, range(engine.world_size))
        comm = engine.traffic.by_kind()
        if not engine.local_training.has_finished(engine.global_steps):  # not part of a round
            self._sent.append(comm)
        return StepFacts(self._learning_rate, self._memory.read(), comm, self._seconds)

    def sent_per_step(self) -> dict[str, int]:
        """Return the bytes that this rank sent in the newest step, by kind of message.

        With local steps, they are means over the last round.
        """
        total = Counter[str]()
        for comm in self._sent:
            total.update(comm)
        return {kind: round(sent / len(self._sent)) for kind, sent in sorted(total.items())}

    def elapsed(self) -> float:
        """Return the seconds since the step began."""
        return time.perf_counter() - self._started


class StepLines:
    """Makes the lines of metrics.jsonl from the measurements of all ranks.

    With local steps (``sdp.sync``), a line is finished some steps later, so that no step waits for
    a message of another group.
    """

    def __init__(self, engine: SDPEngine, utilisation: Utilisation, meter: StepMeter):
        self._engine, self._utilisation = engine, utilisation
        self._times_each = meter.times_each
        # Unfinished lines, each with a function that returns the maxima over the ranks, and with
        # the pending update of a local step.
        self._begun: deque[tuple[dict[str, Any], Callable[[], list[int]], Any]] = deque()

    def begin(self, facts: StepFacts, elapsed: float, signal: int) -> None:
        """Begin the line of metrics.jsonl for the newest step. Collective.

        Args:
            facts: the measurements of this rank.
            elapsed: the seconds of the step.
            signal: the signal that this rank has received, 0 if none.
        """
        engine, config = self._engine, self._engine.config
        tokens, schedule = config.data.tokens_per_sample, config.masking_schedule
        update = engine.local_training.pending
        is_known = update is None
        line: dict[str, Any] = {
            "step": engine.global_steps,
            "tokens": engine.global_samples * tokens,
            "samples": engine.global_samples,
            "loss": engine.get_loss() if is_known else None,
            "grad_norm": engine.get_global_grad_norm() if is_known else None,
            "lr": facts.learning_rate,
            "tokens_per_second": engine.train_batch_size() * tokens / elapsed,
            "samples_per_second": engine.train_batch_size() / elapsed,
            "step_seconds": elapsed,
            **dict.fromkeys(("peak_memory_bytes", "comm_bytes", "comm_bytes_by_kind")),  # maxima over the ranks
            "skipped_steps": engine.skipped_steps if is_known else None,
        }
        masking = schedule.at(line["step"])
        line |= self._utilisation.of(line["tokens_per_second"], masking)
        if schedule.ends:
            line["masking"] = masking
        is_served = engine.local_training.service is not None  # this group reads positions of its own
        if isinstance(engine.loader.sampler, MixtureSampler) and not is_served:
            line["source_samples"] = engine.loader.sampler.counts_at(engine.loader.consumed)
        if config.training.on_spike != "none":
            line |= {"spikes_skipped": engine.spikes.skipped, "rollbacks": engine.spikes.rollbacks}
        line |= engine.local_training.metrics()
        if engine.get_loss_scale() is not None:
            line["loss_scale"] = engine.get_loss_scale()
        if self._times_each:
            line |= facts.seconds
        sent = [facts.comm.get(kind, 0) for kind in _KINDS]
        most = engine.start_max([signal, facts.peak_memory_bytes, sum(facts.comm.values()), *sent])
        self._begun.append((line, most, update))

    def finished(self, *, except_newest: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield finished lines of metrics.jsonl in the order of their steps, each line once.
        Collective.

        Args:
            except_newest: how many of the newest lines may be left for a later call.

        Yields:
            A line, and the signal that any rank had received by the end of its step, 0 if none.
        """
        while len(self._begun) > except_newest:
            line, most, update = self._begun.popleft()
            signal, line["peak_memory_bytes"], line["comm_bytes"], *by_kind = most()
            line["comm_bytes_by_kind"] = {kind: sent for kind, sent in zip(_KINDS, by_kind, strict=True) if sent}
            if update is not None:
                line["loss"], line["grad_norm"] = update.wait().loss, update.wait().norm
                line["skipped_steps"] = self._engine.skipped_until(line["step"])
            yield line, signal


# -- model FLOPs utilisation (MFU) -----------------------------------------------------------------
#
# The share of the devices' dense peak that the model's operations take. The definition is PaLM's
# (arXiv 2204.02311, appendix B). Recomputation does not count. A group counts only the operations
# of its own subnetwork.

# TFLOP/s of dense bfloat16 matrix products in NVIDIA's data sheets, by device name.
NOMINAL_TFLOPS = {
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H200": 989.4,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
}


def nominal_flops(device: torch.device, precision: str) -> float | None:
    """Return the dense peak of ``device`` in its data sheet, in operations per second.

    Returns None on a CPU, in float32, and for a device that is not in the table.
    """
    if device.type != "cuda" or precision == "float32":
        return None
    peak = NOMINAL_TFLOPS.get(torch.cuda.get_device_name(device))
    return None if peak is None else peak * 1e12


class Utilisation:
    """Computes the model FLOPs utilisation (MFU) of a run from its tokens per second.

    The MFU is not known if the device's peak is unknown (:func:`nominal_flops`), or if the model
    has no ``flops_per_token``.
    """

    def __init__(self, engine: SDPEngine, sequence_length: int):
        flops = get_flops_per_token(engine.module)
        self._peak = nominal_flops(engine.device, engine.config.precision)
        self._flops: dict[Masking, float] = {}  # of a device, for each token of the run
        if flops is not None and self._peak is not None:
            placement, costs = engine.layout.placement, flops(sequence_length)
            for masking in engine.config.sdp.maskings:
                of_group = mean_flops_per_token(costs, placement, keeps_frozen=masking == "backward")
                self._flops[masking] = of_group / engine.world_size

    def of(self, tokens_per_second: float, masking: Masking) -> dict[str, float]:
        """Return ``mfu`` and ``flops_per_second`` of a device, or {} if the MFU is unknown.

        ``tokens_per_second`` counts the whole run. ``masking`` is the masking of these steps, on
        which the operations for a token depend.
        """
        if masking not in self._flops or self._peak is None:
            return {}
        rate = self._flops[masking] * tokens_per_second
        return {"mfu": rate / self._peak, "flops_per_second": rate}


def mean_flops_per_token(flops: Mapping[str, float], placement: Placement, *, keeps_frozen: bool) -> float:
    """Return the operations of forward and backward per token, averaged over the groups."""
    return fmean(
        flops_per_token(flops, placement, group, keeps_frozen=keeps_frozen) for group in range(placement.groups)
    )


def flops_per_token(flops: Mapping[str, float], placement: Placement, group: int, *, keeps_frozen: bool) -> float:
    """Return the operations of forward and backward per token in one group.

    Args:
        flops: The operations of each block of the full model, and of the rest as "shared".
        placement: Which group holds which unit.
        group: The number of the group.
        keeps_frozen: Whether the group runs frozen copies of the units that it does not hold. A
            copy takes two thirds of a unit's operations, because it needs no gradients of weights.
    """
    total = flops.get("shared", 0.0)
    for block, cost in flops.items():
        if block == "shared":
            continue
        # A block is a unit, or its neurons are several units.
        units = [index for index, name in enumerate(placement.units) if name == block or name.startswith(f"{block}.")]
        held = 1.0  # of a block that every group has
        if units:
            mine = sum(placement.costs[unit] for unit in units if group in placement.holders[unit])
            held = mine / sum(placement.costs[unit] for unit in units)
        total += cost * ((2 + held) / 3 if keeps_frozen else held)
    return total
