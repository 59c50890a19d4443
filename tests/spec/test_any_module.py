"""Modules that were not written for SDP: FSDP2 equals the oracle."""

import copy
import statistics
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sdp.tests.support.cases import Case, full_gradients, oracle_for
from sdp.tests.support.foreign.foreign_models import WORDS, build, make_batch
from sdp.tests.support.ranks import RankPool
from torch import nn


class Encoder(nn.Module):
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
    return {"encoder": Encoder, "peeking": Peeking}[kind]() if kind in ("encoder", "peeking") else build(kind, 4)


_STACKS = {
    "encoder": "encoder.layers", "peeking": "blocks", "mixtral": "model.layers",
    "llama": "model.layers", "gpt2": "transformer.h", "vit": "vit.layers",
}  # fmt: skip


def _config(kind: str, case: Case, units: str) -> dict[str, Any]:
    """One group holds some blocks, and both hold others. ``units``: how blocks are found."""
    config = case.config()
    del config["scheduler"]
    section = {key: value for key, value in config["sdp"].items() if key != "placement"}
    if units == "explicit":
        section["placement"] = {
            f"{_STACKS[kind]}.{index}": held for index, held in enumerate([[0], [0, 1], [0, 1], [1]])
        }
    else:
        section |= {"profile": [1, 2, 2, 1], "units": "auto" if units == "auto" else [f"{_STACKS[kind]}.*"]}
    return config | {"sdp": section}


Trained = tuple[dict[str, torch.Tensor] | None, float, list[float], dict[str, torch.Tensor]]


def _train(kind: str, case: Case, units: str) -> Trained:
    """Three steps: the state, the loss, every group's own, and the first gradients here."""
    engine = sdp.initialize(model=_build(kind), config=_config(kind, case, units))[0]
    assert [unit.name for unit in engine.layout.units] == [f"{_STACKS[kind]}.{index}" for index in range(4)]
    assert {len(holders) for holders in engine.layout.placement.holders} == {1, 2}
    gradients: dict[str, torch.Tensor] = {}

    def batch(step: int) -> dict[str, torch.Tensor]:
        return make_batch(kind, 100 * step + dist.get_rank())

    for step in range(3):
        output = engine(batch(step))
        engine.backward(output if isinstance(output, torch.Tensor) else output.loss)
        if step == 0:
            gradients = full_gradients(engine)
        engine.step()
    return engine.full_state_dict(), engine.evaluate([batch(7)]), engine.evaluate_subnetworks([batch(7)]), gradients


@pytest.mark.parametrize(
    ("kind", "case", "units"),
    [
        ("encoder", Case(2, 1), "explicit"),
        *((kind, Case(2, 2, 3), "explicit") for kind in ("peeking", "mixtral")),
        pytest.param("llama", Case(2, 2, 3), "patterns", marks=pytest.mark.slow),
        pytest.param("gpt2", Case(2, 2, 3, masking="backward"), "patterns", marks=pytest.mark.slow),
        ("vit", Case(2, 2, 3, masking="backward"), "patterns"),
        ("llama", Case(2, 1, checkpointing="selective"), "auto"),  # would fill a cache of keys and values twice
        ("gpt2", Case(2, 1, checkpointing="full", masking="backward"), "auto"),
    ],
    ids=str,
)
def test_fsdp2_equals_the_oracle(ranks: RankPool, kind: str, case: Case, units: str) -> None:
    oracle = oracle_for(_build(kind), _config(kind, replace(case, checkpointing="none"), units), case.world)
    rows = [[make_batch(kind, 100 * step + rank) for rank in range(case.world)] for step in (0, 1, 2, 7)]
    first, *_ = [oracle.step([batches], 0.1) for batches in rows[:3]]
    gradients = first.gradients
    loss = statistics.mean(map(oracle.evaluate, rows[3]))
    own = [
        statistics.mean(oracle.evaluate(rows[3][group * case.fsdp + rank], group) for rank in range(case.fsdp))
        for group in range(2)
    ]
    expected = oracle.state_dict()
    results = ranks.run(_train, kind, case, units, world=case.world)
    seen = set()
    for name, gradient in (named for result in results for named in result[3].items()):
        largest = gradients[name].abs().max().item()
        torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-5 * largest + 1e-8, msg=name)
        seen.add(name)
    assert seen == set(gradients)
    for name, weight in expected.items():
        # A key's bias has no gradient but round-off, and starts at zero.
        torch.testing.assert_close(
            results[0][0][name], weight, rtol=0, atol=1e-5 * weight.abs().max().item() + 1e-8, msg=name
        )
    assert [result[1] for result in results] == [pytest.approx(loss, rel=1e-5)] * case.world
    assert [result[2] for result in results] == [pytest.approx(own, rel=1e-5)] * case.world
    start = _build(kind).state_dict()
    for index in range(4):
        assert any(
            not torch.equal(expected[name], start[name])
            for name in start
            if name.startswith(f"{_STACKS[kind]}.{index}.")
        )


