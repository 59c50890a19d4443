"""Trains a run of five groups on this host: one has half the speed, and one joins in the middle.

    python -m lab.service.speeds OUT

The script prints in how many rounds each group took part, and writes this to OUT/speeds.json.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parent / "kills.json"
ADDRESS = "127.0.0.1:7817"
SLOW, LATE = 0, 4


def slow_down(process: subprocess.Popen[bytes]) -> None:
    """Halve the speed of a process, by stopping it for half of the time."""
    while process.poll() is None:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                return
            time.sleep(0.05)


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run's rounds so far."""
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> int:
    """Train the run, and count the rounds of each group."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=800)
    args = parser.parse_args()
    run = args.out.absolute() / "run"
    environ = {**os.environ, "SDP_SERVICE_TOKEN": secrets.token_hex(16), "OMP_NUM_THREADS": "1"}
    settings = ["--set", "sdp.groups=5", f"training.steps={args.steps}", "sdp.sync.service.grace_seconds=10"]
    args.out.mkdir(parents=True, exist_ok=True)
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        with (args.out / f"output-{len(started)}.log").open("wb") as output:
            command = [sys.executable, "-m", "sdp", *words]
            started.append(subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT))
        return started[-1]

    def start_group(group: int) -> None:
        data = f"data.path={json.dumps(str(run / 'corpus'))}"
        words = ["--set", data, "--service", ADDRESS, "--dump-dir", str(args.out.absolute() / f"group-{group}")]
        process = start("train", str(CONFIG), *settings, *words)
        if group == SLOW:
            threading.Thread(target=slow_down, args=(process,), daemon=True).start()

    service = start("serve", str(CONFIG), *settings, "--bind", ADDRESS, "--dump-dir", str(run))
    try:
        while not (run / "config.json").exists() and service.poll() is None:
            time.sleep(0.2)
        for group in range(4):
            start_group(group)
        while len(lines_of(run)) < args.steps // 8 // 3 and service.poll() is None:
            time.sleep(0.2)
        start_group(LATE)
        code = service.wait(timeout=1200)
    finally:
        for process in started:
            process.send_signal(signal.SIGCONT)
            process.terminate()
    lines = lines_of(run)
    rounds = {str(slot): [line["round"] for line in lines if str(slot) in line["by_group"]] for slot in range(5)}
    tokens = {slot: sum(line["by_group"].get(slot, {"tokens": 0})["tokens"] for line in lines) for slot in rounds}
    result = {
        "exit_code": code,
        "rounds": len(lines),
        "rounds_of_groups": {slot: len(found) for slot, found in rounds.items()},
        "first_round_of_groups": {slot: min(found, default=None) for slot, found in rounds.items()},
        "tokens_of_groups": tokens,
        "late": lines[-1]["late"],
    }
    (args.out / "speeds.json").write_text(json.dumps(result, indent=1) + "\n")
    print(result)
    return code


if __name__ == "__main__":
    sys.exit(main())
