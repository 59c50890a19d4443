"""``sdp report DIR…``: compares the costs and the losses of runs with those of the dense model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ...engine.accounting.quantities import format_flops
from ...engine.errors import MOST_MESSAGE, escape, shorten
from ...engine.object_store import is_url, local_copy
from ..runs.plot import plot_loss
from ..runs.run_files import PLOT, Run, fetch_files, read_run
from ..shared.table import Row, Table, bytes_row, plain_row, text_row
from .facts import STATE_PARTS, Baseline, Facts, facts_of_all, find_baseline

WIDTH = 100  # columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="DIR",
        help="the --dump-dir of a run; runs are compared with the first dense run",
    )
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--markdown", action="store_true", help="print a Markdown table")
    style.add_argument("--json", action="store_true", help="print the figures as JSON, in bytes, seconds and tokens")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the losses of all runs into FILE (PNG)")


def run(args: argparse.Namespace) -> int:
    """Print the report. Raises ConfigError or DataError if a directory cannot be read."""
    runs = [read_run(_on_this_host(path)) for path in args.runs]
    if args.plot is not None:
        plot_loss(runs, args.plot)
    if args.json:
        print(json.dumps(as_json(runs), indent=2))
        return 0
    print(escape(render_markdown(runs) if args.markdown else render(runs)))
    if args.plot is not None:
        print(f"plot of all runs: {shorten(args.plot, MOST_MESSAGE)}")
    return 0


def _on_this_host(run: str) -> Path:
    if not is_url(run):
        return Path(run)
    fetch_files(run, local_copy(run))
    return local_copy(run)


def render(runs: Sequence[Run]) -> str:
    """Return the report as plain text. If one table would be too wide, there are several."""
    tables = [table.text() for table in _tables(runs, WIDTH)]
    return "\n\n".join([*tables, _notes(runs), _files(runs)])


def render_markdown(runs: Sequence[Run]) -> str:
    """Return the report as one Markdown table with notes."""
    return "\n\n".join([_tables(runs)[0].markdown(), _notes(runs)])


def as_json(runs: Sequence[Run]) -> dict[str, object]:
    """Return the figures of all runs, and of the dense model that they are compared with."""
    facts = facts_of_all(runs)
    baseline = find_baseline(facts)
    name = baseline.run.name if baseline.run else None
    dense = {"measured": baseline.measured, "run": name, "state": baseline.state, "sent": baseline.sent}
    return {"runs": [asdict(run) for run in facts], "dense": dense}


def _tables(runs: Sequence[Run], width: int | None = None) -> list[Table]:
    """One table, or several with the baseline in each if one would be too wide."""
    facts = facts_of_all(runs)
    dense = find_baseline(facts)
    others = [run for run in facts if run is not dense.run]
    tables: list[Table] = []
    for columns in range(len(others), 0, -1):
        parts = [others[start : start + columns] for start in range(0, len(others), columns)]
        tables = [_table(part, dense) for part in parts]
        if width is None or max(table.width for table in tables) <= width:
            break
    return tables or [_table([], dense)]


def _table(others: Sequence[Facts], dense: Baseline) -> Table:
    runs = [*others, dense.run] if dense.run else list(others)
    header = [run.name for run in runs] + (["dense, predicted"] if dense.known and not dense.measured else [])
    table = Table(
        header, [*_identity(runs), *_learning(runs, dense), *_memory(runs, dense), *_traffic(runs, dense)]
    ).without_empty()
    return table.without_last_ratios() if dense.measured else table


def _identity(runs: Sequence[Facts]) -> list[Row]:
    return [
        text_row("model", [run.model for run in runs]),
        text_row("layout", [run.layout for run in runs]),
        text_row("capacity", [None if run.capacity is None else f"{run.capacity:.2f}" for run in runs]),
        text_row("steps", [_steps(run) for run in runs]),
        text_row("masking of the steps", [run.masking for run in runs]),
        text_row("learning rate factors of units", [run.rates for run in runs]),
        text_row(_counted(runs), [f"{run.tokens:,}" for run in runs]),
        plain_row("steps skipped for a spike", [run.spikes_skipped for run in runs], ",d"),
        plain_row("rollbacks after a spike", [run.rollbacks for run in runs], ",d"),
        text_row(
            "restarts", [f"{run.restarts:,} ({run.lost_steps:,} steps lost)" if run.restarts else None for run in runs]
        ),
        *(
            text_row(name, [run.served.get(name) for run in runs])
            for name in dict.fromkeys(name for run in runs for name in run.served)
        ),
    ]


def _counted(runs: Sequence[Facts]) -> str:
    return "images" if runs and all(run.reads_images for run in runs) else "tokens"


def _steps(run: Facts) -> str:
    if run.finished:
        return f"{run.steps:,}"
    return f"{run.steps:,} of {run.planned_steps:,}" if run.planned_steps else f"{run.steps:,} (unfinished)"


def _learning(runs: Sequence[Facts], dense: Baseline) -> list[Row]:
    # Losses can be compared only after the same number of tokens.
    comparable = dense.run is not None and all(run.tokens == dense.run.tokens for run in runs)
    base_loss = dense.run.loss_after if dense.run is not None and comparable else None
    whole = [None if run.path_losses else run for run in runs]
    routed = [run if run.path_losses else None for run in runs]
    return [
        Row("held-out loss"),
        *(
            plain_row(
                f"{name}, {when}",
                [run and getattr(run, f"loss_{when}") for run in chosen],
                ".4f",
                base_loss if when == "after" else None,
                difference=True,
            )
            for name, chosen in (("full model", whole), ("routed", routed))
            for when in ("before", "after")
        ),
        plain_row("routed, after, without prefixes", [run.after_prefix for run in runs], ".4f"),
        plain_row("mean of subnetworks, after", [run.subnetworks_after for run in runs], ".4f"),
        *_paths(runs),
        plain_row("full model's accuracy", [run.accuracy_after for run in runs], ".2%"),
        Row("speed"),
        plain_row(f"{_counted(runs)}/s", [run.tokens_per_second for run in runs], ",.0f"),
        plain_row("MFU, of the data sheet's dense peak", [run.mfu for run in runs], ".1%"),
        text_row("    sustained by a device", [_rate(run.flops_per_second) for run in runs]),
        plain_row("seconds per step", [run.step_seconds for run in runs], ".3f"),
        *(
            plain_row(f"  with {masking} masking", [run.phase_seconds.get(masking) for run in runs], ".3f")
            for masking in ("forward", "backward")
        ),
    ]


def _paths(runs: Sequence[Facts]) -> list[Row]:
    rows = list[Row]()
    for path in range(max((len(run.path_losses) for run in runs), default=0)):
        for what, losses in (
            ("its samples", [run.path_losses for run in runs]),
            ("all samples", [run.single_path_losses for run in runs]),
        ):
            known = [mine[path] if path < len(mine) else None for mine in losses]
            rows.append(plain_row(f"path {path} on {what}, after", known, ".4f"))
    return rows


def _rate(flops_per_second: float | None) -> str | None:
    return None if flops_per_second is None else f"{format_flops(flops_per_second)}/s"


def _memory(runs: Sequence[Facts], dense: Baseline) -> list[Row]:
    base, predicted = dense.run, dense.known and not dense.measured
    state = [
        bytes_row(label, [run.state.get(part) for run in runs], dense.state.get(part), show_baseline=predicted)
        for part, label in {**STATE_PARTS, "together": "together"}.items()
    ]
    process = "peak allocated on the GPU ²" if _on_cuda(runs) else "peak of resident memory ²"
    return [
        Row("memory per rank"),
        *state,
        text_row("    counted against predicted", [_deviation(run.state_deviation) for run in runs]),
        bytes_row("peak of live tensors ¹", [run.peak_tensors for run in runs], _largest(base, "peak_tensors")),
        bytes_row(process, [run.peak_process for run in runs], _largest(base, "peak_process")),
    ]


def _traffic(runs: Sequence[Facts], dense: Baseline) -> list[Row]:
    predicted = dense.known and not dense.measured
    kinds = sorted({kind for run in runs for kind in run.sent_by_kind if not kind.startswith("control")})
    return [
        Row("bytes sent per step, busiest rank"),
        bytes_row("all collectives", [run.sent for run in runs], dense.sent, decimal=True, show_baseline=predicted),
        *(bytes_row(f"  {_kind(kind)}", [run.sent_by_kind.get(kind) for run in runs], decimal=True) for kind in kinds),
        bytes_row("per second", [run.sent_per_second for run in runs], decimal=True, per="/s"),
    ]


def _on_cuda(runs: Sequence[Facts]) -> bool:
    return any(run.device.startswith("cuda") for run in runs)


def _largest(run: Facts | None, key: str) -> float | None:
    spread = getattr(run, key) if run else None
    return spread.largest if spread else None


def _deviation(deviation: float | None) -> str | None:
    if deviation is None:
        return None
    return "equal" if deviation == 0 else f"{deviation:+.2%}"


def _kind(kind: str) -> str:
    scope, _, collective = kind.partition("/")
    return f"{scope}, {collective.replace('_', '-')}"


def _notes(runs: Sequence[Run]) -> str:
    facts = facts_of_all(runs)
    dense = find_baseline(facts)
    lines = ["a–b: the rank with the least and the rank with the most. Speeds are medians over steps. They have"]
    lines += ["     no ratio, because the speeds of runs at different times cannot be compared."]
    if dense.run is not None:
        lines.append(f"×, ±: the rank with the most, against the dense run {dense.run.name}, measured.")
    elif dense.known:
        lines.append(
            "×: the rank with the most, against the dense model, predicted: its float32 state on one rank, and"
        )
        lines.append("   what DistributedDataParallel would send over the same n ranks, 2(n − 1)/n of all gradients.")
    if any(run.peak_tensors for run in facts):
        lines.append("¹ parameters, gradients, optimizer state, activations and temporaries, at the peak of a step.")
    if any(run.peak_process for run in facts):
        lines.append("² more than the process had before the model existed, by")
        lines[-1] += (
            " torch.cuda.max_memory_allocated." if _on_cuda(facts) else " the kernel's count of anonymous memory."
        )
    for run in facts:
        if not run.finished:
            lines.append(f"{run.name} is unfinished: memory per rank is recorded at the end of a run.")
    return "\n".join(lines)


def _files(runs: Sequence[Run]) -> str:
    lines = []
    for run in runs:
        lines.append(f"files  {shorten(run.path, MOST_MESSAGE)}")
        if (run.path / PLOT).is_file():
            lines.append(f"plot   {run.path / PLOT}")
    return "\n".join(lines)
