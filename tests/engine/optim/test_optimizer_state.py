"""Step counts that an optimizer keeps as plain numbers are saved and go on."""

from pathlib import Path
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.errors import CheckpointError
from sdp.engine.optim.optimizer_state import OptimizerState
from sdp.tests.support import models
from sdp.tests.support.cases import Case, one_step
from sdp.tests.support.ranks import RankPool
from torch.optim.adamw import adamw


class CountingAdam(torch.optim.Optimizer):
    """AdamW that counts by "state", at the "last" parameter (FusedAdam), or by "group"."""

    def __init__(self, groups: Any, where: str):
        super().__init__(groups, {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1})
        self.where = where

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                    if self.where != "group":
                        self.state[parameter]["step"] = 0
            if not parameters:
                continue
            states = [self.state[parameter] for parameter in parameters]
            holders = {"state": states, "last": states[-1:], "group": [group]}[self.where]
            for holder in holders:
                holder["step"] = holder.get("step", 0) + 1
            counts = [torch.tensor(float(holder["step"] - 1)) for holder in holders]
            adamw(
                parameters, [parameter.grad for parameter in parameters], [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states], [],
                [count.clone() for count in (counts * len(states))[: len(states)]],
                foreach=False, amsgrad=False, lr=group["lr"], beta1=0.8, beta2=0.95, eps=1e-8, weight_decay=0.1,
                maximize=False,
            )  # fmt: skip


def _engine(case: Case, name: str, where: str) -> Any:
    """Under "torch" the same steps by torch's AdamW."""

    def made(groups: Any) -> torch.optim.Optimizer:
        return (
            torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.95), weight_decay=0.1)
            if where == "torch"
            else CountingAdam(groups, where)
        )

    config = {key: value for key, value in case.config(name).items() if key != "optimizer"}
    return sdp.initialize(model=models.build(case.model), optimizer=made, config=config)[0]


def _run(case: Case, name: str, where: str, folder: str, steps: range) -> Any:
    """The full model after ``steps``; those from 0 on are saved, others go on from what is."""
    engine = _engine(case, name, where)
    if steps.start:
        engine.load_checkpoint(folder)
    for step in steps:
        one_step(engine, case, step, data_rank=dist.get_rank())
        engine.step()
    if not steps.start:
        engine.save_checkpoint(folder)
    return engine.full_state_dict()


SLICES = Case(2, 1, neurons=2, model="even-llama")
RUNS = [
    ("fsdp2", SLICES, "group"),
    ("deepspeed", Case(1, 2, stage=3), "state"),
    pytest.param("deepspeed", Case(1, 2, stage=2), "last", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "case", "where"), RUNS, ids=str)
def test_a_count_goes_on(ranks: RankPool, tmp_path: Path, name: str, case: Case, where: str) -> None:
    """A count that starts again would change the length of the next steps."""
    if name == "deepspeed":
        pytest.importorskip("deepspeed")
    expected = ranks.run(_run, case, name, "torch", str(tmp_path / "torch"), range(4), world=case.world)[0]
    ranks.run(_run, case, name, where, str(tmp_path / "own"), range(2), world=case.world)
    for reader, optimizer in ((name, where), ("fsdp2", "torch")):
        found = ranks.run(_run, case, reader, optimizer, str(tmp_path / "own"), range(2, 4), world=case.world)[0]
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-5 * tensor.abs().max().item())


def test_other_state_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter] = {"history": [1, 2], "unused": None}
    with pytest.raises(
        CheckpointError, match=r"'history' of layer\.weight is a list; a checkpoint can store only tensors and numbers"
    ):
        OptimizerState(optimizer).of(parameter, "layer.weight")
