"""TensorBoard and Weights & Biases get the same curves under DeepSpeed's names."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError
from sdp.tests.support.small_runs import STEPS, read_losses, read_tensorboard, write_config
from sdp.tools.cli import main
from sdp.tools.train.observer import evaluation_scalars, open_monitors, train_scalars

LOSS = "Train/Samples/train_loss"


def write(config: dict[str, Any], dump_dir: Path, points: dict[int, float]) -> None:
    monitors = open_monitors(load_config(config), dump_dir)
    for step, loss in points.items():
        monitors.write(step, {LOSS: loss, "Eval/loss": loss + 1})
    monitors.close()


def test_nothing_enabled_writes_nothing(tmp_path: Path):
    write({}, tmp_path, {1: 2.0})
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_of_a_resumed_run_has_every_step_once(tmp_path: Path):
    config = {"tensorboard": {"enabled": True}}
    write(config, tmp_path, {1: 5.0, 2: 4.0, 3: 3.0})
    write(config, tmp_path, {2: 4.5, 3: 3.5})
    assert read_tensorboard(tmp_path / "tensorboard") == {1: 5.0, 2: 4.5, 3: 3.5}


def test_tensorboard_goes_where_the_configuration_says(tmp_path: Path):
    write(
        {"tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}, tmp_path / "dump", {1: 5.0}
    )
    assert read_tensorboard(tmp_path / "job") == {1: 5.0}


def test_csv_has_the_layout_of_deepspeed(tmp_path: Path):
    write(
        {"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "out"), "job_name": "job"}},
        tmp_path / "dump",
        {1: 2.5, 2: 2.0},
    )
    assert (tmp_path / "out/job/Train_Samples_train_loss.csv").read_text().splitlines() == [
        "step,train_loss",
        "1,2.5",
        "2,2.0",
    ]
    assert (tmp_path / "out/job/Eval_loss.csv").read_text().splitlines() == ["step,loss", "1,3.5", "2,3.0"]


def test_csv_of_a_resumed_run_has_every_step_once(tmp_path: Path):
    config = {"csv_monitor": {"enabled": True}}
    write(config, tmp_path, {1: 5.0, 2: 4.0, 3: 3.0})
    write(config, tmp_path, {2: 4.5, 3: 3.5})
    assert (tmp_path / "csv/Train_Samples_train_loss.csv").read_text().splitlines() == [
        "step,train_loss", "1,5.0", "2,4.5", "3,3.5",
    ]  # fmt: skip


@pytest.mark.parametrize("where", ["file/x", "x" * 300])
def test_a_directory_that_cannot_be_created_is_a_mistake_of_the_user(tmp_path: Path, where: str):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^tensorboard\.output_path: .* cannot be created \(.*\); choose another"):
        open_monitors(load_config({"tensorboard": {"enabled": True, "output_path": f"{tmp_path}/{where}"}}), tmp_path)


@pytest.mark.parametrize(("section", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_a_missing_package_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, module: str):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"pip install {section}, or set {section}.enabled to false"):
        open_monitors(load_config({section: {"enabled": True}}), tmp_path)


class FakeWandb(SimpleNamespace):
    """What is used of the package, recorded."""

    class Error(Exception):
        pass

    def init(self, **settings: Any) -> FakeWandb:
        if self.refuses:
            raise self.Error("no API key\nconfigured")
        self.settings, self.points = settings, []
        return self

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axis = (name, step_metric)

    def log(self, scalars: dict[str, float]) -> None:
        self.points.append(scalars)

    def finish(self) -> None:
        self.points.append("finished")


def test_wandb_gets_the_name_and_the_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = FakeWandb(refuses=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = {"wandb": {"enabled": True, "project": "p", "group": "g", "team": "t"}}
    write(config, tmp_path, {1: 2.0})
    assert {key: wandb.settings[key] for key in ("project", "group", "entity", "name")} == {
        "project": "p", "group": "g", "entity": "t", "name": tmp_path.name,
    }  # fmt: skip
    assert wandb.points == [{"step": 1, LOSS: 2.0, "Eval/loss": 3.0}, "finished"]
    assert wandb.axis == ("*", "step")


def test_wandb_continues_the_run_on_a_resume_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = FakeWandb(refuses=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    ids = []
    for resume in (False, True, True, False):
        open_monitors(load_config({"wandb": {"enabled": True}}), tmp_path, resume=resume).close()
        assert wandb.settings["resume"] == "allow"
        ids.append(wandb.settings["id"])
    assert ids[0] == ids[1] == ids[2] != ids[3]


def test_a_resumed_run_continues_its_curves(config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = FakeWandb(refuses=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config["sdp"] = {"groups": 1}
    config |= {"wandb": {"enabled": True}, "tensorboard": {"enabled": True}}
    run = ["train", str(write_config(config, tmp_path)), "--dump-dir", str(tmp_path / "run")]
    assert main([*run, "--set", f"training.steps={STEPS // 2}"]) == 0
    first, points = wandb.settings["id"], wandb.points
    time.sleep(1 - time.time() % 1)  # TensorBoard reads files of the same second in the order of their names
    assert main([*run, "--resume"]) == 0
    assert wandb.settings["id"] == first
    assert wandb.settings["resume"] == "allow"
    steps = [point["step"] for point in (*points, *wandb.points) if LOSS in point]
    assert steps == list(range(1, STEPS + 1))
    losses = dict(enumerate(read_losses(tmp_path / "run"), start=1))
    assert read_tensorboard(tmp_path / "run/tensorboard") == pytest.approx(losses)


def test_wandb_that_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(refuses=True))
    with pytest.raises(
        ConfigError, match=r"wandb: no API key configured; set WANDB_MODE=offline, or set wandb\.enabled to false"
    ):
        open_monitors(load_config({"wandb": {"enabled": True}}), tmp_path)


def test_the_curves_of_a_line():
    line = {"step": 1, "tokens": 8, "loss": 2.0, "lr": 0.1, "grad_norm": None, "comm_bytes": 7}
    assert train_scalars(line) == {LOSS: 2.0, "Train/Samples/lr": 0.1, "Train/comm_bytes": 7}
    assert evaluation_scalars({"loss": 3.0, "subnetwork_losses": [3.0, 5.0]}) == {
        "Eval/loss": 3.0,
        "Eval/subnetwork_loss_mean": 4.0,
    }
    assert evaluation_scalars({"loss": 3.0}) == {"Eval/loss": 3.0}
