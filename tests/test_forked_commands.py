"""A command that tests fork is like one that a new interpreter runs."""

import signal
from pathlib import Path
from typing import Any

import pytest
from sdp.tests.support.forks.command import ForkedCommand, run_forked
from sdp.tests.support.processes import alive, until
from sdp.tests.support.small_runs import make_corpus, read_losses, run_sdp, tiny_config, write_config


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def test_ranks_end_with_a_forked_command_that_is_killed(corpus: Path, tmp_path: Path) -> None:
    config, run = write_config(tiny_config(corpus, groups=2, steps=100_000), tmp_path), tmp_path / "run"
    with (tmp_path / "said").open("w") as said:
        process = ForkedCommand(["train", config, "--dump-dir", run], said, said)
    until(lambda: (run / "metrics.jsonl").exists(), seconds=120)
    below = [*map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())]
    assert len(below) == 3  # two ranks, and the process that forks them
    process.kill()
    assert process.wait() == -signal.SIGKILL
    until(lambda: not any(alive(pid) for pid in below))


def test_commands_do_not_see_what_others_have_left(corpus: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The same losses as with new interpreters, before and after a command that fails."""
    config = write_config(tiny_config(corpus, groups=2, steps=3), tmp_path)
    words = ["train", config, "--dump-dir"]
    assert run_sdp(*words, tmp_path / "new", new_interpreters=True).returncode == 0
    assert run_forked(*words, tmp_path / "first").returncode == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = run_forked(*words, tmp_path / "first", "--set", "sdp.groups=3")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    monkeypatch.delenv("WORLD_SIZE")
    assert run_forked(*words, tmp_path / "second").returncode == 0
    assert read_losses(tmp_path / "first") == read_losses(tmp_path / "second") == read_losses(tmp_path / "new")
