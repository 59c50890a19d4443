"""The same seed gives the same full model under every layout; a model with weights keeps them."""

import itertools
from typing import Any

import pytest
import sdp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sdp.engine.model_interface import Constant, Init, Normal, Uniform
from sdp.engine.subnetwork.initialisation import BLOCK_ELEMENTS, fill_rows, seed_of
from sdp.tests.support import models
from sdp.tests.support.cases import Case, engine_of, oracle
from sdp.tests.support.ranks import RankPool
from torch import Tensor, nn


def _state(case: Case) -> object:
    engine = engine_of(case)
    engine.check_holders()
    return engine.full_state_dict()


LAYOUTS = [  # others: the table of equality compares the start of each run bit for bit
    Case(2, 1, model="mlp-meta"),
    Case(2, 2, 3, model="llama-meta"),
    Case(2, 2, 1, placement="profile", model="llama-tied-meta"),
    Case(4, 1, placement="cyclic", bf16=True, model="llama-meta"),
    Case(1, 4, 2, placement="full", model="mlp-meta"),
]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_same_model_under_every_layout(ranks: RankPool, case: Case) -> None:
    expected = oracle(Case(2, 1, model=case.model)).before
    assert expected is not None
    state = ranks.run(_state, case, world=case.world)[0]
    assert set(state) == set(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@pytest.mark.usefixtures("one_rank")
def test_seed_and_rules() -> None:
    case = Case(2, 1, model="llama-tied-meta")
    first = oracle(case).before
    other = engine_of(Case(1, 1, placement="full", model=case.model), training={"seed": 1}).full_state_dict()
    assert first is not None
    embedding = "model.embed_tokens.weight"
    assert not torch.equal(first[embedding], other[embedding])
    assert first["model.norm.weight"].eq(1).all()
    assert first["model.layers.0.mlp.up_proj.weight"].std().item() == pytest.approx(0.1, rel=0.2)
    q = [first[f"model.layers.{layer}.self_attn.q_proj.weight"] for layer in range(4)]
    assert not any(torch.equal(q[0], another) for another in q[1:]), "every layer has values of its own"


def test_torch_rules_are_those_of_reset_parameters() -> None:
    state = oracle(Case(2, 1, model="mlp-meta")).before
    assert state is not None
    assert state["layers.0.norm.weight"].eq(1).all()
    assert state["layers.0.norm.bias"].eq(0).all()
    bound = 1 / models.WIDTH**0.5
    assert 0.8 * bound < state["layers.2.up.weight"].abs().max().item() <= bound


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.sampled_from([1, 7, BLOCK_ELEMENTS // 4, BLOCK_ELEMENTS + 1]),
    cuts=st.lists(st.integers(0, 40)),
    init=st.sampled_from([Normal(0.5), Uniform(0.5)]),
)
def test_any_cut_into_rows_gives_the_same_values(rows: int, columns: int, cuts: list[int], init: Init) -> None:
    shape = torch.Size((rows, columns)) if columns > 1 else torch.Size((rows,))
    whole = torch.empty(shape)
    fill_rows(whole, 0, shape, init, 3, "name")
    edges = sorted({0, rows, *(cut for cut in cuts if cut < rows)})
    pieces = []
    for first, last in itertools.pairwise(edges):
        pieces.append(torch.empty((last - first, *shape[1:])))
        fill_rows(pieces[-1], first, shape, init, 3, "name")
    assert torch.equal(torch.cat(pieces), whole)


def test_values_of_neighbouring_blocks_differ() -> None:
    shape = torch.Size((4, BLOCK_ELEMENTS))
    out = torch.empty(shape)
    fill_rows(out, 0, shape, Normal(1.0), 0, "name")
    assert len({row[0].item() for row in out}) == 4
    assert out.std().item() == pytest.approx(1.0, rel=0.02)
    scalar = torch.empty(())
    fill_rows(scalar, 0, torch.Size(()), Constant(3.0), 0, "name")
    assert scalar.item() == 3.0
    assert seed_of(0, "a", 1) != seed_of(0, "a", 11)


@pytest.mark.usefixtures("one_rank")
def test_global_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    engine_of(Case(1, 1, model="mlp-meta"))
    engine_of(Case(1, 1, model="llama-meta"))
    assert torch.equal(torch.get_rng_state(), before)


def _hugging_face(kind: str) -> nn.Module:
    """Sizes at which a standard deviation says something."""
    import transformers as hf

    small: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2,
    }  # fmt: skip
    if kind == "gpt2":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=200, n_embd=64, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0)
        )
    if kind == "vit":
        return hf.ViTForImageClassification(hf.ViTConfig(image_size=32, patch_size=4, initializer_range=0.05, **small))
    if kind == "llama":
        return hf.LlamaForCausalLM(
            hf.LlamaConfig(vocab_size=200, num_key_value_heads=1, initializer_range=0.03, **small)
        )
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(vocab_size=200, num_key_value_heads=1, tie_word_embeddings=True, **small))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["gpt2", "vit", "llama", "qwen2"])
def test_hugging_face_models_are_initialised_as_they_do_it(kind: str) -> None:
    torch.manual_seed(0)
    theirs = _hugging_face(kind)
    with torch.device("meta"):
        model = _hugging_face(kind)
    config = {"train_micro_batch_size_per_gpu": 1}
    state = sdp.initialize(model=model, config=config)[0].module.state_dict()
    expected = dict(theirs.state_dict()) | dict(theirs.named_buffers())
    state |= dict(model.named_buffers())
    assert set(state) == set(expected)
    for name, tensor in expected.items():
        spread = 6 / (2 * tensor.numel()) ** 0.5  # six standard errors of an estimated standard deviation
        if tensor.std() == 0 or "inv_freq" in name:
            torch.testing.assert_close(state[name].cpu(), tensor, rtol=0, atol=0, msg=name)
        else:
            assert state[name].std().item() == pytest.approx(tensor.std().item(), rel=1.5 * spread), name
            assert (
                abs(state[name].mean().item() - tensor.mean().item()) < 6 * tensor.std().item() / tensor.numel() ** 0.5
            ), name
    if kind == "gpt2":
        assert state["transformer.h.1.mlp.c_proj.weight"].std().item() == pytest.approx(0.02 / 6**0.5, rel=0.05)


