"""The report of ``sdp bench CONFIG``: measurements next to the plan, as Markdown, JSON and
plots.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..shared.files import write_whole
from ..shared.plots import plot_bars
from .methods import DDP, is_sdp
from .planned import Plan

REPORT = "report.json"


@dataclass(frozen=True)
class Report:
    """Everything that was planned and measured.

    Attributes:
        settings: How it was measured.
        plans: By method.
        facts: By method: losses, and the parameters and bytes of the rank that has the most.
        turns: By method: the seconds of a step in every round, by mode; ``slowest_over_mean`` of
            the computation; and ``collectives`` of one rank's step.
    """

    settings: Mapping[str, Any]
    plans: Mapping[str, Plan]
    facts: Mapping[str, Mapping[str, Any]]
    turns: Mapping[str, Mapping[str, Any]]

    def rows(self) -> dict[str, dict[str, Any]]:
        """Collect the figures by method.

        A ratio is the median of the ratios of all rounds.
        """
        tokens = self.settings["batch"]["train"] * self.settings["tokens_per_sample"]
        dense = self.turns.get(DDP)
        rows = {}
        for name, turns in self.turns.items():
            plan, facts, seconds = self.plans[name], self.facts[name], turns["seconds"]
            median, compute = statistics.median(seconds), statistics.median(turns["compute_seconds"])
            row: dict[str, Any] = {
                **{key: value for key, value in facts.items() if key != "losses"},
                "layers": plan.config.model.get("num_hidden_layers"),
                "capacity": plan.config.sdp.capacity if is_sdp(name) else 1.0,
                "rates": plan.forecast.rates,
                "planned_peak_bytes": plan.peak,
                "seconds": {"median": median, "least": min(seconds), "most": max(seconds), "rounds": seconds},
                "tokens_per_second": tokens / median,
                "model_flops_per_second": plan.flops / median,
                "compute_seconds": compute,
                "speed_over_no_communication": _median_of(_over, turns["compute_seconds"], seconds),
                "exposed_seconds": _median_of(_minus, seconds, turns["compute_seconds"]),
                "planned_sent_bytes": plan.sent,
                "collectives": turns["collectives"],
                "slowest_over_mean": statistics.median(turns["slowest_over_mean"]),
                "planned_slowest_over_mean": plan.slowest_over_mean,
            }
            if dense is not None:
                row["speed_over_ddp"] = _median_of(_over, dense["seconds"], seconds)
            rows[name] = row
        return rows

    def to_json(self) -> dict[str, Any]:
        return {
            "settings": dict(self.settings),
            "losses": {name: facts["losses"] for name, facts in self.facts.items()},
            "methods": self.rows(),
        }


def _minus(left: float, right: float) -> float:
    return left - right


def _over(left: float, right: float) -> float:
    return left / right


def _median_of(compare: Any, left: Sequence[float], right: Sequence[float]) -> float:
    return statistics.median(compare(*pair) for pair in zip(left, right, strict=True))


def write_report(folder: Path, report: Report) -> None:
    """Write report.md, report.json and bench.png. Prints the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    content = report.to_json()
    text = to_markdown(report, content)
    write_whole(folder / REPORT, json.dumps(content, indent=2) + "\n")
    write_whole(folder / "report.md", text)
    plot_bars(
        {
            "peak of live tensors, MB": {name: row["peak_bytes"] / 1e6 for name, row in content["methods"].items()},
            _unit(report): {name: row["tokens_per_second"] for name, row in content["methods"].items()},
        },
        "peak memory of a rank, and speed",
        folder / "bench.png",
    )
    print(text, flush=True)


def _unit(report: Report) -> str:
    return "tokens/s" if report.settings["tokens_per_sample"] > 1 else "images/s"


def to_markdown(report: Report, content: Mapping[str, Any]) -> str:
    """Write the report as Markdown. ``content`` is ``report.to_json()``."""
    s = report.settings
    batch = s["batch"]
    samples = f"{batch['micro']} × {batch['accumulation']} × {s['tokens_per_sample']}"
    compiled = "compiled" if s["compile"] else "not compiled"
    lines = [
        f"# {s['config']}: {s['world']} ranks side by side",
        "",
        f"{json.dumps(s['model'])}; {samples} {_unit(report)[:-2]} a rank and step; {s['dtype']}, recomputation "
        f"{s['activation_checkpointing']}, {compiled}; {s['device']}, {s['threads']} thread(s) a rank, torch "
        f"{s['torch']}.",
        f"Seconds: median (least … most) of {s['rounds']} interleaved rounds of {s['steps_per_turn']} steps. Speed: "
        "median of the ratios of the rounds. Sent bytes, and other parentheses, are those of sdp plan.",
    ]
    lines += ["", *_table(content["methods"], _unit(report))]
    lines += ["", *_counted(content["methods"])]
    return "\n".join(lines).rstrip() + "\n"


def _counted(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Compare what the engine counts with the plan, for each method of SDP."""
    lines = []
    for name, row in methods.items():
        if is_sdp(name):
            state = row["state_bytes"] / row["planned_state_bytes"]
            rates = "" if row["rates"] is None else f"; learning rates of units multiplied by {row['rates']}"
            sent = f"{row['between_groups_bytes'] / 1e6:,.2f} MB sent between groups, counted by the engine"
            lines.append(f"- {name}: state {state:.3f} of planned; {sent}{rates}")
    return lines


def _table(methods: Mapping[str, Mapping[str, Any]], unit: str) -> list[str]:
    header = [
        "method",
        "M parameters",
        "peak MB",
        "seconds of a step",
        "speed / DDP",
        unit,
        "computing, s (of the step)",
        "exposed, s",
        "slowest / mean",
        "sent MB",
        "collectives",
        "GFLOP/s",
    ]
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    for name, row in methods.items():
        seconds = row["seconds"]
        cells = [
            name,
            f"{row['parameters'] / 1e6:.2f}",
            _with_plan(row["peak_bytes"] / 1e6, row["planned_peak_bytes"] and row["planned_peak_bytes"] / 1e6, ",.1f"),
            f"{seconds['median']:.3f} ({seconds['least']:.3f} … {seconds['most']:.3f})",
            _with_plan(row.get("speed_over_ddp"), None, ".2f"),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['compute_seconds']:.3f} ({row['speed_over_no_communication']:.0%})",
            f"{row['exposed_seconds']:.3f}",
            _with_plan(row["slowest_over_mean"], row["planned_slowest_over_mean"], ".2f"),
            f"{row['planned_sent_bytes'] / 1e6:,.2f}",
            f"{row['collectives']:,.1f}",
            f"{row['model_flops_per_second'] / 1e9:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _with_plan(measured: float | None, planned: float | None, spec: str) -> str:
    if measured is None and planned is None:
        return "–"
    return ("–" if measured is None else format(measured, spec)) + (
        f" ({format(planned, spec)})" if planned is not None else ""
    )
