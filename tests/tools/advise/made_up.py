"""A small run, machines and made-up evidence for tests of ``sdp advise``."""

from __future__ import annotations

import math
from typing import Any

from sdp.tools.advise.evidence import Evidence, Gap, ManyEpochs, Setting
from sdp.tools.plan.machine import Machine

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "model": {"name": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6,
              "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8},
    "data": {"sequence_length": 8, "tokenizer": "bytes"},
    "training": {"steps": 100},
    "sdp": {"groups": 2, "capacity": 0.5, "lr_scale": 0.5},
}  # fmt: skip


def machine_with_link(between: float) -> Machine:
    """Two nodes of one slow device each."""
    return Machine((1, 1), 1e12, 1.0, between, between)


def made_up_evidence(**gaps: float) -> Evidence:
    """Evidence with a gap for each method in every step, 0.1 nats more with local steps."""
    found = {"dense": 0.0, "smaller_dense": 0.1, "forward": 0.3, "backward": 0.2, "forward,_then_backward": 0.15} | gaps
    entries = [
        Gap(method=method.replace("_", " "), every=every, groups=2, capacity=capacity, gap=gap + more, spread=0.0,
            tokens_per_parameter=0.05, seeds=3, source="page")
        for method, gap in found.items()
        for every, more in ((1, 0.0), (32, 0.1))
        for capacity in ((1.0,) if method == "dense" else (0.25, 0.5))
    ]  # fmt: skip
    setting = Setting(parameters=(50_000, 50_000), groups=(2, 2), tokens_of_group=16, tokens_per_parameter=(0.01, 0.1))
    epochs = ManyEpochs(epochs=50, seeds=3, source="page", losses={"dense": (1.0, 0.1)})
    curve = [(0.01, 5.0), (0.1, 5.0 - 0.2 * math.log2(10))]  # 0.2 nats for twice the steps
    curves = {method.replace("_", " "): curve for method in found}
    return Evidence(setting=setting, curves=curves, curves_source="page", gaps=entries, many_epochs=epochs)
