"""A corpus and a finished run for the tests of commands that read one."""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from sdp.data.prepare import prepare
from sdp.engine.tracing.step import StepTrace, trace_step
from sdp.tests.support.small_runs import run_sdp
from sdp.tools.plan import forecast as forecasts

_TRACES: dict[str, StepTrace] = {}


def _fill_once(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], object]) -> Path:
    """Return a folder that is filled once per test session, also if several workers run tests.

    Tests must not change its content, because other workers may read it at the same time.

    Args:
        factory: pytest's factory of temporary folders.
        name: The folder's name, unique in the test session.
        fill: It gets the empty folder and fills it. If it fails, the next caller tries again.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # every worker has a folder of its own below the session's
        base = base.parent
    folder, filled = base / name, base / f"{name}.filled"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not filled.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            fill(folder)
            filled.touch()
    return folder


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Undo what a run leaves in this process: variables, its log and its process group."""
    log, had_group = logging.getLogger("sdp"), dist.is_initialized()
    before, settings, handlers = dict(os.environ), (log.level, log.propagate), list(log.handlers)
    yield
    if dist.is_initialized() and not had_group:
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
    (log.level, log.propagate), log.handlers[:] = settings, handlers


@pytest.fixture(scope="module")
def traced_once() -> Iterator[None]:
    """Trace each step once for all tests of this process that plan, because that is most of a plan.

    A trace depends on the model, the configuration, the layout and the group, but not on the
    machine.
    """

    def once(build: Any, config: Any, layout: Any, batch: Any, group: int, **options: Any) -> StepTrace:
        settings = config.resolved()
        settings["data"] = {**settings["data"], "path": None}  # data tell how large the model is
        shapes = {name: tuple(p.shape) for name, p in build().named_parameters()}
        key = json.dumps([settings, str(shapes), str(layout.mesh), str(layout.placement), group, str(options)])
        if dist.is_initialized() or key not in _TRACES:
            _TRACES[key] = trace_step(build, config, layout, batch, group, **options)
        return _TRACES[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forecasts, "trace_step", once)
        yield


@pytest.fixture(scope="session")
def text_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This project's own sources and README, in a SentencePiece vocabulary of 512."""
    root = Path(__file__).parent.parent.parent
    sources = [*sorted((root / "engine").rglob("*.py")), root / "README.md"]

    def fill(folder: Path) -> None:
        for number, path in enumerate(sources):
            (folder / f"{number}.txt").write_bytes(path.read_bytes())
        options = {"tokenizer": "sentencepiece", "vocab_size": 512, "held_out": 0.2, "workers": 1, "progress": False}
        prepare([str(folder / "*.txt")], folder / "shards", **options)

    return _fill_once(tmp_path_factory, "text", fill) / "shards"


@pytest.fixture(scope="session")
def trained_run(text_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 groups × fsdp 2 at stage 3, with checkpoints at steps 2 and 4."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3},
        "sdp": {"groups": 2, "capacity": 0.75},
        "model": {
            "name": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 64, "rope_theta": 5000.0, "initializer_range": 0.1,
        },
        "data": {"path": str(text_corpus), "sequence_length": 48},
        "training": {"steps": 4, "evaluate_every": 2, "evaluate_batches": 2, "save_every": 2},
    }  # fmt: skip

    def fill(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(config))
        finished = run_sdp("train", path, "--fsdp", "2", "--dump-dir", folder / "run")
        assert finished.returncode == 0, finished.stderr

    # A copy for this worker: commands may write into a run.
    own = tmp_path_factory.mktemp("trained") / "run"
    shutil.copytree(_fill_once(tmp_path_factory, "trained-run", fill) / "run", own)
    return own
