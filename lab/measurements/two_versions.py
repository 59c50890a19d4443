"""Compares the speed of ``sdp train`` in two checkouts of this package, in turns.

Each folder has a checkout named ``sdp``. The runs alternate, and which version comes first changes
from pair to pair. The script divides the first folder's seconds by the second's, and prints the
median, the smallest and the largest ratio. Both versions must end with the same loss and the same
bytes. Nothing else should run on the machine.

    git clone . /tmp/new/sdp; git clone . /tmp/old/sdp; git -C /tmp/old/sdp checkout COMMIT
    python -m lab.measurements.two_versions /tmp/new /tmp/old --pairs 9
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1},
    "sdp": {"groups": 2, "capacity": 0.5, "check_interval": 100},
    "model": {"name": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
              "num_attention_heads": 2, "max_position_embeddings": 64},
    "data": {"path": "shards", "sequence_length": 64},
    "training": {"evaluate_batches": 1, "evaluate_every": 0, "save_every": 0},
}  # fmt: skip


def main() -> None:
    """Prepare a small corpus, run the pairs, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs=2, type=Path)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1500)
    given = parser.parse_args()
    versions = [folder.resolve() for folder in given.folders]
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        _prepare(work, versions[0], given.steps)
        pairs = []
        for pair in range(given.pairs):
            order = versions if pair % 2 == 0 else versions[::-1]
            found = {version: _run(work, version) for version in order}
            pairs.append([found[version] for version in versions])
            print(f"pair {pair + 1} of {given.pairs}, load average {os.getloadavg()[0]:.1f}", flush=True)
    results = {(one.pop("loss"), one.pop("bytes")) for pair in pairs for one in pair}
    print("loss and bytes between groups:", *(f"{loss:.6f} {sent:,}" for loss, sent in sorted(results)))
    for key in pairs[0][0]:
        ratios = sorted(first[key] / second[key] for first, second in pairs)
        print(f"{key}: {statistics.median(ratios):.3f} ({ratios[0]:.3f} … {ratios[-1]:.3f})")
    if len(results) > 1:
        sys.exit("the versions do not compute the same")


def _prepare(work: Path, version: Path, steps: int) -> None:
    texts = work / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"a text of number {number} " * 9}) + "\n" for number in range(3000)))
    words = ["prepare", "--input", texts, "--output", work / "shards", "--tokenizer", "bytes", "--held-out", "0.02"]
    _call(work, version, *words)
    (work / "config.json").write_text(json.dumps(CONFIG | {"training": CONFIG["training"] | {"steps": steps}}))


def _run(work: Path, version: Path) -> dict[str, float]:
    """Train once. Returns seconds by kind, and what both versions must have in common."""
    dump_dir = Path(tempfile.mkdtemp(dir=work))
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    _call(work, version, "train", "config.json", "--dump-dir", dump_dir / "run", "--nproc", "2")
    whole, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [json.loads(line) for line in (dump_dir / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["step_seconds"] for line in lines]
    return {
        "mean step": statistics.mean(seconds),
        "median step": statistics.median(seconds),
        "CPU seconds, with imports": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "whole run, with imports": whole,
        "loss": lines[-1]["loss"],
        "bytes": lines[-1]["comm_bytes_by_kind"]["between groups/all_reduce"],
    }


def _call(work: Path, version: Path, *words: object) -> None:
    command = [sys.executable, "-P", "-m", "sdp", *map(str, words)]
    environment = dict(os.environ, PYTHONPATH=str(version), OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=work, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{version}: sdp {words[0]} ended with exit code {done.returncode}: {done.stderr[-2000:]}")


if __name__ == "__main__":
    main()
