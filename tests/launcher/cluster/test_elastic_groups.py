"""``sdp launch`` for elastic groups: one launch for each group, and what is refused; elastic.sh."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import sdp
from sdp.launcher.cluster.rank import main as rank_main
from sdp.tests.support.network.launch_lines import command_of, dry_run, train_words
from sdp.tools.cli import main

SCRIPT = Path(sdp.__path__[0]) / "configs/clusters/elastic.sh"
HOSTS = ["--hostfile", "hosts", "elastic.json"]


@pytest.fixture(autouse=True)
def elastic(folder: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The working directory has an elastic run, and this process is told its group."""
    config = {
        "train_batch_size": 48,
        "sdp": {"groups": 4, "capacity": 0.6, "elastic": {"enabled": True}},
        "data": {"path": "shards"},
        "training": {"steps": 5},
    }
    (folder / "elastic.json").write_text(json.dumps(config))
    (folder / "token").write_text("x" * 16)
    monkeypatch.setenv("SDP_ELASTIC_GROUP", "2")
    monkeypatch.setenv("SDP_ELASTIC_COORDINATOR", "10.0.0.1:29400")
    monkeypatch.setenv("SDP_ELASTIC_TOKEN_FILE", "token")
    monkeypatch.delenv("SDP_ELASTIC_TOKEN", raising=False)
    return monkeypatch


@pytest.mark.parametrize("launcher", [["mpirun", "--mpi", "openmpi"], ["mpirun", "--mpi", "mpich"], ["deepspeed"]])
def test_a_launch_gives_its_ranks_the_group_and_no_token(
    capsys: pytest.CaptureFixture[str], folder: Path, launcher: list[str]
) -> None:
    printed = dry_run(capsys, "--launcher", *launcher, *HOSTS)
    told = [f"SDP_ELASTIC_{what}" for what in ("GROUP=2", "COORDINATOR=10.0.0.1:29400", f"TOKEN_FILE={folder}/token")]
    assert train_words(printed)[-5:] == [*told, "train", "elastic.json"]
    assert "x" * 16 not in printed
    assert command_of(printed)


def test_a_rank_takes_the_variables_of_its_group(elastic: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def run(words: list[str], settings: dict[str, str], rank: int) -> int:
        seen.append((words, os.environ["SDP_ELASTIC_GROUP"], rank))
        return 0

    elastic.setattr("sdp.launcher.cluster.rank.run_witnessed", run)
    for name, value in {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}.items():
        elastic.setenv(name, value)
    elastic.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    elastic.setenv("CUDA_VISIBLE_DEVICES", "")
    assert rank_main(["0", "host:29500", "SDP_ELASTIC_GROUP=3", "train", "a.json", "--set", "b=c"]) == 0
    assert seen == [(["train", "a.json", "--set", "b=c"], "3", 0)]


@pytest.mark.parametrize(
    ("variables", "words", "message"),
    [
        (
            {"SDP_ELASTIC_GROUP": None},
            ["--launcher", "mpirun", "--mpi", "mpich", *HOSTS],
            "launch each group by itself",
        ),
        ({"SDP_ELASTIC_GROUP": "4"}, ["--launcher", "deepspeed", *HOSTS], "the run has 4 groups, numbered from 0"),
        ({"SDP_ELASTIC_COORDINATOR": None}, ["--launcher", "deepspeed", *HOSTS], "SDP_ELASTIC_COORDINATOR is not"),
        ({"SDP_ELASTIC_TOKEN_FILE": None}, ["--launcher", "deepspeed", *HOSTS], "needs a shared token"),
        (
            {"SDP_ELASTIC_TOKEN_FILE": None, "SDP_ELASTIC_TOKEN": "y" * 16},
            ["--launcher", "deepspeed", *HOSTS],
            "SDP_ELASTIC_TOKEN_FILE is not; put the token into a file",
        ),
        ({}, ["--launcher", "slurm", "--gpus-per-node", "4", "elastic.json"], "submit configs/clusters/elastic.slurm"),
    ],
)
def test_what_is_refused_is_one_line(
    elastic: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str | None],
    words: list[str],
    message: str,
) -> None:
    for name, value in variables.items():
        if value is None:
            elastic.delenv(name)
        else:
            elastic.setenv(name, value)
    assert main(["launch", "--dry-run", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "code", "launches"),
    [
        ("echo x >> tried; exit 0", 0, 1),
        ("echo x >> tried; exit 2", 2, 1),
        ("echo x >> tried; exit 143", 143, 1),
        ("echo x >> tried; exit 1", 1, 2),
        ("echo x >> tried; [ $(wc -l < tried) = 1 ] && exit 7; exit 0", 0, 2),
    ],
)
def test_the_script_launches_a_lost_group_again(folder: Path, command: str, code: int, launches: int) -> None:
    environ = dict(os.environ, RESTARTS="1")
    ended = subprocess.run([SCRIPT, "sh", "-c", command], env=environ, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code, ended.stderr
    assert (folder / "tried").read_text() == "x\n" * launches
    assert ("elastic.sh: group 2: " in ended.stderr) == (launches > 1)


def test_the_script_passes_a_signal_on_and_launches_nothing_more(folder: Path) -> None:
    command = 'trap "echo told >> tried; exit 1" TERM; echo began >> tried; while true; do sleep 0.05; done'
    process = subprocess.Popen([SCRIPT, "sh", "-c", command])
    while not (folder / "tried").exists():
        pass
    process.terminate()
    assert process.wait(30) == 1
    assert (folder / "tried").read_text() == "began\ntold\n"
