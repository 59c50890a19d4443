"""Frozen copies are the holders' weights and cost no gradient."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.distributed.collectives import local_tensor
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.stores.fsdp2.sharding import parameter_groups
from sdp.engine.sync.gradients import WeightRefresh
from sdp.tests.support import models
from sdp.tests.support.cases import Case, data_rank_of, engine_of, one_step
from sdp.tests.support.checkpoints import make_engine
from sdp.tests.support.ranks import RankPool
from torch.distributed.fsdp import FSDPModule
from torch.utils.flop_counter import FlopCounterMode

CASES = [
    Case(2, 1, optimizer="adamw", masking="backward"),
    Case(2, 1, 3, optimizer="adamw", model="even-llama-meta", tp=2, masking="backward"),
    Case(2, 2, 3, optimizer="adamw", model="even-llama-tied-meta", bf16=True, masking="backward", neurons=3),
]
Moment = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


def _weights(engine: Any) -> Moment:
    """This rank's shards: held weights as they are cast, and frozen copies as they are."""
    dtype = torch.bfloat16 if engine.config.bf16.enabled else torch.float32
    held = {name: local_tensor(p.detach()).to(dtype, copy=True) for name, p in engine.parameters_here.items()}
    return held, {name: local_tensor(p.detach()).clone() for name, p in engine.frozen_here.items()}


