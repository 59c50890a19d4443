"""``sdp bench CONFIG --workers 2,4,8``: the ways to train a model side by side, once for each number of workers, and how they scale.

Every number is a run of its own with as many SDP groups of one rank each, whose report lies in ``DIR/workers-N``. A rank's batch stays,
so a step of more ranks trains on more tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...engine.config.load import load_config
from ...engine.errors import ConfigError, SDPError
from ..runs.plot import plot_lines
from ..shared.files import write_whole
from .report import REPORT

OPTION = "--workers"


def counts(text: str) -> list[int]:
    """The numbers in ``2,4,8``. Raises :class:`ConfigError`."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 1 for word in words) or len(set(words)) < len(words):
        raise ConfigError(f"{OPTION} {text}: expected different numbers of ranks from 2 on, such as 2,4,8")
    return sorted(map(int, words))


def run(
    args: argparse.Namespace,
    folder: Path,
    compare: Callable[[argparse.Namespace], int],
    check: Callable[[argparse.Namespace], object],
) -> int:
    """``compare`` once for each number, then workers.md, workers.json and workers.png in ``folder``. Returns 0, or the exit code of the
    first that fails. Raises :class:`ConfigError` for a number that ``check`` refuses, before the first is compared.
    """
    if args.nproc is not None:
        raise ConfigError(f"--nproc: {OPTION} says how many ranks to start; leave it out")
    if load_config(args.config, args.set).train_batch_size is not None:
        raise ConfigError(
            f"train_batch_size: with {OPTION} a rank's batch stays and that of a step grows; state train_micro_batch_size_per_gpu instead"
        )
    runs = {count: _of_one(args, count, folder / f"workers-{count}") for count in counts(args.workers)}
    for count, own in runs.items():
        try:
            check(own)
        except SDPError as error:
            raise ConfigError(f"{OPTION} {args.workers}: {count} cannot be run: {error}") from None
    reports = {}
    for count, own in runs.items():
        code = compare(own)
        if code:
            return code
        reports[count] = json.loads((own.out / REPORT).read_text(encoding="utf-8"))
        _write(folder, reports)  # after each: a number that cannot be run loses none of the others
    print((folder / "workers.md").read_text(encoding="utf-8"), flush=True)
    return 0


def _of_one(args: argparse.Namespace, count: int, out: Path) -> argparse.Namespace:
    """The arguments of the run with ``count`` ranks."""
    words = ["--set", f"sdp.groups={count}", "--nproc", str(count), "--out", str(out)]
    changed = {"workers": None, "nproc": count, "out": out, "set": [*args.set, f"sdp.groups={count}"]}
    return argparse.Namespace(**(vars(args) | changed | {"argv": [*_without_option(args.argv), *words]}))


def _without_option(words: Sequence[str]) -> list[str]:
    kept, left = [], iter(words)
    for word in left:
        if word == OPTION:
            next(left, None)
        elif not word.startswith(f"{OPTION}="):
            kept.append(word)
    return kept


def table(reports: Mapping[int, Mapping[str, Any]], link: int) -> dict[str, dict[int, dict[str, Any]]]:
    """By method and number of workers, over the link at that place of every report: ``tokens_per_second``, ``speed_over_ddp`` (None without
    DDP), ``sent_bytes`` (None where not measured), ``seconds``, and ``efficiency``: tokens a second of a worker over those with the fewest.
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
        f"Of every method {unit} (speed over DDP's; {unit} of a worker over those with the fewest workers). A worker is one rank and one "
        "SDP group; its batch is the same in all columns.",
    ]
    tables = []
    for place, race in enumerate(first["races"]):
        rows = table(reports, place)
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
