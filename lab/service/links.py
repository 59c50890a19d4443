"""Measures seconds of a round over slow links: a service against an all-reduce.

    python -m lab.service.links OUT --rate 100mbit

This is done for SDP, and for DiLoCo, which is SDP with a capacity of 1. Four groups of one rank,
and the service, are on hosts of their own, with links of this rate in both directions (network
namespaces of this machine, see lab/network; needs root). The script prints the mean seconds of a
round after the first one, and writes them to OUT/links.json.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..network.__main__ import variables
from ..network.hosts import Link, address, hosts, on_host, shape

CONFIG = Path(__file__).parent / "kills.json"
GROUPS, EVERY, ROUNDS = 4, 32, 4
MODEL = ("hidden_size=128", "intermediate_size=352", "num_hidden_layers=8")  # 1.7 M parameters
HOW = {"plain": (), "four fragments, overlap 6": ("sdp.sync.fragments=4", "sdp.sync.overlap=6")}
CAPACITIES = {"SDP": 0.5, "DiLoCo": 1.0}


def run(name: str, out: Path, settings: list[str], *, served: bool) -> Path:
    """Train on all hosts of ``name``. Returns the run's file of metrics."""
    environ = os.environ | {"SDP_SERVICE_TOKEN": secrets.token_hex(16), "OMP_NUM_THREADS": "1"}
    sdp, words = [sys.executable, "-m", "sdp"], [str(CONFIG), "--set", *settings]
    commands = []
    if served:
        service = f"{address(GROUPS)}:7900"
        serve = [*sdp, "serve", *words, "--bind", service, "--dump-dir", str(out)]
        commands = [(GROUPS, serve, environ)]
    for rank in range(GROUPS):
        train = [*sdp, "train", *words, "--dump-dir", str(out / f"group-{rank}" if served else out)]
        if served:
            commands.append((rank, [*train, "--service", service], environ))
        else:
            commands.append((rank, train, environ | variables(rank, GROUPS)))
    log = out.parent / f"{out.name}.log"
    with log.open("wb") as output:
        started = [
            subprocess.Popen(on_host(name, host, command), env=variables, stdout=output, stderr=subprocess.STDOUT)
            for host, command, variables in commands
        ]
        try:
            codes = [process.wait(timeout=1800) for process in started]
        finally:
            for process in started:
                process.kill()
    if any(codes):
        raise SystemExit(f"exit codes {codes}; see {log}")
    return out / "metrics.jsonl"


def seconds_of_a_round(metrics: Path) -> float:
    """Return the mean seconds of a round, over all rounds but the first."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    key = "seconds" if "by_group" in lines[0] else "step_seconds"
    # After the last step, the service closes the averages of the other fragments.
    last = next(index for index, line in enumerate(lines) if line["step"] == EVERY * ROUNDS)
    first = next(index for index, line in enumerate(lines) if line["step"] == EVERY)
    return sum(line[key] for line in lines[first + 1 : last + 1]) / (ROUNDS - 1)


def main() -> int:
    """Run all variants, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--only", default="", help="only what has this in its name, such as plain")
    args = parser.parse_args()
    out, result = args.out.absolute(), dict[str, Any]()
    corpus = out / "corpus"
    if not corpus.exists():
        words = ["prepare", "--output", str(corpus), "--tokenizer", "bytes"]
        subprocess.run([sys.executable, "-m", "sdp", *words], check=True)
    settings = [f"data.path={json.dumps(str(corpus))}", f"sdp.sync.every={EVERY}", f"training.steps={EVERY * ROUNDS}"]
    settings += [f"model.{setting}" for setting in MODEL] + ["sdp.sync.service.grace_seconds=60"]
    settings += ["sdp.sync.service.heartbeat_seconds=10", "training.evaluate_batches=1"]
    settings += ["train_micro_batch_size_per_gpu=8"]
    with hosts(GROUPS + 1) as name:
        shape(name, GROUPS + 1, Link.parse(args.rate))
        for method, capacity in CAPACITIES.items():
            for how, more in HOW.items():
                for served in (False, True):
                    label = f"{method}, {how}, {'service' if served else 'all-reduce'}"
                    if args.only not in label:
                        continue
                    chosen = [*settings, f"sdp.capacity={capacity}", *more]
                    chosen += [] if served else ["sdp.sync.service=null"]
                    folder = out / label.replace(", ", "-").replace(" ", "-")
                    result[label] = round(seconds_of_a_round(run(name, folder, chosen, served=served)), 2)
                    print(label, result[label], flush=True)
    file = out / "links.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(before | result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
