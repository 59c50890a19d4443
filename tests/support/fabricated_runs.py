"""Fabricated runs on disk, written by the writer that real runs use."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from sdp.engine.placement.placement import Placement
from sdp.tools.runs.run_files import Run, RunFiles, read_run

MIB = 2**20
KIND = "between groups/all_reduce"


def make_run(
    path: Path, *, holders: int = 2, groups: int = 4, steps: int = 40, finished: bool = True, tail: str = ""
) -> Run:
    """Write a run whose bytes are round numbers, and read it.

    Args:
        path: The dump directory.
        holders: How many groups hold each unit.
        groups: How many SDP groups there are.
        steps: The steps that the run was to take.
        finished: Whether it took them all; otherwise it stopped half-way.
        tail: Text at the end of metrics.jsonl, as a killed process leaves it.
    """
    share = holders / groups
    files = RunFiles(path, resume=False)
    files.write_config({"sdp": {"groups": groups}, "model": {"name": "llama"}, "training": {"steps": steps}})
    sets = tuple(tuple(sorted((unit + offset) % groups for offset in range(holders))) for unit in range(8))
    files.write_placement(Placement(groups, tuple(f"layers.{unit}" for unit in range(8)), sets, (1000,) * 8))
    for step in range((steps if finished else steps // 2) + 1):
        loss = 4 - share + 5 * math.exp(-step / 10)
        if step:
            files.step(_step_line(step, loss, share))
        if step % 10 == 0:
            subnetworks = [loss + 0.2 + group / 10 for group in range(groups)]
            files.evaluation(
                {"step": step, "tokens": step * 1000, "loss": loss, "subnetwork_losses": subnetworks, "seconds": 1.0}
            )
    if finished:
        files.summary(_summary(share, groups, steps))
    files.close()
    if tail:
        with (path / "metrics.jsonl").open("a") as metrics:
            metrics.write(tail)
    return read_run(path)


def _step_line(step: int, loss: float, share: float) -> dict[str, Any]:
    sent = int(20e6 * share)
    return {
        "step": step, "tokens": step * 1000, "loss": loss, "grad_norm": 1.0, "lr": 1e-3,
        "tokens_per_second": 4000 / share,
        "step_seconds": 0.5, "peak_memory_bytes": 300 * MIB, "comm_bytes": sent, "comm_bytes_by_kind": {KIND: sent},
    }  # fmt: skip


def _summary(share: float, groups: int, steps: int) -> dict[str, Any]:
    sent = {KIND: int(20e6 * share), "control/all_reduce": 12}
    state = {
        "parameters": int(24 * MIB * share),
        "gradients": int(24 * MIB * share),
        "optimizer": int(48 * MIB * share),
    }
    ranks = [
        {
            "rank": rank, "group": rank, "state_predicted": state, "state_measured": state,
            "peak_memory_bytes": int((100 + 200 * share + rank) * MIB), "baseline_memory_bytes": 100 * MIB,
            "peak_tensor_bytes": int(160 * MIB * share), "comm_bytes_per_step": sent,
        }
        for rank in range(groups)
    ]  # fmt: skip
    return {
        "steps": steps, "tokens": steps * 1000, "seconds": 20.0, "tokens_per_second": 4000 / share,
        "model": {"name": "llama", "parameters": 6_291_456},
        "layout": {"sdp": groups, "fsdp": 1, "tp": 1, "stage": 0, "engine": "fsdp2", "capacity": share, "units": 8},
        "dense_state_bytes": {"parameters": 24 * MIB, "gradients": 24 * MIB, "optimizer": 48 * MIB},
        "ddp_comm_bytes_per_step": 37_748_736, "ranks": ranks,
    }  # fmt: skip