class Lawless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Copies(nn.Sequential):
    """A rule that needs two modules' values at once."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
        elif module is self:
            self[0].weight.copy_(self[1].weight)  # type: ignore[operator,arg-type]


@pytest.mark.usefixtures("one_rank")
def test_models_that_cannot_be_initialised() -> None:
    config = {"train_micro_batch_size_per_gpu": 1}
    with torch.device("meta"):
        lawless = nn.Sequential(Lawless(), Lawless())
    with pytest.raises(
        sdp.ModelError, match=r"there is no rule to initialise '0.scale'; give Lawless a reset_parameters"
    ):
        sdp.initialize(model=lawless, config=config)
    with torch.device("meta"):
        copies = Copies(nn.Linear(2, 2), nn.Linear(2, 2))
    message = r"^0.weight: its initialisation reads values of other modules, .*; build the model with its weights"
    with pytest.raises(sdp.ModelError, match=message):
        sdp.initialize(model=copies, config=config)
    half = models.mlp()
    half.head.to_empty(device="meta")
    with pytest.raises(sdp.ModelError, match=r"'head.weight' is on the meta device but other parameters have values"):
        sdp.initialize(model=half, config=config)
    with pytest.raises(
        sdp.ModelError, match=r"'stem.weight' is torch.float64; master weights are float32: call model.float"
    ):
        sdp.initialize(model=models.mlp().double(), config=config)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_in_half_precision_gets_master_weights_in_float32(
    caplog: pytest.LogCaptureFixture, device: str
) -> None:
    config = {"train_micro_batch_size_per_gpu": 2}
    low = models.mlp(device=device).bfloat16()
    before = {name: value.float() for name, value in low.state_dict().items()}
    optimizer = torch.optim.SGD(low.parameters(), lr=0.1)
    engine = sdp.initialize(model=low, optimizer=optimizer, config=config)[0]
    assert "in bfloat16), which are now float32" in caplog.text
    state = engine.full_state_dict()
    assert state is not None
    for name, value in state.items():
        assert value.dtype == torch.float32
        assert device == "meta" or torch.equal(value, before[name])
    engine.backward(engine(torch.ones(2, 5), torch.ones(2, 3)))
    engine.step()
    after = engine.full_state_dict()
    assert after is not None
    assert any(not torch.equal(after[name], value) for name, value in state.items())


# -- models that initialise themselves as torchtitan's do start from its values --------------------


TITAN = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
}


class TitanBlock(nn.Module):
    """A gated feed-forward, whose outputs start smaller in deeper layers."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.std = 0.02 / (2 * (depth + 1)) ** 0.5
        self.norm, self.w1, self.w2, self.w3 = nn.RMSNorm(32), nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 48)

    def init_weights(self) -> None:
        self.norm.reset_parameters()
        for linear in (self.w1, self.w2, self.w3):
            nn.init.trunc_normal_(linear.weight, std=0.02 if linear is self.w1 else self.std)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(x)
        return x + self.w2(self.w1(inner).sigmoid() * self.w3(inner))


