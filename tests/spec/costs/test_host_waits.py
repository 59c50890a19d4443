"""The host reads values from the device once in a step, at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.tests.support import models
from sdp.tests.support.cases import Case, engine_of
from sdp.tests.support.ranks import RankPool
from torch.utils._python_dispatch import TorchDispatchMode

# Each of these operators makes the host wait on CUDA. ``tolist`` of a CPU tensor calls no operator,
# so the method itself is watched too.
WAITING = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


class Reads(TorchDispatchMode):
    """Counts what the host reads of tensors while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING:
            self.count[str(func)] += 1
        return func(*args, **kwargs or {})

    def __enter__(self) -> Reads:
        self._tolist: Callable[..., Any] = torch.Tensor.tolist

        def tolist(tensor: torch.Tensor) -> Any:
            self.count["tolist"] += 1
            return self._tolist(tensor)

        torch.Tensor.tolist = tolist  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.Tensor.tolist = self._tolist  # type: ignore[method-assign]
        super().__exit__(*error)


def _reads_of_three_steps(case: Case) -> dict[str, int]:
    engine = engine_of(case)
    batches = [
        models.micro_batch(case.model, step, micro, dist.get_rank())
        for step in range(4)
        for micro in range(case.accumulation)
    ]

    def micro_steps(chosen: list[Any]) -> None:
        for batch in chosen:
            engine.backward(engine(batch))
            engine.step()
            engine.get_loss(), engine.get_global_grad_norm(), engine.get_lr(), engine.skipped_steps

    micro_steps(batches[: case.accumulation])  # the first makes the optimizer's state
    with Reads() as reads:
        micro_steps(batches[case.accumulation :])
    return dict(reads.count)


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, accumulation=2, optimizer="adamw", clip=True),
        Case(2, 1, optimizer="sgd", model="llama-meta", checkpointing="full"),
        Case(1, 2, stage=3, accumulation=2, optimizer="adamw", model="llama-meta", clip=True, placement="full"),
    ],
    ids=str,
)
def test_one_read_a_step(ranks: RankPool, case: Case) -> None:
    assert ranks.run(_reads_of_three_steps, case, world=2) == [{"tolist": 3}] * 2


def test_reads_are_seen() -> None:
    with Reads() as reads:
        bool(torch.ones(1) > 0), torch.ones(2).tolist(), torch.ones(2).nonzero()
    assert dict(reads.count) == {"aten._local_scalar_dense.default": 1, "tolist": 1, "aten.nonzero.default": 1}
