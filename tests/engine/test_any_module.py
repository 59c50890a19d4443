"""Modules that were not written for SDP: torch's encoder, Hugging Face models, blocks with habits. Native equals the reference."""

from __future__ import annotations

from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import RankPool
from ranks_cases import Case
from torch import nn

ROWS, TOKENS, WORDS = 2, 5, 32


class Encoder(nn.Module):
    """torch's TransformerEncoder, which looks into its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 11, dropout=0.0, batch_first=True), 4)
        self.head = nn.Linear(8, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(self.embed(input_ids), src_key_padding_mask=input_ids == 0)
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Peeking(nn.Module):
    """Reads a block's dtype and scale, and counts in ``forward`` with a value of its input."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(8, 8)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, mask: Any = None, *, hidden: torch.Tensor) -> torch.Tensor:
            steps = 1 if hidden.abs().max().item() < 1e3 else 2
            return hidden + steps * self.scale * torch.tanh(self.fc1(hidden))

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first: Any = self.blocks[0]
        hidden = self.embed(input_ids).to(first.fc1.weight.dtype)
        for block in self.blocks:
            hidden = block(hidden=hidden)
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind in ("encoder", "peeking"):
        return Encoder() if kind == "encoder" else Peeking()
    import transformers as hf

    small: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 4, "num_attention_heads": 2}
    if kind == "gpt2":
        sizes: dict[str, Any] = {"vocab_size": WORDS, "n_embd": 8, "n_layer": 4, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
        return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    if kind == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(vocab_size=WORDS, num_key_value_heads=1, num_local_experts=2, **small))
    return hf.ViTForImageClassification(hf.ViTConfig(image_size=8, patch_size=4, **(small | {"num_labels": WORDS})))


_STACKS = {"encoder": "encoder.layers", "peeking": "blocks", "gpt2": "transformer.h", "mixtral": "model.layers", "vit": "vit.layers"}


def _rows(kind: str, step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    if kind == "vit":
        pixels = torch.randn(ROWS, 3, 8, 8, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(WORDS, (ROWS,), generator=generator)}
    tokens = torch.randint(1, WORDS, (ROWS, TOKENS), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def _train(kind: str, case: Case, engine_name: str) -> tuple[dict[str, torch.Tensor] | None, float, list[float]]:
    """Three steps; the full state, the full model's loss and every group's own."""
    config = case.config(engine_name)
    del config["scheduler"]
    holders = [[0], [0, 1], [0, 1], [1]]
    config["sdp"]["placement"] = {f"{_STACKS[kind]}.{index}": held for index, held in enumerate(holders)}
    engine = sdp.initialize(model=_build(kind), config=config)[0]

    def batch(step: int) -> dict[str, torch.Tensor]:
        if engine_name != "reference":
            return _rows(kind, step, dist.get_rank())
        parts = [_rows(kind, step, rank) for rank in range(case.world)]
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    for step in range(3):
        engine.backward(engine(batch(step)))
        engine.step()
    return engine.full_state_dict(), engine.evaluate([batch(7)]), engine.evaluate_subnetworks([batch(7)])


@pytest.mark.parametrize("kind", _STACKS)
@pytest.mark.parametrize("case", [Case(2, 1), Case(2, 2, 3)], ids=str)
def test_native_equals_the_reference(ranks: RankPool, kind: str, case: Case) -> None:
    expected, loss, own = _train(kind, case, "reference")
    results = ranks.run(_train, kind, case, "fsdp2", world=case.world)
    assert expected is not None
    for name, weight in expected.items():
        # A key's bias has no gradient but round-off, and starts at zero.
        torch.testing.assert_close(results[0][0][name], weight, rtol=0, atol=1e-5 * weight.abs().max().item() + 1e-8, msg=name)
    assert [result[1] for result in results] == [pytest.approx(loss, rel=1e-5)] * case.world
    assert [result[2] for result in results] == [pytest.approx(own, rel=1e-5)] * case.world
    start = _build(kind).state_dict()
    for index in range(4):
        assert any(not torch.equal(expected[name], start[name]) for name in start if name.startswith(f"{_STACKS[kind]}.{index}."))


class Scalar(Peeking.Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


def _scalars(case: Case) -> str:
    model = Peeking()
    model.blocks[3] = Scalar()
    try:
        engine = sdp.initialize(model=model, config=case.config(sdp={"groups": 2, "placement": {"blocks.0": [0], "blocks.3": [1]}}))[0]
    except sdp.ModelError as error:
        return str(error)
    engine.backward(engine(_rows("peeking", 0, dist.get_rank())))
    engine.step()
    return "trained"


@pytest.mark.parametrize("case", [Case(2, 1), Case(2, 2), Case(2, 2, 3), Case(2, 1, bf16=True)], ids=str)
def test_parameters_without_a_dimension(ranks: RankPool, case: Case) -> None:
    """FSDP2 cannot shard them; every rank says so, whether it holds them or not."""
    messages = ranks.run(_scalars, case, world=case.world)
    refused = "parameter 'blocks.3.scale' has no dimension that could be sharded; make it shape (1,)"
    for message in messages:
        assert message.startswith(refused if case.stage or case.bf16 else "trained")
