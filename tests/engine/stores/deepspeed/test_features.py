"""DeepSpeed's monitors and loggers, and a script without a launcher."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sdp.tests.support.cases import Case, engine_of, one_step
from sdp.tests.support.ranks import RankPool
from sdp.tests.support.small_runs import read_tensorboard

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def test_a_script_without_a_launcher_and_any_optimizer_work() -> None:
    code = "from sdp.tests.support.deepspeed_runs import train_without_launcher as train; print('norm', train() > 0)"
    environ = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120)
    assert "norm True" in done.stdout, done.stderr[-600:]


def _linear_after_zero_3() -> tuple[bool, bool]:
    """Whether torch has its own linear after an engine with ZeRO 3, and after an fsdp2 engine that
    follows it.
    """
    own = torch.nn.functional.linear
    engine_of(Case(2, 1, stage=3), "deepspeed")
    then = torch.nn.functional.linear is own
    engine_of(Case(2, 1))
    return then, torch.nn.functional.linear is own


def test_an_engine_after_zero_3_has_torchs_own_linear(ranks: RankPool) -> None:
    """DeepSpeed replaces it in the whole process."""
    assert ranks.run(_linear_after_zero_3, world=2) == [(False, True)] * 2


def _with_monitors(folder: str, stage: int) -> tuple[int, int, int]:
    """Bytes between groups that DeepSpeed's communication logger saw, and by our count those of
    all-reduces and of broadcasts sent.
    """
    sections = {
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True},
        "tensorboard": {"enabled": True, "output_path": folder, "job_name": "run"},
        "flops_profiler": {"enabled": True, "profile_step": 2, "output_file": f"{folder}/flops.txt"},
    }
    case = Case(2, 1, stage=stage, model="llama", masking="backward")
    engine = engine_of(case, "deepspeed", **sections)
    for step in range(4):
        one_step(engine, case, step, data_rank=dist.get_rank())
        engine.step()
    comms = importlib.import_module("deepspeed.comm.comm").comms_logger
    logged = sum(
        size * counts[0]
        for name, sizes in comms.comms_dict.items()
        if "sdp_between_groups" in name
        for size, counts in sizes.items()
    )
    comms.enabled = False
    comms.comms_dict.clear()
    sent = engine.traffic.buffers("between groups")
    return logged, sent["all_reduce", 2], sent["broadcast", 2]


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full_table)])
def test_monitor_flops_profiler_and_comms_logger_work(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    everyone = ranks.run(_with_monitors, str(tmp_path), stage, world=2)
    assert all(reduced > 0 for _, reduced, _ in everyone) and any(sent > 0 for *_, sent in everyone)
    # What one sends the other receives, and logs too.
    assert sum(logged for logged, *_ in everyone) == sum(reduced + 2 * sent for _, reduced, sent in everyone)
    assert "params per" in (tmp_path / "flops.txt").read_text()
    assert len(read_tensorboard(tmp_path / "run")) == 4


def test_what_others_put_into_torch_stays() -> None:
    from sdp.engine.stores.deepspeed.private import forget_process_groups, load

    load()
    zero = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    own = torch.nn.functional.linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero.InsertPostInitMethodToModuleSubClasses, "linear_bk", own, raising=False)
        for there, then in ((zero.zero3_linear_wrap, own), (somebody := lambda *given: own(*given), somebody)):
            patch.setattr(torch.nn.functional, "linear", there)
            forget_process_groups()
            assert torch.nn.functional.linear is then
