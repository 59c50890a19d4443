"""The text and the configuration of a small run."""

from pathlib import Path

import pytest
from sdp.tests.support.small_runs import SMALL_LLAMA, STEPS, make_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def config(corpus) -> dict:
    """The configuration of two groups that train a small LLaMA."""
    return {
        "train_batch_size": 8,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
        "scheduler": {"type": "WSD", "params": {"warmup_num_steps": 2, "total_num_steps": STEPS, "decay_num_steps": 2}},
        "sdp": {"groups": 2, "capacity": 0.75, "check_interval": 2},
        "model": dict(SMALL_LLAMA),
        "data": {"path": str(corpus), "sequence_length": 32},
        "training": {"steps": STEPS, "evaluate_every": 3, "evaluate_batches": 2, "save_every": 3},
    }
