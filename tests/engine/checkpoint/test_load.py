"""Loading a checkpoint: what goes on, and what is refused on every rank without a change."""

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.errors import CheckpointError
from sdp.tests.support import models
from sdp.tests.support.cases import Case, engine_of, one_step, said
from sdp.tests.support.checkpoints import ALONE, moments_of
from sdp.tests.support.deepspeed_runs import needs_deepspeed
from sdp.tests.support.ranks import RankPool


def test_a_checkpoint_of_another_model_is_refused(small: Path) -> None:
    with pytest.raises(CheckpointError, match="another model"):
        engine_of(replace(ALONE, model="llama")).load_checkpoint(small)


def test_no_checkpoint_is_no_error_but_a_named_one_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(ALONE)
    caplog.clear()  # the engine warns about the placement
    assert engine.load_checkpoint(tmp_path) == (None, {})
    assert [f"no checkpoint in {tmp_path}; starting from the beginning"] == [
        r.message for r in caplog.records if r.levelname == "WARNING"
    ]
    with pytest.raises(CheckpointError, match="step-7"):
        engine.load_checkpoint(tmp_path, "step-7")


def _trained(optimizer: str, model: str, folder: str, engine: str = "fsdp2", stage: int = 0, steps: int = 1) -> None:
    case = Case(2, 1, optimizer=optimizer, placement="cyclic", model=model, stage=stage)  # type: ignore[arg-type]
    trained = engine_of(case, engine)
    for index in range(steps):
        one_step(trained, case, index, data_rank=dist.get_rank())
        trained.step()
    trained.save_checkpoint(folder)


def _refused(optimizer: str, model: str, folder: str, engine: str = "fsdp2", stage: int = 0) -> tuple[str, int, bool]:
    """The error, the steps that the engine then has, and whether its optimizer has state."""
    case = Case(2, 1, optimizer=optimizer, placement="cyclic", model=model, stage=stage)  # type: ignore[arg-type]
    loaded = engine_of(case, engine)
    message = ""
    try:
        loaded.load_checkpoint(folder)
    except CheckpointError as error:
        message = str(error)
    found = message, loaded.global_steps, bool(loaded.optimizer.state)
    one_step(loaded, case, 1, data_rank=dist.get_rank())
    loaded.step()  # either way it can go on
    return found


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (("adamw", "mlp"), ("adamw", "mlp-of-3"), "has 'model/layers.3.{}', which this model does not have"),
        (("adamw", "mlp-of-3"), ("adamw", "mlp"), "has no 'model/layers.3.{}'"),
        (("adamw", "mlp"), ("sgd", "mlp"), "has 'optimizer/{}/exp_avg', which this optimizer does not have"),
        (("momentum", "mlp"), ("adamw", "mlp"), "has no 'optimizer/{}/step'"),
        (("sgd", "mlp"), ("adamw", "mlp"), "has no 'optimizer/{}/"),
        (("sgd", "mlp"), ("sgd", "mlp"), ""),
    ],
)
def test_nothing_of_a_checkpoint_is_left_out(
    ranks: RankPool, tmp_path: Path, saved: tuple[str, str], loaded: tuple[str, str], message: str
) -> None:
    """Otherwise the next save would replace the whole by a part."""
    ranks.run(_trained, *saved, str(tmp_path), world=2)
    for error, steps, has_state in ranks.run(_refused, *loaded, str(tmp_path), world=2):
        if message:
            start, _, end = message.partition("{}")
            assert start in error
            assert end in error
            assert (steps, has_state) == (0, False)
        else:
            assert (error, steps) == ("", 1)


@needs_deepspeed
@pytest.mark.parametrize(
    ("saved", "loaded", "stage"),
    [("deepspeed", "deepspeed", 2), ("deepspeed", "fsdp2", 3), ("fsdp2", "deepspeed", 1), ("fsdp2", "deepspeed", 3)],
)
def test_a_checkpoint_of_no_step_goes_on_under_any_engine(
    ranks: RankPool, tmp_path: Path, saved: str, loaded: str, stage: int
) -> None:
    ranks.run(_trained, "adamw", "mlp", str(tmp_path), saved, stage, 0, world=2)
    assert ranks.run(_refused, "adamw", "mlp", str(tmp_path), loaded, stage, world=2) == [("", 0, False)] * 2


