"""``training.evaluate_tasks``: scores equal the harness's own on an export."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sdp.tests.support.harness_tasks import write_tasks
from sdp.tests.support.small_runs import run_sdp, tiny_config, write_config
from sdp.tools.cli import main

NEEDED = {"lm_eval": "lm-eval", "accelerate": "accelerate", "transformers": "transformers"}
MISSING = [package for name, package in NEEDED.items() if importlib.util.find_spec(name) is None]
installed = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not installed: pip install 'sdp-engine[eval]'")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@pytest.fixture
def run(text_corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A configuration with two groups, whose tasks are files of this test."""
    for name, value in (OFFLINE | {"HF_HOME": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    names = write_tasks(tmp_path / "tasks")
    config = tiny_config(text_corpus, groups=2, steps=4)
    config["sdp"]["capacity"] = 0.5
    config["model"] |= {"max_position_embeddings": 64, "initializer_range": 0.1}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.02}}
    tasks = {"tasks": names, "every": 2, "include_path": str(tmp_path / "tasks")}
    config["training"] |= {"save_every": 4, "evaluate_tasks": tasks}
    return config


def evaluations(dump_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (dump_dir / "evaluations.jsonl").read_text().splitlines()]


def run_harness(model: Path, names: list[str], folder: Path) -> dict[str, dict]:
    command = [
        *(sys.executable, "-P", "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--batch_size", "2"),
        *("--model_args", f"pretrained={model},dtype=float32", "--tasks", ",".join(names)),
        *("--include_path", str(folder / "tasks"), "--output_path", str(folder / "scores")),
    ]
    finished = subprocess.run(command, env=os.environ | OFFLINE, capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(next((folder / "scores").rglob("results_*.json")).read_text())["results"]


@installed
def test_scores_in_training_are_those_of_the_harness_on_an_export(run, tmp_path, capsys):
    run["tensorboard"] = {"enabled": True}
    dump_dir = tmp_path / "run"
    finished = run_sdp("train", write_config(run, tmp_path), "--dump-dir", dump_dir)
    assert finished.returncode == 0, finished.stderr
    lines = evaluations(dump_dir)
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert ["tasks" in line for line in lines] == [False, True, True]
    ours = lines[-1]["tasks"]
    assert ours != lines[1]["tasks"]
    assert main(["export", str(dump_dir), str(tmp_path / "model")]) == 0
    names = run["training"]["evaluate_tasks"]["tasks"]
    theirs = run_harness(tmp_path / "model", names, tmp_path)
    compared = 0
    for task in names:
        for key, value in theirs[task].items():
            measure, _, filtered = key.partition(",")
            if filtered == "none" and not measure.endswith("_stderr"):
                assert ours[task][measure] == pytest.approx(value, rel=1e-4), key
                compared += 1
    assert compared == 6
    assert {task: scores["samples"] for task, scores in ours.items()} == dict.fromkeys(names, 5)
    # The report, the curves, and the command that evaluates a checkpoint have them too.
    assert f"own_text, bits_per_byte {ours['own_text']['bits_per_byte']:,.4g}" in " ".join(finished.stdout.split())
    assert (dump_dir / "tensorboard").is_dir()
    capsys.readouterr()
    options = ["--tasks", ",".join(names), "--num-fewshot", "1", "--include-path", str(tmp_path / "tasks"), "--json"]
    assert main(["evaluate", str(dump_dir), *options]) == 0
    again = json.loads(capsys.readouterr().out)["tasks"]
    assert {task: pytest.approx(scores, rel=1e-5) for task, scores in ours.items()} == again


def tokenizer_with_a_first_token(folder: Path) -> Path:
    """Write a tokenizer of transformers that begins every text with a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "<unk>", "alpha", "beta", "gamma"]
    own = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    first = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    own.post_processor = first  # pyright: ignore[reportAttributeAccessIssue]
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=own, **names).save_pretrained(folder)
    return folder


@installed
def test_a_tokenizer_of_transformers_makes_the_tokens_of_the_harness(tmp_path):
    import torch
    from lm_eval.models.huggingface import HFLM
    from sdp.data.tokenizers.kinds import HuggingFaceTokenizer
    from sdp.tools.tasks.harness_model import HarnessModel
    from sdp.tools.tasks.scoring import FullModel, Scorer
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tokenizer_with_a_first_token(tmp_path / "tokenizer")
    sizes = {
        "vocab_size": 6, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    theirs = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder), device="cpu")
    scorer = Scorer(FullModel(torch.nn.Module(), lambda _: 0.0, 16, 1, torch.device("cpu")))
    ours = HarnessModel(scorer, HuggingFaceTokenizer(str(folder)))
    assert ours.prefix_token_id == theirs.prefix_token_id == 0
    assert ours.eot_token_id == theirs.eot_token_id == 1
    for text in ("alpha beta", "<s> alpha", "gamma </s> alpha"):
        for special in (None, False, True):
            assert ours.tok_encode(text, special) == theirs.tok_encode(text, special)
    assert ours.tok_encode("alpha") == [0, 3]


@installed
def test_a_run_of_one_rank_limits_the_documents_and_keeps_its_random_numbers(run, tmp_path, monkeypatch):
    tasks = run["training"]["evaluate_tasks"]
    tasks |= {"limit": 2, "every": 0, "tasks": ["own_choice"]}
    run["sdp"] = {"groups": 1}
    random.seed(5)
    np.random.seed(5)
    before = random.getstate()
    assert main(["train", str(write_config(run, tmp_path)), "--dump-dir", str(tmp_path / "run")]) == 0
    assert random.getstate() == before
    lines = evaluations(tmp_path / "run")
    assert ["tasks" in line for line in lines] == [False, True]
    assert lines[-1]["tasks"]["own_choice"]["samples"] == 2
    del run["training"]["evaluate_tasks"]
    assert main(["train", str(write_config(run, tmp_path)), "--dump-dir", str(tmp_path / "plain")]) == 0
    assert evaluations(tmp_path / "plain")[-1]["loss"] == lines[-1]["loss"]


@installed
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ["own_choise"]}, "training.evaluate_tasks: unknown task own_choise, did you mean own_choice?"),
        ({"tasks": ["own_generation"]}, "the task own_generation has output_type generate_until"),
        ({"include_path": "nowhere"}, "/nowhere is not a directory"),
        ({"tasks": []}, "training.evaluate_tasks.tasks: list should have at least 1 item"),
    ],
)
def test_mistakes_are_one_line_before_training(run, tmp_path, capsys, change, message):
    run["training"]["evaluate_tasks"] |= change
    run["sdp"] = {"groups": 1}
    dump_dir = tmp_path / "run"
    assert main(["train", str(write_config(run, tmp_path)), "--dump-dir", str(dump_dir)]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert message in error[0]
    assert not (dump_dir / "metrics.jsonl").exists()


@installed
@pytest.mark.parametrize("spoil", ["documents", "template"])
def test_a_task_that_does_not_work_is_one_line_before_training(run, tmp_path, capsys, spoil):
    run["sdp"] = {"groups": 1}
    if spoil == "documents":
        (tmp_path / "tasks/own_choice.jsonl").unlink()
    else:
        file = tmp_path / "tasks/own_choice.yaml"
        file.write_text(file.read_text().replace("{{choices}}", "{{nothing}}"))
    assert main(["train", str(write_config(run, tmp_path)), "--dump-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert error[0].startswith("sdp: error: training.evaluate_tasks: ")
    assert "own_choice" in error[0]


def test_a_missing_package_is_one_line(run, tmp_path, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "lm_eval" else found(name, *more)
    )
    run["sdp"] = {"groups": 1}
    assert main(["train", str(write_config(run, tmp_path)), "--dump-dir", str(tmp_path / "run")]) == 2
    assert "the package lm-eval is not installed; pip install 'sdp-engine[eval]'" in capsys.readouterr().err


def test_tasks_are_for_text(run, tmp_path, capsys):
    run["data"] = {"name": "digits"}
    run["model"] = {"name": "resnet18"}
    run["sdp"] = {"groups": 1}
    assert main(["train", str(write_config(run, tmp_path)), "--dump-dir", str(tmp_path / "run")]) == 2
    assert "training.evaluate_tasks: tasks are for language models, and digits are images" in capsys.readouterr().err


def test_options_of_tasks_need_tasks(tmp_path, capsys):
    assert main(["evaluate", str(tmp_path), "--limit", "3"]) == 2
    assert "are for tasks; name some with --tasks" in capsys.readouterr().err
