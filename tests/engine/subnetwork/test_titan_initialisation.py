"""Models with torchtitan's initialisation start from its values, and ranks train them as the
oracle does.
"""

from __future__ import annotations

from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sdp.tests.support.cases import oracle_for
from sdp.tests.support.foreign.titan_model import TitanLlama
from sdp.tests.support.ranks import RankPool
from torch import Tensor, nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
}
HOLDERS = {f"model.layers.{index}": holders for index, holders in enumerate([[0], [0, 1], [1], [0, 1]])}


class WithLoss(nn.Module):
    """Has the model inside, as scripts do whose model returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TitanLlama()

    def forward(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def on_meta(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


@pytest.mark.usefixtures("one_rank")
def test_values_are_those_of_init_weights() -> None:
    torch.manual_seed(0)
    expected = TitanLlama()
    with torch.no_grad():
        expected.init_weights()
    engine = sdp.initialize(model=on_meta(TitanLlama), config=CONFIG)[0]
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


class Titan03(TitanLlama):
    """The name that later versions of torchtitan give the method."""

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        TitanLlama.init_weights(self, buffer_device)

    init_weights = None  # type: ignore[assignment]


@pytest.mark.usefixtures("one_rank")
def test_the_later_name_of_the_method_gives_the_same_values() -> None:
    states = [sdp.initialize(model=on_meta(kind), config=CONFIG)[0].full_state_dict() for kind in (TitanLlama, Titan03)]
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())


class SavedUnderOtherNames(TitanLlama):
    """Splits a parameter when it is saved, as torchtitan 0.3 does with fused queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(lambda module, state, *_: state.update(half=state.pop("output.weight")))


@pytest.mark.usefixtures("one_rank")
def test_a_model_that_saves_its_parameters_under_other_names_has_its_own_names_here() -> None:
    engine = sdp.initialize(model=on_meta(SavedUnderOtherNames), config=CONFIG)[0]
    assert "output.weight" in (engine.full_state_dict() or {})


def config_of(stage: int) -> dict[str, Any]:
    return CONFIG | {"sdp": {"groups": 2, "placement": HOLDERS}, "zero_optimization": {"stage": stage}}


def rows_of(step: int) -> list[Tensor]:
    return list(torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(step)).chunk(2))


def _train(stage: int) -> dict[str, Any]:
    engine = sdp.initialize(model=on_meta(WithLoss), config=config_of(stage))[0]
    losses = []
    for step in range(2):
        mine = rows_of(step)[dist.get_rank()]
        engine.backward(engine(mine))
        engine.step()
        losses.append(engine.get_loss())
    return {"losses": losses, "loss": engine.evaluate([mine]), "weights": engine.full_state_dict() or {}}


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_train_a_model_from_the_meta_device_as_the_oracle_does(ranks: RankPool, stage: int) -> None:
    ours = ranks.run(_train, stage, world=2)[0]
    oracle = oracle_for(on_meta(WithLoss), config_of(0), 2)
    batches = [[{"tokens": rows} for rows in rows_of(step)] for step in range(2)]
    losses = [oracle.step([of_ranks], 0.5).loss for of_ranks in batches]
    assert ours["losses"] == pytest.approx(losses, rel=1e-5)
    assert ours["loss"] == pytest.approx(sum(map(oracle.evaluate, batches[-1])) / 2, rel=1e-5)
    for name, value in oracle.state_dict().items():
        torch.testing.assert_close(ours["weights"][name], value, rtol=1e-5, atol=1e-5, msg=name)
