"""Converts LLaMA's configuration to the ``config.json`` of ``transformers``, and back.

Parameters need no conversion, because their names are the same. A LLaMA with ``qk_norm`` is Qwen3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..engine.config.section import parse_section
from ..engine.errors import ConfigError
from .sections import LlamaConfig, RopeScaling

TYPES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""The classes of transformers that compute what a LLaMA of ours computes, by model_type."""

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
    "use_sliding_window": False,
}


def to_huggingface(config: LlamaConfig) -> dict[str, Any]:
    """Return the ``config.json`` of ``LlamaForCausalLM``, or of ``Qwen3ForCausalLM``.

    Defaults that affect results are written out, because they differ between versions.
    """
    kind = "qwen3" if config.qk_norm else "llama"
    rotary: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        rotary = config.rope_scaling.model_dump(exclude_none=True)
    return {
        "architectures": [TYPES[kind]],
        "model_type": kind,
        **{key: getattr(config, key) for key in (*_REQUIRED, *_OPTIONAL, "rope_theta")},
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_size,
        # transformers 5 reads this; transformers 4 reads rope_scaling and the rope_theta above.
        "rope_parameters": {**rotary, "rope_theta": config.rope_theta},
        **({"rope_scaling": rotary} if config.rope_scaling is not None else {}),
        **{key: value for key, value in _NEUTRAL.items() if value is not None},
        "use_cache": True,
    }


def from_huggingface(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``model`` section for the content of a ``config.json`` of transformers 4 or 5.

    Its ``model_type`` must be one of ``TYPES``. Missing keys have the defaults of ``LlamaConfig``
    of ``transformers``. Raises ValueError for settings that this project's LLaMA does not support.
    """
    qk_norm = content["model_type"] == "qwen3"
    for key in (*_REQUIRED, "head_dim", "num_key_value_heads") if qk_norm else _REQUIRED:
        if key not in content:
            raise ValueError(f"{key} is missing")
    for key, neutral in _NEUTRAL.items():
        if content.get(key, neutral) != neutral:
            raise ValueError(f"{key} {content[key]!r} is not supported, only {neutral!r}")
    rotary = dict(content.get("rope_parameters") or content.get("rope_scaling") or {})
    theta = float(rotary.pop("rope_theta", None) or content.get("rope_theta") or 10000.0)
    rotary["rope_type"] = rotary.pop("type", None) or rotary.get("rope_type", "default")
    try:
        scaling = None if rotary["rope_type"] == "default" else parse_section(RopeScaling, rotary, "rope_scaling")
    except ConfigError as error:
        raise ValueError(str(error)) from None
    heads = content["num_attention_heads"]
    return {
        **{key: content[key] for key in _REQUIRED},
        **{key: content.get(key, default) for key, default in _OPTIONAL.items()},
        "num_key_value_heads": content.get("num_key_value_heads") or heads,
        "head_dim": content.get("head_dim") or content["hidden_size"] // heads,
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else scaling.model_dump(exclude_none=True),
        "qk_norm": qk_norm,
    }
