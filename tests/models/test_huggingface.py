"""Models of transformers at the level of neurons train as the oracle does."""

from typing import Any

import pytest
import sdp
import torch
from sdp.models.huggingface import declare_neuron_branches, neuron_branches
from sdp.tests.support.cases import oracle_for
from sdp.tests.support.ranks import RankPool
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed; the extra 'dev' has it")
_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {"vocab_size": 32, "attn_implementation": "eager", "use_cache": False}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _SIZES | _TEXT | {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _SIZES | _TEXT | {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _SIZES | _TEXT | {"num_key_value_heads": 2, "head_dim": 4}),
    "mistral": ("MistralConfig", "MistralForCausalLM", _SIZES | _TEXT | {"num_key_value_heads": 2}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", _SIZES | _TEXT | {"num_key_value_heads": 2, "head_dim": 4}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _SIZES | _TEXT | {"num_key_value_heads": 2, "head_dim": 4}),
    "gpt2": (
        "GPT2Config", "GPT2LMHeadModel",
        {"n_embd": 16, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} | _TEXT,
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _SIZES | _TEXT),
    "opt": (
        "OPTConfig", "OPTForCausalLM",
        _SIZES | _TEXT | {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0, "max_position_embeddings": 32},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", _SIZES | _TEXT | _NO_DROPOUT),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", _SIZES | _TEXT | _NO_DROPOUT),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", _SIZES | _TEXT | _NO_DROPOUT | {"embedding_size": 8}),
    "vit": (
        "ViTConfig", "ViTForImageClassification",
        _SIZES | _NO_DROPOUT | {"image_size": 8, "patch_size": 4, "attn_implementation": "eager"},
    ),
}  # fmt: skip


def _build(family: str) -> nn.Module:
    config, kind, values = FAMILIES[family]
    torch.manual_seed(0)
    return declare_neuron_branches(getattr(transformers, kind)(getattr(transformers, config)(**values)))


def _rows(family: str, count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        return {
            "pixel_values": torch.randn(count, 3, 8, 8, generator=generator),
            "labels": torch.randint(2, (count,), generator=generator),
        }
    tokens = torch.randint(2, 32, (count, 6), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def _config(family: str) -> dict[str, Any]:
    names = [branch.name for branch in neuron_branches(_build(family))]
    groups = 2
    holders = [[0], [0, 1], [1], [0, 1]]
    units = [f"{name}.neurons.{index}" for name in names for index in range(groups)]
    return {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "sdp": {
            "groups": 2, "granularity": "neuron", "neuron_groups": groups,
            "placement": {unit: holders[index % 4] for index, unit in enumerate(units)},
        },
    }  # fmt: skip


def _rows_of(family: str, rank: int) -> dict[str, torch.Tensor]:
    return {key: value[2 * rank : 2 * rank + 2] for key, value in _rows(family, 4).items()}


def _train(family: str) -> tuple[dict[str, torch.Tensor] | None, float, float]:
    engine = sdp.initialize(model=_build(family), config=_config(family))[0]
    mine = _rows_of(family, engine.global_rank)
    for _ in range(2):
        engine.backward(engine(mine))
        engine.step()
    loss = engine.get_loss()
    assert loss is not None
    return engine.full_state_dict(), loss, engine.evaluate([mine])


KINDS = ["llama", "gpt2", "gpt_neox", "opt", "bert", "albert", "vit"]  # the others are like LLaMA or BERT


@pytest.mark.parametrize(
    "families", [KINDS, pytest.param([*{*FAMILIES} - {*KINDS}], marks=pytest.mark.slow)], ids=["kinds", "others"]
)
def test_ranks_with_slices_train_as_the_oracle_does(ranks: RankPool, families: list[str]) -> None:
    for family in sorted(families):
        ours, loss, evaluated = ranks.run(_train, family, world=2)[0]
        oracle = oracle_for(_build(family), _config(family), 2)
        rows = [_rows_of(family, rank) for rank in range(2)]
        expected = [oracle.step([rows], 0.1).loss for _ in range(2)]
        assert loss == pytest.approx(expected[1], rel=1e-5), family
        assert evaluated == pytest.approx(sum(map(oracle.evaluate, rows)) / 2, rel=1e-5), family
        for name, value in oracle.state_dict().items():
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6, msg=f"{family}: {name}")


def test_the_declaration_does_not_change_the_model() -> None:
    for family in KINDS:
        config, kind, values = FAMILIES[family]
        torch.manual_seed(0)
        plain = getattr(transformers, kind)(getattr(transformers, config)(**values)).eval()
        declared, batch = _build(family).eval(), _rows(family, 2)
        assert plain.state_dict().keys() == declared.state_dict().keys()
        with torch.no_grad():
            torch.testing.assert_close(declared(**batch).logits, plain(**batch).logits, msg=family)


@pytest.mark.usefixtures("one_rank")
def test_branch_scale_is_refused_for_weights_with_inputs_as_rows() -> None:
    config = _config("gpt2")
    config["sdp"] = {"granularity": "neuron", "branch_scale": "train"}
    with pytest.raises(
        sdp.ConfigError, match=r"branch_scale: \"train\" is not available with transformer.h.0"
    ) as caught:
        sdp.initialize(model=_build("gpt2"), config=config)
    assert "\n" not in str(caught.value)


def test_another_model_is_refused_with_the_known_ones() -> None:
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    with pytest.raises(
        sdp.ModelError, match=r"T5ForConditionalGeneration \(t5\) are not known; known: albert, bert, gemma"
    ) as caught:
        declare_neuron_branches(model)
    assert "\n" not in str(caught.value)
