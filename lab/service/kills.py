"""Trains a run with a service on this host, and kills its processes at random.

    python -m lab.service.kills OUT --ranks 60 --groups 25 --stops 10 --services 5 --steps 6400

Groups have two ranks. The script kills a rank, a whole group, or the service, or stops a group for
30 s. The disturbances are spread evenly over the rounds of the run, or over the first of them:
``--until 0.8`` leaves the last fifth undisturbed. It prints what was done, and what became of every
sample, and writes both to OUT/kills.json. It fails if the run fails, or if a sample was counted
twice or lost silently. Without disturbances, it makes a run to compare with.
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
from contextlib import suppress
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parent / "kills.json"
EVERY = json.loads(CONFIG.read_text())["sdp"]["sync"]["every"]
KINDS = {"rank": "kill a rank", "group": "kill a group", "stop": "stop a group for 30 s", "service": "kill the service"}
STOP_SECONDS = 30.0


def processes(run: Path) -> dict[int, list[str]]:
    """Return the command lines of a run's processes that serve or train, by process id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if str(run) in words or any(word.startswith(f"{run}/groups/") for word in words):
            found[int(path.parent.name)] = words
    return found


def victims(run: Path, kind: str, rng: random.Random) -> list[int]:
    """Return the processes to disturb: the service, a rank, or all processes of a group."""
    if kind == "service":
        return [pid for pid, words in processes(run).items() if "serve" in words]
    groups = dict[str, list[int]]()
    for pid, words in sorted(processes(run).items()):
        if "--service" in words:
            groups.setdefault(words[words.index("--dump-dir") + 1], []).append(pid)
    if not groups:
        return []
    group = groups[rng.choice(sorted(groups))]
    return group if kind != "rank" else [rng.choice(group[1:] or group)]  # the first one started the ranks


def rounds_of(run: Path) -> int:
    """Return how many rounds a run has completed."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return json.loads(lines[-1])["round"] if lines else 0


def send(pids: list[int], number: int) -> None:
    """Send a signal to all given processes that still live."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def disturb(
    run: Path, launcher: subprocess.Popen[bytes], kinds: list[str], rounds: float, rng: random.Random
) -> list[dict[str, Any]]:
    """Kill or stop processes, evenly over the first ``rounds``. Returns what was done."""
    done: list[dict[str, Any]] = []
    started, stopped = time.monotonic(), list[tuple[float, list[int]]]()
    while launcher.poll() is None:
        time.sleep(0.1)
        while stopped and time.monotonic() >= stopped[0][0]:
            send(stopped.pop(0)[1], signal.SIGCONT)
        is_due = len(done) < len(kinds) and rounds_of(run) >= (len(done) + 1) * rounds / (len(kinds) + 1)
        pids = victims(run, kinds[len(done)], rng) if is_due else []
        if not pids or any(pid in held for pid in pids for _, held in stopped):
            continue
        kind = kinds[len(done)]
        send(pids, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        if kind == "stop":
            stopped.append((time.monotonic() + STOP_SECONDS, pids))
        done.append({"seconds": round(time.monotonic() - started, 1), "round": rounds_of(run), "what": kind})
        print(done[-1], flush=True)
    return done


def account(run: Path) -> dict[str, Any]:
    """Count the rounds of a run and what became of its samples, for the report."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary, order = json.loads((run / "summary.json").read_text()), json.loads((run / "data_order.json").read_text())
    shares = order["first"] * order["groups"] + sum(len(indices) for indices in order["dealt"].values())
    losses = [json.loads(line)["loss"] for line in (run / "evaluations.jsonl").read_text().splitlines()]
    return {
        "rounds": len(lines),
        "groups_of_rounds": [line["groups"] for line in lines],
        "rounds_without_a_holder_of_some_unit": sum(bool(line["orphans"]) for line in lines),
        "rounds_without_a_group": sum(line["groups"] < order["groups"] for line in lines),
        "steps": summary["steps"],
        "samples_dealt": shares * order["micro_batches"] * order["width"],
        "samples_counted": summary["samples"],
        "samples_skipped": summary["skipped_samples"],
        "late": summary["late"],
        "held_out": [losses[0], losses[-1]],
    }


def main() -> int:
    """Start the run, disturb it, and check the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    for kind in KINDS:
        parser.add_argument(f"--{kind}s", type=int, default=0, help=f"how often to disturb: {KINDS[kind]}")
    parser.add_argument("--steps", type=int, default=6400)
    parser.add_argument("--until", type=float, default=1.0, help="the share of the run that is disturbed")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, run = random.Random(args.seed), args.out.absolute() / "run"
    kinds = [kind for kind in KINDS for _ in range(vars(args)[f"{kind}s"])]
    rng.shuffle(kinds)
    command = [sys.executable, "-m", "sdp", "train", str(CONFIG), "--nproc", "8", "--dump-dir", str(run)]
    command += ["--set", f"training.steps={args.steps}", f"training.seed={args.seed}"]
    command += [f"scheduler.params.total_num_steps={args.steps}"]
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "output.log").open("wb") as output:
        launcher = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while not (run / "metrics.jsonl").exists() and launcher.poll() is None:
                time.sleep(0.2)
            started = time.monotonic()
            done = disturb(run, launcher, kinds, args.until * args.steps / EVERY, rng)
            code = launcher.wait()
        finally:
            launcher.terminate()
    result: dict[str, Any] = {"exit_code": code, "seconds": round(time.monotonic() - started), "events": done}
    result["not_done"] = kinds[len(done) :]
    if code == 0:
        result |= account(run)
    (args.out / "kills.json").write_text(json.dumps(result, indent=1) + "\n")
    print({key: value for key, value in result.items() if key != "events"}, f"{len(done)} events")
    if code:
        return 1
    return int(result["samples_counted"] + result["samples_skipped"] != result["samples_dealt"])


if __name__ == "__main__":
    sys.exit(main())
