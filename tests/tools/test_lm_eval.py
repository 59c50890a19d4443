"""An export under EleutherAI's harness, from its own command line and without a network: its scores
are those of our model.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sdp.data.tokenizers import load_tokenizer
from sdp.engine.checkpoint.load import load
from sdp.models.llama import Llama
from sdp.models.registry import build_model
from sdp.tools.cli import main
from sdp.tools.runs import saved_run

MISSING = [name for name in ("lm_eval", "accelerate", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: pip install 'sdp-engine[eval]'"),
]

TEXTS = [
    "def run(args):\n    return 0\n",
    "import torch\nfrom torch import nn\n",
    "a line of é漢字 and  two spaces",
    "the rank's own shard",
]
QUESTIONS = [
    {"question": "import", "choices": ["torch", "qzx", "\u6f22\u5b57"], "answer": 0},
    {"question": "def __init__", "choices": ["zzz", "(self"], "answer": 1},
    {"question": "return", "choices": ["None", "self", "xq"], "answer": 2},
    {"question": "the", "choices": ["model", "rank", "~~"], "answer": 1},
]

COMMON = (
    "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\nmetadata:\n  version: 1\n"
)
TASKS = {
    "own_text": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list:\n  - metric: bits_per_byte\n",
    "own_choice": "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
    "doc_to_target: '{{answer}}'\nmetric_list:\n  - metric: acc\n",
}  # fmt: skip


def write_tasks(folder: Path) -> None:
    for name, rows in (("own_text", [{"text": text} for text in TEXTS]), ("own_choice", QUESTIONS)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{COMMON.replace('{data}', str(data))}{TASKS[name]}")


class Ours:
    """The checkpoint's model and tokenizer, and the log-likelihood of a text after another."""

    def __init__(self, run: Path):
        saved = saved_run.find(saved_run.CheckpointChoice(run))
        self.tokenizer = load_tokenizer(saved.data)
        self.model = Llama(build_model(saved.config.model, self.tokenizer.vocab_size).config)
        tensors = {f"model/{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
        load(saved.checkpoint, tensors, saved.state["files"], alone=True)

    @torch.no_grad()
    def log_likelihood(self, context: list[int], ids: list[int]) -> float:
        whole = torch.tensor([context + ids])
        logs = self.model(whole)[0].log_softmax(-1)[len(context) - 1 : -1]
        return logs.gather(1, whole[0, len(context) :, None]).sum().item()

    def bits_per_byte(self) -> float:
        start = [self.tokenizer.end_of_text]
        total = sum(self.log_likelihood(start, self.tokenizer.encode(text)) for text in TEXTS)
        return -total / math.log(2) / sum(len(text.encode()) for text in TEXTS)

    def accuracy(self) -> float:
        return sum(self._best(row) == row["answer"] for row in QUESTIONS) / len(QUESTIONS)

    def _best(self, row: dict) -> int:
        context = self.tokenizer.encode(row["question"])
        wholes = [self.tokenizer.encode(f"{row['question']} {choice}") for choice in row["choices"]]
        scores = [self.log_likelihood(context, whole[len(context) :]) for whole in wholes]
        return scores.index(max(scores))


def test_the_harness_scores_our_model(trained_run, tmp_path):
    assert main(["export", str(trained_run), str(tmp_path / "model")]) == 0
    (tmp_path / "tasks").mkdir()
    write_tasks(tmp_path / "tasks")
    model = f"pretrained={tmp_path / 'model'}"
    command = [
        sys.executable, "-P", "-m", "lm_eval", "--model", "hf", "--model_args", model, "--device", "cpu",
        "--batch_size", "2",
    ]  # fmt: skip
    command += ["--tasks", ",".join(TASKS), "--include_path", tmp_path / "tasks", "--output_path", tmp_path / "scores"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    finished = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=500)
    assert finished.returncode == 0, finished.stderr[-3000:]
    scores = json.loads(next((tmp_path / "scores").rglob("results_*.json")).read_text())["results"]
    ours = Ours(trained_run)
    assert scores["own_text"]["bits_per_byte,none"] == pytest.approx(ours.bits_per_byte(), rel=1e-5)
    assert scores["own_choice"]["acc,none"] == ours.accuracy()
