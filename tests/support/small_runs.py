"""A small run of ``sdp train``, and the files that it writes."""

import json
import random
import subprocess
import sys
from pathlib import Path

from sdp.data.prepare import prepare

from .forks.command import run_forked

STEPS = 6
SMALL_LLAMA = {
    "name": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
}  # fmt: skip


def make_corpus(folder: Path, seed: int = 0, *, vocab_size: int | None = None) -> Path:
    """Write sixty small documents, as bytes or by sentencepiece with ``vocab_size``."""
    words = random.Random(seed)
    for number in range(60):
        text = " ".join(words.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(80))
        (folder / f"{number}.txt").write_text(text)
    prepare(
        [str(folder / "*.txt")], folder / "shards", tokenizer="bytes" if vocab_size is None else "sentencepiece",
        vocab_size=vocab_size, held_out=0.2, workers=1, progress=False,
    )  # fmt: skip
    return folder / "shards"


def tiny_config(corpus: Path, *, groups: int, steps: int) -> dict:
    """Return the configuration of a LLaMA with two layers, which trains in about a second."""
    return {
        "train_batch_size": 4,
        "sdp": {"groups": groups},
        "model": {"name": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2},
        "data": {"path": str(corpus), "sequence_length": 16},
        "training": {"steps": steps, "evaluate_batches": 1},
    }  # fmt: skip


def write_config(config: dict, tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


def run_sdp(*arguments: object, new_interpreters: bool = False) -> subprocess.CompletedProcess[str]:
    """Run ``sdp`` in a process of its own.

    Args:
        *arguments: what follows ``sdp``.
        new_interpreters: start the command and its ranks as users do. Otherwise they are forked,
            which takes a tenth of the processor seconds.
    """
    if not new_interpreters:
        return run_forked(*arguments)
    command = [sys.executable, "-P", "-m", "sdp", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def read_metrics(dump_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (dump_dir / "metrics.jsonl").read_text().splitlines()]


def read_losses(dump_dir: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(dump_dir)]


def read_tensorboard(directory: Path, curve: str = "Train/Samples/train_loss") -> dict[int, float]:
    """Return the points of a curve that TensorBoard shows, by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(curve)}
