"""A run with a service on this host, whose processes are killed at random.

    python -m lab.service.kills OUT --kills 20 --stops 3 --service-kills 2

It prints, and writes to OUT/kills.json, what was done and what became of every sample. It fails if
the run fails, or if a sample was counted twice or lost silently.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parent / "kills.json"


def processes(run: Path) -> dict[int, list[str]]:
    """Return the words of all processes that serve or train in the directory of a run, by id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if str(run) in words or any(word.startswith(f"{run}/groups/") for word in words):
            found[int(path.parent.name)] = words
    return found


def choose(run: Path, kind: str, rng: random.Random) -> int | None:
    """Return a process of a run to disturb: the service, or one of a group."""
    word = "serve" if kind == "service" else "--service"
    candidates = sorted(pid for pid, words in processes(run).items() if word in words)
    return rng.choice(candidates) if candidates else None


def disturb(run: Path, launcher: subprocess.Popen[bytes], events: list[str], pause: float, rng: random.Random) -> list:
    """Kill or stop processes until all events have happened or the run has ended."""
    done: list[dict[str, Any]] = []
    started, stopped = time.monotonic(), dict[int, float]()
    while (events or stopped) and launcher.poll() is None:
        time.sleep(pause * rng.uniform(0.5, 1.5))
        for pid in [pid for pid, until in stopped.items() if time.monotonic() >= until]:
            del stopped[pid]
            os.kill(pid, signal.SIGCONT)
        pid = choose(run, events[-1], rng) if events else None
        if pid is None or pid in stopped:
            continue
        kind = events.pop()
        try:
            os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        except ProcessLookupError:
            events.append(kind)
            continue
        if kind == "stop":
            stopped[pid] = time.monotonic() + 10.0
        done.append({"seconds": round(time.monotonic() - started, 1), "what": kind})
        print(done[-1], flush=True)
    return done


def account(run: Path) -> dict[str, Any]:
    """Return what became of every sample of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary, order = json.loads((run / "summary.json").read_text()), json.loads((run / "data_order.json").read_text())
    shares = order["first"] * order["groups"] + sum(len(indices) for indices in order["dealt"].values())
    losses = [json.loads(line)["loss"] for line in (run / "evaluations.jsonl").read_text().splitlines()]
    return {
        "rounds": len(lines),
        "rounds_without_a_group": sum(line["groups"] < order["groups"] for line in lines),
        "steps": summary["steps"],
        "samples_dealt": shares * order["micro_batches"] * order["width"],
        "samples_counted": summary["samples"],
        "samples_skipped": summary["skipped_samples"],
        "late": summary["late"],
        "held_out": [losses[0], losses[-1]],
    }


def main() -> int:
    """Run, disturb, and check."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=3)
    parser.add_argument("--service-kills", type=int, default=2)
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between two events, on average")
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, run = random.Random(args.seed), args.out.absolute() / "run"
    events = ["group"] * args.kills + ["stop"] * args.stops + ["service"] * args.service_kills
    rng.shuffle(events)
    command = [sys.executable, "-m", "sdp", "train", str(CONFIG), "--dump-dir", str(run)]
    command += ["--set", f"training.steps={args.steps}", f"training.seed={args.seed}"]
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "output.log").open("wb") as output:
        launcher = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while not (run / "metrics.jsonl").exists() and launcher.poll() is None:
                time.sleep(0.2)
            started = time.monotonic()
            done = disturb(run, launcher, events, args.pause, rng)
            code = launcher.wait(timeout=1800)
        finally:
            launcher.terminate()
    result: dict[str, Any] = {"exit_code": code, "seconds": round(time.monotonic() - started), "events": done}
    result["not_done"] = events
    if code == 0:
        result |= account(run)
    (args.out / "kills.json").write_text(json.dumps(result, indent=1) + "\n")
    print({key: value for key, value in result.items() if key != "events"}, f"{len(done)} events")
    if code:
        return 1
    return int(result["samples_counted"] + result["samples_skipped"] != result["samples_dealt"])


if __name__ == "__main__":
    sys.exit(main())
