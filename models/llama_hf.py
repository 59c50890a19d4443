"""LLaMA's configuration as the ``config.json`` of ``transformers``, and back.

Parameters need no mapping, because their names are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .sections import LlamaConfig

_SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps", "rope_theta", "tie_word_embeddings", "initializer_range",
)  # fmt: skip


def to_huggingface(config: LlamaConfig) -> dict[str, Any]:
    """The ``config.json`` of ``LlamaForCausalLM``.

    Defaults that affect results are written out, because they differ between versions.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: getattr(config, key) for key in _SHARED},
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_size,
        # transformers 5 reads this; transformers 4 reads the rope_theta above.
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
    }


_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_OPTIONAL = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
_NEUTRAL = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "quantization_config": None,
}


def from_huggingface(content: Mapping[str, Any]) -> dict[str, Any]:
    """The ``model`` section for a LLaMA's ``config.json`` of transformers 4 or 5.

    Missing keys have the defaults of ``transformers``. Raises ValueError for settings that this
    LLaMA does not support.
    """
    for key in _REQUIRED:
        if key not in content:
            raise ValueError(f"{key} is missing")
    for key, neutral in _NEUTRAL.items():
        if content.get(key, neutral) != neutral:
            raise ValueError(f"{key} {content[key]!r} is not supported, only {neutral!r}")
    rotary = content.get("rope_parameters") or content.get("rope_scaling") or {}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rotary embedding of type {kind!r} is not supported, only 'default'")
    heads = content["num_attention_heads"]
    return {
        **{key: content[key] for key in _REQUIRED},
        **{key: content.get(key, default) for key, default in _OPTIONAL.items()},
        "num_key_value_heads": content.get("num_key_value_heads") or heads,
        "head_dim": content.get("head_dim") or content["hidden_size"] // heads,
        "rope_theta": float(rotary.get("rope_theta") or content.get("rope_theta") or 10000.0),
    }
