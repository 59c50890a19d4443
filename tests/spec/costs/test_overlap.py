"""The cross-group reduction starts while backward still runs, in one global order."""

import gc
import time
import weakref
from typing import Any

import pytest
import torch.distributed as dist
from sdp.engine.placement.placement import plan_buckets
from sdp.tests.support import models
from sdp.tests.support.cases import Case, one_step
from sdp.tests.support.ranks import RankPool


def _events(case: Case) -> list[str]:
    """Reductions started in a backward pass, and the gradient of the first layer's input."""
    import sdp

    engine = sdp.initialize(model=models.build(case.model), config=case.config())[0]
    one_step(engine, case, 0, data_rank=dist.get_rank())
    engine.step()
    events: list[str] = []
    all_reduce = dist.all_reduce

    def spy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("async_op"):
            events.append("reduction")
        return all_reduce(tensor, *args, **kwargs)

    first = next(parameter for name, parameter in engine.parameters_here.items())
    first.register_post_accumulate_grad_hook(lambda _: events.append("last gradient"))
    dist.all_reduce = spy
    try:
        one_step(engine, case, 1, data_rank=dist.get_rank())
    finally:
        dist.all_reduce = all_reduce
    return events


@pytest.mark.parametrize("stage", [0, 3])
def test_reductions_start_before_backward_ends(ranks: RankPool, stage: int) -> None:
    for events in ranks.run(_events, Case(2, 2, stage), world=4):
        before = events[: events.index("last gradient")]
        assert before.count("reduction") >= 2, events  # the head and the last shared unit at least


def test_a_unit_is_cut_into_few_buckets() -> None:
    """Up to a quarter of the unit each, from 0.5 to 64 MiB; parameters stay whole."""
    mega = 2**18  # elements of a MiB of float32
    sizes = {
        "embedding": 40, "a.1": 1, "a.2": 1, "a.3": 3, "a.4": 3, "a.5": 8, "b.1": 100, "b.2": 30, "b.3": 30, "b.4": 240,
        "norm": 1,
    }  # fmt: skip
    numels = {name: size * mega for name, size in sizes.items()} | {
        "c.1": mega // 8, "c.2": mega // 8, "c.3": mega // 4, "c.4": mega // 4,
    }  # fmt: skip
    units = {name: name[0] if "." in name else "shared" for name in numels}
    buckets = plan_buckets(numels, lambda name: (0, 1), units.__getitem__, lambda name: name == "norm")
    assert [bucket.names for bucket in buckets] == [
        ("c.3", "c.4"), ("c.1", "c.2"), ("b.4",), ("b.2", "b.3"), ("b.1",), ("a.5",), ("a.4",), ("a.2", "a.3"),
        ("a.1",),
        ("embedding",), ("norm",),
    ]  # fmt: skip
    shared = plan_buckets({"x": 4, "y": 4}, lambda name: (0, 1), lambda name: "shared", lambda name: False)
    assert [bucket.names for bucket in shared] == [("x", "y")]


def _exposed(case: Case, delay: float) -> float:
    """Seconds that this rank waited for reductions; rank 1 begins ``delay`` seconds late."""
    import sdp

    engine = sdp.initialize(model=models.build(case.model), config=case.config())[0]
    before = 0.0
    for step in range(2):  # the first one connects
        before = engine.exposed_reduction_seconds
        loss = engine(models.micro_batch(case.model, step, 0, dist.get_rank()))
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(delay)
        engine.backward(loss)
        engine.step()
    return engine.exposed_reduction_seconds - before


def test_what_backward_does_not_hide_of_the_reductions_is_timed(ranks: RankPool) -> None:
    waiting, late = ranks.run(_exposed, Case(2, 1), 1.0, world=2)
    assert 0.8 < waiting < 5.0
    assert 0 < late < 0.5 * waiting


def _outlive(case: Case) -> list[str]:
    """Parameters that are there after their engine was dropped."""
    import sdp

    engine = sdp.initialize(model=models.build(case.model), config=case.config())[0]
    for step in range(2):
        one_step(engine, case, step, data_rank=dist.get_rank())
        engine.step()
    parameters = {name: weakref.ref(parameter) for name, parameter in engine.module.named_parameters()}
    del engine
    gc.collect()
    return [name for name, parameter in parameters.items() if parameter() is not None]


@pytest.mark.parametrize(
    "case", [Case(2, 1, 0), Case(2, 1, 0, masking="backward"), Case(1, 2, 3), Case(2, 2, 3)], ids=str
)
def test_no_parameter_outlives_its_engine(ranks: RankPool, case: Case) -> None:
    assert ranks.run(_outlive, case, world=case.world) == [[]] * case.world
