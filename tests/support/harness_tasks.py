"""Small tasks of lm-evaluation-harness whose documents are files."""

import json
from pathlib import Path

TEXTS = [
    "def run(args):\n    return 0\n", "import torch\nfrom torch import nn\n", "a line of é漢字 and  two spaces",
    "the rank's own shard", "alpha beta gamma delta " * 12,
]  # fmt: skip
QUESTIONS = [
    {"question": "import", "choices": ["torch", "qzx", "漢字"], "answer": 0},
    {"question": "def __init__", "choices": ["zzz", "(self"], "answer": 1},
    {"question": "return", "choices": ["None", "self", "xq"], "answer": 2},
    {"question": "the", "choices": ["model", "rank", "~~"], "answer": 1},
    {"question": "alpha beta gamma", "choices": ["alpha", "beta", "gamma", "delta delta"], "answer": 3},
]
_COMMON = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
num_fewshot: 1
metadata:
  version: 1
"""
_TASKS = {
    "own_text": """\
output_type: loglikelihood_rolling
doc_to_text: ''
doc_to_target: '{{text}}'
metric_list:
  - metric: bits_per_byte
  - metric: word_perplexity
""",
    "own_choice": """\
output_type: multiple_choice
doc_to_text: '{{question}}'
doc_to_choice: '{{choices}}'
doc_to_target: '{{answer}}'
fewshot_split: test
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "own_next": """\
output_type: loglikelihood
doc_to_text: '{{question}}'
doc_to_target: ' {{choices[answer]}}'
metric_list:
  - metric: perplexity
  - metric: acc
""",
}


def write_tasks(folder: Path) -> list[str]:
    """Write tasks; return their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, task in _TASKS.items():
        rows = [{"text": text} for text in TEXTS] if name == "own_text" else QUESTIONS
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(_COMMON.format(name=name, data=data) + task)
    return list(_TASKS)
