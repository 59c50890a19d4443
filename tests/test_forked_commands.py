"""A command that tests fork is like one that a new interpreter runs."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sdp.data.prepare import prepare
from sdp.tests.support.forks.command import ForkedCommand, run_forked
from sdp.tests.support.processes import alive, until
from sdp.tests.support.small_runs import read_losses, run_sdp, tiny_config, write_config

NEW, FORKED = "run-with-new-interpreters", "run-with-forks"
MANY = 100_000  # steps that no run reaches


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"document {number} " * 40)
    prepare([str(folder / "*.txt")], folder / "shards", tokenizer="bytes", held_out=0.2, workers=1, progress=False)
    return folder / "shards"


def children(pid: int) -> dict[int, list[str]]:
    """Return the process ids of the children of a process, with the fields of /proc/PID/stat."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found[int(folder.name)] = fields
    return found


@pytest.fixture
def start(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    monkeypatch.chdir(tmp_path)
    words = ["train", write_config(tiny_config(corpus, groups=2, steps=MANY), tmp_path), "--dump-dir"]
    started: list[Any] = []
    with Path(os.devnull).open("w") as null, (tmp_path / "stderr").open("w") as said:

        def begin(kind: str) -> Any:
            if kind == FORKED:
                started.append(ForkedCommand([*words, kind], null, said))
            else:
                command = [sys.executable, "-P", "-m", "sdp", *map(str, [*words, kind])]
                started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=null, stderr=said))
            return started[-1]

        yield begin
    for process in started:
        process.kill()
        process.wait()


def test_ranks_end_with_a_forked_command_that_is_killed(start: Callable[[str], Any], tmp_path: Path) -> None:
    process = start(FORKED)
    until(lambda: (tmp_path / FORKED / "metrics.jsonl").exists(), seconds=120)
    below = list(children(process.pid))
    assert len(below) == 3  # two ranks, and the process that forks them
    process.kill()
    assert process.wait() == -signal.SIGKILL
    until(lambda: not any(alive(pid) for pid in below))


def test_commands_do_not_see_what_others_have_left(corpus: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The same losses as with new interpreters, before and after a command that fails."""
    config = write_config(tiny_config(corpus, groups=2, steps=3), tmp_path)
    words = ["train", config, "--dump-dir"]
    assert run_sdp(*words, tmp_path / NEW, new_interpreters=True).returncode == 0
    assert run_forked(*words, tmp_path / "first").returncode == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = run_forked(*words, tmp_path / "first", "--set", "sdp.groups=3")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    monkeypatch.delenv("WORLD_SIZE")
    assert run_forked(*words, tmp_path / "second").returncode == 0
    assert read_losses(tmp_path / "first") == read_losses(tmp_path / "second") == read_losses(tmp_path / NEW)
