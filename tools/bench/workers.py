"""``sdp bench CONFIG --workers 2,4,8``: compares the methods once for each number of workers.

Each number is a run with as many SDP groups of one rank each. Its report is in ``DIR/workers-N``. A
rank's batch stays the same, so a step of more ranks trains on more tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...engine.config.load import load_config
from ...engine.errors import ConfigError, SDPError
from ...engine.json_files import read_json_file
from ..shared.files import write_whole
from ..shared.plots import plot_lines
from .options import WORKERS, MethodOptions
from .report import REPORT

_MOST = 2**12  # ranks that one machine can start


def parse_counts(text: str) -> list[int]:
    """Read the numbers of ranks in ``2,4,8``. Raises :class:`ConfigError`."""
    words = text.split(",")
    if not all(word.isdecimal() and 1 < int(word) <= _MOST for word in words) or len(set(words)) < len(words):
        raise ConfigError(f"{WORKERS} {text}: expected different numbers of ranks from 2 to {_MOST:,}, such as 2,4,8")
    return sorted(map(int, words))


def run(
    options: MethodOptions,
    compare: Callable[[MethodOptions], int],
    check: Callable[[MethodOptions], object],
) -> int:
    """Compare the methods once for each number of workers.

    Writes workers.md, workers.json and workers.png after each of them, so that a number that fails
    loses nothing of the others.

    Args:
        options: The options of the command. ``workers`` is given.
        compare: Runs one comparison and returns its exit code.
        check: Raises an :class:`SDPError` for what cannot be compared. It starts nothing.

    Returns:
        0, or the exit code of the first comparison that fails.

    Raises:
        ConfigError: ``check`` refuses one of the numbers. Nothing was compared then.
    """
    assert options.workers is not None
    if options.nproc is not None:
        raise ConfigError(f"--nproc: {WORKERS} says how many ranks to start; leave it out")
    if load_config(options.config, options.settings).train_batch_size is not None:
        raise ConfigError(
            f"train_batch_size: with {WORKERS} a rank's batch stays and that of a step grows; give "
            "train_micro_batch_size_per_gpu instead"
        )
    runs = {count: _options_for(options, count) for count in parse_counts(options.workers)}
    for count, own in runs.items():
        try:
            check(own)
        except SDPError as error:
            raise ConfigError(f"{WORKERS} {options.workers}: {count} cannot be run: {error}") from None
    reports = {}
    for count, own in runs.items():
        code = compare(own)
        if code:
            return code
        reports[count] = read_json_file(own.out / REPORT)
        _write(options.out, reports)
    print((options.out / "workers.md").read_text(encoding="utf-8"), flush=True)
    return 0


def _options_for(options: MethodOptions, count: int) -> MethodOptions:
    """The options of the run with ``count`` ranks."""
    out, setting = options.out / f"workers-{count}", f"sdp.groups={count}"
    words = ["--set", setting, "--nproc", str(count), "--out", str(out)]
    argv = (*_without_workers(options.argv), *words)
    return replace(options, workers=None, nproc=count, out=out, settings=(*options.settings, setting), argv=argv)


def _without_workers(words: Sequence[str]) -> list[str]:
    kept, left = [], iter(words)
    for word in left:
        if word == WORKERS:
            next(left, None)
        elif not word.startswith(f"{WORKERS}="):
            kept.append(word)
    return kept


def tabulate(reports: Mapping[int, Mapping[str, Any]], link: int) -> dict[str, dict[int, dict[str, Any]]]:
    """Collect figures by method and number of workers.

    Args:
        reports: The reports, by number of workers.
        link: The index of the link in every report.

    Returns:
        ``tokens_per_second``; ``speed_over_ddp`` (None without DDP); ``sent_bytes`` (None if not
        measured); ``seconds``; and ``efficiency``, the tokens a second of one worker over those
        with the fewest workers.
    """
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for count, report in reports.items():
        for name, row in report["races"][link]["methods"].items():
            fewest = next(iter(rows.get(name, {count: row})))
            speed = row["tokens_per_second"]
            base = speed / count if fewest == count else rows[name][fewest]["tokens_per_second"] / fewest
            rows.setdefault(name, {})[count] = {
                "tokens_per_second": speed,
                "seconds": row["seconds"]["median"],
                "speed_over_ddp": row.get("speed_over_ddp"),
                "efficiency": speed / count / base,
                "sent_bytes": row["sent_bytes"],
            }
    return rows


def _write(folder: Path, reports: Mapping[int, Mapping[str, Any]]) -> None:
    first = next(iter(reports.values()))
    unit = "tokens/s" if first["settings"]["tokens_per_sample"] > 1 else "images/s"
    lines = [
        f"# {first['settings']['config']}: {', '.join(map(str, reports))} workers",
        "",
        f"Each cell: {unit} (speed over DDP; {unit} of a worker over those with the fewest workers). A worker is one "
        "rank and one SDP group. Its batch is the same in all columns.",
    ]
    tables = []
    for index, race in enumerate(first["races"]):
        rows = tabulate(reports, index)
        title = f"Hosts with links of {race['link']}" if race["link"] else "Processes of one host"
        header = ["method", *(f"{count} workers" for count in reports)]
        lines += ["", f"## {title}", "", "| " + " | ".join(header) + " |", "|---|" + "---:|" * len(reports)]
        lines += [
            "| " + " | ".join([name, *(_cell(own.get(count)) for count in reports)]) + " |"
            for name, own in rows.items()
        ]
        tables.append({"link": race["link"], "methods": rows})
    text = "\n".join(lines) + "\n"
    write_whole(folder / "workers.md", text)
    write_whole(folder / "workers.json", json.dumps({"settings": first["settings"], "links": tables}, indent=2) + "\n")
    last = tables[-1]["methods"]
    points = {name: [(count, row["tokens_per_second"]) for count, row in own.items()] for name, own in last.items()}
    plot_lines(points, "speed against the number of workers", "workers", unit, folder / "workers.png")


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "–"
    over = "–" if row["speed_over_ddp"] is None else f"{row['speed_over_ddp']:.2f} ×"
    return f"{row['tokens_per_second']:,.0f} ({over}; {row['efficiency']:.0%})"
