"""The loss scale of float16: DeepSpeed's own scaler, step by step, and what a run does with it."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.engine.config.load import load_config
from sdp.engine.config.schema import FP16Section
from sdp.engine.errors import ConfigError
from sdp.engine.optim.clip import LossScaler
from sdp.tests.support import models
from sdp.tests.support.cases import Case, assert_same_run, data_rank_of, engine_of, one_step, oracle, run_oracle, train
from sdp.tests.support.deepspeed_runs import float16_here


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"initial_scale_power": 4, "loss_scale_window": 3},
        {"initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 0.25},
        {"initial_scale_power": 8, "loss_scale_window": 5, "hysteresis": 3},
    ],
    ids=str,
)
def test_a_dynamic_scale_follows_deepspeed(section: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    loss_scaler = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 0)  # it tells its rank, and has no process group here
    monkeypatch.setattr(loss_scaler, "log_dist", lambda *_, **__: None)
    settings = FP16Section(**section)
    ours = LossScaler(settings)
    theirs: Any = loss_scaler.DynamicLossScaler(
        2.0**settings.initial_scale_power,
        settings.loss_scale_window,
        settings.min_loss_scale,
        settings.hysteresis,
        False,  # consecutive_hysteresis
        raise_error_at_min_scale=False,
    )
    draw = random.Random(0)
    for step in range(300):
        overflow = draw.random() < (0.5 if step % 60 < 10 else 0.05)
        ours.update(overflow=overflow)
        theirs.update_scale(overflow)
        expected = {key: getattr(theirs, key) for key in ours.state_dict() or ()}
        assert ours.state_dict() == expected, step
    again = LossScaler(settings)
    again.load_state_dict(ours.state_dict())
    assert again.state_dict() == ours.state_dict()


def test_a_fixed_scale_never_changes() -> None:
    scaler = LossScaler(FP16Section(loss_scale=128.0))
    scaler.update(overflow=True)
    assert (scaler.cur_scale, scaler.state_dict(), scaler.can_be_lowered) == (128.0, None, False)


FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}


def train_with(case: Case, sections: dict[str, Any]) -> Any:
    return train(case, **sections)


@pytest.mark.parametrize(
    ("case", "sections"),
    [
        (Case(2, 1, 0, 1, clip=True), {"fp16": FP16}),
        pytest.param(Case(2, 2, 3, 2), {"fp16": {"enabled": True, "loss_scale": 64.0}}, marks=pytest.mark.slow),
        (Case(2, 2, 1, 2, masking="backward"), {"fp16": FP16}),
        (Case(2, 1, 0, 1), {"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}),
        (Case(2, 2, 3, 1), {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"initial_scale_power": 4}}),
    ],
    ids=str,
)
def test_groups_equal_the_oracle(case: Case, sections: dict[str, Any], ranks: Any) -> None:
    results = ranks.run(train_with, case, sections, world=case.world)
    dtype = torch.bfloat16 if "bfloat16" in str(sections) else torch.float16
    casts = "torch_autocast" in sections
    with torch.autocast("cpu", dtype, enabled=casts, cache_enabled=False):  # it would keep casts of old weights
        expected = run_oracle(case, dtype=torch.float32 if casts else dtype, loss_scale=64.0)
    assert_same_run(results, expected, case)
    assert results[0].losses != pytest.approx(oracle(case).losses, rel=1e-6), "nothing was computed in half precision"


def train_in_half(case: Case, engine: str) -> Any:
    with float16_here():
        return train(case, engine, fp16={"enabled": True, "loss_scale": 64.0})


def test_float16_equals_deepspeed(ranks: Any) -> None:
    """The two round in other places, by less than float16 differs from float32."""
    pytest.importorskip("deepspeed")
    case = Case(2, 1, 1, model="llama-tied")  # its inputs are integers, as DeepSpeed does not cast inputs
    ours, theirs = (ranks.run(train_in_half, case, engine, world=case.world)[0] for engine in ("fsdp2", "deepspeed"))
    exact = oracle(case)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-2)
    between = rounding = update = 0.0
    for name, after in theirs.after.items():
        between += (ours.after[name] - after).square().sum().item()
        rounding += (exact.after[name] - after).square().sum().item()
        update += (after - theirs.before[name]).square().sum().item()
    assert between < 1e-4 * update, "more than 1 % of the update"
    assert between < 4 * rounding, "the engines differ more than twice as much as float16 from float32"


@pytest.mark.usefixtures("one_rank")
def test_autocast_equals_a_loop_of_torch() -> None:
    """One group in one process, against torch's autocast, GradScaler and SGD, written out."""
    for dtype, scale in ((torch.bfloat16, None), (torch.float16, 2.0**7)):
        case = Case(1, 1, 0, 1, placement="full", steps=3)
        sections = {"torch_autocast": {"enabled": True, "dtype": str(dtype)}, "scheduler": None}
        engine = engine_of(case, fp16={"initial_scale_power": 7}, **sections)
        device = engine.device
        model = models.build(case.model).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device.type, init_scale=scale or 1.0, enabled=scale is not None)
        for step in range(3):
            loss = one_step(engine, case, step, data_rank=0)
            engine.step()
            with torch.autocast(device.type, dtype=dtype):
                expected = model(**models.on_device(models.rows_of_all(case.model, step, 0, 1), device))
            scaler.scale(expected).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert loss == expected.item()
        assert engine.get_loss_scale() == scale
        for mine, other in zip(engine.module.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def step_with_overflows(case: Case, sections: dict[str, Any], folder: str) -> list[Any]:
    """By step: the loss scale, which starts far too high, skipped steps, and any change."""
    engine = engine_of(case, **sections)
    seen = []
    for step in range(12):
        before = [p.detach().clone() for p in engine.module.parameters()]
        one_step(engine, case, step, data_rank=data_rank_of(case))
        engine.step()
        moved = any(not torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
        seen.append((engine.get_loss_scale(), engine.skipped_steps, moved))
    engine.save_checkpoint(folder)
    again = engine_of(case, **sections)
    again.load_checkpoint(folder)
    assert again.loss_scaler.state_dict() == engine.loss_scaler.state_dict()
    assert again.get_loss_scale() == engine.get_loss_scale()
    return seen


def test_an_overflow_skips_the_step_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    sections = {"fp16": {"enabled": True, "initial_scale_power": 22, "hysteresis": 1}, "training": {"max_skips": 1}}
    case = Case(2, 2, 3, 1)
    results = ranks.run(step_with_overflows, case, sections, str(tmp_path), world=case.world)
    scales = [scale for scale, *_ in results[0]]
    skipped = [count for _, count, _ in results[0]]
    assert all([each[:2] for each in seen] == list(zip(scales, skipped, strict=True)) for seen in results)
    assert skipped[0] == 1 and 1 < skipped[-1] < 12, "more skips than max_skips, as a scale that can fall excuses them"
    assert scales[0] == 2**21
    for seen in results:
        for step, (_, count, moved) in enumerate(seen):
            assert moved == (count == (seen[step - 1][1] if step else 0)), "weights move unless the step is skipped"


def test_what_cannot_scale_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"not available together with sdp\.sync"):
        load_config({"fp16": {"enabled": True}, "sdp": {"sync": {"every": 2}}})
