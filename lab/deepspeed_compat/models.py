"""Tries which models train with SDP: by blocks and by neurons, with both maskings.

    python -m lab.deepspeed_compat.models

Each model is small and takes two steps on two ranks. Each rank is a group. The script prints the
table of docs/units.md, and the reason of each refusal.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import sdp
import torch
from sdp.models.huggingface import declare_neuron_branches
from sdp.tests.support.foreign import foreign_models
from sdp.tests.support.models import even_llama
from sdp.tests.support.ranks import RankPool
from torch import nn

WORDS, TOKENS = 32, 6
_SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 24}
_GPT2 = {"n_embd": 16, "n_layer": 4, "n_head": 4}
_QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_KEYS = {"num_key_value_heads": 2}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# The name in the table: the configuration and the model in transformers, and the settings.
LANGUAGE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "LLaMA": ("LlamaConfig", "LlamaForCausalLM", _SIZES | _KEYS),
    "Mistral": ("MistralConfig", "MistralForCausalLM", _SIZES | _KEYS),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _SIZES | _KEYS),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _SIZES | _KEYS | {"head_dim": 4}),
    "Gemma": ("GemmaConfig", "GemmaForCausalLM", _SIZES | _KEYS | {"head_dim": 4}),
    "Gemma 2": ("Gemma2Config", "Gemma2ForCausalLM", _SIZES | _KEYS | {"head_dim": 4}),
    "Phi": ("PhiConfig", "PhiForCausalLM", _SIZES | {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "Phi-3": ("Phi3Config", "Phi3ForCausalLM", _SIZES | _SPECIAL),
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", _GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "GPT-J": (
        "GPTJConfig", "GPTJForCausalLM",
        _GPT2 | {"rotary_dim": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "GPT-Neo": (
        "GPTNeoConfig", "GPTNeoForCausalLM",
        {"hidden_size": 16, "num_layers": 4, "num_heads": 4, "attention_types": [[["global"], 4]],
         "resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "GPT-NeoX": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _SIZES),
    "OPT": ("OPTConfig", "OPTForCausalLM", _SIZES | {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0}),
    "BLOOM": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 16, "n_layer": 4, "n_head": 4, "hidden_dropout": 0.0}),
    "Falcon": ("FalconConfig", "FalconForCausalLM", _SIZES),
    "BERT": ("BertConfig", "BertForMaskedLM", _SIZES | _QUIET),
    "RoBERTa": ("RobertaConfig", "RobertaForMaskedLM", _SIZES | _QUIET),
    "ALBERT": ("AlbertConfig", "AlbertForMaskedLM", _SIZES | {"embedding_size": 16, "classifier_dropout_prob": 0.0}),
}  # fmt: skip
# Names in the table, and those of tests/support/foreign/foreign_models.py.
OTHERS = {
    "T5": "t5", "Whisper": "whisper", "ViT": "vit", "Swin (transformers)": "swin", "ResNet (transformers)": "resnet",
    "ResNet-18 (as torchvision's)": "torchvision-resnet",
}  # fmt: skip
CASES = [(granularity, masking) for granularity in ("block", "neuron") for masking in ("forward", "backward")]


def build(name: str) -> tuple[nn.Module, Any]:
    """Build the model of this name, and a batch of two rows for it."""
    torch.manual_seed(0)
    if name in OTHERS:
        return foreign_models.build(OTHERS[name]), foreign_models.make_batch(OTHERS[name], seed=0)
    if name == "LLaMA (ours)":
        rows = torch.randint(1, WORDS, (2, TOKENS))
        return even_llama(tied=False, device="cpu"), {"input_ids": rows % 19, "labels": rows % 19}
    config, kind, values = LANGUAGE[name]
    hf: Any = importlib.import_module("transformers")
    rows = torch.randint(3, WORDS, (2, TOKENS))
    settings = {"vocab_size": WORDS, "use_cache": False, "attn_implementation": "eager"} | values
    return getattr(hf, kind)(getattr(hf, config)(**settings)), {"input_ids": rows, "labels": rows}


def find_reasons(ranks: RankPool, name: str) -> list[str | None]:
    """Return for each of ``CASES`` why the model does not train in this way, or None if it does."""
    return [next(filter(None, ranks.run(find_reason, name, *case, world=2)), None) for case in CASES]


def find_reason(name: str, granularity: str, masking: str) -> str | None:
    """Train on this rank. Return why the model does not train in this way, or None if it does."""
    model, batch = build(name)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "sdp": {"groups": 2, "capacity": 0.5, "granularity": granularity, "masking": masking},
    }
    try:
        if granularity == "neuron" and not hasattr(model, "neuron_branches"):
            declare_neuron_branches(model)
        engine = sdp.initialize(model=model, config=config)[0]
        for _ in range(2):
            engine.backward(engine(batch))
            engine.step()
        loss = engine.evaluate([batch])
    except sdp.SDPError as error:
        return str(error)
    return None if torch.isfinite(torch.tensor(loss)) else f"the loss is {loss}"


def main() -> None:
    """Print the table and the reasons."""
    logging.disable(logging.WARNING)
    ranks = RankPool()
    reasons: dict[str, list[str]] = {}
    rows: dict[str, list[str]] = {}
    for name in ["LLaMA (ours)", *LANGUAGE, *OTHERS]:
        found = find_reasons(ranks, name)
        rows.setdefault(" | ".join("no" if reason else "yes" for reason in found), []).append(name)
        for case, reason in zip(CASES, found, strict=True):
            if reason:
                reasons.setdefault(reason, []).append(f"{name}: {' '.join(case)}")
    ranks.close()
    print("| models | blocks, forward | blocks, backward | neurons, forward | neurons, backward |")
    print("|---|---|---|---|---|")
    for cells, names in rows.items():
        print(f"| {', '.join(names)} | {cells} |")
    for reason, names in reasons.items():
        print(f"\n{reason}\n    {'; '.join(names)}")


if __name__ == "__main__":
    # The ranks import the function by the name of its module.
    from lab.deepspeed_compat import models

    models.main()
