"""Small random models of transformers, in folders as people have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from sdp.tools.cli import main

_SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
# By family: the class of the configuration, and its values.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "llama3": ("LlamaConfig", _GROUPED | {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama-yarn": ("LlamaConfig", _GROUPED | {"rope_parameters": _YARN, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3Config", _GROUPED | {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", _GROUPED | {"sliding_window": 8}),
    "gemma2": (
        "Gemma2Config", _GROUPED | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        _GROUPED | {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
         "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "gpt-neox": ("GPTNeoXConfig", _SIZES),
    "phi": ("PhiConfig", _GROUPED),
    "olmo2": ("Olmo2Config", _GROUPED),
    "mixtral": ("MixtralConfig", _GROUPED | {"num_local_experts": 4}),
}  # fmt: skip


def make(
    folder: Path, family: str | tuple[str, dict[str, Any]], *, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Write a model whose weights differ from every initialisation.

    ``family``: a key of FAMILIES, or a class and its values.
    """
    import transformers

    kind, values = FAMILIES[family] if isinstance(family, str) else family
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**values | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(dtype).save_pretrained(folder)
    return folder


def theirs(folder: Path) -> Any:
    """The model of ``folder``, as transformers loads it, in float32."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def rows(count: int, tokens: int = 24, seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch of random tokens, a quarter of whose labels do not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 90, (count, tokens), generator=generator)
    masked = torch.rand(ids.shape, generator=generator) < 0.25
    return {"input_ids": ids, "labels": ids.masked_fill(masked, -100)}


def add_tokenizer(folder: Path) -> Path:
    """Add a tokenizer with a token a word, a chat template, and settings for generation."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    names = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(85))]
    made = Tokenizer(WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    fast.save_pretrained(folder)
    transformers.GenerationConfig(temperature=0.7, do_sample=True, eos_token_id=2).save_pretrained(folder)
    return folder


def prepared(folder: Path, tokenizer: Path) -> Path:
    """Prepare some text with ``tokenizer``, and return the directory of the shards."""
    lines = ({"text": " ".join(f"w{(7 * line + word) % 85}" for word in range(60))} for line in range(60))
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--input", folder / "text.jsonl", "--output", folder / "data", "--tokenizer", f"hf:{tokenizer}"]
    assert main(["prepare", *map(str, arguments), "--held-out", "0.3", "--workers", "1"]) == 0
    return folder / "data"
