"""Models with dropout or stochastic depth. The same seed draws the same numbers."""

from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.config.load import load_config
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.errors import ConfigError
from sdp.engine.placement.layout import Layout
from sdp.models.registry import build_model
from sdp.tests.support.models import on_device
from sdp.tests.support.ranks import RankPool

MODEL = {
    "name": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
    "max_position_embeddings": 32, "initializer_range": 0.2,
}  # fmt: skip


def config_of(option: str, seed: int = 0, **section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "model": MODEL | {option: 0.5}, "sdp": section, "training": {"seed": seed},
    }  # fmt: skip


OPTIONS = ("attention_dropout", "residual_dropout", "stochastic_depth")
IDS = torch.randint(31, (2, 12), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}


def _losses(option: str, masking: str) -> tuple[float, float, float]:
    """Losses of a step here, of a plain dense model, and of a plain model of the held blocks."""
    placement = {f"model.layers.{block}": [0] if block % 2 else [0, 1] for block in range(4)}
    config = config_of(option, groups=2, placement=placement, masking=masking)
    torch.manual_seed(1)
    engine = sdp.initialize(model=build_model(MODEL | {option: 0.5}, 31), config=config)[0]
    losses = []
    for step in range(2):
        weights = [engine.full_state_dict()]
        dist.broadcast_object_list(weights)
        dense = build_model(MODEL | {option: 0.5}, 31).train()
        dense.load_state_dict(weights[0], assign=True)
        held = build_model(MODEL | {option: 0.5}, 31).train()
        held.load_state_dict(weights[0], assign=True)
        if dist.get_rank() == 1:
            held.model.layers = torch.nn.ModuleList([held.model.layers[0], held.model.layers[2]])
        losses = []
        for model in (engine, dense.to(engine.device), held.to(engine.device)):
            torch.manual_seed(10 * step + dist.get_rank())
            loss = model(BATCH) if model is engine else model(**on_device(BATCH, engine.device))
            losses.append(loss.item())
            if model is engine:
                engine.backward(loss)
        engine.step()
    engine.check_holders()
    return tuple(losses)


@pytest.mark.parametrize("masking", ["forward", "backward"])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_group_draws_what_a_plain_model_of_its_blocks_draws(ranks: RankPool, option: str, masking: str) -> None:
    """Under backward masking that is the dense model."""
    for engine, dense, held in ranks.run(_losses, option, masking, world=2):
        assert engine == pytest.approx(dense if masking == "backward" else held, rel=1e-5)
    assert dense != pytest.approx(held, rel=1e-3), "the group of rank 1 lacks blocks"


def test_tensor_parallel_ranks_are_refused() -> None:
    config = load_config(config_of("residual_dropout"))
    with pytest.raises(ConfigError, match="tensor-parallel ranks would draw different numbers"):
        Layout.of(build_model(config.model, 32), config, Mesh(1, 1, 2))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("option", OPTIONS)
def test_draws_follow_the_seed_of_the_run(option: str) -> None:
    def losses(seed: int, before: int) -> list[float]:
        torch.manual_seed(before)
        config = config_of(option, seed)
        trained = sdp.initialize(model=build_model(config["model"], 31), config=config)[0]
        found = []
        for _ in range(3):
            loss = trained(BATCH)
            trained.backward(loss)
            trained.step()
            found.append(loss.item())
        return found

    assert losses(0, before=1) == losses(0, before=2)
    assert losses(0, before=1) != losses(1, before=1)
