"""The LLaMA against Hugging Face's, and what it states about itself."""

import copy

import pytest
import torch
from sdp.engine.errors import ConfigError, ModelError
from sdp.engine.model_interface import Constant, Normal
from sdp.models.llama import Llama, LlamaConfig, rotary_frequencies, rotary_table
from sdp.models.llama_hf import from_huggingface, to_huggingface
from sdp.models.registry import build_model
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

transformers = pytest.importorskip("transformers")
BASE = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 48,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 16}
SHAPES = {
    "plain": {},
    "grouped": {"num_key_value_heads": 2},
    "multi-query, tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "own head size": {"head_dim": 12, "rope_theta": 500000.0, "rms_norm_eps": 1e-5},
    "normalised heads": {"qk_norm": True, "num_key_value_heads": 2, "head_dim": 12},
    "llama3": {"rope_scaling": LLAMA3, "tie_word_embeddings": True},
    "yarn": {"rope_scaling": YARN, "num_key_value_heads": 1},
    "everything": {"qk_norm": True, "rope_scaling": YARN | {"beta_fast": 20.0, "attention_factor": 1.3},
                   "tie_word_embeddings": True, "num_key_value_heads": 2},
}  # fmt: skip


def pair(**fields) -> tuple[Llama, nn.Module]:
    """Ours and Hugging Face's with the same large weights."""
    torch.manual_seed(0)
    ours = Llama(LlamaConfig(**BASE | fields))
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.2)
    config = transformers.AutoConfig.for_model(**to_huggingface(ours.config))
    config._attn_implementation = "sdpa"
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return ours, theirs


def close(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 17, 48])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_loss_and_gradients_equal_hugging_face(shape, tokens):
    ours, theirs = pair(**SHAPES[shape])
    ids = torch.randint(BASE["vocab_size"], (2, tokens))
    close(ours(ids), theirs(ids).logits)
    if tokens == 1:
        return  # nothing to predict: both means are over no token
    labels = ids.clone()
    labels[0, : tokens // 2] = -100
    loss, expected = ours(ids, labels), theirs(ids, labels=labels).loss
    assert loss.shape == () and loss.dtype == torch.float32
    close(loss, expected)
    loss.backward()
    expected.backward()
    for name, parameter in ours.named_parameters():
        mine, other = parameter.grad, theirs.get_parameter(name).grad
        assert mine is not None and other is not None
        assert (mine - other).abs().max() <= 1e-5 * other.abs().max(), name


@pytest.mark.parametrize("scaling", [
    LLAMA3 | {"original_max_position_embeddings": 8192}, LLAMA3 | {"high_freq_factor": 1.5}, YARN,
    YARN | {"factor": 1.0}, YARN | {"original_max_position_embeddings": 4096, "factor": 16.0, "beta_slow": 2.0},
    YARN | {"original_max_position_embeddings": 6},
])  # fmt: skip
def test_frequencies_equal_those_of_transformers(scaling):
    """Also where both bounds of YaRN are the same pair, and for the sizes of Llama 3."""
    shape = BASE | {"rope_theta": 500000.0, "head_dim": 128, "rope_scaling": scaling}
    config = LlamaConfig(**shape)
    content = to_huggingface(config)
    theirs, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[scaling["rope_type"]](
        transformers.LlamaConfig(**content), device="cpu"
    )
    mine, own_factor = rotary_frequencies(config, torch.device("cpu"))
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)
    assert own_factor == pytest.approx(factor, rel=1e-7)
    plain, _ = rotary_frequencies(LlamaConfig(**shape | {"rope_scaling": None}), torch.device("cpu"))
    assert torch.equal(mine, plain) == (scaling["factor"] == 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_configuration_of_transformers_gives_the_section_back(shape):
    config = LlamaConfig(**BASE | SHAPES[shape])
    content = to_huggingface(config)
    assert to_huggingface(LlamaConfig(**from_huggingface(content))) == content
    saved = transformers.AutoConfig.for_model(**copy.deepcopy(content)).to_dict()  # as save_pretrained writes it
    assert to_huggingface(LlamaConfig(**from_huggingface(saved))) == content


@pytest.mark.parametrize(("scaling", "message"), [
    (YARN | {"low_freq_factor": 1.0}, 'low_freq_factor has no effect with rope_type "yarn"; remove it'),
    (LLAMA3 | {"beta_fast": 32.0}, 'beta_fast has no effect with rope_type "llama3"; remove it'),
    (LLAMA3 | {"low_freq_factor": None}, 'rope_type "llama3" needs low_freq_factor and high_freq_factor'),
    (LLAMA3 | {"low_freq_factor": 4.0}, "must be below the upper"),
    (YARN | {"beta_fast": 1.0}, "must be below the upper"),
    (YARN | {"factor": 0.5}, "factor"),
    (YARN | {"rope_type": "linear"}, "'llama3' or 'yarn'"),
])  # fmt: skip
def test_a_rope_scaling_that_cannot_be_is_one_line(scaling, message):
    with pytest.raises(ConfigError) as error:
        build_model({"name": "llama", **BASE, "rope_scaling": scaling})
    assert message in str(error.value) and str(error.value).startswith("model.rope_scaling")
    assert "\n" not in str(error.value)


def test_bfloat16_stays_near_hugging_face():
    ours, theirs = pair(num_key_value_heads=2)
    ids = torch.randint(BASE["vocab_size"], (2, 33))
    exact = ours(ids)
    mine, other = ours.bfloat16()(ids), theirs.bfloat16()(ids).logits
    # Both are bfloat16's rounding away from the exact logits; ours must not be further away than
    # theirs.
    assert mine.dtype == torch.bfloat16
    assert (mine - exact).abs().mean() <= 1.2 * (other - exact).abs().mean()
    assert ours(ids, ids).dtype == torch.float32


def test_every_parameter_has_an_initialisation():
    model = Llama(LlamaConfig(**BASE, initializer_range=0.01, qk_norm=True))
    for name, parameter in model.named_parameters():
        expected = Constant(1.0) if parameter.ndim == 1 else Normal(0.01)
        assert model.parameter_init(name) == expected, name
    with pytest.raises(ModelError, match="rotary"):
        model.parameter_init("model.rotary.weight")


def test_flops_equal_the_matrix_products_that_are_run():
    model = Llama(LlamaConfig(**BASE, num_key_value_heads=2))
    tokens = 16
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):  # the counter does not know the CPU's fused attention
        model(torch.zeros(1, tokens, dtype=torch.int64))
    forward = counter.get_total_flops() / tokens
    stated = model.flops_per_token(tokens)
    assert list(stated) == ["model.layers.0", "model.layers.1", "model.layers.2", "shared"]
    assert sum(stated.values()) == pytest.approx(3 * forward)


