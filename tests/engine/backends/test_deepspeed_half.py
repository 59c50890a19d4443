"""Half precision on the DeepSpeed backend: bf16 at stage 0 too, and fp16, whose loss scale all groups share."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.engine.config.load import load_config
from sdp.engine.errors import CheckpointError, ConfigError, DivergedError, DivergenceError
from sdp.tests.support import models
from sdp.tests.support.cases import Case, assert_bytes_as_planned, engine_of, one_step, reference, train, zero_of
from sdp.tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

FP16 = {
    "enabled": True,
    "initial_scale_power": 10,
    "hysteresis": 1,
    "loss_scale_window": 1,
}  # 1,024; doubled by the second good step
STEPS = 4
BAD = 1  # the step in which one rank's gradient is no number


@contextmanager
def float16_here(supported: bool = True) -> Iterator[None]:
    """torch computes in half precision on any CPU; DeepSpeed asks for instructions."""
    from sdp.engine.backends.deepspeed.private import load

    load()
    with pytest.MonkeyPatch.context() as patch:
        accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
        patch.setattr(accelerator, "is_fp16_supported", lambda: supported)
        yield


@dataclass
class Life:
    """What one rank saw: a value per step; weights on rank 0."""

    states: list[Any] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float | None] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    loss: float = 0.0  # of the full model, at the end


def _sections(case: Case, offload: bool) -> dict[str, Any]:
    zero = {"zero_optimization": {**zero_of(case.stage), "offload_optimizer": {"device": "cpu"}}} if offload else {}
    return zero if case.bf16 else {"fp16": FP16, **zero}


def _steps(engine: Any, case: Case, steps: range, life: Life, rank: int | None) -> Life:
    for step in steps:
        engine.traffic.reset()
        if rank is None:
            batch, factor = models.rows_of_all(case.model, step, 0, case.data_ranks), float("nan")
        else:
            # Finite, and more than float16 holds once it is scaled; bfloat16 holds it.
            batch, factor = models.micro_batch(case.model, step, 0, rank), float("nan") if case.bf16 else 1e9
            factor = factor if rank == case.world - 1 else 1.0
        engine.backward(engine(batch) * (factor if step == BAD else 1.0))
        engine.step()
        assert rank is None or step == BAD or engine.traffic.by_kind() == engine.planned_traffic().by_kind()
        life.states.append(engine.full_state_dict())
        life.norms.append(engine.get_global_grad_norm())
        life.scales.append(engine.get_loss_scale())
        life.skipped.append(engine.skipped_steps)
    last = (
        models.rows_of_all(case.model, 9, 0, case.data_ranks)
        if rank is None
        else models.micro_batch(case.model, 9, 0, rank)
    )
    life.loss = engine.evaluate([last])
    return life


def _in_float32(case: Case) -> Life:
    """The reference, which skips the same step."""
    engine = engine_of(case, "reference")
    return _steps(engine, case, range(STEPS), Life([engine.full_state_dict()]), None)


def _two_lives(case: Case, offload: bool, folder: str) -> tuple[Life, Life]:
    """A whole run, and one that goes on from where a good step has followed one that was skipped: it counts towards a higher scale."""
    rank = dist.get_rank()
    with float16_here():
        engine = engine_of(case, "deepspeed", **_sections(case, offload))
        life = _steps(engine, case, range(STEPS - 1), Life([engine.full_state_dict()]), rank)
        engine.save_checkpoint(folder)
        _steps(engine, case, range(STEPS - 1, STEPS), life, rank)
        assert engine.measured_state_bytes() == engine.predicted_state_bytes()
        assert engine.deepspeed.skipped_steps == engine.skipped_steps == 1
        engine.check_holders()

        engine = engine_of(case, "deepspeed", **_sections(case, offload))
        engine.load_checkpoint(folder)
        again = Life([engine.full_state_dict()], scales=[engine.get_loss_scale()])
        return life, _steps(engine, case, range(STEPS - 1, STEPS), again, rank)


def _assert_near(ours: Life, theirs: Life, epsilon: float) -> None:
    """What each step did to the weights, as a whole; by a wrong scale it would be half or twice as much, or a thousand times."""
    for step in range(STEPS):
        deviation = update = 0.0
        for name, before in theirs.states[step].items():
            done = theirs.states[step + 1][name] - before
            here = ours.states[step + 1][name] - ours.states[step][name]
            assert here.dtype == torch.float32
            deviation += (here - done).square().sum().item()
            update += done.square().sum().item()
        assert deviation**0.5 <= epsilon * update**0.5, f"step {step}: {(deviation / max(update, 1e-30)) ** 0.5:.2e}"
        assert (update > 0) == (step != BAD)


MORE = [
    (Case(2, 2, stage=1, optimizer="momentum", model="llama"), False),
    (Case(2, 2, stage=0, optimizer="momentum", model="even-llama", neurons=2, masking="backward"), False),
    (Case(2, 2, stage=0, optimizer="adamw", model="even-llama", neurons=2, bf16=True), False),
    (Case(2, 2, stage=2, optimizer="momentum", model="llama", clip=True), True),
    (Case(2, 2, stage=3, optimizer="momentum", model="llama", clip=True), True),
    (Case(2, 2, stage=3, optimizer="momentum", model="llama-tied-meta", masking="backward"), False),
]


@pytest.mark.parametrize(
    ("case", "offload"),
    [
        (Case(2, 2, stage=0, optimizer="adamw", model="llama-tied", masking="backward", bf16=True), False),
        (Case(2, 1, stage=0, optimizer="momentum", model="llama", clip=True), False),
        (Case(2, 2, stage=2, optimizer="momentum", model="llama-tied", masking="backward"), False),
        (Case(2, stage=3, optimizer="momentum", model="llama", clip=True, sizes=(2, 1)), False),
        *(pytest.param(*case, marks=pytest.mark.full_table) for case in MORE),
    ],
    ids=str,
)
def test_all_groups_skip_an_overflow_and_go_on_alike(
    ranks: RankPool, tmp_path: Path, case: Case, offload: bool
) -> None:
    """Near the reference before, then and after, also in the step after which a scale is raised; a resumed run is the same, bit for bit."""
    everyone = ranks.run(_two_lives, case, offload, str(tmp_path), world=case.world)
    theirs = _in_float32(case)
    for life, again in everyone:
        assert life.skipped == [0, 1, 1, 1]
        assert life.scales == ([None] * 4 if case.bf16 else [1024, 512, 512, 1024])
        assert [life.scales[2:], life.norms[3:], life.loss] == [again.scales, again.norms, again.loss]
        assert life.norms[0] == pytest.approx(theirs.norms[0], rel=0.02)
        assert life.norms[2:] == pytest.approx(theirs.norms[2:], rel=0.02)
        assert life.loss == pytest.approx(theirs.loss, rel=0.02)
    life, again = everyone[0]
    dtype = torch.bfloat16 if case.bf16 else torch.float16
    assert all(torch.equal(value, value.to(dtype).float()) for value in life.states[0].values()), (
        "a step was taken before the first"
    )
    _assert_near(life, theirs, 2 * torch.finfo(dtype).eps)
    for one, other in zip(life.states[3:], again.states, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


# -- bf16 at stage 0 -----------------------------------------------------------------------------------------------------------------------


def test_bf16_at_stage_0_is_that_of_stage_1(ranks: RankPool) -> None:
    """With one rank a group ZeRO 1 cuts nothing: the same start, and the same steps but for what it rounds to bfloat16 before it sums."""
    case = Case(2, 1, stage=0, optimizer="adamw", model="llama-meta", clip=True, bf16=True)
    whole, cut = (ranks.run(train, one, "deepspeed", world=2) for one in (case, replace(case, stage=1)))
    assert_bytes_as_planned(whole)
    assert whole[0].norms == pytest.approx(cut[0].norms, rel=1e-3)
    assert whole[0].rates == cut[0].rates
    worst = 0.0
    for name, before in cut[0].before.items():
        assert torch.equal(whole[0].before[name], before)
        update = cut[0].after[name] - before
        worst = max(worst, ((whole[0].after[name] - before - update).norm() / update.norm()).item())
    assert worst < torch.finfo(torch.bfloat16).eps / 2


# -- the loss scale ------------------------------------------------------------------------------------------------------------------------


def _one_group(stage: int) -> tuple[Any, Any, float]:
    with float16_here():
        case = Case(1, 2, stage=stage, model="llama")
        engine = engine_of(case, "deepspeed", fp16={"enabled": True, "loss_scale": 1024})
        before = engine.full_state_dict()
        one_step(engine, case, 0, data_rank=dist.get_rank())
        engine.step()
        assert engine.measured_state_bytes() == engine.predicted_state_bytes()
        return before, engine.full_state_dict(), engine.get_global_grad_norm()


@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.full_table), pytest.param(3, marks=pytest.mark.full_table)]
)
def test_one_group_steps_by_the_unscaled_gradient(ranks: RankPool, stage: int) -> None:
    """DeepSpeed's own backward leaves the loss as it is at stage 0, and its step divides by the scale."""
    theirs = reference(Case(1, 2, model="llama", steps=1))
    before, after, norm = ranks.run(_one_group, stage, world=2)[0]
    assert theirs.before is not None and theirs.after is not None
    assert norm == pytest.approx(theirs.norms[0], rel=0.02)
    for name, value in theirs.after.items():
        update = value - theirs.before[name]
        torch.testing.assert_close(after[name] - before[name], update, rtol=0, atol=0.02 * update.abs().max().item())


