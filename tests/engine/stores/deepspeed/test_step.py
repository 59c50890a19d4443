"""A step under DeepSpeed: overlap, dropped gradients, and one group alone."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.tests.support import models
from sdp.tests.support.cases import Case, engine_of, one_step, zero_of
from sdp.tests.support.deepspeed_runs import offload_settings
from sdp.tests.support.ranks import RankPool


def _norm_of_two_backward_passes(stage: int, kind: str) -> float:
    case = Case(2, 1, stage=stage)
    engine = engine_of(case, kind)
    for micro in range(2):
        engine.backward(engine(models.micro_batch(case.model, 0, micro, dist.get_rank())))
    engine.step()
    return engine.get_global_grad_norm()


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_of_two_backward_passes_before_a_step_are_added(ranks: RankPool, stage: int) -> None:
    ours = ranks.run(_norm_of_two_backward_passes, stage, "deepspeed", world=2)
    assert ours == pytest.approx(ranks.run(_norm_of_two_backward_passes, stage, "fsdp2", world=2), rel=1e-5)


class _Watched:
    """A reduction that tells when it is waited for."""

    def __init__(self, work: Any, events: list[str]):
        self._work, self._events = work, events

    def wait(self) -> Any:
        self._events.append("wait")
        return self._work.wait()


def _events(stage: int, accumulation: int) -> list[str]:
    """Averages launched and waited for in a step, and backward at the first layer."""
    from sdp.engine.stores.deepspeed import store

    case = Case(2, 2, stage=stage, accumulation=accumulation, placement="full")
    zero = {**zero_of(stage), "reduce_bucket_size": 16}  # each parameter is reduced by itself
    events: list[str] = []
    launch = store.logged_all_reduce

    def watched(*given: Any) -> _Watched:
        events.append("launch")
        return _Watched(launch(*given), events)

    store.logged_all_reduce = watched
    try:
        engine = engine_of(case, "deepspeed", zero_optimization=zero)
        first = next(module for module in engine.module.modules() if isinstance(module, torch.nn.Linear))
        hooks = lambda *given: given[-1].register_hook(lambda _: events.append("backward")) and None  # noqa: E731
        first.register_forward_hook(hooks)
        one_step(engine, case, 0, data_rank=dist.get_rank())
        engine.step()
    finally:
        store.logged_all_reduce = launch
    return events


@pytest.mark.parametrize(("stage", "accumulation"), [(2, 1), (3, 2)])
def test_averages_between_groups_overlap_each_other(ranks: RankPool, stage: int, accumulation: int) -> None:
    """All are launched before one is waited for."""
    for events in ranks.run(_events, stage, accumulation, world=4):
        count = events.count("launch")
        assert count >= 4
        assert events == ["backward"] * accumulation + ["launch"] * count + ["wait"] * count


def _beside_plain_deepspeed(stage: int, settings: dict[str, Any]) -> tuple[list[float], list[float], int, int]:
    """Losses of DeepSpeed alone and under sdp, and optimizer bytes against the plan."""
    import sdp
    from sdp.engine.stores.deepspeed.private import forget_process_groups, load

    package = load()
    forget_process_groups()
    file = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        **settings,
    }
    kind = "llama" if "bf16" in settings else "mlp"  # whose inputs are no numbers to be cast
    adamw = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1)  # of a configuration, it would be torch's fused one
    plain, ours = models.build(kind), models.build(kind)
    plain = package.initialize(model=plain, optimizer=adamw(plain.parameters()), config=file)[0]
    file["sdp"] = {"engine": "deepspeed"}
    ours = sdp.initialize(model=ours, optimizer=adamw(ours.parameters()), config=file)[0]
    losses: list[list[float]] = []
    for engine in (plain, ours):
        losses.append([])
        for step in range(8):
            loss = engine(**models.micro_batch(kind, step, 0, dist.get_rank()))
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
    norm = plain.get_global_grad_norm()
    assert norm is None or ours.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-6)
    return *losses, ours.measured_state_bytes().optimizer, ours.predicted_state_bytes().optimizer


HALF = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 2}}}


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        (2, {"gradient_clipping": 0.0, **HALF}),
        (3, {"gradient_clipping": 0.0, **WARMUP}),
        (2, {"gradient_clipping": 0.25}),
    ],
)
def test_with_one_group_it_is_deepspeed_bit_for_bit(ranks: RankPool, stage: int, settings: dict[str, Any]) -> None:
    """But for the rounding of clipping, for which DeepSpeed multiplies in another order."""
    is_clipped = settings.get("gradient_clipping") != 0.0  # by default at 1
    for plain, ours, measured, predicted in ranks.run(_beside_plain_deepspeed, stage, settings, world=2):
        assert ours == pytest.approx(plain, rel=1e-5) if is_clipped else ours == plain
        assert len(set(plain)) == len(plain)
        assert measured == predicted > 0


def _dropped(stage: int, offload: bool) -> None:
    case = Case(2, 1, stage=stage, accumulation=2)
    after = []
    for first in (0, 9):
        engine = engine_of(case, "deepspeed", **offload_settings(stage, offload))
        engine.backward(engine(models.micro_batch(case.model, first, 0, dist.get_rank())))
        engine.step()
        engine.forget_micro_batches()
        engine.backward(engine(models.micro_batch(case.model, 1, 0, dist.get_rank())))
        engine.step()
        after.append((engine.get_global_grad_norm(), engine.full_state_dict()))
    (norm, weights), (other_norm, other_weights) = after
    assert norm == other_norm > 0
    assert dist.get_rank() or all(torch.equal(weights[name], other_weights[name]) for name in weights)


@pytest.mark.parametrize(("stage", "offload"), [(2, True), (3, False)])
def test_a_step_that_is_given_up_drops_earlier_micro_batches(ranks: RankPool, stage: int, offload: bool) -> None:
    ranks.run(_dropped, stage, offload, world=2)
