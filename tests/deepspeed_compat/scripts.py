"""Starts a script for DeepSpeed, Accelerate or the Trainer with two processes on CPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# What a page or a test leaves to the script: a model and a data set. And DeepSpeed would compile a
# collective in shared memory on CPUs, which takes minutes.
_BEGINNING = """
import deepspeed, torch, transformers

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, use_cache=False
))
rows = torch.randint(32, (16, 6), generator=torch.Generator().manual_seed(0))
dataset = [{"input_ids": row, "labels": row} for row in rows]
"""


def start_script(folder: Path, script: str, settings: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` under torchrun."""
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", write_script(folder, script, settings)]
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)


def write_script(folder: Path, script: str, settings: str) -> Path:
    """Write a script that finds ``model``, ``dataset``, and ``settings`` in ds_config.json."""
    (folder / "ds_config.json").write_text(settings, encoding="utf-8")
    (path := folder / "train.py").write_text(f"{_BEGINNING}\n{script}", encoding="utf-8")
    return path