def _until_the_end(case: Case) -> tuple[str, list[str]]:
    """Steps of which one rank's gradient is no number; the error, and the warnings before it."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sdp").addHandler(handler)
    try:
        with float16_here():
            fp16 = {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 2, "hysteresis": 1}
            engine = engine_of(case, "deepspeed", fp16=fp16, training={"max_skips": 1})
            with pytest.raises(DivergedError) as caught:
                for step in range(9):
                    loss = engine(models.micro_batch(case.model, step, 0, dist.get_rank()))
                    engine.backward(loss * (float("inf") if dist.get_rank() == 0 else 1.0))
                    engine.step()
        return str(caught.value), [line for line in said if "skipped" in line]
    finally:
        logging.getLogger("sdp").removeHandler(handler)


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=pytest.mark.full_table) for stage in (0, 3))])
def test_skips_count_from_the_lowest_scale_on(ranks: RankPool, stage: int) -> None:
    for error, warnings in ranks.run(_until_the_end, Case(2, 1, stage=stage, model="llama"), world=2):
        assert [line.partition(", ")[2] for line in warnings] == [
            f"the loss scale is now 2 ({count} in a row, training.max_skips 1)" for count in (0, 1)
        ]
        assert "at step 3 and loss scale 2, for the 2. time in a row (training.max_skips 1)" in error
        assert "the weights are those after step 0" in error


def _go_on_after_skips(case: Case, folder: str) -> tuple[int, int, float | None]:
    """Skipped steps and loss scale of a run that goes on from before its first update, after one more."""
    with float16_here():
        fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
        engine = engine_of(case, "deepspeed", fp16=fp16)
        for step in range(2):
            engine.backward(engine(models.micro_batch(case.model, step, 0, dist.get_rank())) * float("inf"))
            engine.step()
        engine.save_checkpoint(folder)
        engine = engine_of(case, "deepspeed", fp16=fp16)
        engine.load_checkpoint(folder)
        found = engine.skipped_steps, engine.get_loss_scale()
        engine.backward(engine(models.micro_batch(case.model, 2, 0, dist.get_rank())))
        engine.step()
        return engine.global_steps, *found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_goes_on_from_before_its_first_update(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    case = Case(2, 1, stage=stage, model="llama", optimizer="adamw")
    assert ranks.run(_go_on_after_skips, case, str(tmp_path), world=2) == [(3, 2, 4.0)] * 2


def _other_scale_on_one_rank() -> str:
    with float16_here():
        engine = engine_of(Case(2, 1, stage=1, model="llama"), "deepspeed", fp16={"enabled": True})
        engine.check_holders()
        if dist.get_rank():
            engine.deepspeed.optimizer.loss_scaler.cur_scale /= 2
        with pytest.raises(DivergenceError) as caught:
            engine.check_holders()
        return str(caught.value)


def test_scales_that_differ_are_found(ranks: RankPool) -> None:
    for message in ranks.run(_other_scale_on_one_rank, world=2):
        assert message.startswith("fp16: ranks have different loss scales")


# -- refused -------------------------------------------------------------------------------------------------------------------------------

REFUSED = [
    ({"bf16": {"enabled": True}}, "fp16.enabled: true beside bf16.enabled"),
    ({"fp16": {"enabled": True, "loss_scale": -1}}, "fp16.loss_scale: input should be greater than or equal to 0"),
    ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "fp16.loss_scale_window: input should be greater than 0"),
    (
        {"fp16": {"enabled": True, "min_loss_scale": 4, "initial_scale_power": 1}},
        "fp16: min_loss_scale 4 is more than the scale at",
    ),
    ({"fp16": {"enabled": True, "loss_scales": 1}}, "fp16.loss_scales: unknown key, did you mean loss_scale?"),
    ({"fp16": {"enabled": True, "auto_cast": True}}, "fp16.auto_cast: true cannot be honoured"),
    (
        {"amp": {"enabled": True}},
        'amp.enabled: true cannot be honoured by sdp.engine "deepspeed": DeepSpeed has it no more; use',
    ),
    (
        {"sdp": {"engine": "fsdp2"}},
        'fp16.enabled: true needs sdp.engine "deepspeed", which scales the loss; with "fsdp2" use bf16',
    ),
    ({"sdp": {"engine": "reference"}}, 'fp16.enabled: true needs sdp.engine "deepspeed"'),
]


@pytest.mark.parametrize(
    ("section", "message"), REFUSED, ids=lambda value: "" if isinstance(value, str) else str(value)[:60]
)
def test_what_cannot_be_honoured_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"fp16": {"enabled": True}, "sdp": {"engine": "deepspeed"}, **section})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_fp16_goes_to_deepspeed_and_through_a_resolved_file() -> None:
    config = load_config({"fp16": FP16, "sdp": {"engine": "deepspeed"}})
    assert config.deepspeed["fp16"] == FP16
    assert (config.precision, config.compute_bytes) == ("float16", 2)
    again = load_config(config.resolved())
    assert again.fp16 == config.fp16
    assert again.deepspeed["fp16"].items() >= FP16.items()


def test_a_device_without_float16_is_told() -> None:
    from sdp.engine.backends.deepspeed.private import require_float16

    with (
        float16_here(False),
        pytest.raises(ConfigError, match=r"^fp16.enabled: true is not supported on .*; use bf16$"),
    ):
        require_float16()
    with float16_here():
        require_float16()


def test_weights_laid_side_by_side_are_refused() -> None:
    """DeepSpeed does so for its FusedAdam, which runs on GPUs alone: of the optimizer that it makes only what tells them apart is here."""
    from sdp.engine.backends.deepspeed import private
    from sdp.engine.backends.deepspeed.private import check_engine, load

    package = load()
    engine = SimpleNamespace(
        **dict.fromkeys(private._OF_ENGINE.split()), optimizer=SimpleNamespace(fp32_groups_flat=[])
    )
    with pytest.raises(
        ConfigError, match=r"^bfloat16 at zero_optimization.stage 0: DeepSpeed lays .*; set optimizer.params.torch_adam"
    ):
        check_engine(package, engine, 0, "bfloat16")


# -- what is there before ------------------------------------------------------------------------------------------------------------------


DAMAGED = {
    "empty": {},
    "a list": [],
    "no partitions": {"optimizer_state_dict": {"zero_stage": 1, "partition_count": 1}},
    "a number": 1,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_checkpoint_of_deepspeeds_is_told_in_one_line(tmp_path: Path, content: Any) -> None:
    from sdp.engine.backends.deepspeed.zero_checkpoint import is_zero_checkpoint, weights_of_zero_checkpoint

    (tmp_path / "latest").write_text("step")
    (tmp_path / "step").mkdir()
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save(content, tmp_path / "step" / name)
    assert is_zero_checkpoint(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        weights_of_zero_checkpoint(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: ")
    assert "\n" not in str(caught.value)
    (tmp_path / "latest").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="latest: is no text"):
        is_zero_checkpoint(tmp_path)


def test_a_checkpoint_of_deepspeeds_leads_nowhere_else_and_does_not_hang(tmp_path: Path) -> None:
    from sdp.engine.backends.deepspeed.zero_checkpoint import is_zero_checkpoint, weights_of_zero_checkpoint

    for tag in ("../step", "/etc", "a/b"):
        (tmp_path / "latest").write_text(tag)
        with pytest.raises(CheckpointError, match=r"latest: the tag .* is no name of one directory"):
            is_zero_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("step")
    (tmp_path / "step").mkdir()
    os.mkfifo(tmp_path / "step" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert is_zero_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"optim_states\.pt: is not a regular file"):
        weights_of_zero_checkpoint(tmp_path)
    (tmp_path / "latest").unlink()
    os.mkfifo(tmp_path / "latest")
    assert not is_zero_checkpoint(tmp_path)


def test_what_others_put_into_torch_stays() -> None:
    from sdp.engine.backends.deepspeed.private import forget_process_groups, load

    load()
    zero = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    own = torch.nn.functional.linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero.InsertPostInitMethodToModuleSubClasses, "linear_bk", own, raising=False)
        for there, then in ((zero.zero3_linear_wrap, own), (somebody := lambda *given: own(*given), somebody)):
            patch.setattr(torch.nn.functional, "linear", there)
            forget_process_groups()
            assert torch.nn.functional.linear is then
