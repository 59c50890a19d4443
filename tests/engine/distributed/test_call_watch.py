"""Ranks of a script that wait for each other say who stands where."""

import os
import subprocess
import sys
from pathlib import Path

from sdp.engine.environment.detect import free_port

SCRIPT = """
import sys, time, datetime
import torch, torch.nn as nn
import torch.distributed as dist
import sdp
from sdp.tests.support import models

what, folder = sys.argv[1:]
sdp.init_distributed(timeout=datetime.timedelta(seconds=8 if what == "backend" else 300))
rank = dist.get_rank()
config = {
    "train_micro_batch_size_per_gpu": 2, "sdp": {"groups": 2, "check_interval": 0},
    "training": {"step_timeout": 60 if what == "backend" else 3, "start_timeout": 60},
}
engine = sdp.initialize(model=models.mlp(), config=config)[0]

def step(number):
    engine.backward(engine(models.micro_batch("mlp", number, 0, rank)))
    engine.step()

step(0)
step(1)
if what == "backend" and rank == 0:
    engine.save_checkpoint(folder)
if what == "script" and rank == 0:
    time.sleep(20)
if what == "batches" and rank == 1:
    sys.exit()
step(2)
"""


def run(tmp_path: Path, what: str) -> list[tuple[int, str]]:
    """Run the script on two ranks; return exit codes and what they printed."""
    (tmp_path / "script.py").write_text(SCRIPT)
    port = free_port()
    root = str(Path(__file__).parents[4])
    ranks = []
    for rank in range(2):
        variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
        environ = os.environ | {name: str(value) for name, value in variables.items()}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": root}
        words = [sys.executable, str(tmp_path / "script.py"), what, str(tmp_path / "checkpoints")]
        ranks.append(subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        texts = [rank.communicate(timeout=120)[0] for rank in reversed(ranks)][::-1]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, text) for rank, text in zip(ranks, texts, strict=True)]


def test_a_rank_that_waits_too_long_says_who_stands_where(tmp_path: Path) -> None:
    _, (code, text) = run(tmp_path, "script")
    assert code == 1
    (line,) = [line for line in text.splitlines() if "no progress for 3 s: " in line]
    assert line.startswith("sdp: error: rank 1 on ")
    assert "rank 0 is in the script behind engine.step after step 2; rank 1 is in engine.backward after step 2." in line
    assert line.endswith("All ranks must make the same calls, and read the same number of batches")


def test_an_error_of_the_backend_says_who_stands_where(tmp_path: Path) -> None:
    """The time limit of the process group ends first."""
    for code, text in run(tmp_path, "backend"):
        assert code == 1
        last = [line for line in text.splitlines() if "PeerLostError" in line][-1]
        assert "rank 0 is in engine.save_checkpoint after step 2; rank 1 is in engine.backward after step 2." in last


def test_unequal_numbers_of_batches_are_told(tmp_path: Path) -> None:
    (code, text), (other, _) = run(tmp_path, "batches")
    assert (code, other) == (1, 0)
    assert "rank 1 is at the end of its script after step 2" in text
