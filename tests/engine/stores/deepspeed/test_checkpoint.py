"""Checkpoints of the DeepSpeed store, and DeepSpeed's own ones, which are converted first."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.errors import ModelError
from sdp.tests.support import models
from sdp.tests.support.cases import Case, engine_of, one_step
from sdp.tests.support.ranks import RankPool


def _save_after_two_steps(case: Case, name: str, folder: str) -> tuple[Any, Any, list[float]]:
    """The full model as saved, as it is after a step more, and the rates as saved."""
    engine = engine_of(case, name)
    for step in range(3):
        one_step(engine, case, step, data_rank=dist.get_rank())
        engine.step()
        if step == 1:
            engine.save_checkpoint(folder, client_state={"note": name})
            saved, rates = engine.full_state_dict(), engine.get_lr()
    return saved, engine.full_state_dict(), rates


def _go_on(case: Case, name: str, folder: str) -> tuple[Any, Any, Any, Any]:
    engine = engine_of(case, name)
    _, client = engine.load_checkpoint(folder)
    loaded, rates = {key: value.clone() for key, value in (engine.full_state_dict() or {}).items()}, engine.get_lr()
    one_step(engine, case, 2, data_rank=dist.get_rank())
    engine.step()
    return loaded, engine.full_state_dict(), client, rates


ADAMW = Case(2, 2, optimizer="adamw")
LLAMA, NEURONS = replace(ADAMW, model="llama-tied"), replace(ADAMW, neurons=2, model="even-llama")
MOVES = [
    (replace(ADAMW, stage=3), "deepspeed", replace(ADAMW, stage=1), "fsdp2"),
    (replace(LLAMA, stage=3), "fsdp2", replace(LLAMA, stage=2), "deepspeed"),
    pytest.param(replace(LLAMA, stage=3), "deepspeed", replace(LLAMA, stage=1), "deepspeed", marks=pytest.mark.slow),
    (replace(NEURONS, stage=3), "deepspeed", replace(NEURONS, stage=3), "deepspeed"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "wrote", "target", "reads"), MOVES, ids=lambda value: str(value))
def test_a_run_moves_between_engines_and_stages(
    ranks: RankPool, tmp_path: Path, source: Case, wrote: str, target: Case, reads: str
) -> None:
    saved, expected, saved_rates = ranks.run(_save_after_two_steps, source, wrote, str(tmp_path), world=source.world)[0]
    loaded, after, client, rates = ranks.run(_go_on, target, reads, str(tmp_path), world=target.world)[0]
    assert client == {"note": wrote}
    assert rates == saved_rates
    assert list(loaded) == list(saved)
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    for name, tensor in expected.items():  # a step with the moments that were loaded
        assert not torch.equal(after[name], loaded[name])
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-5 * tensor.abs().max().item())


def test_a_checkpoint_of_another_placement_and_stage_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    """As FSDP2 does from the same checkpoint, under the layout that reads it."""
    target = replace(ADAMW, placement="cyclic", stage=1)
    source = replace(target, placement="mixed", stage=3)
    saved, _, _ = ranks.run(_save_after_two_steps, source, "deepspeed", str(tmp_path), world=source.world)[0]
    loaded, after, _, _ = ranks.run(_go_on, target, "deepspeed", str(tmp_path), world=target.world)[0]
    _, expected, _, _ = ranks.run(_go_on, target, "fsdp2", str(tmp_path), world=target.world)[0]
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    for name, tensor in expected.items():
        assert not torch.equal(after[name], loaded[name])
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-5 * tensor.abs().max().item())


def _partly_frozen(case: Case, folder: str) -> None:
    def make() -> Any:
        model = models.build(case.model)
        for parameter in list(model.parameters())[::2]:
            parameter.requires_grad_(False)
        return sdp.initialize(model=model, config=case.config("deepspeed"))[0]

    engine = make()
    one_step(engine, case, 0, data_rank=dist.get_rank())
    engine.step()
    engine.save_checkpoint(folder)
    resumed = make()
    for parameter in resumed.parameters_here.values():
        getattr(parameter, "ds_tensor", parameter).data.zero_()
    resumed.load_checkpoint(folder)
    for each in (engine, resumed):
        one_step(each, case, 1, data_rank=dist.get_rank())
        each.step()
    saved, loaded = engine.full_state_dict(), resumed.full_state_dict()
    assert saved is None or all(torch.equal(loaded[name], weight) for name, weight in saved.items())


def test_parameters_that_the_user_froze_are_saved(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(2, 2, stage=3, model="llama", optimizer="adamw")
    ranks.run(_partly_frozen, case, str(tmp_path), world=case.world)


def _save_plain(folder: str) -> Any:
    """A step of DeepSpeed's own, saved; the weights that it has in float32."""
    from sdp.engine.stores.deepspeed.private import forget_process_groups, load

    package = load()
    forget_process_groups()
    model = models.build("llama")
    optimizer = {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}}
    file = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "zero_optimization": {"stage": 3}}
    engine = package.initialize(model=model, model_parameters=model.parameters(), config=file)[0]
    engine.backward(engine(**models.micro_batch("llama", 0, 0, dist.get_rank())))
    engine.step()
    engine.save_checkpoint(folder)
    whole = package.utils.safe_get_full_fp32_param
    return {name: whole(parameter).clone() for name, parameter in model.named_parameters()}


def _started_from(folder: str) -> Any:
    return engine_of(Case(2, 1, model="llama-meta"), training={"init_from": folder}).full_state_dict()


def _refused(folder: str) -> str:
    with pytest.raises(ModelError) as caught:
        _started_from(folder)
    return str(caught.value)


def test_a_checkpoint_of_deepspeed_is_a_start_once_it_is_converted(ranks: RankPool, tmp_path: Path) -> None:
    trained = ranks.run(_save_plain, str(tmp_path / "saved"), world=2)[0]
    for message in ranks.run(_refused, str(tmp_path / "saved"), world=2):
        assert "is a checkpoint of DeepSpeed" in message and "run its zero_to_fp32.py" in message
        assert "\n" not in message
    convert = importlib.import_module("deepspeed.utils.zero_to_fp32").convert_zero_checkpoint_to_fp32_state_dict
    convert(str(tmp_path / "saved"), str(tmp_path / "converted"), safe_serialization=True)
    started = ranks.run(_started_from, str(tmp_path / "converted"), world=2)[0]
    for name, weight in trained.items():
        assert torch.equal(started[name], weight), name
    untrained = dict(models.build("llama").named_parameters())
    assert all(not torch.equal(started[name], weight) for name, weight in untrained.items())
