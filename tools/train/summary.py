"""What a finished run says of itself in ``summary.json``: measured beside planned, for every rank."""

from __future__ import annotations

import platform
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from ...engine.accounting.memory import state_tensors
from ...engine.accounting.traffic_plan import data_parallel_traffic
from ...engine.engine import SDPEngine
from ..runs.dataset import Corpus
from ..runs.run_files import read_run

WARM_UP_STEPS = 3  # the first allocates state, the second is probed


@dataclass
class StepFacts:
    """What one rank observed in one step."""

    loss: float
    learning_rate: float
    peak_memory_bytes: int
    comm: dict[str, int]
    seconds: dict[str, float] = field(default_factory=dict)


def rank_facts(engine: SDPEngine, last: StepFacts | None, baseline: int, peak_tensors: int | None) -> dict[str, Any]:
    """One rank's state, memory and traffic, the latter of its ``last`` step.

    ``baseline``: bytes resident before the model existed. ``peak_tensors``: peak bytes of live tensors in the probed step.
    """
    return {
        "rank": engine.global_rank,
        "group": engine.layout.mesh.coordinates(engine.global_rank).sdp,
        "state_predicted": engine.predicted_state_bytes().to_json(),
        "state_measured": engine.measured_state_bytes().to_json(),
        "peak_memory_bytes": last.peak_memory_bytes if last else None,
        "baseline_memory_bytes": baseline,
        "peak_tensor_bytes": peak_tensors,
        "comm_bytes_per_step": last.comm if last else {},
        "comm_bytes_planned": engine.planned_traffic().by_kind(),
    }


def run_summary(
    engine: SDPEngine, corpus: Corpus, dump_dir: Path, ranks: list[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """The whole run's summary, on rank 0. ``ranks``: every rank's :func:`rank_facts`; ``seconds``: wall time of the training."""
    layout, config = engine.layout, engine.config
    run = read_run(dump_dir)
    parameters = sum(info.numel for info in layout.parameters.values())
    trained = sum(info.numel for info in layout.parameters.values() if info.trainable)
    speeds = [line["tokens_per_second"] for line in run.metrics if line["step"] > WARM_UP_STEPS]
    held = [layout.placement.held_fraction(group) for group in range(layout.mesh.sdp)] if layout.units else [1.0]
    losses = [line["loss"] for line in run.evaluations]
    accuracy = {key: line[key] for line in run.evaluations[-1:] for key in ("accuracy",) if key in line}
    return {
        "steps": engine.global_steps,
        "tokens": engine.global_samples * config.data.tokens_per_sample,
        "samples": engine.global_samples,
        "seconds": seconds,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "model": {"name": config.model["name"], "parameters": parameters},
        "layout": {
            "sdp": layout.mesh.sdp,
            "fsdp": layout.mesh.fsdp,
            "tp": layout.mesh.tp,
            **({"group_sizes": list(layout.mesh.sizes)} if layout.mesh.sizes else {}),
            "stage": config.zero_optimization.stage,
            "engine": config.sdp.engine,
            "capacity": sum(held) / len(held),
            "units": len(layout.units),
        },
        "held_out": {"before": losses[0] if losses else None, "after": losses[-1] if losses else None} | accuracy,
        "corpus": {"sha256": corpus.sha256, "path": str(corpus.path)},
        "device": str(engine.device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__},
        "dense_state_bytes": {
            "parameters": 4 * parameters,
            "gradients": 4 * trained,
            "optimizer": 4 * trained * state_tensors(engine.optimizer),
        },
        "ddp_comm_bytes_per_step": data_parallel_traffic(layout).total(),
        "ranks": ranks,
    }
