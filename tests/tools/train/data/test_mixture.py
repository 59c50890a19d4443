"""Runs on several sources: proportions, resumption, changed weights, losses."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from sdp.data.prepare import prepare
from sdp.engine.checkpoint.storage.files import read_state
from sdp.tests.support.small_runs import STEPS, read_losses, read_metrics, run_sdp, write_config
from sdp.tools.cli import main


@pytest.fixture(scope="module")
def two(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The corpus of the other tests, and one of digits."""
    folder = tmp_path_factory.mktemp("digits")
    digits = random.Random(1)
    for number in range(40):
        (folder / f"{number}.txt").write_text(" ".join(str(digits.randrange(10**6)) for _ in range(60)))
    prepare([str(folder / "*.txt")], folder / "digits", tokenizer="bytes", held_out=0.2, workers=1, progress=False)
    return [corpus, folder / "digits"]


@pytest.fixture
def mixed(config: dict[str, Any], two: list[Path]) -> dict[str, Any]:
    config["data"] = {
        "sources": [{"path": str(path), "weight": weight} for path, weight in zip(two, (3, 1), strict=True)],
        "sequence_length": 32,
    }
    return config


def weights(two: list[Path], *values: float) -> str:
    sources = [{"path": str(path), "weight": value} for path, value in zip(two, values, strict=True)]
    return f"data.sources={json.dumps(sources)}"


def test_a_mixture_on_two_ranks_resumes_exactly(mixed, two, tmp_path):
    path = write_config(mixed, tmp_path)
    for name, *words in (("whole",), ("halves", "--resume")):
        finished = run_sdp("train", path, "--dump-dir", tmp_path / name, *words)
        assert finished.returncode == 0, finished.stderr
        assert "shards 75.0%, digits 25.0%" in finished.stderr
        if name == "whole":
            shutil.copytree(tmp_path / "whole", tmp_path / "halves")
            shutil.rmtree(tmp_path / "halves/checkpoints/step-6")
    assert f"resumed from {tmp_path / 'halves/checkpoints/step-3'}" in finished.stderr
    assert read_losses(tmp_path / "halves") == read_losses(tmp_path / "whole")
    for line in read_metrics(tmp_path / "whole"):
        assert sum(line["source_samples"].values()) == line["samples"]
    last = json.loads((tmp_path / "whole/evaluations.jsonl").read_text().splitlines()[-1])
    assert set(last["source_losses"]) == {"shards", "digits"}
    assert last["source_losses"]["digits"] != last["source_losses"]["shards"]


def first_evaluation(dump_dir: Path) -> dict[str, Any]:
    return json.loads((dump_dir / "evaluations.jsonl").read_text().splitlines()[0])


def test_the_loss_of_a_source_is_that_of_its_own_held_out_samples(mixed, two, tmp_path):
    mixed["sdp"] = {"groups": 1}
    mixed["training"] |= {"steps": 1, "evaluate_every": 0, "save_every": 0}
    assert main(["train", str(write_config(mixed, tmp_path)), "--dump-dir", str(tmp_path / "mixed")]) == 0
    losses = first_evaluation(tmp_path / "mixed")["source_losses"]
    for path in two:
        mixed["data"] = {"path": str(path), "sequence_length": 32}
        assert main(["train", str(write_config(mixed, tmp_path)), "--dump-dir", str(tmp_path / path.name)]) == 0
        assert losses[path.name] == pytest.approx(first_evaluation(tmp_path / path.name)["loss"], rel=1e-6)


def test_weights_may_change_on_a_resume(mixed, two, tmp_path, capsys):
    mixed["sdp"] = {"groups": 1}
    run = ["train", str(write_config(mixed, tmp_path)), "--dump-dir", str(tmp_path / "run"), "--set"]
    assert main([*run, "training.steps=3"]) == 0
    before = read_metrics(tmp_path / "run")[-1]["source_samples"]
    assert min(before.values()) > 0
    assert main([*run, weights(two, 0, 1), "--resume"]) == 0
    assert "data.sources: {" in capsys.readouterr().err
    after = read_metrics(tmp_path / "run")[-1]["source_samples"]
    assert after == {"shards": before["shards"], "digits": before["digits"] + 3 * 8}
    state = read_state(tmp_path / "run" / f"checkpoints/step-{STEPS}")["loader"]
    assert sorted(entry["share"] for entry in state["sources"].values()) == [0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "x"}, "data: path and sources are both given"),
        ({"sources": [{"path": "x", "weight": 0}]}, "data: sources: every weight is 0"),
        ({"sources": []}, "data.sources: list should have at least 1 item"),
        ({"name": "digits"}, 'data: sources is for tokens, and data.name is "digits"'),
    ],
)
def test_mistakes_are_one_line(mixed, tmp_path, capsys, change, message):
    mixed["data"] |= change
    assert main(["train", str(write_config(mixed, tmp_path)), "--dump-dir", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err


def test_the_same_corpus_twice_is_refused(mixed, two, tmp_path, capsys):
    mixed["sdp"] = {"groups": 1}
    run = ["train", str(write_config(mixed, tmp_path)), "--dump-dir", str(tmp_path / "run"), "--set"]
    assert main([*run, weights([two[0], two[0]], 1, 2)]) == 2
    assert "have the same corpus; name it only once" in capsys.readouterr().err
