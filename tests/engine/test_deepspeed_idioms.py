"""What scripts for DeepSpeed do around the training loop: parameters, losses, several models."""

from pathlib import Path
from typing import Any

import pytest
import sdp
import torch
from safetensors.torch import load_file
from sdp.tests.support.models import Mlp, cpu_state, llama, mlp
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")
CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


class Outputs(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden = self.stem(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def make_outputs() -> Outputs:
    torch.manual_seed(0)
    return Outputs()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)


def test_backward_returns_the_loss_divided_by_the_accumulation_steps() -> None:
    engine = sdp.initialize(model=mlp(), config=CONFIG)[0]
    loss = engine(*rows())
    assert engine.backward(loss).item() == pytest.approx(loss.item() / 2)
    loss = engine(*rows())
    assert engine.backward(loss, scale_wrt_gas=False).item() == pytest.approx(loss.item())


def test_a_schedule_that_the_script_makes_after_initialize_sets_the_rates() -> None:
    engine, optimizer, _, _ = sdp.initialize(model=mlp(), config=CONFIG)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(4):
        engine.backward(engine(*rows()))
        is_boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if is_boundary:
            schedule.step()
    assert engine.get_lr() == [pytest.approx(0.1 * 0.5**2)]


def test_a_schedule_whose_step_needs_a_loss_is_stepped_by_the_script() -> None:
    """Otherwise the first step would fail, or DeepSpeed's engine would give it the batch size."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    with pytest.raises(sdp.ConfigError, match=r"^lr_scheduler: ReduceLROnPlateau\.step needs metrics"):
        sdp.initialize(model=mlp(), lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau, config=CONFIG)
    engine = sdp.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    for step in range(3):
        for _ in range(2):
            engine.backward(engine(*rows()))
            engine.step()
        schedule.step(float(step))
    assert engine.get_lr() == [pytest.approx(0.1 * 0.1**2)]
    with pytest.raises(sdp.ConfigError, match="step: lr_kwargs is not supported"):
        engine.step(lr_kwargs={"metrics": 1.0})


def test_an_actor_a_critic_and_a_model_that_does_not_train_share_a_script() -> None:
    actor = sdp.initialize(model=make_outputs(), config=CONFIG)[0]
    critic = sdp.initialize(model=make_outputs(), config=CONFIG)[0]
    config = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    fixed = sdp.initialize(model=make_outputs(), config=config)[0].eval()
    inputs, targets = rows()
    for _ in range(2):
        with torch.no_grad():
            target = fixed(inputs)
        assert not target.requires_grad
        for engine, wanted in ((actor, target + 1), (critic, targets)):
            engine.backward(nn.functional.mse_loss(engine(inputs), wanted))
            engine.step()
    states = [engine.full_state_dict() for engine in (actor, critic, fixed)]
    assert all(state is not None for state in states)
    start = make_outputs().state_dict()
    assert [torch.equal(state["head.weight"], start["head.weight"]) for state in states if state is not None] == [
        False, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_the_file_of_weights_is_what_its_name_says(tmp_path: Path, name: str) -> None:
    """DeepSpeed writes ``pytorch_model.bin``, and other programs read it with ``torch.load``."""
    model = llama(tied=True, device="cpu")
    state = cpu_state(model)
    engine = sdp.initialize(model=model, config=CONFIG | {"bf16": {"enabled": True}})[0]
    engine.save_16bit_model(tmp_path, name)
    file = tmp_path / name
    found = load_file(file) if name.endswith(".safetensors") else torch.load(file, weights_only=True)
    if name.endswith(".bin"):  # tied tensors have all of their names, and are stored once
        assert found.keys() == state.keys()
        assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()
    for key, value in found.items():
        assert torch.equal(value, state[key].bfloat16())
    with pytest.raises(sdp.ConfigError, match="exclude_frozen_parameters must be False"):
        engine.save_16bit_model(tmp_path, name, exclude_frozen_parameters=True)


def test_a_loss_without_a_gradient_says_why() -> None:
    engine = sdp.initialize(model=mlp(), config=CONFIG)[0]
    with torch.no_grad():
        loss = engine(*rows())
    with pytest.raises(sdp.ConfigError, match=r"^backward: the loss has no gradient: .*call model\.train\(\)"):
        engine.backward(loss)
