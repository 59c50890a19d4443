"""Runs with paths: each path reads its own cluster or source, resumes exactly, and is evaluated on
the sequences that the router sends to it.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sdp.data.clusters import make_clusters
from sdp.data.prepare import prepare
from sdp.data.shards import TokenDataset
from sdp.engine.batch.loader import evaluation_rows
from sdp.engine.batch.sampler import PathSamples
from sdp.tests.support.small_runs import STEPS, read_losses, run_sdp, write_config
from sdp.tools.cli import main
from sdp.tools.train.loop.evaluator import Routed

PREFIX = 16


def write_texts(folder: Path, kind: str) -> None:
    folder.mkdir()
    draw = random.Random(kind)
    for number in range(40):
        words = [
            str(draw.randrange(10**6)) if kind == "digits" else draw.choice(["the ", "cat ", "sat "]) for _ in range(60)
        ]
        (folder / f"{number}.txt").write_text(" ".join(words))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Prepared digits, prepared words, and both together with clusters."""
    folder, options = tmp_path_factory.mktemp("texts"), {"tokenizer": "bytes", "held_out": 0.2, "progress": False}
    for kind in ("digits", "words"):
        write_texts(folder / kind, kind)
        prepare([str(folder / kind / "*.txt")], folder / f"prepared-{kind}", **options)
    prepare([str(folder / "*/*.txt")], folder / "both", **options)
    make_clusters(folder / "both", 2, PREFIX, 32, progress=False)
    return {"digits": folder / "prepared-digits", "words": folder / "prepared-words", "both": folder / "both"}


@pytest.fixture
def routed(config: dict[str, Any], folders: dict[str, Path]) -> dict[str, Any]:
    config["sdp"] = {"groups": 2, "paths": {"count": 2, "own": ["model.layers.2", "model.layers.3"]}}
    config["data"] = {"path": str(folders["both"]), "sequence_length": 32}
    config["training"] |= {"evaluate_batches": 4}
    return config


def last_evaluation(run: Path) -> dict[str, Any]:
    return json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])


def test_paths_read_their_clusters_and_resume_exactly(routed: dict[str, Any], tmp_path: Path) -> None:
    path = write_config(routed, tmp_path)
    whole = run_sdp("train", path, "--dump-dir", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    shutil.copytree(tmp_path / "whole", tmp_path / "halves")
    shutil.rmtree(tmp_path / "halves/checkpoints/step-6")
    resumed = run_sdp("train", path, "--dump-dir", tmp_path / "halves", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed from {tmp_path / 'halves/checkpoints/step-3'}" in resumed.stderr
    assert read_losses(tmp_path / "halves") == read_losses(tmp_path / "whole")
    last = last_evaluation(tmp_path / "whole")
    assert last == last_evaluation(tmp_path / "halves") | {"seconds": last["seconds"]}
    assert len(last["single_path_losses"]) == len(last["subnetwork_losses"]) == 2
    assert min(last["single_path_losses"]) > last["loss"]  # the two kinds have nothing in common
    assert last["loss_after_prefix"] != last["loss"]
    assert f"step {last['step']}: held-out loss {last['loss']:.4f} (routed)" in resumed.stderr
    report = run_sdp("report", tmp_path / "whole")
    assert report.returncode == 0, report.stderr
    shown = {"  routed, after  ": last["loss"], "  routed, after, without prefixes ": last["loss_after_prefix"]}
    for path in range(2):
        shown[f"  path {path} on its samples, after "] = last["subnetwork_losses"][path]
        shown[f"  path {path} on all samples, after "] = last["single_path_losses"][path]
    for label, loss in shown.items():
        line = next(line for line in report.stdout.splitlines() if line.startswith(label))
        assert line.split()[-1] == f"{loss:.4f}"
    assert "full model" not in report.stdout


def test_held_out_samples_are_read_by_path_and_paths_take_turns() -> None:
    members = [np.array([0, 3, 4, 9]), np.array([1, 2]), np.array([5, 6, 7, 8, 10])]
    samples = Routed([{} for _ in range(11)], PathSamples(members, 3))
    rows = evaluation_rows(11, 2, drop_last=False)
    order = samples.by_path(rows, 2)
    assert order.indices == [0, 3, 1, 2, 5, 6, 4, 9, 7, 8, 10]
    assert [order[item]["path"] for item in range(11)] == [0, 0, 1, 1, 2, 2, 0, 0, 2, 2, 2]
    assert samples.by_path([1, 3, 4, 5, 6], 2).indices == [3, 4, 5, 6, 1]


def test_another_router_is_refused(
    routed: dict[str, Any], folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folders["both"], tmp_path / "data")
    routed["data"]["path"] = str(tmp_path / "data")
    routed["training"] |= {"steps": 2, "save_every": 2, "evaluate_every": 0}
    path, run = write_config(routed, tmp_path), tmp_path / "run"
    assert run_sdp("train", path, "--dump-dir", run).returncode == 0
    make_clusters(tmp_path / "data", 2, PREFIX, 32, seed=5, progress=False)
    resumed = run_sdp("train", path, "--dump-dir", run, "--resume", "--set", "training.steps=4")
    assert resumed.returncode == 2
    assert "the paths were trained with another router" in resumed.stderr
    assert main(["export", str(run), "--to", "hf", str(tmp_path / "out")]) == 2
    assert "the paths were trained with another router" in capsys.readouterr().err


def test_paths_read_one_source_each_until_one_has_no_more(
    routed: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    sources = [folders["digits"], folders["words"]]
    routed["data"] = {"sources": [{"path": str(path), "weight": 1} for path in sources], "sequence_length": 32}
    routed["training"] |= {"steps": 1000, "evaluate_every": 0, "save_every": 0}
    routed |= {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8}
    routed["sdp"]["paths"]["on_short"] = "end"
    finished = run_sdp("train", write_config(routed, tmp_path), "--dump-dir", tmp_path / "run")
    assert finished.returncode == 0, finished.stderr
    samples = [len(TokenDataset(path, "train", 32)) for path in sources]
    steps = min(samples) * 2 // routed["train_batch_size"]
    assert len(read_losses(tmp_path / "run")) == steps
    short = samples.index(min(samples))
    assert f"path {short} has no more sequences after step {steps}: the run ends" in finished.stderr
    last = last_evaluation(tmp_path / "run")
    assert min(last["source_losses"].values()) < last["loss"] < max(last["source_losses"].values())
    assert min(last["single_path_losses"]) > last["loss"]
    assert "loss_after_prefix" not in last


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["sdp.paths.count=4", "sdp.groups=4"], "has 2 clusters"),
        (["data.sequence_length=16"], "clusters are of sequences of 32 tokens"),
        (["data.path=DIGITS"], "no router here; make it with: sdp prepare --output DIR --clusters K"),
        (['data.sources=[{"path":"DIGITS","weight":1}]', "data.path=null"], "data.sources has 1 sources"),
    ],
)
def test_data_that_do_not_fit_are_one_line(
    routed: dict[str, Any], folders: dict[str, Path], tmp_path: Path, changed: list[str], message: str
) -> None:
    settings = [text.replace("DIGITS", str(folders["digits"])) for text in changed]
    finished = run_sdp(
        "train",
        write_config(routed, tmp_path),
        "--dump-dir",
        tmp_path / "run",
        "--set",
        *settings,
        f"training.steps={STEPS}",
    )
    assert finished.returncode == 2
    assert message in finished.stderr.splitlines()[-1], finished.stderr
