"""``sdp generate``, and ``sdp evaluate`` of a folder: what they give is what transformers gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.data.shards import TokenDataset
from sdp.data.tokenizers import load_tokenizer
from sdp.engine.errors import escape
from sdp.tests.support.foreign.given_models import add_tokenizer, make, prepared, theirs
from sdp.tools.cli import main

transformers = pytest.importorskip("transformers", reason="transformers is not installed; the extra 'dev' has it")

PROMPT = "w1 w2 w3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(make(tmp_path_factory.mktemp("given") / "model", "qwen3"))


def output(capsys: Any, *arguments: object) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def greedy(folder: Path, prompt: str) -> tuple[list[int], str]:
    """The tokens that transformers makes, and their text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    made = theirs(folder).generate(ids, do_sample=False, temperature=None, max_new_tokens=8)
    return made[0].tolist(), tokenizer.decode(made[0], skip_special_tokens=True)


def test_a_folder_continues_a_text_as_transformers_does(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", folder, PROMPT, "--max-new-tokens", 8]
    likeliest = output(capsys, *command, "--temperature", 0)
    assert likeliest == greedy(folder, PROMPT)[1] != PROMPT
    sampled = [output(capsys, *command, "--seed", seed) for seed in (1, 1, 2)]  # generation_config.json samples
    assert sampled[0] == sampled[1] != sampled[2]


def test_a_run_continues_a_text_as_its_export_does(
    trained_run: Path, text_corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(trained_run), str(tmp_path / "out")]) == 0
    texts = [
        output(capsys, "generate", model, "def f(", "--max-new-tokens", 8) for model in (trained_run, tmp_path / "out")
    ]
    ids, text = greedy(tmp_path / "out", "def f(")
    # SentencePiece and tokenizers give different texts for bytes that are not UTF-8.
    tokenizer = load_tokenizer(text_corpus)
    assert texts == [escape(tokenizer.decode([i for i in ids if i != tokenizer.end_of_text])), escape(text)]
    assert all(text.startswith("def f(") for text in texts)


def test_a_folder_is_evaluated_as_transformers_does(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = prepared(tmp_path, folder)
    held_out = TokenDataset(data, "held_out", 32)
    rows = torch.stack([held_out[index]["input_ids"] for index in range(len(held_out))])
    settings = ["--set", f"data.path={data}", "data.sequence_length=32", "train_micro_batch_size_per_gpu=2"]
    result = json.loads(output(capsys, "evaluate", folder, "--json", "--batches", 100, *settings))
    with torch.no_grad():
        expected = theirs(folder)(rows, labels=rows).loss.item()
    assert result["sequences"] == len(rows)
    assert result["loss"] == pytest.approx(expected, rel=1e-5)


def test_what_cannot_be_done_is_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (pickled / path.name).write_bytes(path.read_bytes())
    (pickled / "pytorch_model.bin").write_bytes(b"")
    cases = {
        ("generate", pickled, PROMPT): "pytorch_model.bin, a pickle, which can run code and is not read",
        ("generate", folder, PROMPT, "--max-new-tokens", 0): "at least one token is needed",
        ("generate", folder, PROMPT, "--temperature", -1): "--temperature -1: give 0 or more",
        ("generate", tmp_path, PROMPT): "neither a run nor a checkpoint of a run",
        ("export", folder, tmp_path / "out"): "is a model of transformers already",
    }
    for number, settings in enumerate(("{bad", '{"eos_token_id": []}')):
        copied = shutil.copytree(folder, tmp_path / f"settings-{number}")
        (copied / "generation_config.json").write_text(settings)
        cases["generate", copied, PROMPT] = "generation_config.json: not settings for generation"
    for arguments, message in cases.items():
        assert main([str(argument) for argument in arguments]) == 2
        printed = capsys.readouterr()
        assert message in printed.err and printed.err.count("\n") == 1 and not printed.out
