"""A command that tests fork is like one that a new interpreter runs."""

from pathlib import Path
from typing import Any

import pytest
from sdp.tests.support.forks.command import run_forked
from sdp.tests.support.small_runs import make_corpus, read_losses, run_sdp, tiny_config, write_config


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def test_commands_do_not_see_what_others_have_left(corpus: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The same losses as with new interpreters, after a command that fails."""
    config = write_config(tiny_config(corpus, groups=2, steps=3), tmp_path)
    words = ["train", config, "--dump-dir"]
    assert run_sdp(*words, tmp_path / "new", new_interpreters=True).returncode == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = run_forked(*words, tmp_path / "refused", "--set", "sdp.groups=3")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    monkeypatch.delenv("WORLD_SIZE")
    assert run_forked(*words, tmp_path / "forked").returncode == 0
    assert read_losses(tmp_path / "forked") == read_losses(tmp_path / "new")
