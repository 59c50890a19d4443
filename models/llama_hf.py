"""LLaMA's configuration as the ``config.json`` of ``transformers``; parameters need no mapping, their names are the same."""

from __future__ import annotations

from typing import Any

from .llama import LlamaConfig

_SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
    "rms_norm_eps", "rope_theta", "tie_word_embeddings", "initializer_range",
)  # fmt: skip


def to_huggingface(config: LlamaConfig) -> dict[str, Any]:
    """The ``config.json`` of ``LlamaForCausalLM``; defaults that decide numbers are spelled out, since they differ between versions."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: getattr(config, key) for key in _SHARED},
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_size,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},  # transformers 5; rope_theta above is for 4
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
    }