def _refused_once_trained(folder: str, tag: str) -> tuple[str, bool]:
    """The error, and whether all of the engine is as before."""
    case = Case(2, 1, optimizer="adamw", placement="cyclic")
    samples = [{"x": torch.zeros(1)}] * (24 if tag == "step-0" else 48)
    model = models.build("mlp-of-3" if tag == "step-0" else "mlp")
    engine = sdp.initialize(model=model, config=case.config("fsdp2"), training_data=samples)[0]
    one_step(engine, case, 0, data_rank=dist.get_rank())
    engine.step()

    def everything() -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in [*engine.module.parameters(), *moments_of(engine).values()]]

    before = everything()
    try:
        engine.load_checkpoint(folder, tag)
    except CheckpointError as error:
        same = all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
        return str(error), same and engine.global_steps == 1
    return "", False


def _of_24_samples(folder: str) -> None:
    case = Case(2, 1, optimizer="adamw", placement="cyclic")
    engine = sdp.initialize(
        model=models.mlp(), config=case.config("fsdp2"), training_data=[{"x": torch.zeros(1)}] * 24
    )[0]
    for index in range(2):
        engine.save_checkpoint(folder)
        one_step(engine, case, index, data_rank=dist.get_rank())
        engine.step()
    engine.save_checkpoint(folder)


@pytest.mark.parametrize(
    ("tag", "message"), [("step-0", "'model/layers.3."), ("step-2", "a data set of 24 samples, but this one has 48")]
)
def test_a_refusal_changes_nothing(ranks: RankPool, tmp_path: Path, tag: str, message: str) -> None:
    ranks.run(_of_24_samples, str(tmp_path), world=2)
    for error, same in ranks.run(_refused_once_trained, str(tmp_path), tag, world=2):
        assert message in error
        assert same


def _freezing(folder: str) -> str:
    case, messages = Case(2, 1, optimizer="adamw", placement="cyclic"), []
    for frozen in (0, 2):
        model = models.mlp()
        model.layers[:frozen].requires_grad_(False)
        engine = sdp.initialize(model=model, config=case.config("fsdp2"))[0]
        try:
            engine.load_checkpoint(folder)
        except CheckpointError as error:
            messages.append(str(error))
        one_step(engine, case, 0, data_rank=dist.get_rank())
        engine.step()
        if not frozen:
            engine.save_checkpoint(folder)
    return "".join(messages)


def test_state_of_what_is_frozen_now_is_not_dropped(ranks: RankPool, tmp_path: Path) -> None:
    for message in ranks.run(_freezing, str(tmp_path), world=2):
        assert "has 'optimizer/layers.0." in message
        assert "or with that parameter trained" in message


