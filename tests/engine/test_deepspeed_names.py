"""Names of DeepSpeed's engine: those that exist, those of the model, and those that are refused."""

from pathlib import Path

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.deepspeed_names import REFUSED
from sdp.tests.support.models import mlp
from sdp.tests.support.small_runs import read_tensorboard
from torch import nn

pytestmark = pytest.mark.usefixtures("one_rank")


class Chat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.vocabulary = 37

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.body(x, y)

    def generate(self, length: int) -> int:
        return 2 * length


def _engine() -> sdp.SDPEngine:
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}},
        "gradient_clipping": 2.0,
    }
    return sdp.initialize(model=Chat(), config=config)[0]


def test_a_name_that_the_engine_does_not_have_is_the_models() -> None:
    engine = _engine()
    assert engine.vocabulary == 37
    assert engine.generate(3) == 6
    assert [name for name, _ in engine.named_parameters()] == [name for name, _ in engine.module.named_parameters()]
    assert engine.body is engine.module.body
    assert not hasattr(engine, "no_such_name")
    with pytest.raises(
        AttributeError, match=r"neither the engine nor the model \(Chat\) has the attribute 'no_such_name'"
    ):
        engine.no_such_name  # noqa: B018


def test_a_property_that_fails_says_why_itself() -> None:
    with pytest.raises(AttributeError, match="'fsdp2' has no engine of DeepSpeed"):
        _engine().deepspeed  # noqa: B018


def test_facts_with_deepspeeds_names() -> None:
    engine = _engine()
    assert engine.steps_per_print() == 10
    assert engine.wall_clock_breakdown() is False
    engine.tput_timer.update_epoch_count()
    assert engine.tput_timer.epoch_count == 1
    engine.backward(engine(torch.ones(4, 5), torch.ones(4, 3)))
    engine.step()
    assert engine.tput_timer.avg_samples_per_sec() > 0
    engine.destroy()


def test_a_method_that_is_out_of_scope_says_so_when_it_is_called() -> None:
    engine = _engine()
    for name in REFUSED:
        with pytest.raises(sdp.ConfigError, match=f"engine.{name}: "):
            getattr(engine, name)(1)


def test_the_methods_about_the_configuration_have_deepspeeds_names() -> None:
    config = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "bf16": {"enabled": True}}
    engine = sdp.initialize(model=Chat(), config=config)[0]
    assert (engine.bfloat16_enabled(), engine.fp16_enabled()) == (True, False)
    assert engine.dp_world_size == 1
    assert engine.data_parallel_group is dist.group.WORLD


def test_a_script_says_where_a_step_ends() -> None:
    engine = _engine()
    batch = torch.ones(4, 5), torch.ones(4, 3)
    for is_boundary in (False, False, True):
        engine.set_gradient_accumulation_boundary(is_boundary)
        engine.backward(engine(*batch))
        engine.step()
    assert (engine.global_steps, engine.micro_steps) == (1, 3)
    engine.set_gradient_accumulation_boundary(None)
    engine.backward(engine(*batch))
    engine.step()
    assert engine.global_steps == 2


def test_the_monitor_writes_a_scripts_own_curves(tmp_path: Path) -> None:
    config = {"train_batch_size": 4, "tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    engine = sdp.initialize(model=Chat(), config=config)[0]
    assert engine.monitor.enabled
    engine.monitor.write_events([("Train/reward", torch.tensor(0.5), 1), ("Train/reward", 0.75, 2)])
    assert read_tensorboard(tmp_path / "job", "Train/reward") == {1: 0.5, 2: 0.75}
    assert not _engine().monitor.enabled


@pytest.mark.parametrize("sync", [None, {"every": 2}])
def test_monitors_get_the_curves_of_sdp_train(tmp_path: Path, sync: dict[str, int] | None) -> None:
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.25}},
        "sdp": {"sync": sync} if sync else {},
        "tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
    }
    engine = sdp.initialize(model=Chat(), config=config)[0]
    losses, norms = [], []
    for step in range(1, 5):
        engine.backward(engine(torch.full((4, 5), float(step)), torch.ones(4, 3)))
        engine.step()
        losses.append(engine.get_loss())
        norms.append(engine.get_global_grad_norm())
    value = engine.evaluate([(torch.ones(4, 5), torch.ones(4, 3))])
    known = len(losses) if sync is None else len(losses) - 1  # in local steps, the outcome comes a step later
    curves = {"train_loss": losses[:known], "lr": [0.25] * known}
    curves = {f"Train/Samples/{name}": values for name, values in curves.items()} | {"Train/grad_norm": norms[:known]}
    for name, values in curves.items():
        written = read_tensorboard(tmp_path / "job", name)
        assert written == {step: pytest.approx(value, rel=1e-6) for step, value in enumerate(values, 1)}, name
    assert read_tensorboard(tmp_path / "job", "Eval/loss") == {4: pytest.approx(value, rel=1e-6)}


def test_the_model_stays_where_it_is() -> None:
    engine = _engine()
    tensor = torch.ones(1)
    assert (
        engine.to(engine.device.type)
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
