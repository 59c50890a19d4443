"""Batch norm's statistics of the full model, measured on ranks that hold parts of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import ranks_models as models
import torch
import torch.distributed as dist
from ranks import RankPool
from ranks_cases import Case, data_rank_of, engine_of, one_step
from sdp.engine.errors import ModelError
from sdp.engine.units import find_neuron_units
from torch import nn

CALIBRATION, HELD_OUT = 90, 95  # numbers of "steps" whose batches are read


def batches(first: int, count: int, data_rank: int | None, data_ranks: int = 1) -> list[Any]:
    if data_rank is None:
        return [models.rows_of_all("resnet", first + i, 0, data_ranks) for i in range(count)]
    return [models.micro_batch("resnet", first + i, 0, data_rank) for i in range(count)]


def buffers_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


def _recalibrate(case: Case, engine_name: str = "fsdp2") -> dict[str, Any]:
    """Two steps, then the full model's loss and state with statistics measured over two batches a rank."""
    engine = engine_of(case, engine_name)
    rank = None if engine_name == "reference" else data_rank_of(case)
    for step in range(2):
        one_step(engine, case, step, data_rank=rank)
        engine.step()
    plain = engine.full_state_dict()
    before = buffers_of(engine)
    with engine.recalibrated(batches(CALIBRATION, 2, rank, case.data_ranks)):
        inside = buffers_of(engine)
        state = engine.full_state_dict()
        loss = engine.evaluate(batches(HELD_OUT, 2, rank, case.data_ranks))
    after = buffers_of(engine)
    return {"plain": plain, "before": before, "inside": inside, "after": after, "state": state, "loss": loss}


def by_hand(case: Case, state: dict[str, torch.Tensor]) -> tuple[nn.Module, float, torch.Tensor]:
    """A plain model with its means over all batches, its loss as it is, and what its first batch norm reads."""
    model: Any = models.resnet("cpu")
    model.load_state_dict(state)
    with torch.no_grad():
        held_out = [batch for rank in range(case.data_ranks) for batch in batches(HELD_OUT, 2, rank)]
        loss = sum(model.eval()(**batch).item() for batch in held_out) / len(held_out)
        calibration = [batch for rank in range(case.data_ranks) for batch in batches(CALIBRATION, 2, rank)]
        first = torch.cat([model.conv1(batch["images"]) for batch in calibration])
        cumulative = copy.deepcopy(model).train()
        for number, batch in enumerate(calibration, start=1):
            for module in cumulative.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.momentum = 1 / number  # torch's own mean over batches
            cumulative(**batch)
    return cumulative, loss, first


@pytest.mark.parametrize("case", [Case(2, 1, model="resnet-meta"), Case(2, 1, model="resnet-meta", neurons=2)], ids=str)
def test_statistics_are_the_full_models_over_all_ranks(ranks: RankPool, case: Case) -> None:
    results = ranks.run(_recalibrate, case, world=case.world)
    state = results[0]["state"]
    cumulative, loss, first = by_hand(case, state)
    for name, buffer in cumulative.named_buffers():
        if name.endswith("running_mean"):
            torch.testing.assert_close(state[name], buffer, rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(state["bn1.running_var"], first.var((0, 2, 3), correction=0), rtol=1e-4, atol=1e-6)
    differs = {name for name, buffer in results[0]["before"].items() if not torch.allclose(buffer, results[0]["inside"][name], rtol=1e-2)}
    assert {"layer4.0.bn1.running_var", "bn1.running_mean"} <= differs
    for result in results:
        assert all(torch.equal(state[name], buffer) for name, buffer in result["inside"].items()), "holders differ"
        assert all(torch.equal(result["after"][name], buffer) for name, buffer in result["before"].items()), "not restored"
        assert result["loss"] == pytest.approx(loss, rel=1e-5)
    theirs = _recalibrate(case, "reference")
    for name, buffer in theirs["inside"].items():
        if not name.endswith("num_batches_tracked"):  # of all workers in one process
            torch.testing.assert_close(state[name], buffer, rtol=1e-4, atol=1e-5, msg=name)
    assert results[0]["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


class Idle(nn.Module):
    """Has a batch norm that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(models.Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def test_a_norm_that_does_not_run_is_named() -> None:
    import sdp

    assert not dist.is_initialized()
    engine = sdp.initialize(model=Idle(), config={"train_micro_batch_size_per_gpu": 2, "sdp": {"engine": "reference"}})[0]
    with pytest.raises(ModelError, match="norm: did not run"), engine.recalibrated([torch.randn(2, models.WIDTH)]):
        pass
    assert engine.module.get_submodule("norm").track_running_stats


@pytest.mark.parametrize("masking", ["forward", "backward"])
def test_statistics_of_channels_are_those_of_their_first_holder(ranks: RankPool, masking: Any) -> None:
    case = Case(2, 1, model="resnet-meta", neurons=2, masking=masking)
    results = ranks.run(_recalibrate, case, world=case.world)
    holders = engine_of(case, "reference").layout.placement.holders
    units = find_neuron_units(models.build(case.model), case.neurons)
    assert {held[0] for held in holders} == {0, 1}
    for unit in units:
        for part in unit.buffers:
            ((first, last),) = part.ranges
            own = results[holders[unit.index][0]]["before"][part.parameter][first:last]
            assert torch.equal(results[0]["plain"][part.parameter][first:last], own), part
            assert not own.eq(own.round()).any(), f"{part}: not trained"
