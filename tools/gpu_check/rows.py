"""The rows of ``sdp gpu-check``, in the order in which they are measured, and their plans.

A row is a configuration and a way to train it. Plans are made on CPU cores while the GPU works.
"""

from __future__ import annotations

import itertools
import multiprocessing
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from ...engine.config.load import load_config
from ...engine.distributed.mesh import mesh_of
from ...engine.environment.detect import export
from ...engine.json_files import read_json_file
from ...engine.placement.layout import Layout
from ...engine.tracing.operators import Device
from ...engine.tracing.step import trace_step
from ...models.registry import build_model
from ..shared.variants import Variant, variants

GROUPS = 8
DENSE = Variant(1.0)
VARIANTS = [DENSE, *variants((0.75, 0.5, 0.375), ("block", "neuron"), ("forward", "backward"))]
# Samples of a step: so many that matrix products dominate kernel launches and the update. All fit
# into 80 GB.
MICRO_BATCHES = {"llama_1b": 16, "llama_134m": 32, "llama_500m": 16}
CONFIGS = tuple(MICRO_BATCHES)
SEQUENCE = 2048
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 2, "vocab_size": 128}
TINY_SEQUENCE, TINY_MICRO_BATCH = 32, 2


@dataclass(frozen=True)
class Row:
    """A ready configuration trained one way. Plans always describe the uncompiled program."""

    config: str
    variant: Variant
    compiled: bool = True

    @property
    def name(self) -> str:
        return self.variant.name if self.compiled else f"{self.variant.name} uncompiled"

    @property
    def family(self) -> tuple[str, str, str, bool]:
        """Rows of a family run the same compiled blocks.

        Forward masking leaves blocks as the dense model has them.
        """
        granularity, masking = (
            ("block", "forward") if self.variant == DENSE else (self.variant.granularity, self.variant.masking)
        )
        return self.config, granularity, masking, self.compiled


UNCOMPILED = Row(CONFIGS[0], Variant(0.5, "block", "forward"), compiled=False)
NAMES = [*(variant.name for variant in VARIANTS), UNCOMPILED.name]


def rows(configs: Sequence[str], names: Sequence[str]) -> list[Row]:
    """Return the rows: first those with goals (dense, blocks under forward masking), then the other
    0.5 rows.
    """
    chosen = [variant for variant in VARIANTS if variant.name in names]
    goals = [v for v in chosen if v == DENSE or (v.granularity, v.masking) == ("block", "forward")]
    halves = [v for v in chosen if v not in goals and v.capacity == 0.5]
    rest = [v for v in chosen if v not in goals and v not in halves]
    ordered: list[Row] = []
    for config in configs:
        ordered += [Row(config, variant) for variant in goals]
        ordered += [UNCOMPILED] if config == UNCOMPILED.config and UNCOMPILED.name in names else []
    rest.sort(
        key=lambda variant: (variant.granularity, variant.masking)
    )  # rows of a family follow one another: they share compiled blocks
    ordered += [Row(*pair) for some in (halves, rest) for pair in itertools.product(configs, some)]
    return ordered


@dataclass(frozen=True)
class Job:
    """What a row runs: the configuration, one micro-batch a step, of sequences of so many
    tokens.
    """

    config: Mapping[str, Any]
    sequence: int


def job_of(row: Row, *, micro_batch: int | None = None, tiny: bool = False) -> Job:
    """The row's ready configuration, with ``micro_batch`` samples in place of this command's own
    number.
    """
    path = Path(__file__).parent.parent.parent / "configs" / f"{row.config}.json"
    config = read_json_file(path)
    config["sdp"] |= {"groups": GROUPS, "capacity": row.variant.capacity, "check_interval": 0}
    if row.variant.granularity:
        config["sdp"] |= {"granularity": row.variant.granularity, "masking": row.variant.masking}
    config |= {"gradient_accumulation_steps": 1, "training": {"compile": row.compiled}}
    config["train_micro_batch_size_per_gpu"] = micro_batch or (TINY_MICRO_BATCH if tiny else MICRO_BATCHES[row.config])
    config.pop("data")
    if tiny:
        config["model"] |= TINY
    return Job(config, TINY_SEQUENCE if tiny else SEQUENCE)


@dataclass(frozen=True)
class Planned:
    """What ``trace_step`` says of a share: bytes, and the operations of a step including
    recomputation.
    """

    state_bytes: int
    peak_memory_bytes: int
    flops: float


def planned(job: Job, device: Device) -> Planned:
    """Plan the share of rank 0 from its step on fake tensors, with the operators of ``device``."""
    config = load_config(dict(job.config))
    with torch.device("meta"):
        layout = Layout.of(build_model(config.model), config, mesh_of(config, GROUPS))

    def batch(samples: int) -> dict[str, torch.Tensor]:
        ids = torch.zeros(samples, job.sequence, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids.clone()}

    trace = trace_step(partial(build_model, config.model), config, layout, batch, 0, device=device)
    return Planned(trace.state.total, trace.peak, trace.flops)


class Plans:
    """Plans of all ``jobs``, made ahead in ``workers`` processes without a GPU.

    With 0 workers, this process makes each plan when it is asked for.
    """

    def __init__(self, jobs: Mapping[Row, Job], workers: int, device: Device):
        self._jobs, self._workers = jobs, workers
        self._device: Device = device
        self._pool: ProcessPoolExecutor | None = None
        self._begun: dict[Row, Future[Planned]] = {}

    def __enter__(self) -> Self:
        if self._workers:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, mp_context=spawn, initializer=_begin_worker)
            self._begun = {row: self._pool.submit(planned, job, self._device) for row, job in self._jobs.items()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def of(self, row: Row) -> Planned:
        """Wait for the plan of ``row``. Raises what planning raised."""
        return self._begun[row].result() if row in self._begun else planned(self._jobs[row], self._device)


def _begin_worker() -> None:
    """Hide the GPU, where each process would take memory, and leave interrupts to the parent."""
    export({"CUDA_VISIBLE_DEVICES": ""})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
