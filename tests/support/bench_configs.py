"""A tiny model and the configuration with which the tests of ``sdp bench`` compare methods."""

from typing import Any

MODEL = {
    "name": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "sdp": {"groups": 4, "capacity": 0.5}, "model": MODEL,
    "data": {"sequence_length": 16},
}  # fmt: skip
