"""Ranks of a script that wait for each other say who stands where."""

import pytest
from sdp.engine.environment.detect import free_port
from sdp.tests.support.forks.command import ForkedScript

Ended = dict[str, list[tuple[int, str]]]

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
    time.sleep(60)
if what == "batches" and rank == 1:
    sys.exit()
step(2)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The exit code and the output of both ranks, by what happens. All wait at the same time."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "script.py").write_text(SCRIPT)
    started: dict[str, list[ForkedScript]] = {}
    for what in ("script", "backend", "batches"):
        words = [folder / "script.py", what, folder / "checkpoints"]
        job = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        places = [job | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(2)]
        started[what] = [ForkedScript(*words, environment=place) for place in places]
    found = {"script": [(0, ""), started["script"][1].end()]}  # rank 0 would sleep on
    started["script"][0].kill()
    return found | {what: [rank.end() for rank in started[what]] for what in ("backend", "batches")}


def test_a_rank_that_waits_too_long_says_who_stands_where(ended: Ended) -> None:
    code, text = ended["script"][1]
    assert code == 1
    (line,) = [line for line in text.splitlines() if "no progress for 3 s: " in line]
    assert line.startswith("sdp: error: rank 1 on ")
    assert "rank 0 is in the script behind engine.step after step 2; rank 1 is in engine.backward after step 2." in line
    assert line.endswith("All ranks must make the same calls, and read the same number of batches")


def test_an_error_of_the_backend_says_who_stands_where(ended: Ended) -> None:
    """The time limit of the process group ends first."""
    for code, text in ended["backend"]:
        assert code == 1
        last = [line for line in text.splitlines() if "PeerLostError" in line][-1]
        assert "rank 0 is in engine.save_checkpoint after step 2; rank 1 is in engine.backward after step 2." in last


def test_unequal_numbers_of_batches_are_told(ended: Ended) -> None:
    (code, text), (other, _) = ended["batches"]
    assert (code, other) == (1, 0)
    assert "rank 1 is at the end of its script after step 2" in text