def _rates_of_layers(folder: str, groups: int) -> tuple[dict[str, float], dict[str, float], list[bool]]:
    """Rates before a save and after a load, and whether the optimizer has them too."""
    case = Case(groups, 2 // groups, placement="cyclic" if groups == 2 else "full")
    rates = [0.1, 0.05, 0.025, 0.0125, 0.00625]

    def build() -> sdp.SDPEngine:
        model = models.mlp()
        members: list[dict[str, Any]] = [{"params": [*model.stem.parameters(), *model.head.parameters()]}]
        members += [{"params": list(layer.parameters())} for layer in model.layers]
        params = {"warmup_min_lr": [0.0] * 5, "warmup_max_lr": rates, "warmup_num_steps": 2, "warmup_type": "linear"}
        config = case.config() | {"scheduler": {"type": "WarmupLR", "params": params}}
        return sdp.initialize(model=model, model_parameters=members, config=config)[0]

    saved = build()
    for index in range(2):
        one_step(saved, case, index, data_rank=dist.get_rank())
        saved.step()
    saved.save_checkpoint(folder)
    loaded = build()
    loaded.load_checkpoint(folder)
    same = [
        a["lr"] == b["lr"]
        for a, b in zip(saved.optimizer.param_groups, loaded.optimizer.param_groups, strict=True)
        if a["params"]
    ]
    return saved.rates_of_parameters(), loaded.rates_of_parameters(), same


@pytest.mark.parametrize("groups", [2, 1])
def test_every_layer_keeps_its_learning_rate(ranks: RankPool, tmp_path: Path, groups: int) -> None:
    for saved, loaded, same in ranks.run(_rates_of_layers, str(tmp_path), groups, world=2):
        assert saved == loaded
        assert len(set(saved.values())) == 5
        assert same
        assert all(same)


def test_a_checkpoint_in_place_of_its_directory_is_said(small: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"step-1: is itself a checkpoint; give the directory that contains it, with the tag 'step-1'",
    ):
        engine_of(ALONE).load_checkpoint(small / "step-1")


def test_a_checkpoint_from_before_the_first_update_brings_that_back(tmp_path: Path) -> None:
    engine = engine_of(ALONE, training={"max_skips": 3})
    engine.save_checkpoint(tmp_path)
    engine.backward(engine(models.micro_batch(ALONE.model, 0, 0, 0)) * float("nan"))
    engine.step()
    engine.save_checkpoint(tmp_path)  # the only step so far was skipped: there is no optimizer state
    before = engine.full_state_dict()
    trained = []
    for tag in ("step-0", "step-1"):
        engine.load_checkpoint(tmp_path, tag)
        assert not engine.optimizer.state
        assert all(torch.equal(engine.full_state_dict()[name], value) for name, value in before.items())
        one_step(engine, ALONE, 0, data_rank=0)
        engine.step()
        trained.append(engine.full_state_dict())
    # From step 1 the schedule is one skip behind, not a step ahead: the same update.
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in before)


# -- a load says which settings of the checkpoint differ from the configured ones ------------------


CYCLIC = Case(2, 1, optimizer="adamw", placement="cyclic")


def settings_warnings(folder: str) -> dict[str, list[str]]:
    """What rank 0 says at each load, by what was changed in the configuration."""

    def build(**change: Any) -> sdp.SDPEngine:
        config = copy.deepcopy(CYCLIC.config())
        config["optimizer"]["params"] |= change.pop("params", {})
        if change.pop("plain", False):
            del config["scheduler"]
        return sdp.initialize(model=models.mlp(), config=config | change)[0]

    found = {}
    for plain in (False, True):
        trained = build(plain=plain)
        one_step(trained, CYCLIC, 0, data_rank=dist.get_rank())
        trained.step()
        trained.save_checkpoint(folder, "plain" if plain else "scheduled")
    optimizer = {"params": {"lr": 0.05, "weight_decay": 0.3, "betas": [0.8, 0.9]}}
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 3}}}
    changes: dict[str, dict[str, Any]] = {
        "same": {}, "clip": {"gradient_clipping": 0.25}, "schedule": schedule, "same plain": {"plain": True},
        "optimizer": optimizer | {"plain": True},
    }  # fmt: skip
    for name, change in changes.items():
        loaded = build(**change)
        with said(logging.WARNING) as lines:
            loaded.load_checkpoint(folder, "plain" if change.get("plain") else "scheduled")
        found[name] = [line for line in lines if "other settings" in line]
        if name == "optimizer":
            assert set(loaded.rates_of_parameters().values()) == {0.02}  # the checkpoint's, as in DeepSpeed
    return found


def test_a_load_warns_of_other_settings(ranks: RankPool, tmp_path: Any) -> None:
    first, second = ranks.run(settings_warnings, str(tmp_path), world=2)
    assert first["same"] == first["same plain"] == []
    assert not any(second.values())
    lines = {name: line for name in ("clip", "schedule", "optimizer") for (line,) in [first[name]]}
    assert not any("\n" in line for line in lines.values())
    assert "gradient_clipping: 0.0 → 0.25;" in lines["clip"]
    assert "scheduler.params.warmup_max_lr: 0.03 → 0.5;" in lines["schedule"]
    for change in ("optimizer.params.lr: 0.02 → 0.05", "weight_decay: 0.1 → 0.3", "betas: unset → [0.8, 0.9]"):
        assert change in lines["optimizer"]
