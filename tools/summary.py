"""What a finished run says of itself in ``summary.json``: measured beside planned, for every rank."""

from __future__ import annotations

import platform
import statistics
from typing import TYPE_CHECKING, Any

import numpy
import torch

from ..engine.memory import state_tensors
from ..engine.traffic_plan import data_parallel_traffic
from .metrics import read_run

if TYPE_CHECKING:
    from .train import Trainer

WARM_UP_STEPS = 3  # the first allocates state, the second is probed


def rank_facts(trainer: Trainer) -> dict[str, Any]:
    """One rank's state, memory and traffic."""
    engine, facts = trainer.engine, trainer.last_facts
    return {
        "rank": engine.global_rank,
        "group": engine.layout.mesh.coordinates(engine.global_rank).sdp,
        "state_predicted": engine.predicted_state_bytes().to_json(),
        "state_measured": engine.measured_state_bytes().to_json(),
        "peak_memory_bytes": facts.peak_memory_bytes if facts else None,
        "baseline_memory_bytes": trainer.baseline_memory,
        "peak_tensor_bytes": trainer.peak_tensors,
        "comm_bytes_per_step": facts.comm if facts else {},
        "comm_bytes_planned": engine.planned_traffic().by_kind(),
    }


def run_summary(trainer: Trainer, ranks: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The whole run's summary, on rank 0. ``ranks``: every rank's :func:`rank_facts`; ``seconds``: wall time of the training."""
    engine, layout = trainer.engine, trainer.engine.layout
    run = read_run(trainer.dump_dir)
    parameters = sum(info.numel for info in layout.parameters.values())
    trained = sum(info.numel for info in layout.parameters.values() if info.trainable)
    speeds = [line["tokens_per_second"] for line in run.metrics if line["step"] > WARM_UP_STEPS]
    held = [layout.placement.held_fraction(group) for group in range(layout.mesh.sdp)] if layout.units else [1.0]
    losses = [line["loss"] for line in run.evaluations]
    index = trainer.corpus.train.index
    return {
        "steps": engine.global_steps,
        "tokens": engine.global_steps * trainer.tokens_per_step,
        "seconds": seconds,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "model": {"name": trainer.config.model["name"], "parameters": parameters},
        "layout": {
            "sdp": layout.mesh.sdp,
            "fsdp": layout.mesh.fsdp,
            "tp": layout.mesh.tp,
            "stage": trainer.config.zero_optimization.stage,
            "engine": trainer.config.sdp.engine,
            "capacity": sum(held) / len(held),
            "units": len(layout.units),
        },
        "held_out": {"before": losses[0] if losses else None, "after": losses[-1] if losses else None},
        "corpus": {"sha256": index.corpus.sha256, "path": str(trainer.corpus.train.directory)},
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
