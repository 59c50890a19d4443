"""Runs of a case under the engine "deepspeed"."""

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sdp.tests.support.cases import Case, Result, engine_of, one_step, train, zero_of
from sdp.tests.support.ranks import RankPool

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
# The loss scale starts at 1,024, and the second good step doubles it.
FP16 = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1, "loss_scale_window": 1}


def train_under_deepspeed(case: Case) -> Result:
    return train(case, "deepspeed")


def run_under_deepspeed(ranks: RankPool, case: Case) -> list[Result]:
    return ranks.run(train_under_deepspeed, case, world=case.world)


def offload_settings(stage: int, offload: bool = True) -> dict[str, Any]:
    """Return the sections that put a case's optimizer into host memory, or none."""
    return {"zero_optimization": {**zero_of(stage), "offload_optimizer": {"device": "cpu"}}} if offload else {}


def train_without_launcher() -> float:
    """Take a step in one process without a launcher's variables; return its gradient norm."""
    norms = []
    for stage in (1, 3):
        engine = engine_of(Case(1, 1, stage=stage), "deepspeed")  # SGD, which DeepSpeed has not tested with ZeRO
        one_step(engine, Case(1, 1), 0, data_rank=0)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    return norms[1]


@contextmanager
def float16_here(supported: bool = True) -> Iterator[None]:
    """Make DeepSpeed believe that this CPU computes in half precision, or that it does not.

    torch computes in half precision on any CPU, but DeepSpeed looks for CPU instructions.
    """
    from sdp.engine.stores.deepspeed.private import load

    load()
    with pytest.MonkeyPatch.context() as patch:
        accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
        patch.setattr(accelerator, "is_fp16_supported", lambda: supported)
        yield
