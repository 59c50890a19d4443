"""A load says which settings of the checkpoint differ from the configured ones."""

from __future__ import annotations

import copy
import importlib.util
import logging
from typing import Any

import pytest
import sdp
import torch.distributed as dist
from sdp.tests.support import models
from sdp.tests.support.cases import Case, one_step, said
from sdp.tests.support.ranks import RankPool

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
CASE = Case(2, 1, optimizer="adamw", placement="cyclic")


def _warnings(engine: str, folder: str) -> dict[str, list[str]]:
    """What rank 0 says at each load, by what was changed in the configuration."""

    def build(**change: Any) -> sdp.SDPEngine:
        config = copy.deepcopy(CASE.config(engine))
        config["optimizer"]["params"] |= change.pop("params", {})
        if change.pop("plain", False):
            del config["scheduler"]
        return sdp.initialize(model=models.mlp(), config=config | change)[0]

    found = {}
    for plain in (False, True):
        trained = build(plain=plain)
        one_step(trained, CASE, 0, data_rank=dist.get_rank())
        trained.step()
        trained.save_checkpoint(folder, "plain" if plain else "scheduled")
    optimizer = {"params": {"lr": 0.05, "weight_decay": 0.3, "betas": [0.8, 0.9]}}
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 3}}}
    changes: dict[str, dict[str, Any]] = {
        "same": {},
        "clip": {"gradient_clipping": 0.25},
        "schedule": schedule,
        "same plain": {"plain": True},
        "optimizer": optimizer | {"plain": True},
    }
    for name, change in changes.items():
        loaded = build(**change)
        with said(logging.WARNING) as lines:
            loaded.load_checkpoint(folder, "plain" if change.get("plain") else "scheduled")
        found[name] = [line for line in lines if "other settings" in line]
        if name == "optimizer":
            assert set(loaded.rates_of_parameters().values()) == {0.02}  # the checkpoint's, as in DeepSpeed
    return found


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("deepspeed", marks=needs_deepspeed)])
def test_a_load_warns_of_other_settings(ranks: RankPool, tmp_path: Any, engine: str) -> None:
    first, second = ranks.run(_warnings, engine, str(tmp_path), world=2)
    assert first["same"] == first["same plain"] == []
    assert not any(second.values())
    lines = {name: line for name in ("clip", "schedule", "optimizer") for (line,) in [first[name]]}
    assert not any("\n" in line for line in lines.values())
    assert "gradient_clipping: 0.0 → 0.25;" in lines["clip"]
    assert "scheduler.params.warmup_max_lr: 0.03 → 0.5;" in lines["schedule"]
    for change in ("optimizer.params.lr: 0.02 → 0.05", "weight_decay: 0.1 → 0.3", "betas: unset → [0.8, 0.9]"):
        assert change in lines["optimizer"]
