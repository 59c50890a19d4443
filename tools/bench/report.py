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
from ..shared.plots import plot_bars, plot_lines
from .methods import DDP, is_sdp
from .planned import Plan

REPORT = "report.json"
BOUND, OVER_FSDP2, STATE, PEAK, OVERLAP = 0.9, 2.5, 0.01, 1.05, 0.6  # the aims of SDP
FOR_CAPACITY = 0.5  # OVER_FSDP2 is an aim for this capacity only
_NOTICED = 0.02  # the part of the processors' time from which steal is reported
_LARGE = 1e9  # bytes; smaller peaks are not judged


@dataclass(frozen=True)
class Race:
    """All methods over one link.

    Attributes:
        link: The rate of the link. None: the processes are on one host.
        speed: Bytes a second that a rank can send.
        turns: By method: the seconds of a step in every round, by mode; ``slowest_over_mean`` of
            the computation; and ``collectives`` and ``sent_bytes`` of one rank's step.
        uncounted: Why ``sent_bytes`` is None, if it is.
        stolen: The part of the processors' time that the hypervisor gave to others, on the host
            that lost the most. None if the kernel does not tell.
    """

    link: str | None
    speed: float | None
    turns: Mapping[str, Mapping[str, Any]]
    uncounted: str | None = None
    stolen: float | None = None


@dataclass(frozen=True)
class Report:
    """Everything that was planned and measured.

    Attributes:
        settings: How it was measured.
        plans: By method.
        facts: By method: losses, and the parameters and bytes of the rank that has the most.
        races: A race for each link.
    """

    settings: Mapping[str, Any]
    plans: Mapping[str, Plan]
    facts: Mapping[str, Mapping[str, Any]]
    races: Sequence[Race]

    def rows(self, race: Race) -> dict[str, dict[str, Any]]:
        """Collect the figures of a race by method.

        A ratio is the median of the ratios of all rounds.
        """
        tokens = self.settings["batch"]["train"] * self.settings["tokens_per_sample"]
        dense = race.turns.get(DDP)
        # The rate at which a rank computes here: that of DDP without communication.
        rate = self.plans[DDP].flops / statistics.median(dense["compute_seconds"]) if dense else None
        rows = {}
        for name, turns in race.turns.items():
            plan, facts, seconds = self.plans[name], self.facts[name], turns["seconds"]
            median, compute = statistics.median(seconds), statistics.median(turns["compute_seconds"])
            row: dict[str, Any] = {
                **{key: value for key, value in facts.items() if key != "losses"},
                "layers": plan.config.model.get("num_hidden_layers"),
                "capacity": plan.config.sdp.capacity if is_sdp(name) else 1.0,
                "rates": plan.forecast.rates,
                "overlaps": plan.config.sdp.sync is None or plan.config.sdp.sync.overlap > 0,
                "planned_peak_bytes": plan.peak,
                "seconds": {"median": median, "least": min(seconds), "most": max(seconds), "rounds": seconds},
                "tokens_per_second": tokens / median,
                "model_flops_per_second": plan.flops / median,
                "compute_seconds": compute,
                "speed_over_no_communication": _median_of(_over, turns["compute_seconds"], seconds),
                "exposed_seconds": _median_of(_minus, seconds, turns["compute_seconds"]),
                "sent_bytes": turns["sent_bytes"],
                "planned_sent_bytes": plan.sent,
                "collectives": turns["collectives"],
                "slowest_over_mean": statistics.median(turns["slowest_over_mean"]),
                "planned_slowest_over_mean": plan.slowest_over_mean,
            }
            if "not_overlapped_seconds" in turns:
                row["exposed_not_overlapped_seconds"] = _median_of(
                    _minus, turns["not_overlapped_seconds"], turns["compute_seconds"]
                )
            if dense is not None:
                row["speed_over_ddp"] = _median_of(_over, dense["seconds"], seconds)
            if "fsdp2" in race.turns:
                row["speed_over_fsdp2"] = _median_of(_over, race.turns["fsdp2"]["seconds"], seconds)
            if race.speed is not None and rate is not None:
                row["planned_seconds"] = plan.seconds(rate, race.speed)
                row["planned_speed_over_ddp"] = self.plans[DDP].seconds(rate, race.speed) / row["planned_seconds"]
                if "not_overlapped_seconds" in turns:
                    row["planned_exposed_over_not_overlapped"] = plan.exposed_share(rate, race.speed)
            rows[name] = row
        return rows

    def to_json(self) -> dict[str, Any]:
        races = [
            {
                "link": race.link,
                "bytes_per_second": race.speed,
                "sent_bytes_not_measured": race.uncounted,
                "stolen_processor_time": race.stolen,
                "methods": self.rows(race),
            }
            for race in self.races
        ]
        return {
            "settings": dict(self.settings),
            "losses": {name: facts["losses"] for name, facts in self.facts.items()},
            "races": races,
        }


def _minus(left: float, right: float) -> float:
    return left - right


def _over(left: float, right: float) -> float:
    return left / right


def _median_of(compare: Any, left: Sequence[float], right: Sequence[float]) -> float:
    return statistics.median(compare(*pair) for pair in zip(left, right, strict=True))


