"""Batch norm's statistics of the full model, measured on ranks that hold parts of it."""

import copy
from typing import Any

import pytest
import torch
from sdp.engine.errors import ModelError
from sdp.tests.support import models
from sdp.tests.support.cases import Case, data_rank_of, engine_of, one_step, oracle_of
from sdp.tests.support.ranks import RankPool
from torch import nn

CALIBRATION, HELD_OUT = 90, 95  # numbers of "steps" whose batches are read


def batches(first: int, count: int, data_rank: int) -> list[Any]:
    return [models.micro_batch("resnet", first + i, 0, data_rank) for i in range(count)]


def buffers_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: buffer.cpu().clone() for name, buffer in engine.module.named_buffers()}


def _recalibrate(case: Case) -> dict[str, Any]:
    """Two steps, then loss and state with statistics of two batches a rank."""
    engine, rank = engine_of(case), data_rank_of(case)
    for step in range(2):
        one_step(engine, case, step, data_rank=rank)
        engine.step()
    plain = engine.full_state_dict()
    before = buffers_of(engine)
    with engine.recalibrated(batches(CALIBRATION, 2, rank)):
        inside = buffers_of(engine)
        state = engine.full_state_dict()
        loss = engine.evaluate(batches(HELD_OUT, 2, rank))
    after = buffers_of(engine)
    return {"plain": plain, "before": before, "inside": inside, "after": after, "state": state, "loss": loss}


def by_hand(case: Case, state: dict[str, torch.Tensor]) -> tuple[nn.Module, float, torch.Tensor]:
    """A plain model with its means over all batches, its loss, and what its first norm reads."""
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
    differs = {
        name
        for name, buffer in results[0]["before"].items()
        if not torch.allclose(buffer, results[0]["inside"][name], rtol=1e-2)
    }
    assert {"layer4.0.bn1.running_var", "bn1.running_mean"} <= differs
    for result in results:
        assert all(torch.equal(state[name], buffer) for name, buffer in result["inside"].items()), "holders differ"
        assert all(torch.equal(result["after"][name], buffer) for name, buffer in result["before"].items()), (
            "not restored"
        )
        assert result["loss"] == pytest.approx(loss, rel=1e-5)


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


@pytest.mark.usefixtures("one_rank")
def test_a_norm_that_does_not_run_is_named() -> None:
    import sdp

    engine = sdp.initialize(model=Idle(), config={"train_micro_batch_size_per_gpu": 2})[0]
    with pytest.raises(ModelError, match="norm: did not run"), engine.recalibrated([torch.randn(2, models.WIDTH)]):
        pass
    assert engine.module.get_submodule("norm").track_running_stats


def _own_and_agreed(case: Case, engine_name: str) -> dict[str, Any]:
    """What a rank has tracked itself in a step, and what evaluation leaves it with."""
    engine = engine_of(case, engine_name)
    one_step(engine, case, 0, data_rank=data_rank_of(case))
    engine.step()
    own = buffers_of(engine)
    engine.evaluate(batches(HELD_OUT, 1, data_rank_of(case)))
    return {"own": own, "agreed": buffers_of(engine), "state": engine.full_state_dict()}


@pytest.mark.parametrize(
    ("neurons", "masking", "engine_name"),
    [(0, "backward", "fsdp2"), (2, "backward", "fsdp2"), (2, "forward", "deepspeed")],
)
def test_statistics_are_means_over_the_holders_ranks(
    ranks: RankPool, neurons: int, masking: Any, engine_name: str
) -> None:
    """Frozen copies have statistics too, but do not count."""
    if engine_name == "deepspeed":
        pytest.importorskip("deepspeed")
    case = Case(2, 2, stage=1, model="resnet-meta", neurons=neurons, masking=masking)
    results = ranks.run(_own_and_agreed, case, engine_name, world=case.world)
    layout = oracle_of(case).layout
    entries = [
        (name, slice(None), next((unit.index for unit in layout.units if name.startswith(f"{unit.name}.")), None))
        for name in layout.buffers
        if name.endswith(("mean", "var"))
        and not any(part.parameter == name for unit in layout.units for part in unit.buffers)
    ]
    entries += [(part.parameter, slice(*part.ranges[0]), unit.index) for unit in layout.units for part in unit.buffers]
    assert {layout.placement.holders[unit] for _, _, unit in entries if unit is not None} == {(0,), (1,), (0, 1)}
    for name, where, unit in entries:
        holders = layout.everyone if unit is None else layout.placement.holders[unit]
        own = [results[rank]["own"][name][where] for rank in range(case.world) if rank // case.fsdp in holders]
        assert not any(torch.equal(own[0], other) for other in own[1:]), f"{name}: nothing to agree on"
        torch.testing.assert_close(
            results[0]["state"][name][where], torch.stack(own).mean(0), rtol=1e-6, atol=1e-8, msg=name
        )
    for rank, result in enumerate(results):
        counts = {buffer.item() for name, buffer in result["agreed"].items() if name.endswith("num_batches_tracked")}
        assert counts == {1}
        assert all(torch.equal(buffer, results[0]["state"][name]) for name, buffer in result["agreed"].items()), (
            f"rank {rank}"
        )
