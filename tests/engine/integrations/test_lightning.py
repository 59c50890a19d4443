"""Lightning's Trainer, with the real package: it trains as the reference does, and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.tests.support.models import IN, OUT, Mlp
from sdp.tests.support.ranks import RankPool
from torch.utils.data import DataLoader, Dataset, DistributedSampler

pytestmark = pytest.mark.slow  # it trains with another library, 20 seconds and more

lightning = pytest.importorskip("lightning", reason="lightning is not installed; the extra 'dev' has it")

HOLDERS = {"net.layers.0": [0], "net.layers.1": [0, 1], "net.layers.2": [1], "net.layers.3": [1]}
ROWS = 28  # 7 micro-batches per epoch, so that the last step of an epoch has one


class Pairs(Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(IN, generator=generator), torch.randn(OUT, generator=generator)


def _module(rates: list[float] | None = None) -> Any:
    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = Mlp()
            self.losses: list[float] = []

        def training_step(self, batch: Any, number: int) -> Any:
            if rates is not None:
                rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            return {"loss": self.net(*batch)}

        def validation_step(self, batch: Any, number: int) -> None:
            loss = self.net(*batch)
            self.losses.append(loss.item())
            self.log("loss", loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Regression()


def _config(stage: int = 0) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "sdp": {"groups": 2, "placement": HOLDERS},
    }


def _trainer(folder: str, epochs: int, config: dict[str, Any], **options: Any) -> Any:
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from sdp.engine.integrations.lightning import SDPStrategy

    return lightning.Trainer(
        strategy=SDPStrategy(config, cluster_environment=TorchElasticEnvironment()), accelerator="cpu",
        devices=dist.get_world_size(), max_epochs=epochs, accumulate_grad_batches=2, gradient_clip_val=0.5,
        default_root_dir=folder, logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, **options,
    )  # fmt: skip


def _loaders() -> tuple[Any, Any]:
    order = DistributedSampler(
        Pairs(), dist.get_world_size(), dist.get_rank(), shuffle=False
    )  # Lightning would shuffle
    return DataLoader(Pairs(), batch_size=2, sampler=order), DataLoader(Pairs(), batch_size=ROWS // 2)


def _expected(epochs: int, ranks: int) -> Any:
    """Weights after the same steps in the reference engine."""
    model = _module()
    config = _config() | {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    config["sdp"]["engine"] = "reference"
    optimizer = torch.optim.SGD(model.net.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model.net

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.net(x, y)

    engine = sdp.initialize(model=Net(), optimizer=optimizer, config=config)[0]
    data = Pairs()
    for _ in range(epochs):
        for first in range(0, ROWS, 2 * ranks):  # rank r has rows r, r + ranks, …
            last = first + 2 * ranks >= ROWS
            engine.set_gradient_accumulation_boundary(last or (first // (2 * ranks)) % 2 == 1)
            rows = [data[first + rank + ranks * row] for rank in range(ranks) for row in range(2)]
            engine.backward(engine(tuple(torch.stack(part) for part in zip(*rows, strict=True))))
            stepped = engine.is_gradient_accumulation_boundary()
            engine.step()
            if stepped:
                schedule.step()
    return engine.full_state_dict()


def _fit(folder: str, stage: int) -> None:
    train, valid = _loaders()
    rates: list[float] = []
    module = _module(rates)
    trainer = _trainer(folder, 2, _config(stage))
    trainer.fit(module, train, valid)
    engine = trainer.strategy.engine
    world = dist.get_world_size()
    steps = 2 * -(-ROWS // (2 * world) // 2)
    assert engine.global_steps == trainer.global_step == steps, (engine.global_steps, trainer.global_step, steps)
    assert rates[0] == 0.2
    assert rates[-1] == pytest.approx(0.2 * 0.5 ** (steps - 1))
    weights = engine.full_state_dict()
    trainer.save_checkpoint(f"{folder}/two.ckpt")
    trainer.validate(module, valid, verbose=False)  # after fit, too, the full model is evaluated
    found = trainer.callback_metrics["loss"].item()
    if dist.get_rank() == 0:
        assert weights is not None
        for name, value in _expected(2, world).items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)
        whole = torch.load(f"{folder}/two.ckpt", weights_only=True)["state_dict"]
        assert all(torch.equal(whole[name], value) for name, value in weights.items())
        alone = _module()
        alone.load_state_dict(whole)
        rows = [torch.stack(part) for part in zip(*(Pairs()[row] for row in range(ROWS)), strict=True)]
        assert found == pytest.approx(alone.net(*rows).item(), rel=1e-5)
    again = _trainer(folder, 3, _config(stage))
    again.fit(_module(), train, valid, ckpt_path=f"{folder}/two.ckpt")
    resumed = again.strategy.engine.full_state_dict()
    straight = _trainer(folder, 3, _config(stage))
    straight.fit(_module(), train, valid)
    expected = straight.strategy.engine.full_state_dict()
    if dist.get_rank() == 0:
        for name, value in expected.items():
            torch.testing.assert_close(resumed[name], value, rtol=1e-5, atol=1e-7, msg=name)


def _refuse(folder: str) -> list[str]:
    messages = []
    for config, options in (
        ({"gradient_accumulation_steps": 3}, {}),
        ({"gradient_clipping": 2.0}, {}),
        ({}, {"gradient_clip_algorithm": "value"}),
    ):
        trainer = _trainer(folder, 1, _config() | config, **options)
        with pytest.raises(sdp.ConfigError) as caught:
            trainer.fit(_module(), _loaders()[0])
        messages.append(str(caught.value))
    with pytest.raises(sdp.ConfigError) as caught:
        _trainer(folder, 1, _config(), precision="bf16-mixed")
    return [*messages, str(caught.value)]


def test_settings_that_cannot_be_honoured_are_refused_in_one_line(ranks: RankPool, tmp_path: Path) -> None:
    messages = ranks.run(_refuse, str(tmp_path), world=2, timeout=300)[0]
    assert not any("\n" in message for message in messages)
    for message, part in zip(
        messages,
        ("gradient_accumulation_steps is 3", "gradient_clipping is 2.0", "gradient_clip_algorithm", "precision"),
        strict=True,
    ):
        assert part in message


@pytest.mark.parametrize("stage", [0, 3])
def test_the_trainer_of_lightning_trains_evaluates_and_resumes(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    ranks.run(_fit, str(tmp_path), stage, world=2, timeout=300)