def test_sequence_beyond_the_positions_is_refused():
    model = Llama(LlamaConfig(**BASE))
    with pytest.raises(ModelError, match=r"49 tokens is longer than model\.max_position_embeddings = 48"):
        model(torch.zeros(1, 49, dtype=torch.int64))


def small(**fields) -> Llama:
    """With weights that are large enough for differences to show."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig(**BASE | fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.2)
    return model


@pytest.mark.parametrize("option", ["attention_dropout", "residual_dropout", "stochastic_depth"])
def test_what_is_drawn_at_random_is_for_training_alone(option):
    ids = torch.randint(BASE["vocab_size"], (2, 9))
    plain, random = small(), small(**{option: 0.5})
    assert plain.random_options() == [] and random.random_options() == [f"model.{option} 0.5"]
    assert torch.equal(random.eval()(ids), plain.eval()(ids))
    random.train()
    first, second = random(ids), random(ids)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    third = random(ids)
    torch.manual_seed(3)
    assert torch.equal(random(ids), third)


def test_stochastic_depth_skips_sequences_more_often_the_deeper_the_layer_and_keeps_the_mean():
    model = small(num_hidden_layers=4, stochastic_depth=0.5)
    assert [layer.survival for layer in model.model.layers] == [0.875, 0.75, 0.625, 0.5]
    layer, one = model.model.layers[3], torch.randn(1, 6, 32)
    hidden = one.repeat(4000, 1, 1)
    tables = rotary_table(6, model.config, like=hidden)
    full = layer.eval()(one, *tables)
    skipped = layer.train()(hidden, *tables)
    stays = (skipped == hidden).flatten(1).all(1)
    assert 0.46 < stays.float().mean() < 0.54
    torch.testing.assert_close(
        skipped[~stays], (one + 2 * (full - one)).expand_as(skipped[~stays]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("option", "value"), [("attention_dropout", 1.0), ("residual_dropout", -0.1), ("stochastic_depth", 1.0)]
)
def test_rates_are_probabilities_below_one(option, value):
    with pytest.raises(ValueError, match=option):
        LlamaConfig(**BASE, **{option: value})


@pytest.mark.parametrize("shape", ["plain", "grouped", "everything"])
def test_a_document_mask_gives_the_logits_and_gradients_of_separate_documents(shape):
    ours, _ = pair(**SHAPES[shape])
    lengths = [(5, 1, 17, 20), (30, 13)]
    ids = torch.randint(BASE["vocab_size"], (2, 43))
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])
    together = ours(ids, documents=documents)
    weight = torch.randn(together.shape)
    (together * weight).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in ours.named_parameters()}
    ours.zero_grad()
    for row, own in enumerate(lengths):
        start = 0
        for length in own:
            part = slice(start, start + length)
            alone = ours(ids[row : row + 1, part])[0]
            close(together[row, part], alone)
            (alone * weight[row, part]).sum().backward()
            start += length
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        largest = parameter.grad.abs().max().item()  # the gradients are sums of thousands of terms
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-5 * largest)
    assert not torch.allclose(together, ours(ids), atol=1e-2)
    close(ours(ids, documents=torch.zeros_like(documents)), ours(ids))