def _cut(model: nn.Module, batch: dict[str, torch.Tensor], **section: Any) -> None:
    config = {key: value for key, value in Case(2, 1).config().items() if key != "scheduler"}
    config["sdp"] = {"groups": 2, "capacity": 0.5} | section
    engine = sdp.initialize(model=model, config=config)[0]
    engine(batch)


def test_models_that_cannot_be_cut(ranks: RankPool) -> None:
    ranks.run(_cut_in_vain, world=2)


def _cut_in_vain() -> None:
    """Blocks that change the shape can run from frozen copies, where nothing is skipped."""
    import transformers as hf

    tied: Any = _build("llama")
    tied.model.layers[2].mlp.up_proj.weight = tied.model.layers[0].mlp.up_proj.weight
    remedy = r"a tied weight cannot be in a unit; leave that module out of sdp\.units"
    with pytest.raises(sdp.ModelError, match=rf"model\.layers\.2: .* is tied to 'model\.layers\.0'; {remedy}"):
        _cut(tied, make_batch("llama", 0))

    shape: dict[str, Any] = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "num_labels": WORDS}
    stages = hf.ResNetForImageClassification(hf.ResNetConfig(**shape))
    pixels = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.arange(4)}
    remedy = r"leave it out of sdp\.units, list it in sdp\.protect, or use sdp\.masking \"backward\""
    message = rf"resnet\.encoder\.stages\.1: returns \(4, 8, 2, 2\) from \(4, 4, 4, 4\), .*; {remedy}"
    with pytest.raises(sdp.ModelError, match=message) if dist.get_rank() == 0 else nullcontext():  # it skips the unit
        _cut(copy.deepcopy(stages), pixels, units=["resnet.encoder.stages.*"])
    _cut(stages, pixels, units=["resnet.encoder.stages.*"], masking="backward")


class Scalar(Peeking.Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


def _scalars(case: Case) -> str:
    model = Peeking()
    model.blocks[3] = Scalar()
    try:
        engine = sdp.initialize(
            model=model, config=case.config(sdp={"groups": 2, "placement": {"blocks.0": [0], "blocks.3": [1]}})
        )[0]
    except sdp.ModelError as error:
        return str(error)
    engine.backward(engine(make_batch("peeking", dist.get_rank())))
    engine.step()
    return "trained"


@pytest.mark.parametrize("case", [Case(2, 1), Case(2, 2), Case(2, 2, 3), Case(2, 1, bf16=True)], ids=str)
def test_parameters_without_a_dimension(ranks: RankPool, case: Case) -> None:
    """FSDP2 cannot shard them; every rank says so, whether it holds them or not."""
    messages = ranks.run(_scalars, case, world=case.world)
    refused = "parameter 'blocks.3.scale' has no dimension that could be sharded; give it the shape (1,)"
    for message in messages:
        assert message.startswith(refused if case.stage or case.bf16 else "trained")
