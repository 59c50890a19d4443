"""A script like DeepSpeed's CIFAR example runs with one call changed."""

import argparse
import json
import os
import runpy
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sdp
import torch
from sdp.engine.errors import ConfigError
from sdp.tests.support.ranks import RankPool

SCRIPT = Path(__file__).parents[3] / "scripts" / "images.py"


def changed(folder: Path) -> Path:
    """The script with one call changed."""
    text = SCRIPT.read_text()
    assert text.count(" deepspeed.initialize(") == 1
    text = text.replace(" deepspeed.initialize(", " sdp.initialize(").replace(
        "import torch\n", "import sdp\nimport torch\n", 1
    )
    # DeepSpeed would compile a collective in shared memory, which takes minutes.
    text = text.replace(
        "def main(args):\n", 'def main(args):\n    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False\n'
    )
    (folder / "script.py").write_text(text)
    return folder / "script.py"


def configuration(folder: Path, engine: str, stage: int, **sections: Any) -> Path:
    file = {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {"type": "Adam", "params": {"lr": 0.03, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.03, "warmup_num_steps": 4}},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": False},
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": stage, "allgather_partitions": True, "reduce_scatter": True, "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000, "overlap_comm": True, "contiguous_gradients": True,
        },
        "sdp": {"groups": 2, "capacity": 0.5, "engine": engine},
        **sections,
    }  # fmt: skip
    (folder / "ds_config.json").write_text(json.dumps(file))
    return folder / "ds_config.json"


def _run(script: str, arguments: list[str]) -> dict[str, Any]:
    sys.argv = [script, *arguments]
    module = runpy.run_path(script)
    return module["main"](module["add_argument"]())


@pytest.mark.parametrize(("engine", "stage"), [("fsdp2", 0), ("deepspeed", 2)])
def test_one_call_is_changed(ranks: RankPool, tmp_path: Path, engine: str, stage: int) -> None:
    arguments = [
        "--deepspeed", "--deepspeed_config", str(configuration(tmp_path, engine, stage)), "--checkpoint",
        str(tmp_path / "saved"),
    ]  # fmt: skip
    everyone = ranks.run(_run, str(changed(tmp_path)), arguments, world=2)
    for rank, facts in enumerate(everyone):
        assert facts["losses"][-1] < 0.8 * facts["losses"][0]
        assert (facts["train_batch_size"], facts["micro_batch"], facts["accumulation"]) == (16, 8, 1)
        assert facts["rank"] == facts["local_rank"] == rank
        assert facts["lr"] == [0.03]
        assert facts["steps"] == 3 * 128 // 16
        assert facts["is_boundary"] is True
        assert facts["norm"] == everyone[0]["norm"] > 0
    assert everyone[0]["parameters"] < 4 * 660 + 200  # half of the blocks, not the four


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "stage"), [("fsdp2", 1), ("deepspeed", 1)])
def test_it_runs_by_the_deepspeed_launcher(tmp_path: Path, engine: str, stage: int) -> None:
    root = tmp_path / "path"
    root.mkdir()
    (root / "sdp").symlink_to(Path(sdp.__file__).parent)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [Path(sys.executable).parent / "deepspeed", "--num_gpus", "2", "--master_port", port, changed(tmp_path)]
    words += ["--deepspeed", "--deepspeed_config", configuration(tmp_path, engine, stage)]
    words += ["--checkpoint", tmp_path / "saved"]
    settings = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment = {**os.environ, **settings}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]
    assert [line.rpartition(" after ")[2] for line in lines] == ["8 steps", "16 steps", "24 steps"]
    assert float(lines[-1].split()[3]) < 0.8 * float(lines[0].split()[3])


def test_config_arguments() -> None:
    parser = sdp.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "a.json"])
    assert (args.deepspeed, args.deepspeed_config) == (True, "a.json")
    assert parser.parse_args([]).deepspeed_config is None


def test_what_a_script_may_not_ask_for_is_one_line() -> None:
    with pytest.raises(ConfigError, match="dist_backend 'mpi' is not available on this machine"):
        sdp.init_distributed("mpi")
    with pytest.raises(ConfigError, match="come from the launcher's variables"):
        sdp.init_distributed(timeout=timedelta(seconds=5), rank=0, world_size=1)
    args = argparse.Namespace(deepspeed_config="a.json")
    with pytest.raises(ConfigError, match="both given"):
        sdp.initialize(args, torch.nn.Linear(1, 1), config={})


@pytest.mark.usefixtures("one_rank")
def test_options_of_deepspeed_that_are_not_honoured_are_one_line(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    engine = sdp.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1})[0]
    for call in (
        lambda: engine.load_checkpoint(tmp_path, custom_load_fn=print),
        lambda: engine.backward(engine(torch.ones(1, 2)).sum(), retain_graph=True),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("one_rank")
def test_options_without_effect_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Scripts that train adapters save and load without the frozen weights."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[0].requires_grad_(False)
    config = {"train_micro_batch_size_per_gpu": 1}
    engine = sdp.initialize(model=model, config=config)[0]
    engine.save_checkpoint(tmp_path, "t", exclude_frozen_parameters=True)
    path, _ = engine.load_checkpoint(tmp_path, load_module_strict=False)
    assert path == str(tmp_path / "t")
    assert "exclude_frozen_parameters has no effect" in caplog.text
    assert "load_module_strict has no effect" in caplog.text
