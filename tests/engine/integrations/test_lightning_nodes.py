"""Lightning's launcher and torchrun, on one node or two. Nodes are sets of processes on this host.

The file is also the script that the processes run:
``python test_lightning_nodes.py FOLDER DEVICES NODES``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sdp
import torch
from sdp.engine.environment.detect import free_port
from sdp.tests.support.models import IN, OUT, mlp
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

pytestmark = pytest.mark.slow  # it starts four processes with another library

lightning = pytest.importorskip("lightning", reason="lightning is not installed; the extra 'dev' has it")

ROWS, MICRO, EPOCHS = 32, 2, 2
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": MICRO,
    "zero_optimization": {"stage": 3},
    "sdp": {"groups": 2, "capacity": 0.5},
}


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(ROWS, IN, generator=generator), torch.randn(ROWS, OUT, generator=generator))


def make_module() -> Any:
    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def training_step(self, batch: Any, number: int) -> Any:
            return self.net(*batch)

        def train_dataloader(self) -> Any:
            trainer = self.trainer
            order = DistributedSampler(make_data(), trainer.world_size, trainer.global_rank, shuffle=False)
            return DataLoader(make_data(), batch_size=MICRO, sampler=order)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Regression()


def fit(folder: str, devices: int, nodes: int) -> None:
    """Train one epoch, and another one from the checkpoint. Rank 0 writes the weights."""
    from sdp.integrations.lightning import SDPStrategy

    engine: Any = None
    for epochs in range(1, EPOCHS + 1):
        trainer = lightning.Trainer(
            strategy=SDPStrategy(CONFIG), accelerator="cpu", devices=devices, num_nodes=nodes, max_epochs=epochs,
            default_root_dir=folder, logger=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        checkpoint = f"{folder}/{epochs - 1}.ckpt" if epochs > 1 else None
        trainer.fit(make_module(), ckpt_path=checkpoint)
        engine = trainer.strategy.engine
        assert (trainer.num_nodes, trainer.world_size) == (nodes, devices * nodes)
        assert engine.local_rank == trainer.local_rank == engine.global_rank % devices
        trainer.save_checkpoint(f"{folder}/{epochs}.ckpt")
    weights = engine.full_state_dict()
    if weights is not None:
        torch.save(weights, f"{folder}/weights.pt")


def train_reference(ranks: int) -> dict[str, torch.Tensor]:
    """Return the weights after the same steps in the reference engine."""
    config = CONFIG | {"sdp": CONFIG["sdp"] | {"engine": "reference", "group_sizes": [ranks // 2] * 2}}
    module = make_module()

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = module.net

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.net(x, y)

    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    engine = sdp.initialize(model=Net(), optimizer=optimizer, config=config)[0]
    data = make_data()
    for first in [*range(0, ROWS, MICRO * ranks)] * EPOCHS:  # rank r has rows r, r + ranks, …
        rows = [first + rank + ranks * row for rank in range(ranks) for row in range(MICRO)]
        engine.backward(engine(*data[rows]))
        engine.step()
    weights = engine.full_state_dict()
    assert weights is not None
    return weights


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        command, env=inherited | {"OMP_NUM_THREADS": "1"} | environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(("launcher", "nodes"), [("torchrun", 2), ("lightning", 1), ("lightning", 2)])
def test_nodes_train_and_resume_as_the_reference_does(tmp_path: Path, launcher: str, nodes: int) -> None:
    devices, port = 2, str(free_port())
    script = [__file__, str(tmp_path), str(devices), str(nodes)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={devices}"]
    processes = [
        start([*torchrun, f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}", *script])
        if launcher == "torchrun"
        else start([sys.executable, *script], NODE_RANK=str(node), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for node in range(nodes)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * nodes, "\n".join(outputs)[-4000:]
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    for name, value in train_reference(devices * nodes).items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


if __name__ == "__main__":
    fit(sys.argv[1], *map(int, sys.argv[2:]))
