"""The full model on every rank: for generation, after local training, and where it does not fit."""

import logging
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.errors import OutOfMemoryError
from sdp.engine.full_model.whole_copy import check_room, free_bytes
from sdp.tests.support import models
from sdp.tests.support.cases import Case, data_rank_of, engine_of, one_step, said
from sdp.tests.support.ranks import RankPool
from torch import nn

transformers = pytest.importorskip("transformers")


def _llama(device: str) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        tie_word_embeddings=True
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.LlamaForCausalLM(config)


def _generate(device: str) -> list[str]:
    configuration = Case(2, 1).config()
    holders = [[0], [0, 1], [1], [1]]
    configuration["sdp"]["placement"] = {f"model.layers.{index}": held for index, held in enumerate(holders)}
    engine = sdp.initialize(model=_llama(device), config=configuration)[0]
    tokens = torch.arange(8).view(2, 4)
    engine.backward(engine(input_ids=tokens, labels=tokens))
    engine.step()
    state = engine.full_state_dict()
    box = [state]
    dist.broadcast_object_list(box, src=0)
    expected = _llama("cpu").eval()
    expected.load_state_dict(box[0])
    length = 3 + 2 * dist.get_rank()  # the ranks take different numbers of steps
    options = {"do_sample": False, "max_new_tokens": length, "min_new_tokens": length, "pad_token_id": 0}
    here = tokens.to(engine.device)
    assert torch.equal(engine.generate(here, **options).cpu(), expected.generate(tokens, **options))
    with engine.full_model() as model, torch.no_grad():
        assert type(model) is transformers.LlamaForCausalLM
        assert model.lm_head.weight is model.model.embed_tokens.weight
        torch.testing.assert_close(model(here).logits.cpu(), expected(tokens).logits, rtol=0, atol=1e-6)
        if dist.get_rank() == 0:
            model(here)  # alone
    assert all(parameter.is_meta for parameter in model.parameters())
    return _warnings(engine, here)


def _warnings(engine: Any, tokens: torch.Tensor) -> list[str]:
    batch = {"input_ids": tokens, "labels": tokens}
    with said(logging.WARNING) as records:
        engine.evaluate([batch])
        engine.evaluate_subnetworks([batch])
        engine(batch)
        assert not records
        engine.eval()
        with torch.no_grad():
            engine(batch)
            engine.module(**batch)
        engine.train()
    return records


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_rank_generates_with_the_full_model(ranks: RankPool, device: str) -> None:
    for records in ranks.run(_generate, device, world=2):
        assert len(records) == 1
        assert "engine.evaluate(BATCHES)" in records[0]
        assert "engine.full_model()" in records[0]


def _losses(case: Case) -> tuple[float, float]:
    """Return the loss of the full model by the engine's evaluation, and by a copy."""
    engine = engine_of(case)
    one_step(engine, case, 0, data_rank=data_rank_of(case))
    engine.step()
    batch = models.micro_batch(case.model, 0, 0, 0)
    with engine.full_model() as model, torch.no_grad():
        output = model(**models.on_device(batch, engine.device))
    return engine.evaluate([batch]), float(output)


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 2, stage=3, placement="mixed"),
        Case(2, 2, stage=2, branch_scale="eval"),
        Case(2, 1, placement="mixed", masking="backward"),
        Case(2, 1, model="llama-of-3", neurons=3, branch_scale="eval"),
        Case(2, 1, model="resnet-meta"),
    ],
    ids=str,
)
def test_the_copy_computes_what_the_evaluation_does(ranks: RankPool, case: Case) -> None:
    for by_engine, by_copy in ranks.run(_losses, case, world=case.world):
        assert by_copy == pytest.approx(by_engine, rel=1e-6)


def test_it_says_where_the_full_model_does_not_fit() -> None:
    cpu, cuda, gib = torch.device("cpu"), torch.device("cuda"), 2**30
    check_room(gib, [3 * gib, 3 * gib], ["a", "a"], cpu)
    check_room(gib, [None], ["a"], cpu)
    check_room(2 * gib, [3 * gib, 3 * gib], ["a", "a"], cuda)
    with pytest.raises(OutOfMemoryError, match=r"2 ranks on a would need 4\.00 GiB, but 3\.00 GiB") as caught:
        check_room(2 * gib, [3 * gib, 3 * gib], ["a", "a"], cpu)
    assert "\n" not in str(caught.value)
    with pytest.raises(OutOfMemoryError, match="rank 1"):
        check_room(2 * gib, [3 * gib, 2 * gib], ["a", "a"], cuda)
    free = free_bytes(cpu)
    assert free is not None and free > 0


class Uncopyable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = models.mlp()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.body(x, y)

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("there is only one")


def _refused() -> str:
    config = {"train_batch_size": 4, "sdp": {"groups": 2, "capacity": 0.5}}
    engine = sdp.initialize(model=Uncopyable(), config=config)[0]
    with pytest.raises(sdp.ModelError) as caught, engine.full_model():
        pass
    return str(caught.value)


def test_a_model_that_cannot_be_copied_trains_and_says_so(ranks: RankPool) -> None:
    for message in ranks.run(_refused, world=2):
        assert "there is only one" in message and "full_state_dict()" in message
