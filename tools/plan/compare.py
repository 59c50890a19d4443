"""``sdp plan CONFIG --compare``: ways to train one model on the same machines, a row each.

All rows are planned with the ranks, batch, tensor parallelism and recomputation of the
configuration. What a way learns is not planned.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from ...engine.accounting.quantities import format_bytes, format_seconds
from ...engine.config.method import Masking, SyncSection
from ...engine.config.schema import Config
from ...engine.distributed.mesh import mesh_of
from ...engine.environment.detect import export
from ...engine.errors import ConfigError, SDPError
from ...engine.placement.layout import Layout
from ..runs.model_inputs import model_and_batch
from .alternatives import dense_config, distributed_data_parallel, smaller_dense, why_not_hsdp
from .forecast import MOST_TRACES, forecast, require_planned
from .machine import LINKS, Link, Machine
from .result import Forecast

CAPACITY = 0.5  # of SDP, if the configuration is dense
EVERY = 32  # steps of a round, if the configuration has no local steps
SMALLER = "smaller dense"
LARGE = 10**9  # parameters, from which rows are planned in processes of their own, each for the group that holds most
_MOST_PROCESSES = 4  # each needs about a gigabyte


@dataclass(frozen=True)
class Row:
    """The plan of one way to train.

    Attributes:
        name: What users call it.
        parameters: Parameters of the model that is trained.
        groups, ranks_of_group, zero_stage: How it is spread.
        peak: Bytes of the rank that needs the most.
        seconds: Of a step.
        sent: Bytes that a rank sends in a step, at most, by kind of link.
        others: The number of groups that run other units, or the same in another order, than those
            that were traced.
    """

    name: str
    parameters: int
    groups: int
    ranks_of_group: int
    zero_stage: int
    peak: int
    seconds: float
    sent: Mapping[Link, float]
    others: int

    @classmethod
    def of(cls, plan: Forecast) -> Row:
        mesh, stage = plan.layout.mesh, plan.config.zero_optimization.stage
        others = len(plan.untraced) + len(plan.reordered)
        return cls(plan.name, plan.parameters, mesh.sdp, mesh.fsdp * mesh.tp, stage, plan.worst.trace.peak,
                   plan.seconds, plan.sent_at_most, others)  # fmt: skip


def compare(config: Config, machine: Machine, world: int) -> tuple[list[Row], list[str]]:
    """Plan all ways to train the model of ``config``.

    Returns:
        The rows, and a line for each way that cannot be planned and for what was chosen here.

    Raises:
        SDPError: Nothing can be planned.
    """
    require_planned(config)
    config, notes = _with_groups(config, machine, world)
    ways = _ways(config)
    if (why := why_not_hsdp(config, machine, world)) is not None:
        del ways["HSDP"]
        notes.append(why)
    else:
        ways["HSDP"] = dense_config(config, len(machine.slots), 3)
    build, _ = model_and_batch(config)
    model = build()
    layout = Layout.of(model, config, mesh_of(config, world))
    if config.sdp.groups > 1:
        held = layout.in_phase("forward")
        most = max(sum(info.numel for info in held.held(group)) for group in range(held.mesh.sdp))
        small = smaller_dense(config, most)
        if small is None or small.model == config.model:
            del ways[SMALLER]
            notes.append(f"{SMALLER}: no smaller size of this model is known that has at most {most:,} parameters")
        else:
            ways[SMALLER] = dense_config(small, config.sdp.groups, config.zero_optimization.stage)
    is_large = sum(parameter.numel() for parameter in model.parameters()) >= LARGE
    plan = partial(_planned, machine=machine, world=world, traces=1 if is_large else MOST_TRACES)
    # Backward masking takes the longest, since all blocks run, and begins first.
    order = sorted(ways.items(), key=lambda way: way[1].sdp.masking != "backward" or way[1].sdp.groups == 1)
    workers = min(_MOST_PROCESSES, len(ways), os.cpu_count() or 1) if is_large and sys.platform == "linux" else 1
    if workers > 1:
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(workers, mp_context=fork, initializer=_begin_worker) as pool:
            found = dict(zip(dict(order), pool.map(plan, *zip(*order, strict=True)), strict=True))
    else:
        found = {name: plan(name, config) for name, config in order}
    rows = [row for name in ways if isinstance(row := found[name], Row)]
    notes += _failures({name: reason for name in ways if isinstance(reason := found[name], str)})
    if not rows:
        raise ConfigError(f"nothing can be planned: {'; '.join(notes)}")
    return rows, [*notes, *_about(rows, config)]


def _with_groups(config: Config, machine: Machine, world: int) -> tuple[Config, list[str]]:
    """Return ``config`` with SDP groups, and a sentence for what was chosen here.

    A dense configuration gets a group for each node, or on one node for each rank.
    """
    sdp, nodes = config.sdp, len(machine.slots)
    if (sdp.groups > 1 and sdp.capacity != 1.0) or sdp.paths is not None:
        return config, []
    of_ranks = max(1, world // config.tensor_parallel.autotp_size)
    groups = sdp.groups if sdp.groups > 1 else (nodes if nodes > 1 and world % nodes == 0 else of_ranks)
    if groups == 1:
        return config, ["SDP and DiLoCo need at least two groups"]
    note = f"The configuration is dense. SDP is planned with sdp.groups {groups} and sdp.capacity {CAPACITY:g}."
    sdp = sdp.model_copy(update={"groups": groups, "capacity": CAPACITY})
    return config.model_copy(update={"sdp": sdp}), [note]


def _ways(config: Config) -> dict[str, Config]:
    """The configuration of each way, in the order of the table."""
    sync, stage, groups = config.sdp.sync or SyncSection(every=EVERY), config.zero_optimization.stage, config.sdp.groups
    masking: Masking = "backward" if "backward" in config.sdp.maskings else "forward"
    ways = {
        "DDP": dense_config(config, 1, 0), "FSDP (ZeRO-3)": dense_config(config, 1, 3), "HSDP": config,
        "ZeRO-2": dense_config(config, 1, 2),
    }  # fmt: skip
    if groups > 1:
        diloco = dense_config(config, groups, stage)
        ways |= {SMALLER: config, "DiLoCo": _with_sdp(diloco, sync=sync)}
        ways |= (
            {
                "paths": _with_sdp(config, sync=None),
                "paths, local steps": _with_sdp(config, sync=sync, lr_scale="none"),
            }
            if config.sdp.paths is not None
            else {
                "SDP, forward": _with_sdp(config, masking="forward", sync=None),
                "SDP, backward": _with_sdp(config, masking="backward", sync=None),
                # Local steps refuse rates by holders.
                f"SDP, {masking}, local steps": _with_sdp(config, masking=masking, sync=sync, lr_scale="none"),
            }
        )
    return ways


def _with_sdp(config: Config, **keys: object) -> Config:
    return config.model_copy(update={"sdp": config.sdp.model_copy(update=keys)})


def _planned(name: str, config: Config, *, machine: Machine, world: int, traces: int) -> Row | str:
    """Plan one way. Returns the reason if it cannot be planned."""
    try:
        if name == "DDP":
            return Row.of(distributed_data_parallel(config, machine, world))
        return Row.of(forecast(name, config, machine, world, traces=traces))
    except SDPError as error:
        return str(error)


def _begin_worker() -> None:
    """Hide GPUs, where each process would take memory, and leave interrupts to the parent."""
    export({"CUDA_VISIBLE_DEVICES": ""})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _failures(reasons: Mapping[str, str]) -> list[str]:
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return [f"{'; '.join(some)}: {reason}" for reason, some in names.items()]


def _about(rows: Sequence[Row], config: Config) -> list[str]:
    """What a reader needs to know to use the rows."""
    notes, sync = [], config.sdp.sync or SyncSection(every=EVERY)
    by_name = {row.name: row for row in rows}
    if SMALLER in by_name:
        small, full = by_name[SMALLER].parameters, rows[0].parameters
        notes.append(
            f"The smaller dense model has {small / 1e6:,.1f} M of {full / 1e6:,.1f} M parameters, no more than an SDP "
            "group under forward masking holds, so its weights, gradients and moments need no more memory."
        )
    if config.sdp.groups > 1:
        notes.append(
            f"DiLoCo, the smaller dense model and SDP are planned with sdp.groups {config.sdp.groups} and "
            f"zero_optimization.stage {config.zero_optimization.stage}. Local steps average every {sync.every} steps."
        )
    notes += [
        f"{row.name}: the group with the most parameters was traced. {row.others} groups run other units, or the same "
        "in another order; their peaks may differ."
        for row in rows
        if row.others
    ]
    if len(config.sdp.maskings) > 1:
        notes.append("sdp.masking is a schedule: it needs the larger peak of its maskings.")
    return [*notes, "What each way learns is not planned. `sdp plan` without --compare shows one way in detail."]


def table(rows: Sequence[Row], memory: float | None) -> str:
    """The rows as text. ``memory``: bytes of a device, or None if nobody said."""
    mesh = [f"{row.groups} × {row.ranks_of_group}" for row in rows]
    columns = [
        ["", *(row.name for row in rows)],
        ["groups × ranks", *mesh],
        ["ZeRO", *(str(row.zero_stage) for row in rows)],
        ["peak", *(format_bytes(row.peak) for row in rows)],
        ["fits", *("yes" if memory is None or row.peak <= memory else "no" for row in rows)],
        ["time of a step", *(format_seconds(row.seconds) for row in rows)],
        *([f"sent {link}", *(format_bytes(row.sent[link]) for row in rows)] for link in LINKS),
    ]
    columns = [column for column in columns if memory is not None or column[0] != "fits"]
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in zip(*columns, strict=True)
    ]
    return "\n".join(lines)


def to_json(rows: Sequence[Row], memory: float | None) -> dict[str, Any]:
    """The rows by name."""
    return {row.name: asdict(row) | ({} if memory is None else {"fits": row.peak <= memory}) for row in rows}