def _moments(case: Case, folder: str) -> list[Moment]:
    """Weights at the start, after steps 2 and 4 (step 3 is skipped), and after a resume."""
    engine = engine_of(case)
    seen = [_weights(engine)]
    for step in range(4):
        one_step(engine, case, step, data_rank=data_rank_of(case))
        if step == 2:
            next(p for p in engine.parameters_here.values() if p.grad is not None).grad.mul_(float("nan"))  # type: ignore[union-attr]
        engine.traffic.reset()
        engine.step()
        assert engine.was_step_skipped == (step == 2)
        sends = any(
            refresh.sent_by(engine.layout.mesh.coordinates(dist.get_rank()).sdp) for refresh in engine.layout.refreshes
        )
        assert ("between groups/broadcast" in engine.traffic.by_kind()) == (sends and step != 2)
        if step:
            seen.append(_weights(engine))
    engine.save_checkpoint(folder)
    other = engine_of(case, training={"seed": 5})
    one_step(other, case, 7, data_rank=data_rank_of(case))
    other.step()
    other.load_checkpoint(folder)
    return [*seen, _weights(other)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_copies_are_bitwise_the_holders_weights(ranks: RankPool, case: Case, tmp_path: Path) -> None:
    answers = ranks.run(_moments, case, str(tmp_path), world=case.world)
    mesh = Mesh(case.groups, case.fsdp, case.tp)
    compared = 0
    for moment in range(5):
        for rank, (held, frozen) in enumerate(answer[moment] for answer in answers):
            at = mesh.coordinates(rank)
            assert frozen
            assert not set(held) & set(frozen)
            for name, copy in frozen.items():
                others = [
                    answers[mesh.rank(group, at.fsdp, at.tp)][moment][0].get(name) for group in range(case.groups)
                ]
                weights = [weight for weight in others if weight is not None]
                assert weights
                assert all(torch.equal(copy, weight) for weight in weights), f"{name} on rank {rank} at moment {moment}"
                compared += copy.numel()
    assert compared > 0
    name = next(name for name in answers[0][0][1] if name.partition(":")[0].endswith(("up.weight", "up_proj.weight")))
    start, trained, skipped, more, resumed = (answers[0][moment][1][name] for moment in range(5))
    assert torch.equal(trained, skipped)
    assert torch.equal(more, resumed)
    assert not torch.equal(start, trained)
    assert not torch.equal(skipped, more)


def _backward_flops(case: Case) -> tuple[int, int, int]:
    """Operations of forward and backward, and the number of copies with a gradient."""
    engine = engine_of(case)
    one_step(engine, case, 0, data_rank=data_rank_of(case))
    engine.step()
    with FlopCounterMode(display=False) as forward:
        loss = engine(models.micro_batch(case.model, 1, 0, data_rank_of(case)))
    with FlopCounterMode(display=False) as backward:
        engine.backward(loss)
    gradients = sum(parameter.grad is not None or parameter.requires_grad for parameter in engine.frozen_here.values())
    for module in engine.module.modules():
        if isinstance(module, FSDPModule):
            for part in [part for group in parameter_groups(module) for part in group.fsdp_params]:
                if part._param_fqn in engine.frozen_here:
                    whole = getattr(part, "_unsharded_param", None)
                    gradients += part.unsharded_accumulated_grad is not None or (
                        whole is not None and whole.grad is not None
                    )
    assert not any(id(p) in {id(f) for f in engine.frozen_here.values()} for p in engine.optimizer.state)
    return forward.get_total_flops(), backward.get_total_flops(), gradients


@pytest.mark.parametrize(
    ("case", "saved"),
    [
        (Case(2, 2, 0, masking="backward"), 8 * models.WIDTH * models.HIDDEN),  # of one block in four, two matrices
        # Of half of each branch of four blocks: 4 of 8 heads' projections of 6 and of 14 hidden
        # units, by 12 features.
        (Case(2, 2, 3, masking="backward", placement="cyclic", model="even-llama-meta", neurons=2),
            4 * 2 * (2 * models.TOKENS) * 12 * ((12 + 6 + 6 + 12) + 3 * 7)),
    ],
    ids=str,
)  # fmt: skip
def test_weight_gradients_of_copies_are_not_computed(ranks: RankPool, case: Case, saved: int) -> None:
    """2 operations for a row of the batch and an element of a matrix."""
    masked = ranks.run(_backward_flops, case, world=4)
    dense = ranks.run(_backward_flops, replace(case, masking="forward", placement="full", neurons=0), world=4)
    for (forward, backward, gradients), (dense_forward, dense_backward, _) in zip(masked, dense, strict=True):
        assert forward == dense_forward
        assert backward == dense_backward - saved
        assert gradients == 0


def _order(case: Case) -> list[str]:
    """What happens from the update on: broadcasts begun, units run, and works awaited."""
    engine = engine_of(case)
    one_step(engine, case, 0, data_rank=data_rank_of(case))
    events: list[str] = []
    broadcast, wait = dist.broadcast, WeightRefresh.wait
    dist.broadcast = lambda *args, **kwargs: events.append("broadcast") or broadcast(*args, **kwargs)  # type: ignore[func-returns-value]
    WeightRefresh.wait = lambda self, unit, stream=None: events.append(f"await {unit}") or wait(self, unit, stream)  # type: ignore
    for index in range(4):
        engine.module.layers[index].register_forward_hook(lambda *_, index=index: events.append(f"run layers.{index}"))
    try:
        engine.step()
        engine(models.micro_batch(case.model, 1, 0, data_rank_of(case)))
    finally:
        dist.broadcast, WeightRefresh.wait = broadcast, wait  # type: ignore[method-assign]
    return events


def _gradients_at_refresh(case: Case) -> int:
    """How many gradients are in memory when new weights are sent."""
    engine = engine_of(case)
    one_step(engine, case, 0, data_rank=data_rank_of(case))
    found: list[int] = []
    refresh = engine.groups.refresh

    def watched(*arguments: Any) -> None:
        found.append(sum(parameter.grad is not None for parameter in engine.parameters_here.values()))
        refresh(*arguments)

    engine.groups.refresh = watched
    engine.step()
    (left,) = found
    return left


def test_gradients_are_gone_before_casts_of_weights_are_made(ranks: RankPool) -> None:
    assert ranks.run(_gradients_at_refresh, Case(2, 1, masking="backward"), world=2) == [0, 0]


def test_a_unit_waits_for_its_own_weights_only(ranks: RankPool) -> None:
    for events in ranks.run(_order, Case(2, 1, masking="backward"), world=2):
        assert events[:12] == ["broadcast"] * 12  # six parameters sent, six received
        assert events[12:] == [
            "await layers.0", *(f"run layers.{index}" for index in range(3)), "await layers.3", "run layers.3",
        ]  # fmt: skip


def _never_trained() -> tuple[dict[str, int], bool]:
    case = Case(2, 1, masking="backward")
    model = models.mlp(seed=dist.get_rank())  # rank 0's weights are taken
    trained = [p for name, p in model.named_parameters() if name.endswith("weight")]
    engine = sdp.initialize(model=model, model_parameters=trained, config=case.config())[0]
    first = {name: p.detach().clone() for name, p in engine.frozen_here.items()}
    expected = dict(models.mlp(seed=0).named_parameters())
    equal = all(torch.equal(value.cpu(), expected[name]) for name, value in first.items())
    engine.traffic.reset()
    one_step(engine, case, 0, data_rank=dist.get_rank())
    engine.step()
    return engine.traffic.by_kind(), equal


def test_what_never_changes_is_sent_once(ranks: RankPool) -> None:
    weights = 4 * sum(p.numel() for name, p in models.Block().named_parameters() if name.endswith("weight"))
    for counted, equal in ranks.run(_never_trained, world=2):
        assert counted["between groups/broadcast"] == weights
        assert equal


def _statistics(case: Case, folder: str) -> dict[str, torch.Tensor]:
    """Statistics of this rank's blocks once it has loaded what an earlier run saved."""
    engine = make_engine(case, "fsdp2")
    engine.backward(engine(models.micro_batch("mlp", 0, 0, dist.get_rank(), rows=4)))
    engine.step()
    before = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    after = dict(engine.module.named_buffers())
    return {"before": before["layers.0.norm.running_mean"], "after": after["layers.0.norm.running_mean"]}


def test_a_checkpoint_has_the_holders_statistics(ranks: RankPool, tmp_path: Path) -> None:
    holder, other = ranks.run(_statistics, Case(2, 1, masking="backward", model="dropped"), str(tmp_path), world=2)
    assert torch.equal(holder["before"], holder["after"])
    assert not torch.equal(other["before"], holder["before"])
    assert torch.equal(other["after"], holder["before"])
