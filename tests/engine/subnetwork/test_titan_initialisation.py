"""Models with torchtitan's initialisation start from its values, and ranks train them as the
oracle does.
"""

from __future__ import annotations

import pytest
import sdp
import torch
from sdp.tests.support.foreign.titan_model import TitanLlama
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
}


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


class SavedUnderOtherNames(TitanLlama):
    """Splits a parameter when it is saved, as torchtitan 0.3 does with fused queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(lambda module, state, *_: state.update(half=state.pop("output.weight")))


@pytest.mark.usefixtures("one_rank")
def test_a_model_that_saves_its_parameters_under_other_names_has_its_own_names_here() -> None:
    engine = sdp.initialize(model=on_meta(SavedUnderOtherNames), config=CONFIG)[0]
    assert "output.weight" in (engine.full_state_dict() or {})
