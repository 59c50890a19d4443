"""The cross-group reduction starts while backward still runs, in one global order."""

from __future__ import annotations

from typing import Any

import pytest
import ranks_models as models
import torch.distributed as dist
from ranks import RankPool
from ranks_cases import Case, one_step


def _events(case: Case) -> list[str]:
    """What happened in a backward pass: reductions started, and the gradient of the first layer's input computed."""
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
