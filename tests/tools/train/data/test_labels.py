"""JSON lines with ``input_ids`` and ``labels``: which labels count in a run is what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.data.index import load_index
from sdp.data.shards import TokenDataset
from sdp.tests.support.foreign.given_models import add_tokenizer, make, theirs
from sdp.tests.support.small_runs import read_losses
from sdp.tools.cli import main

pytest.importorskip("transformers", reason="transformers is not installed; the extra 'dev' has it")

END = 2  # of the tokenizer
LENGTH = 16


def conversations(count: int = 60) -> list[dict[str, Any]]:
    """Questions that do not count and answers that do. Every other one ends with END itself."""
    rows = []
    for number in range(count):
        question, answer = [3 + number % 80] * (3 + number % 4), [5 + (7 * number + k) % 80 for k in range(9)]
        answer += [END] * (number % 2)
        rows.append({"input_ids": question + answer, "labels": [-100] * len(question) + answer, "text": "unused"})
    rows[3]["labels"] = [-100] * len(rows[3]["labels"])  # nothing counts
    return rows


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(make(tmp_path_factory.mktemp("given") / "model", "llama"))


def prepare(lines: Path, out: Path, tokenizer: str, *more: str) -> int:
    arguments = ["--input", str(lines), "--output", str(out), "--held-out", "0.3", "--tokenizer", tokenizer, *more]
    return main(["prepare", *arguments])


def test_shards_hold_the_tokens_and_which_labels_count(folder: Path, tmp_path: Path) -> None:
    rows = conversations()
    for workers in ("1", "2"):
        lines = write(tmp_path / "rows.jsonl", rows)
        assert prepare(lines, tmp_path / workers, f"hf:{folder}", "--workers", workers) == 0
    assert (tmp_path / "1" / "train-00000.bin").read_bytes() == (tmp_path / "2" / "train-00000.bin").read_bytes()
    assert load_index(tmp_path / "1").masks_labels
    found = []
    for split in ("train", "held_out"):
        data = TokenDataset(tmp_path / "1", split, 1)
        tokens = [(int(data[i]["input_ids"]), int(data[i]["labels"])) for i in range(len(data))]
        start = 0
        for at, (token, _) in enumerate(tokens):
            if token == END:
                found.append(tokens[start : at + 1])
                start = at + 1
    expected = []
    for row in rows:
        pairs = list(zip(row["input_ids"], row["labels"], strict=True))
        expected.append(pairs if pairs[-1][0] == END else [*pairs, (END, -100)])
    assert sorted(found) == sorted(expected)
    assert main(["prepare", "--output", str(tmp_path / "1"), "--verify"]) == 0


def test_a_run_weighs_and_evaluates_by_the_labels_that_count(folder: Path, tmp_path: Path) -> None:
    lines = write(tmp_path / "rows.jsonl", conversations())
    assert prepare(lines, tmp_path / "data", f"hf:{folder}", "--workers", "1") == 0
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "sdp": {"groups": 1},
        "model": {"name": "huggingface", "path": str(folder)},
        "data": {"path": str(tmp_path / "data"), "sequence_length": LENGTH},
        "training": {"steps": 12, "evaluate_batches": 1000},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = tmp_path / "run"
    assert main(["train", str(tmp_path / "config.json"), "--dump-dir", str(run)]) == 0
    assert all(loss is not None for loss in read_losses(run))
    held_out = TokenDataset(tmp_path / "data", "held_out", LENGTH)
    rows = [held_out[index] for index in range(len(held_out))]
    batch = {key: torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels")}
    with torch.no_grad():
        expected = theirs(folder)(**batch).loss.item()  # the mean over all labels that count
    first = json.loads((run / "evaluations.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(expected, rel=1e-5)
    by_ranks = ["--set", "training.loss_weighting=ranks"]
    assert main(["train", str(tmp_path / "config.json"), "--dump-dir", str(tmp_path / "ranks"), *by_ranks]) == 0
    assert read_losses(tmp_path / "ranks")[0] != pytest.approx(read_losses(run)[0], rel=1e-4)


GOOD = {"input_ids": [5, 6], "labels": [-100, 6]}
BAD: dict[str, tuple[list[Any], str]] = {
    "another label": ([GOOD, {"input_ids": [5, 6, 7], "labels": [6, 7, -100]}], "line 2: label 0 is 6, but token 0"),
    "other lengths": ([{"input_ids": [5, 6], "labels": [5]}], "line 1: 'labels' must be a list of integers, as"),
    "no tokens": ([{"input_ids": []}], "line 1: 'input_ids' must be a list of one or more token ids"),
    "a text": ([{"input_ids": "5 6"}], "line 1: 'input_ids' must be a list of one or more token ids"),
    "halves": ([{"input_ids": [5.5]}], "line 1: 'input_ids' must be a list of one or more token ids"),
    "below 0": ([{"input_ids": [-1]}], "line 1: 'input_ids' must be a list of one or more token ids"),
    "unequal": ([GOOD | {"input_ids": [[1], [2, 3]]}], "line 1: 'input_ids' and 'labels' must be lists of integers"),
    "no mask": ([GOOD | {"attention_mask": 1}], "line 1: 'attention_mask' hides some of 'input_ids'"),
    "padding": ([GOOD | {"attention_mask": [1, 0]}], "line 1: 'attention_mask' hides some of 'input_ids'"),
    "outside": ([GOOD, {"input_ids": [88]}], "token 88 is outside the vocabulary of 88"),
    "text between": ([GOOD, {"text": "w1"}], "some documents are text and some are input_ids"),
    "tokens between": ([{"text": "w1"}, GOOD], "some documents are text and some are input_ids"),
}  # fmt: skip


@pytest.mark.parametrize("how", BAD)
def test_what_is_no_such_data_is_one_line(folder: Path, tmp_path: Path, capsys: Any, how: str) -> None:
    rows, message = BAD[how]
    lines = write(tmp_path / "rows.jsonl", rows)
    assert prepare(lines, tmp_path / "data", f"hf:{folder}", "--workers", "1") == 2
    printed = capsys.readouterr().err.splitlines()
    assert message in printed[-1]
    assert not (tmp_path / "data").exists()


def test_tokens_need_their_own_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = write(tmp_path / "rows.jsonl", [GOOD])
    assert prepare(lines, tmp_path / "data", "sentencepiece") == 2
    assert "name the tokenizer that made them, for example --tokenizer hf:DIR" in capsys.readouterr().err
