"""Models with dropout or stochastic depth must be dense. The same seed draws the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import sdp
import torch
from sdp.engine.config.load import load_config
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.errors import ConfigError
from sdp.engine.placement.layout import Layout
from sdp.models.registry import build_model

MODEL = {
    "name": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
    "max_position_embeddings": 32, "initializer_range": 0.2,
}  # fmt: skip


def config_of(option: str, seed: int = 0, **section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "model": MODEL | {option: 0.5},
        "sdp": {"engine": "reference"} | section,
        "training": {"seed": seed},
    }


@pytest.mark.parametrize("option", ["attention_dropout", "residual_dropout", "stochastic_depth"])
def test_groups_that_lack_units_are_refused_in_one_line(option: str) -> None:
    config = load_config(config_of(option, groups=2, capacity=0.5))
    with pytest.raises(
        ConfigError, match=rf"^model\.{option} 0\.5: a control of dense training.*; set sdp\.capacity 1"
    ) as error:
        Layout.of(build_model(config.model, 31), config, Mesh(2))
    assert "\n" not in str(error.value)


def test_tensor_parallel_ranks_are_refused() -> None:
    config = load_config(config_of("residual_dropout", engine="fsdp2"))
    with pytest.raises(ConfigError, match="tensor-parallel ranks would draw different numbers"):
        Layout.of(build_model(config.model, 32), config, Mesh(1, 1, 2))


def test_whole_groups_are_allowed_and_a_model_without_draws_is_not_asked() -> None:
    for section, option in (({"groups": 2, "capacity": 1.0}, 0.5), ({"groups": 2, "capacity": 0.5}, 0.0)):
        given = config_of("residual_dropout", **section)
        given["model"]["residual_dropout"] = option
        config = load_config(given)
        assert Layout.of(build_model(config.model, 31), config, Mesh(2)).mesh.sdp == 2


@pytest.mark.parametrize("engine", ["reference", "vectorized"])
@pytest.mark.parametrize("option", ["attention_dropout", "residual_dropout", "stochastic_depth"])
def test_draws_follow_the_seed_of_the_run(option: str, engine: str) -> None:
    ids = torch.randint(31, (2, 12), generator=torch.Generator().manual_seed(0))

    def losses(seed: int, before: int) -> list[float]:
        torch.manual_seed(before)
        config = config_of(option, seed, engine=engine)
        trained = sdp.initialize(model=build_model(config["model"], 31), config=config)[0]
        found = []
        for _ in range(3):
            loss = trained({"input_ids": ids, "labels": ids})
            trained.backward(loss)
            trained.step()
            found.append(loss.item())
        return found

    assert losses(0, before=1) == losses(0, before=2)
    assert losses(0, before=1) != losses(1, before=1)