class TitanModel(nn.Module):
    """Has blocks in a ModuleDict, nested ``init_weights``, and a table that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.output = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.register_buffer("freqs_cis", self.rotations(), persistent=False)
        self.layers = nn.ModuleDict({str(depth): TitanBlock(depth) for depth in range(4)})

    @staticmethod
    def rotations() -> Tensor:
        angles = torch.outer(torch.arange(16).float(), 10000.0 ** -(torch.arange(0, 8, 2).float() / 8))
        return torch.polar(torch.ones_like(angles), angles)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        with torch.device(buffer_device or self.freqs_cis.device):  # type: ignore[arg-type]
            self.freqs_cis = self.rotations()
        nn.init.normal_(self.tok_embeddings.weight)
        for layer in self.layers.values():
            layer.init_weights()  # type: ignore[operator]
        nn.init.trunc_normal_(self.output.weight, std=32**-0.5, a=-3 * 32**-0.5, b=3 * 32**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return self.output(hidden)


class SavedUnderOtherNames(TitanModel):
    """Splits a parameter when it is saved, as torchtitan 0.3 does with fused queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(lambda module, state, *_: state.update(half=state.pop("output.weight")))


@pytest.mark.usefixtures("one_rank")
def test_values_and_names_are_those_of_init_weights() -> None:
    torch.manual_seed(0)
    expected = TitanModel()
    with torch.no_grad():
        expected.init_weights()
    with torch.device("meta"):
        models = [TitanModel(), SavedUnderOtherNames()]
    engine, other = (sdp.initialize(model=model, config=TITAN)[0] for model in models)
    torch.testing.assert_close(engine.module.freqs_cis.cpu(), expected.freqs_cis, rtol=0, atol=0)
    found = engine.full_state_dict()
    assert found is not None
    assert found.keys() == expected.state_dict().keys()  # without freqs_cis
    for name, value in expected.named_parameters():
        error = 6 / (2 * value.numel()) ** 0.5  # six standard errors of an estimated standard deviation
        assert found[name].std().item() == pytest.approx(value.std().item(), rel=1.5 * error), name
        assert value.std() or torch.equal(found[name], value), name
    deep, first = (found[f"layers.{depth}.w2.weight"].std().item() for depth in (3, 0))
    assert deep / first == pytest.approx(0.5, rel=0.1)
    assert "output.weight" in (other.full_state_dict() or {})
