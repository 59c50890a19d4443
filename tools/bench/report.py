"""The report of ``sdp bench CONFIG``, as Markdown and JSON: measurements next to the plan."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ...engine.batch.size import BatchSize
from ...engine.config.schema import Config
from ...engine.distributed.mesh import mesh_of
from ...engine.errors import ConfigError
from ...engine.files import write_whole
from ...engine.tracing.operators import device_here
from ..plan.forecast import Forecast, forecast
from ..plan.machine import Machine
from ..plan.ways import with_buckets
from ..shared.table import Table, text_row
from .methods import SDP, variant

REPORT = "report.json"


def make_folder(folder: Path) -> None:
    """Make the folder of the report, or raise ConfigError before time is spent on measurements."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be made ({error.strerror})") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {folder}: cannot be written")


def settings_of(args: argparse.Namespace, config: Config, world: int, device: torch.device) -> dict[str, Any]:
    """Return the settings that the report lists: configuration, batch, device and versions."""
    return {
        "config": str(args.config),
        "model": config.model,
        "sdp": config.sdp.model_dump(mode="json"),
        "world": world,
        "batch": asdict(BatchSize.resolve(config, mesh_of(config, world))),
        "tokens_per_sample": config.data.tokens_per_sample,
        "activation_checkpointing": config.activation_checkpointing.mode,
        "compile": config.training.compile,
        "precision": config.precision,
        "rounds": args.rounds,
        "steps": args.steps,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def plan_methods(names: Sequence[str], config: Config, world: int) -> dict[str, Forecast]:
    """Return the plan of each method, by name, to compare it with what is measured."""
    machine = Machine((world,), 1.0, 1.0, 1.0, 1.0, device_here())
    plans = {name: forecast(name, variant(name, config, world), machine, world) for name in names}
    return {name: with_buckets(plan) if name == "ddp" else plan for name, plan in plans.items()}


def rows_of(
    facts: Mapping[str, Mapping[str, Any]], plans: Mapping[str, Forecast], tokens: int
) -> dict[str, dict[str, Any]]:
    """Collect the figures of each method, measured and planned.

    The speed over DDP is DDP's seconds divided by the method's, as the median over all rounds.

    Args:
        facts: The measured figures of each method.
        plans: The plan of each method.
        tokens: Tokens (or images) of a step.
    """
    rows = {}
    for name, measured in facts.items():
        plan, seconds = plans[name], measured["seconds"]
        median = statistics.median(seconds)
        row: dict[str, Any] = {
            **measured,
            "rates": plan.rates,
            "planned_peak_bytes": plan.worst.trace.peak,
            "planned_sent_bytes": max(sum(rank.sent(plan.machine).values()) for rank in plan.ranks),
            "seconds": {"median": median, "least": min(seconds), "most": max(seconds), "rounds": seconds},
            "tokens_per_second": tokens / median,
        }
        if "ddp" in facts:
            pairs = zip(facts["ddp"]["seconds"], seconds, strict=True)
            row["speed_over_ddp"] = statistics.median(ddp / mine for ddp, mine in pairs)
        rows[name] = row
    return rows


def write_report(folder: Path, settings: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Write report.md and report.json to ``folder``, and print the Markdown."""
    text = to_markdown(settings, rows)
    write_whole(folder / REPORT, json.dumps({"settings": settings, "methods": rows}, indent=2) + "\n")
    write_whole(folder / "report.md", text)
    print(text, flush=True)


def to_markdown(settings: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the report as Markdown: the settings, and a table with a row for each method."""
    s, batch = settings, settings["batch"]
    unit = "tokens/s" if s["tokens_per_sample"] > 1 else "images/s"
    header = ["M parameters", "peak MB (planned)", "seconds of a step", "speed / DDP", unit, "sent MB, planned"]
    table = []
    for name, row in rows.items():
        seconds = row["seconds"]
        table.append(text_row(name, [
            f"{row['parameters'] / 1e6:.2f}",
            f"{row['peak_bytes'] / 1e6:,.1f} ({row['planned_peak_bytes'] / 1e6:,.1f})",
            f"{seconds['median']:.3f} ({seconds['least']:.3f} … {seconds['most']:.3f})",
            f"{row['speed_over_ddp']:.2f}" if "speed_over_ddp" in row else "–",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['planned_sent_bytes'] / 1e6:,.2f}",
        ]))  # fmt: skip
    lines = [
        f"# {s['config']}: {s['world']} ranks side by side",
        "",
        f"{json.dumps(s['model'])}; {batch['micro']} × {batch['accumulation']} × {s['tokens_per_sample']} {unit[:-2]} "
        f"per rank and step; {s['precision']}, recomputation {s['activation_checkpointing']}, "
        f"{'compiled' if s['compile'] else 'not compiled'}; {s['device']}, {s['threads']} thread(s) per rank, torch "
        f"{s['torch']}.",
        f"Seconds: median (least … most) of {s['rounds']} interleaved rounds of {s['steps']} steps. Speed: "
        "median of the ratios of the rounds.",
        "",
        Table(header, table).markdown(),
        "",
    ]
    for name, row in rows.items():
        if name in SDP:
            state, sent = row["state_bytes"] / row["planned_state_bytes"], row["between_groups_bytes"] / 1e6
            line = f"- {name}: state {state:.3f} of planned; {sent:,.2f} MB sent between groups, counted by the engine"
            lines.append(line + (f"; learning rates of units multiplied by {row['rates']}" if row["rates"] else ""))
    return "\n".join(lines).rstrip() + "\n"