def write_report(folder: Path, report: Report) -> None:
    """Write report.md, report.json, bench.png and, for several links, network.png.

    Prints the Markdown.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = report.to_json()
    text = to_markdown(report, content)
    write_whole(folder / REPORT, json.dumps(content, indent=2) + "\n")
    write_whole(folder / "report.md", text)
    last = content["races"][-1]
    title = f"{_title(last)}: peak memory of a rank, and speed"
    plot_bars(
        {
            "peak of live tensors, MB": {name: row["peak_bytes"] / 1e6 for name, row in last["methods"].items()},
            _unit(report): {name: row["tokens_per_second"] for name, row in last["methods"].items()},
        },
        title,
        folder / "bench.png",
    )
    if len(report.races) > 1:
        lines = {
            name: [
                (race["bytes_per_second"] * 8e-6, race["methods"][name]["tokens_per_second"])
                for race in content["races"]
            ]
            for name in last["methods"]
        }
        plot_lines(lines, "speed against the hosts' links", "Mbit/s", _unit(report), folder / "network.png")
    print(text, flush=True)


def _unit(report: Report) -> str:
    return "tokens/s" if report.settings["tokens_per_sample"] > 1 else "images/s"


def _title(race: Mapping[str, Any]) -> str:
    return f"hosts with links of {race['link']}" if race["link"] else "processes of one host"


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
        "median of the ratios of the rounds. Other parentheses show what sdp plan says: the bytes of ring "
        "algorithms, and the speed if a rank computes as fast as with DDP here.",
    ]
    for race in content["races"]:
        title = _title(race)
        lines += ["", f"## {title[0].upper()}{title[1:]}", "", *_table(race, _unit(report))]
        if race["sent_bytes_not_measured"]:
            lines += [
                "",
                f"Sent bytes are not measured: {race['sent_bytes_not_measured']}. The planned bytes are in "
                "parentheses.",
            ]
        if (race["stolen_processor_time"] or 0.0) >= _NOTICED:
            share = f"{race['stolen_processor_time']:.0%} of the processors' time to other machines"
            lines += [
                "",
                f"The hypervisor gave {share} during the race. Seconds, and all that is derived, vary with that.",
            ]
        lines += ["", *_aims(race)] if _aims(race) else []
    return "\n".join(lines) + "\n"


def _table(race: Mapping[str, Any], unit: str) -> list[str]:
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
    for name, row in race["methods"].items():
        seconds = row["seconds"]
        cells = [
            f"{name} ({row['layers']} layer{'s' * (row['layers'] > 1)})" if name.startswith("smaller") else name,
            f"{row['parameters'] / 1e6:.2f}",
            _with_plan(row["peak_bytes"] / 1e6, row["planned_peak_bytes"] and row["planned_peak_bytes"] / 1e6, ",.1f"),
            f"{seconds['median']:.3f} ({seconds['least']:.3f} … {seconds['most']:.3f})",
            _with_plan(row.get("speed_over_ddp"), row.get("planned_speed_over_ddp"), ".2f"),
            f"{row['tokens_per_second']:,.0f}",
            f"{row['compute_seconds']:.3f} ({row['speed_over_no_communication']:.0%})",
            f"{row['exposed_seconds']:.3f}",
            _with_plan(row["slowest_over_mean"], row["planned_slowest_over_mean"], ".2f"),
            _with_plan(row["sent_bytes"] and row["sent_bytes"] / 1e6, row["planned_sent_bytes"] / 1e6, ",.2f"),
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


def _aims(race: Mapping[str, Any]) -> list[str]:
    """List the aims of SDP, and whether they were reached."""
    lines = []
    for name, row in race["methods"].items():
        if not is_sdp(name):
            continue
        state = row["state_bytes"] / row["planned_state_bytes"]
        sent = row["between_groups_bytes"] / row["planned_between_groups_bytes"]
        said = [
            _aim("state", state, f"of planned, aim 1 ± {STATE}", abs(state - 1) <= STATE),
            _aim("sent between groups, by the engine's count,", sent, "of planned, aim 1", sent == 1),
        ]
        if row["planned_peak_bytes"] >= _LARGE:
            ratio = row["peak_bytes"] / row["planned_peak_bytes"]
            said.append(_aim("peak", ratio, f"of planned, aim at most {PEAK}", ratio <= PEAK))
        if race["link"]:
            if "planned_speed_over_ddp" in row:
                ratio = row["speed_over_ddp"] / row["planned_speed_over_ddp"]
                said.append(_aim("speed over DDP's", ratio, f"of planned, aim at least {BOUND}", ratio >= BOUND))
            if "speed_over_fsdp2" in row and row["capacity"] == FOR_CAPACITY:
                said.append(
                    _aim(
                        "speed",
                        row["speed_over_fsdp2"],
                        f"× FSDP2's, aim at least {OVER_FSDP2}",
                        row["speed_over_fsdp2"] >= OVER_FSDP2,
                    )
                )
            if row["exposed_not_overlapped_seconds"] > 0:
                ratio, plan = (
                    row["exposed_seconds"] / row["exposed_not_overlapped_seconds"],
                    row.get("planned_exposed_over_not_overlapped"),
                )
                planned = "" if plan is None else f" ({plan:.3f} planned)"
                what, of = "exposed communication", f"of that without overlap{planned}"
                if not row["overlaps"]:
                    said.append(f"{what} {ratio:.3f} {of}")
                else:
                    said.append(_aim(what, ratio, f"{of}, aim at most {OVERLAP}", ratio <= OVERLAP))
        if row["rates"] is not None:
            said.append(f"learning rates of units multiplied by {row['rates']}")
        lines.append(f"- {name}: {'; '.join(said)}")
    return lines


def _aim(what: str, value: float, of: str, reached: bool) -> str:
    return f"{what} {value:.3f} {of}: {'reached' if reached else 'NOT reached'}"
