"""``summary.json``, with the figures of every rank of a finished run."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy
import torch

from ....engine.accounting.memory import state_bytes
from ....engine.distributed.collectives import sent_bytes
from ....engine.engine import SDPEngine
from ....engine.files import refuse_link
from ...report.facts import WARM_UP_STEPS
from ...report.render import render
from ...runs.dataset import Corpus
from ...runs.plot import plot_loss
from ...runs.run_files import PLOT, RunFiles, read_run


def write_summary(files: RunFiles, summary: dict[str, Any]) -> None:
    """Write summary.json and the plot of the loss, and print the report."""
    files.summary(summary)
    finished = read_run(files.dump_dir)
    for path in (files.dump_dir / PLOT, (files.dump_dir / PLOT).parent):
        refuse_link(path)
    plot_loss([finished], files.dump_dir / PLOT)
    try:
        print(render([finished]), flush=True)
    except BrokenPipeError:  # nobody reads it, as in `sdp train … | head`; summary.json has the figures
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_summary(
    engine: SDPEngine, corpus: Corpus, dump_dir: Path, ranks: list[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """Return the content of summary.json.

    Args:
        engine: the engine after the last step.
        corpus: the data of the run.
        dump_dir: the directory of the run.
        ranks: the figures of every rank: state, memory and traffic.
        seconds: wall time of the training.
    """
    layout, config = engine.layout, engine.config
    run = read_run(dump_dir)
    of_model = layout.parameters_at(0).values()  # of one path
    parameters, trained = sum(info.numel for info in of_model), sum(info.numel for info in of_model if info.trainable)
    settled = (line.get("tokens_per_second") for line in run.metrics if line["step"] > WARM_UP_STEPS)
    speeds = [speed for speed in settled if speed is not None]
    held = [layout.placement.held_fraction(group) for group in range(layout.mesh.sdp)] if layout.units else [1.0]
    losses = [line.get("loss") for line in run.evaluations]
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
            "stage": config.zero_optimization.stage,
            "engine": config.sdp.engine,
            "capacity": sum(held) / len(held),
            "units": len(layout.units),
            "paths": layout.paths,
        },
        "held_out": {"before": losses[0] if losses else None, "after": losses[-1] if losses else None} | accuracy,
        "corpus": {"sha256": corpus.sha256, "path": str(corpus.path)},
        "device": str(engine.device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__},
        "dense_state_bytes": {
            "parameters": 4 * parameters,
            "gradients": 4 * trained,
            "optimizer": sum(
                state_bytes(engine.optimizer, layout, info, info.numel) for info in of_model if info.trainable
            ),
        },
        "ddp_comm_bytes_per_step": round(sent_bytes("all_reduce", 4 * trained, layout.mesh.world_size)),
        "ranks": ranks,
    }
