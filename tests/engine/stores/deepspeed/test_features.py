"""DeepSpeed's monitors and loggers, partly used parameters, and a script without a launcher."""

import importlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sdp.engine.errors import ModelError
from sdp.tests.support.cases import Case, assert_same_run, engine_of, one_step, oracle, train
from sdp.tests.support.deepspeed_runs import offload_settings, run_under_deepspeed
from sdp.tests.support.foreign.plain_torch import train_plainly
from sdp.tests.support.forks.command import ForkedScript
from sdp.tests.support.ranks import RankPool
from sdp.tests.support.small_runs import read_tensorboard


def test_a_script_without_a_launcher_and_any_optimizer_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "script.py"
    script.write_text("from sdp.tests.support import deepspeed_runs as d; print(d.train_without_launcher() > 0)")
    code, printed = ForkedScript(script).end()
    assert (code, printed.splitlines()[-1]) == (0, "True"), printed


def _linear_after_zero_3() -> tuple[bool, bool]:
    """Whether torch has its own linear after ZeRO 3, and after an fsdp2 engine then."""
    own = torch.nn.functional.linear
    engine_of(Case(2, 1, stage=3), "deepspeed")
    then = torch.nn.functional.linear is own
    engine_of(Case(2, 1))
    return then, torch.nn.functional.linear is own


def test_an_engine_after_zero_3_has_torchs_own_linear(ranks: RankPool) -> None:
    """DeepSpeed replaces it in the whole process."""
    assert ranks.run(_linear_after_zero_3, world=2) == [(False, True)] * 2


def _with_monitors(folder: str) -> tuple[int, int, int]:
    """Bytes that DeepSpeed's logger saw between groups, and those of our count."""
    sections = {
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True},
        "tensorboard": {"enabled": True, "output_path": folder, "job_name": "run"},
        "flops_profiler": {"enabled": True, "profile_step": 2, "output_file": f"{folder}/flops.txt"},
    }
    case = Case(2, 1, stage=1, model="llama", masking="backward")
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
    buffers = engine.traffic.buffers
    reduced, sent = (buffers["between groups", kind, (0, 1)] for kind in ("all_reduce", "broadcast"))
    return logged, reduced, sent


def test_monitor_flops_profiler_and_comms_logger_work(ranks: RankPool, tmp_path: Path) -> None:
    everyone = ranks.run(_with_monitors, str(tmp_path), world=2)
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


def _built_from_huggingface() -> tuple[int, int, int, list[str]]:
    """Bytes of the whole model, of the peak and of what is held; units that it has."""
    import sdp
    from sdp.engine.accounting.memory_probe import LiveStorages
    from sdp.engine.stores.deepspeed.private import load
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 16, "num_attention_heads": 2,
    }  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape))
    whole = sum(p.numel() * 4 for p in model.parameters())
    file = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 4096},
        "sdp": {"groups": 4, "capacity": 0.25, "engine": "deepspeed"},
    }
    package, handed_over = load(), []
    with LiveStorages(torch.device("cpu")) as live, pytest.MonkeyPatch.context() as patch:
        own = package.initialize
        patch.setattr(package, "initialize", lambda **given: (handed_over.append(live.peak), own(**given))[1])
        engine = sdp.initialize(model=model, config=file)[0]
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for _ in range(8):
        loss = engine({"input_ids": tokens, "labels": tokens}).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    held = sum(engine.layout.parameters[name].numel * 4 for name in engine.parameters_here)
    units = [
        u.name
        for u in engine.layout.units
        if any(n.startswith(f"{u.name}.") for n, _ in engine.module.named_parameters())
    ]
    group, layout = engine.store.context.at.sdp, engine.layout
    expected = [u.name for u in layout.units if layout.placement.holds(group, u.index)]
    assert units == expected
    return whole, handed_over[0], held, units


def test_a_huggingface_model_is_built_of_what_a_rank_holds_alone(ranks: RankPool) -> None:
    pytest.importorskip("transformers")
    everyone = ranks.run(_built_from_huggingface, world=4)
    for whole, peak, held, units in everyone:
        assert len(units) == 4
        assert held < 0.35 * whole
        assert held <= peak < 1.5 * held < 0.55 * whole  # and the numbers that are being drawn
    assert len({name for *_, units in everyone for name in units}) == 16


def test_deepspeed_equals_the_oracle_and_plain_torch(ranks: RankPool) -> None:
    case = Case(2, 2, stage=3, accumulation=2, model="experts")
    ours = run_under_deepspeed(ranks, case)
    assert_same_run(ours, oracle(case), case)
    after = ours[0].after
    assert after is not None
    for name, expected in train_plainly(case, ours[0].rates).items():
        torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-6, msg=name)


def _refusal(case: Case, offload: bool) -> str:
    with pytest.raises(ModelError) as caught:
        train(case, "deepspeed", **offload_settings(case.stage, offload))
    return str(caught.value)


@pytest.mark.parametrize(
    "case", [Case(2, 2, stage=stage, accumulation=2, model="experts-by-rank") for stage in (1, 3)], ids=str
)
def test_ranks_that_use_different_parameters_are_refused(ranks: RankPool, case: Case) -> None:
    """DeepSpeed adds up the gradients of different experts. Every rank refuses."""
    for message in ranks.run(_refusal, case, False, world=case.world):
        assert "the ranks of a group use different parameters" in message and "layers." in message


@pytest.mark.parametrize(
    "case", [Case(1, 2, stage=stage, accumulation=2, model="experts") for stage in (2, 3)], ids=str
)
def test_offload_is_refused(ranks: RankPool, case: Case) -> None:
    """With offload, DeepSpeed loses gradients of experts."""
    for message in ranks.run(_refusal, case, True, world=case.world):
        assert "only some micro-batches use all parameters" in message and "offload_optimizer" in message
