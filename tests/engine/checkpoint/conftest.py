"""Checkpoints that many tests read."""

import shutil
from pathlib import Path

import pytest
import torch
from sdp.tests.support.checkpoints import SOURCE, merge_moments, save_one_step, train_and_save
from sdp.tests.support.ranks import RankPool, rank_alone


@pytest.fixture(scope="session")
def saved(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A checkpoint that four ranks wrote after two steps: its folder, weights and moments."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    answers = ranks.run(train_and_save, SOURCE, folder, world=4)
    return folder, answers[0][0], merge_moments(answers)


@pytest.fixture(scope="session")
def _saved_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that one rank wrote after one step; tests change copies of it."""
    folder = tmp_path_factory.mktemp("saved-alone")
    with rank_alone():
        save_one_step(folder)
    return folder


@pytest.fixture(autouse=True, scope="module")
def _alone(one_rank: None) -> None:
    """Tests have engines in this process, too."""


@pytest.fixture
def small(_saved_alone: Path, tmp_path: Path) -> Path:
    """The folder of a checkpoint that one rank wrote after one step, for this test alone."""
    shutil.copytree(_saved_alone, tmp_path, dirs_exist_ok=True)
    return tmp_path
