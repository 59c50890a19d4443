"""Names of DeepSpeed's engine: those that exist, those of the model, and those that are out of scope."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sdp
import torch
from sdp.engine.deepspeed_names import ATTRIBUTES_OUT_OF_SCOPE, METHODS_OUT_OF_SCOPE
from sdp.tests.support.models import mlp
from torch import nn

# The names that 34 public scripts use on DeepSpeed's engine, by script. They were counted in the syntax trees.
USED_NAMES = Path(__file__).parents[1] / "support" / "deepspeed_names.json"


class Chat(nn.Module):
    """A model with methods and attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.vocabulary = 37

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.body(x, y)

    def generate(self, length: int) -> int:
        return 2 * length


def _engine(**sdp_section: object) -> sdp.SDPEngine:
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}},
        "gradient_clipping": 2.0,
        "sdp": {"engine": "reference", **sdp_section},
    }
    return sdp.initialize(model=Chat(), config=config)[0]


def test_a_name_that_the_engine_does_not_have_is_the_models() -> None:
    engine = _engine(groups=2, capacity=0.5)
    assert engine.vocabulary == 37
    assert engine.generate(3) == 6
    assert [name for name, _ in engine.named_parameters()] == [name for name, _ in engine.module.named_parameters()]
    assert engine.body is engine.module.body
    assert not hasattr(engine, "no_such_name")
    with pytest.raises(
        AttributeError, match=r"neither the engine nor the model \(Chat\) has the attribute 'no_such_name'"
    ):
        engine.no_such_name  # noqa: B018


def test_facts_with_deepspeeds_names() -> None:
    engine = _engine()
    assert engine.gradient_clipping() == 2.0
    assert engine.get_mom() == [0.5]
    assert engine.steps_per_print() == 10
    assert engine.wall_clock_breakdown() is False
    engine.tput_timer.update_epoch_count()
    assert engine.tput_timer.epoch_count == 1
    engine.backward(engine(torch.ones(4, 5), torch.ones(4, 3)))
    engine.step()
    assert engine.tput_timer.avg_samples_per_sec() > 0


def test_a_part_that_is_out_of_scope_says_so() -> None:
    engine = _engine()
    for name in ATTRIBUTES_OUT_OF_SCOPE:
        assert not hasattr(engine, name)
        with pytest.raises(sdp.ConfigError, match=f"engine.{name}: "):
            getattr(engine, name)
    for name in METHODS_OUT_OF_SCOPE:
        with pytest.raises(sdp.ConfigError, match=f"engine.{name}: "):
            getattr(engine, name)(1)


def test_the_model_stays_where_it_is() -> None:
    engine = _engine()
    tensor = torch.ones(1)
    assert (
        engine.to("cpu")
        is engine.to(torch.float32)
        is engine.to(tensor)
        is engine.to(device="cpu")
        is engine.cpu()
        is engine
    )
    for call in (
        engine.cuda,
        engine.half,
        engine.bfloat16,
        lambda: engine.to(torch.float16),
        lambda: engine.to("meta"),
    ):
        with pytest.raises(sdp.ConfigError, match="the model"):
            call()


def test_the_consolidated_weights_are_the_full_models() -> None:
    engine = _engine(groups=2, capacity=0.5)
    state = engine._zero3_consolidated_16bit_state_dict()
    assert state is not None
    assert state.keys() == engine.module.state_dict().keys()


def test_names_that_public_scripts_use_exist() -> None:
    """A script counts if the engine or the model has every name that it uses."""
    of_the_models = {"gradient_checkpointing_enable", "no_weight_decay", "no_weight_decay_keywords"}
    of_the_models |= {"model", "features", "encoder", "parallelize"}
    # These belong to torch's wrappers. The engine refuses the first, which one of the two scripts that use it catches.
    # The other script was not read; it uses both.
    of_torchs_wrappers = {"register_comm_hook", "clip_grad_norm_"}
    names = {*dir(_engine()), *dir(nn.Module()), *of_the_models, *of_torchs_wrappers}
    scripts = json.loads(USED_NAMES.read_text())
    missing = {script: absent for script, used in scripts.items() if (absent := sorted({*used} - names))}
    assert len(scripts) == 34
    assert len(scripts) - len(missing) >= 30, missing
