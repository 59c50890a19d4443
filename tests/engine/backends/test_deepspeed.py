"""The DeepSpeed backend equals the reference; with one group it is DeepSpeed as it comes."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.engine.config.load import load_config
from sdp.engine.errors import CheckpointError, ConfigError
from sdp.tests.support import models
from sdp.tests.support.cases import (
    Case,
    Result,
    assert_bytes_as_planned,
    assert_same_run,
    engine_of,
    one_step,
    reference,
    train,
    zero_of,
)
from sdp.tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def _train(case: Case) -> Result:
    return train(case, "deepspeed")


def deepspeed(ranks: RankPool, case: Case) -> list[Result]:
    """The run by rank."""
    return ranks.run(_train, case, world=case.world)


WIDE = [
    Case(2, 1, stage=1, optimizer="momentum", placement="full"),
    Case(4, 1, stage=2, clip=True, placement="profile", model="llama"),
    Case(4, 1, stage=3, accumulation=3, optimizer="adamw", placement="cyclic", model="llama-meta"),
    Case(2, 2, stage=0, clip=True, optimizer="adamw", masking="backward"),
    Case(2, 2, stage=1, accumulation=3, model="llama-tied-meta", masking="backward"),
    Case(2, 2, stage=2, clip=True, optimizer="adamw", model="llama-tied", masking="backward"),
    Case(2, 2, stage=0, neurons=2, model="even-llama"),
    Case(2, 2, stage=2, neurons=3, model="even-llama-tied-meta", optimizer="adamw", clip=True),
    Case(4, 2, stage=3, clip=True, optimizer="adamw", model="mlp-meta"),
    Case(2, 2, stage=2, model="llama-tied-meta", checkpointing="selective"),
]
COVER = [
    Case(2, 2, stage=0, accumulation=3, clip=True, model="llama-tied"),
    Case(2, 2, stage=1, accumulation=1, clip=True, optimizer="adamw"),
    Case(2, 2, stage=2, accumulation=3, model="llama-tied-meta"),
    Case(2, 2, stage=3, accumulation=3, clip=True, optimizer="adamw", model="llama-tied-meta"),
]

VARIANTS = [
    Case(2, 2, stage=2, neurons=2, model="even-llama", masking="backward"),
    Case(2, 2, stage=3, model="llama-meta", masking="backward"),
    Case(2, 2, stage=3, neurons=2, model="even-llama-tied-meta", accumulation=3),
    Case(2, 2, stage=3, model="llama-tied-meta", checkpointing="full"),
]


@pytest.mark.parametrize("case", COVER, ids=str)
def test_deepspeed_equals_the_reference(ranks: RankPool, case: Case) -> None:
    """Bytes are as planned too: of parameters, gradients and optimizer state, and of what is sent between groups."""
    ours = deepspeed(ranks, case)
    assert_same_run(ours, reference(case), case)
    assert_bytes_as_planned(ours)
    assert all((result.predicted["optimizer"] > 0) == (case.optimizer == "adamw") for result in ours)


@pytest.mark.parametrize(
    "case", [*VARIANTS, *(pytest.param(case, marks=pytest.mark.full_table) for case in WIDE)], ids=str
)
def test_deepspeed_equals_the_reference_everywhere(ranks: RankPool, case: Case) -> None:
    ours = deepspeed(ranks, case)
    assert_same_run(ours, reference(replace(case, checkpointing="none")), case)
    for rank, result in enumerate(ours):
        assert all(traffic == result.planned for traffic in result.traffic), f"rank {rank}"


UNEQUAL = Case(2, sizes=(2, 1))
LARGE_AND_SMALL = [
    replace(UNEQUAL, stage=0, accumulation=3, clip=True, optimizer="adamw", masking="backward", model="llama-tied"),
    replace(UNEQUAL, stage=1, model="llama-tied-meta"),
    replace(UNEQUAL, stage=2, clip=True, optimizer="adamw", neurons=2, model="even-llama"),
    replace(
        UNEQUAL,
        stage=3,
        accumulation=3,
        clip=True,
        optimizer="adamw",
        neurons=2,
        masking="backward",
        model="even-llama",
    ),
]
WIDE_UNEQUAL = [
    replace(UNEQUAL, stage=stage, neurons=neurons, masking=masking, optimizer=optimizer, clip=stage % 2 == 1, model=model)
    for stage in (0, 1, 2, 3)
    for optimizer, neurons, masking, model in (
        ("sgd", 0, "forward", "mlp"), ("adamw", 0, "backward", "llama-meta"), ("adamw", 2, "forward", "even-llama-tied-meta"),
        ("sgd", 2, "backward", "even-llama"),
    )
] + [replace(UNEQUAL, groups=4, sizes=(1, 2, 3, 1), stage=stage, optimizer="adamw", masking=masking, clip=True)
     for stage, masking in ((0, "backward"), (1, "forward"), (2, "backward"), (3, "forward"), (3, "backward"))]  # fmt: skip


@pytest.mark.parametrize(
    "case", [*LARGE_AND_SMALL, *(pytest.param(case, marks=pytest.mark.full_table) for case in WIDE_UNEQUAL)], ids=str
)
def test_groups_of_unequal_size_equal_the_reference(ranks: RankPool, case: Case) -> None:
    ours = deepspeed(ranks, case)
    assert_same_run(ours, reference(case), case)
    for rank, result in enumerate(ours):
        assert result.measured == result.predicted, f"rank {rank}"
        assert all(traffic == result.planned for traffic in result.traffic), f"rank {rank}"


def test_ranks_of_unequal_groups_weigh_alike() -> None:
    """Where every group holds every unit, it is the dense run on as many ranks."""
    case = replace(UNEQUAL, sizes=(1, 3), placement="full", clip=True)
    assert_same_run([reference(case)], reference(Case(1, 4, placement="full", clip=True)), case)


# -- unlike others ---------------------------------------------------------------------------------------------------------------------


def _nan_in_one_group(case: Case, offload: bool) -> tuple[list[int], bool, bool]:
    """Skipped steps after each of 4, of which the last rank has a NaN in the second; whether holders agree and steps go on."""
    engine = engine_of(case, "deepspeed", **offloaded(case.stage, offload))
    skipped, states = [], [engine.full_state_dict()]
    for step in range(4):
        batch = dict(models.micro_batch(case.model, step, 0, dist.get_rank()))
        if step == 1 and dist.get_rank() == case.world - 1:
            batch["x"] = batch["x"] * float("nan")
        engine.backward(engine(batch))
        engine.step()
        skipped.append(engine.skipped_steps)
        states.append(engine.full_state_dict())
    engine.check_holders()
    assert engine.deepspeed.skipped_steps == engine.skipped_steps
    assert engine.deepspeed.global_steps == engine.global_steps == 4
    if dist.get_rank():
        return skipped, True, True
    same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in itertools.pairwise(states)]
    return skipped, same == [False, True, False, False], all(bool(torch.isfinite(t).all()) for t in states[-1].values())


def offloaded(stage: int, offload: bool = True) -> dict[str, Any]:
    """Sections that put the optimizer of a case into host memory."""
    return {"zero_optimization": {**zero_of(stage), "offload_optimizer": {"device": "cpu"}}} if offload else {}


MORE_SKIPS = [
    pytest.param(*case, marks=pytest.mark.full_table)
    for case in (((), 1, False), ((), 2, True), ((), 3, True), ((2, 1), 0, False))
]


@pytest.mark.parametrize(("sizes", "stage", "offload"), [((), 0, False), ((2, 1), 3, False), *MORE_SKIPS])
def test_a_nan_in_one_group_makes_all_skip_the_step(
    ranks: RankPool, sizes: tuple[int, ...], stage: int, offload: bool
) -> None:
    case = Case(2, 2, stage=stage, optimizer="adamw", clip=True, sizes=sizes)
    for skipped, only_then, finite in ranks.run(_nan_in_one_group, case, offload, world=case.world):
        assert skipped == [0, 1, 1, 1]
        assert only_then and finite


def _offloaded(case: Case) -> Result:
    return train(case, "deepspeed", **offloaded(case.stage))


OFFLOADED = Case(2, 2, stage=2, accumulation=3, clip=True, optimizer="adamw")
MORE_OFFLOADED = [
    replace(OFFLOADED, stage=3),
    replace(OFFLOADED, sizes=(2, 1), masking="backward"),
    replace(OFFLOADED, stage=3, sizes=(2, 1)),
]


@pytest.mark.parametrize(
    "case", [OFFLOADED, *(pytest.param(case, marks=pytest.mark.full_table) for case in MORE_OFFLOADED)], ids=str
)
def test_offloaded_optimizers_equal_the_reference(ranks: RankPool, case: Case) -> None:
    assert_same_run(ranks.run(_offloaded, case, world=case.world), reference(case), case)


class _Watched:
    """A reduction that tells when it is waited for."""

    def __init__(self, work: Any, events: list[str]):
        self._work, self._events = work, events

    def wait(self) -> Any:
        self._events.append("wait")
        return self._work.wait()


def _events(stage: int, accumulation: int) -> list[str]:
    """What happened in an optimizer step: reductions between groups launched and waited for, and backward at the first layer."""
    case = Case(2, 2, stage=stage, accumulation=accumulation, placement="full")
    zero = {**zero_of(stage), **({"reduce_bucket_size": 16} if stage else {})}  # each parameter is reduced by itself
    engine = engine_of(case, "deepspeed", zero_optimization=zero)
    events: list[str] = []
    sync = engine._backend._sync or engine._backend._hooked
    launch = sync._all_reduce

    def watched(*given: Any) -> _Watched:
        events.append("launch")
        return _Watched(launch(*given), events)

    sync._all_reduce = watched
    first = next(module for module in engine.module.modules() if isinstance(module, torch.nn.Linear))
    first.register_forward_hook(lambda *given: given[-1].register_hook(lambda _: events.append("first layer")) and None)
    one_step(engine, case, 0, data_rank=dist.get_rank())
    engine.step()
    return events


@pytest.mark.parametrize(
    ("stage", "accumulation"), [(0, 1), (2, 1), (3, 2), pytest.param(1, 2, marks=pytest.mark.full_table)]
)
def test_reductions_between_groups_overlap(ranks: RankPool, stage: int, accumulation: int) -> None:
    """Each other always: all are launched before one is waited for. At stages 0 and 3 backward too, in its last micro-batch."""
    for events in ranks.run(_events, stage, accumulation, world=4):
        assert events.count("first layer") == accumulation
        assert events.count("launch") == events.count("wait") >= 4, events
        assert "launch" not in events[events.index("wait") :], events
        last = len(events) - 1 - events[::-1].index("first layer")
        before = events[:last].count("launch")
        assert before >= 2 if stage in (0, 3) else before == 0, events


# -- checkpoints -----------------------------------------------------------------------------------------------------------------------


def _save_after_two_steps(case: Case, name: str, folder: str) -> tuple[Any, Any, list[float]]:
    """The full model as saved, as it is after two steps more, and the rates as saved."""
    engine = engine_of(case, name)
    for step in range(4):
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
    for step in (2, 3):
        one_step(engine, case, step, data_rank=None if name == "reference" else dist.get_rank())
        engine.step()
    if name == "deepspeed":  # its own counters go on, of its own group's samples
        own = engine.deepspeed
        assert [own.global_steps, own.global_samples] == [4, 4 * own.train_batch_size()]
    return loaded, engine.full_state_dict(), client, rates


ADAMW = Case(2, 2, optimizer="adamw")
LLAMA, NEURONS = replace(ADAMW, model="llama-tied"), replace(ADAMW, neurons=2, model="even-llama")
MOVES = [
    (replace(ADAMW, stage=3), "deepspeed", replace(ADAMW, stage=1), "fsdp2"),
    (replace(LLAMA, stage=3), "fsdp2", replace(LLAMA, stage=2), "deepspeed"),
    pytest.param(
        replace(ADAMW, stage=1), "deepspeed", replace(ADAMW, stage=3), "deepspeed", marks=pytest.mark.full_table
    ),
    (replace(LLAMA, stage=3, sizes=(2, 1)), "deepspeed", replace(LLAMA, stage=1, sizes=(2, 1)), "deepspeed"),
    pytest.param(replace(NEURONS, stage=2), "deepspeed", NEURONS, "deepspeed", marks=pytest.mark.full_table),
    pytest.param(
        replace(NEURONS, stage=1), "deepspeed", replace(NEURONS, stage=1), "deepspeed", marks=pytest.mark.full_table
    ),
    (replace(NEURONS, stage=3), "deepspeed", replace(NEURONS, stage=3), "deepspeed"),
]


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
    for name, tensor in expected.items():  # two steps with the moments that were loaded
        assert not torch.equal(after[name], loaded[name])
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-5 * tensor.abs().max().item())


PLACED = replace(ADAMW, placement="cyclic", stage=1, sizes=(2, 1))


@pytest.mark.parametrize(
    "target",
    [PLACED, pytest.param(replace(PLACED, stage=3, neurons=2, model="even-llama"), marks=pytest.mark.full_table)],
)
def test_a_checkpoint_of_another_placement_and_other_group_sizes_goes_on(
    ranks: RankPool, tmp_path: Path, target: Case
) -> None:
    """As the reference does from the same checkpoint, under the layout that reads it."""
    source = replace(target, placement="mixed", stage=3, sizes=())
    saved, _, _ = ranks.run(_save_after_two_steps, source, "deepspeed", str(tmp_path), world=source.world)[0]
    loaded, after, _, _ = ranks.run(_go_on, target, "deepspeed", str(tmp_path), world=target.world)[0]
    _, expected, _, _ = _go_on(target, "reference", str(tmp_path))
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    for name, tensor in expected.items():
        assert not torch.equal(after[name], loaded[name])
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-5 * tensor.abs().max().item())


# -- as DeepSpeed comes ----------------------------------------------------------------------------------------------------------------


def _beside_plain_deepspeed(stage: int, settings: dict[str, Any]) -> tuple[list[float], list[float], int, int]:
    """Losses of DeepSpeed alone and of one group under sdp, and bytes of optimizer state against the prediction."""
    import sdp
    from sdp.engine.backends.deepspeed.private import forget_process_groups, load

    package = load()
    forget_process_groups()
    file = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        **settings,
    }
    kind = "llama" if "bf16" in settings else "mlp"  # whose inputs are no numbers to be cast
    model = models.build(kind)
    plain = package.initialize(model=model, model_parameters=model.parameters(), config=file)[0]
    ours = sdp.initialize(model=models.build(kind), config={**file, "sdp": {"engine": "deepspeed"}})[0]
    losses: list[list[float]] = []
    for engine in (plain, ours):
        losses.append([])
        for step in range(8):
            loss = engine(**models.micro_batch(kind, step, 0, dist.get_rank()))
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
    assert plain.get_global_grad_norm() is None or float(plain.get_global_grad_norm()) == ours.get_global_grad_norm()
    return *losses, ours.measured_state_bytes().optimizer, ours.predicted_state_bytes().optimizer


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        (0, {"gradient_clipping": 0.25}),
        (0, {"gradient_clipping": 0.25, "bf16": {"enabled": True}}),
        pytest.param(1, {}, marks=pytest.mark.full_table),
        pytest.param(2, {"gradient_clipping": 0.25}, marks=pytest.mark.full_table),
        (3, {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 2}}}),
    ],
)
def test_with_one_group_it_is_deepspeed_bit_for_bit(ranks: RankPool, stage: int, settings: dict[str, Any]) -> None:
    for plain, ours, measured, predicted in ranks.run(_beside_plain_deepspeed, stage, settings, world=2):
        assert plain == ours
        assert len(set(plain)) == len(plain)
        assert measured == predicted > 0


def _nan_in_one_group_alone(stage: int, offload: bool) -> None:
    from sdp.engine.errors import DivergedError

    case = Case(1, 2, stage=stage, optimizer="adamw")
    engine = engine_of(case, "deepspeed", training={"max_skips": 1}, **offloaded(stage, offload))
    one_step(engine, case, 0, data_rank=dist.get_rank())
    engine.step()
    assert engine.measured_state_bytes().gradients == engine.predicted_state_bytes().gradients > 0
    before = engine.full_state_dict()
    for skipped in (1, 2):
        batch = dict(models.micro_batch(case.model, 1, 0, dist.get_rank()))
        batch["x"] = batch["x"] * (float("nan") if dist.get_rank() else 1.0)
        engine.backward(engine(batch))
        if skipped == 1:
            engine.step()
        else:
            with pytest.raises(DivergedError, match="at step 3, for the 2"):
                engine.step()
        assert [engine.skipped_steps, engine.deepspeed.skipped_steps] == [skipped, skipped]
    after = engine.full_state_dict()
    assert dist.get_rank() or all(torch.equal(before[name], after[name]) for name in before)


MORE_ALONE = [
    pytest.param(*case, marks=pytest.mark.full_table) for case in ((1, False), (2, True), (3, False), (3, True))
]


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (2, False), *MORE_ALONE])
def test_one_group_skips_a_step_whose_gradient_is_not_finite(ranks: RankPool, stage: int, offload: bool) -> None:
    ranks.run(_nan_in_one_group_alone, stage, offload, world=2)


def _dropped(stage: int, offload: bool) -> None:
    case = Case(2, 1, stage=stage, accumulation=2)
    after = []
    for first in (0, 9):
        engine = engine_of(case, "deepspeed", **offloaded(stage, offload))
        engine.backward(engine(models.micro_batch(case.model, first, 0, dist.get_rank())))
        engine.step()
        engine.zero_grad()
        engine.backward(engine(models.micro_batch(case.model, 1, 0, dist.get_rank())))
        engine.step()
        after.append((engine.get_global_grad_norm(), engine.full_state_dict()))
    (norm, weights), (other_norm, other_weights) = after
    assert norm == other_norm > 0
    assert dist.get_rank() or all(torch.equal(weights[name], other_weights[name]) for name in weights)


MORE_DROPS = [
    pytest.param(*case, marks=pytest.mark.full_table) for case in ((0, False), (1, False), (3, False), (3, True))
]


@pytest.mark.parametrize(("stage", "offload"), [(2, False), (2, True), *MORE_DROPS])
def test_zero_grad_drops_earlier_micro_batches(ranks: RankPool, stage: int, offload: bool) -> None:
    ranks.run(_dropped, stage, offload, world=2)


def _partly_frozen(stage: int, bf16: bool) -> None:
    import sdp

    case = Case(2, 1, stage=stage, model="llama", bf16=bf16)
    model = models.build(case.model)
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    expected = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    engine = sdp.initialize(model=model, config=case.config("deepspeed"))[0]
    one_step(engine, case, 0, data_rank=dist.get_rank())
    engine.step()
    assert torch.isfinite(torch.tensor(engine.evaluate([models.micro_batch(case.model, 7, 0, dist.get_rank())])))
    state = engine.full_state_dict()
    for name, value in expected.items() if dist.get_rank() == 0 else ():
        rounded = value.bfloat16().float() if bf16 else value
        assert state[name].dtype == torch.float32 and torch.equal(state[name], rounded), name


@pytest.mark.parametrize(
    ("stage", "bf16"), [(3, False), (1, True), pytest.param(3, True, marks=pytest.mark.full_table)]
)
def test_the_full_state_has_parameters_that_the_user_froze(ranks: RankPool, stage: int, bf16: bool) -> None:
    ranks.run(_partly_frozen, stage, bf16, world=2)


# -- a plain checkpoint as the start -----------------------------------------------------------------------------------------------------


def _save_plain(stage: int, folder: str) -> Any:
    """A step of DeepSpeed's own, saved; the weights that it has in float32."""
    from sdp.engine.backends.deepspeed.private import forget_process_groups, load

    package = load()
    forget_process_groups()
    model = models.build("llama-tied")
    optimizer = {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}}
    file = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "zero_optimization": {"stage": stage}}
    engine = package.initialize(model=model, model_parameters=model.parameters(), config=file)[0]
    engine.backward(engine(**models.micro_batch("llama", 0, 0, dist.get_rank())))
    engine.step()
    engine.save_checkpoint(folder)
    whole = package.utils.safe_get_full_fp32_param
    return {name: whole(parameter).clone() for name, parameter in model.named_parameters()}


def _started_from(case: Case, folder: str, scratch: str) -> tuple[Any, int]:
    """The weights at the start, and how often this rank converted the checkpoint."""
    from sdp.engine.backends.deepspeed import zero_checkpoint

    conversions: list[Path] = []
    convert = zero_checkpoint.weights_of_zero_checkpoint
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", scratch)
        patch.setattr(
            zero_checkpoint, "weights_of_zero_checkpoint", lambda path: (conversions.append(path), convert(path))[1]
        )
        patch.setattr(zero_checkpoint, "_FILE_BYTES", 4096)  # several files
        return engine_of(case, "fsdp2", training={"init_from": folder}).full_state_dict(), len(conversions)


@pytest.mark.parametrize(
    "stage", [pytest.param(1, marks=pytest.mark.full_table), pytest.param(2, marks=pytest.mark.full_table), 3]
)
def test_a_plain_deepspeed_checkpoint_can_be_the_start(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    trained = ranks.run(_save_plain, stage, str(tmp_path), world=2)[0]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (started, first), (_, second) = ranks.run(
        _started_from, Case(2, 1, model="llama-tied-meta"), str(tmp_path), str(scratch), world=2
    )
    assert [first, second] == [1, 0]
    assert list(scratch.iterdir()) == []
    assert set(trained) <= set(started)
    for name, weight in trained.items():
        assert torch.equal(started[name], weight), name
    untrained = dict(models.build("llama-tied").named_parameters())
    assert all(not torch.equal(started[name], weight) for name, weight in untrained.items())


def test_a_checkpoint_that_could_run_code_is_refused(tmp_path: Path) -> None:
    from sdp.engine.backends.deepspeed.zero_checkpoint import weights_of_zero_checkpoint

    (tmp_path / "latest").write_text("step")
    (tmp_path / "step").mkdir()
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save({"optimizer_state_dict": Path("/")}, tmp_path / "step" / name)
    with pytest.raises(CheckpointError, match="holds more than weights, which could run code and is not read"):
        weights_of_zero_checkpoint(tmp_path)


# -- refused ---------------------------------------------------------------------------------------------------------------------------

REFUSED = [
    (
        {"zero_optimization": {"round_robin_gradients": True}},
        "zero_optimization.round_robin_gradients: true cannot be honoured",
    ),
    (
        {"zero_optimization": {"zero_hpz_partition_size": 2}},
        "zero_optimization.zero_hpz_partition_size: 2 cannot be honoured",
    ),
    ({"zero_optimization": {"mics_shard_size": 2}}, "zero_optimization.mics_shard_size: 2 cannot be honoured"),
    (
        {"zero_optimization": {"zero_quantized_gradients": True}},
        "zero_optimization.zero_quantized_gradients: true cannot be honoured",
    ),
    (
        {"zero_optimization": {"zero_quantized_weights": True}},
        "zero_optimization.zero_quantized_weights: true cannot be honoured",
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
        'zero_optimization.offload_optimizer.device: "nvme" cannot',
    ),
    (
        {"zero_optimization": {"offload_param": {"device": "cpu"}}},
        'zero_optimization.offload_param.device: "cpu" cannot be honoured',
    ),
    ({"zero_optimization": {"param_alignment": 8}}, "zero_optimization.param_alignment: unknown key"),
    (
        {"tensor_parallel": {"autotp_size": 2}},
        'tensor_parallel.autotp_size: 2 is not available in this version beside sdp.engine "deepspeed"',
    ),
    (
        {"training": {"compile": True}},
        'training.compile: true is not available in this version beside sdp.engine "deepspeed"',
    ),
    ({"communication_data_type": "bf16"}, 'communication_data_type: "bf16" cannot be honoured'),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, 'data_types.grad_accum_dtype: "bf16" cannot be honoured'),
    ({"prescale_gradients": True}, "prescale_gradients: true cannot be honoured"),
    ({"elasticity": {"enabled": True}}, "elasticity.enabled: true cannot be honoured"),
    ({"compression_training": {"layer_reduction": {}}}, "compression_training: "),
    ({"autotuning": {"enabled": True}}, "autotuning.enabled: true cannot be honoured"),
    ({"mesh_param": [2, 2]}, "mesh_param: unknown key"),
]


@pytest.mark.parametrize(
    ("section", "message"), REFUSED, ids=lambda value: json.dumps(value)[:70] if isinstance(value, dict) else ""
)
def test_what_cannot_be_honoured_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({**section, "sdp": {"engine": "deepspeed", "groups": 2}})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_what_deepspeed_acts_on_goes_to_it() -> None:
    file = {"gradient_clipping": 0.5,
            "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
            "flops_profiler": {"enabled": True, "profile_step": 2}, "comms_logger": {"enabled": True}}  # fmt: skip
    config = load_config({**file, "sdp": {"engine": "deepspeed"}, "training": {"seed": 3}, "train_batch_size": 8})
    assert config.deepspeed == file
    assert config.hints == ()


def test_a_file_without_clipping_is_clipped_as_deepspeed_does() -> None:
    """With several groups too, and by the file that a run keeps; by the other engines it is not."""
    constants = importlib.import_module("deepspeed.runtime.constants")
    file: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "sdp": {"engine": "deepspeed", "groups": 2}}
    config = load_config(file)
    assert config.gradient_clipping == config.deepspeed["gradient_clipping"] == constants.GRADIENT_CLIPPING_DEFAULT
    assert config.resolved()["gradient_clipping"] == constants.GRADIENT_CLIPPING_DEFAULT
    assert load_config({**file, "gradient_clipping": 0.0}).gradient_clipping == 0
    assert load_config({**file, "sdp": {"groups": 2}}).gradient_clipping == 0


def test_a_resolved_configuration_trains_the_same() -> None:
    file = {"gradient_clipping": 0.5,
            "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
            "comms_logger": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}  # fmt: skip
    resolved = load_config({**file, "sdp": {"engine": "deepspeed"}}).resolved()
    again = load_config(resolved)
    assert again.resolved() == resolved
    assert again.deepspeed["zero_optimization"] == file["zero_optimization"]
    assert again.deepspeed["comms_logger"] == file["comms_logger"]
    assert None not in again.deepspeed.values()


def _mismatched_stages() -> str:
    with pytest.raises(ConfigError) as caught:
        engine_of(Case(2, 1, stage=1 + dist.get_rank()), "deepspeed")
    return str(caught.value)


def test_stages_that_differ_between_ranks_are_found(ranks: RankPool) -> None:
    message = (
        "zero_optimization.stage: rank 0 has 1, rank 1 has 2; start all with the same configuration, model and data"
    )
    assert ranks.run(_mismatched_stages, world=2) == [message] * 2


def _sub_groups(groups: int) -> str:
    with pytest.raises(ConfigError) as caught:
        engine_of(
            Case(groups, 2 // groups, stage=3), "deepspeed", zero_optimization={"stage": 3, "sub_group_size": 100}
        )
    return str(caught.value)


@pytest.mark.parametrize("groups", [1, 2])
def test_sub_groups_below_a_unit_are_refused(ranks: RankPool, groups: int) -> None:
    for message in ranks.run(_sub_groups, groups, world=2):
        assert message.startswith("zero_optimization.sub_group_size: 100 is less than the ")


def _refusals() -> tuple[str, str, str]:
    """A scheduler over the user's groups of an optimizer; what DeepSpeed refuses itself; an optimizer that it replaces."""
    import sdp

    model = models.build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {
        key: value
        for key, value in Case(2, 1, stage=3).config("deepspeed").items()
        if key not in ("optimizer", "scheduler")
    }
    with pytest.raises(ConfigError) as scheduler:
        sdp.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, float),
            config=config,
        )
    with pytest.raises(ConfigError) as refused:
        engine_of(Case(1, 2, stage=1), "deepspeed", optimizer={"type": "Unheard", "params": {"lr": 0.1}})
    with pytest.raises(ConfigError) as replaced:
        engine_of(Case(1, 2, stage=2), "deepspeed", optimizer={"type": "Adagrad", "params": {"lr": 0.1}})
    return str(scheduler.value), str(refused.value), str(replaced.value)


def test_what_deepspeed_would_refuse_is_told_in_one_line(ranks: RankPool) -> None:
    for scheduler, refused, replaced in ranks.run(_refusals, world=2):
        assert replaced.startswith(
            "optimizer: under ZeRO DeepSpeed makes another Adagrad than the one that it was given"
        )
        assert scheduler.startswith(
            "lr_scheduler: the LambdaLR given has rates for 1 parameter groups, and DeepSpeed has "
        )
        assert "Unheard" in refused and "\n" not in refused


def _plain_script() -> float:
    norms = []
    for stage in (1, 3):
        engine = engine_of(Case(1, 1, stage=stage), "deepspeed")  # SGD, which DeepSpeed has not tested with ZeRO
        one_step(engine, Case(1, 1), 0, data_rank=0)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    return norms[1]


def test_a_script_without_a_launcher_and_any_optimizer_work() -> None:
    here = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})"
    code = f"{here}; import test_deepspeed as t; print('norm', t._plain_script() > 0)"
    environ = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120)
    assert "norm True" in done.stdout, done.stderr[-600:]


def _without_a_name() -> str:
    from sdp.engine.backends.deepspeed.private import load

    package = load()
    coordinator = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
    kept = coordinator.assert_ints_same_as_other_ranks
    del coordinator.assert_ints_same_as_other_ranks
    package.__version__ = "0.99.0"
    try:
        with pytest.raises(ConfigError) as caught:
            engine_of(Case(2, 1, stage=3), "deepspeed")
        return str(caught.value)
    finally:
        coordinator.assert_ints_same_as_other_ranks, package.__version__ = kept, package.version


def test_a_deepspeed_without_a_name_that_is_needed_is_not_supported(ranks: RankPool) -> None:
    for message in ranks.run(_without_a_name, world=2):
        assert message == (
            "DeepSpeed 0.99.0 is not supported (tested: 0.19.8): it has no "
            "deepspeed.runtime.zero.partitioned_param_coordinator.assert_ints_same_as_other_ranks; install deepspeed==0.19.8"
        )


# -- beside training ---------------------------------------------------------------------------------------------------------------------


def _evaluations(case: Case, name: str) -> tuple[float, list[float], float]:
    """The full model's loss and the subnetworks' after a step, and the loss of the step after: training goes on."""
    engine = engine_of(case, name)
    rank = None if name == "reference" else dist.get_rank()
    one_step(engine, case, 0, data_rank=rank)
    engine.step()
    if rank is None:
        batches = [models.rows_of_all(case.model, 7, micro, case.data_ranks) for micro in range(2)]
    else:
        batches = [models.micro_batch(case.model, 7, micro, rank) for micro in range(2)]
    results = engine.evaluate(batches), engine.evaluate_subnetworks(batches)
    one_step(engine, case, 1, data_rank=rank)
    engine.step()
    return *results, engine.get_global_grad_norm()


@pytest.mark.parametrize(
    "case",
    [
        Case(2, stage=3, model="llama-tied-meta", sizes=(2, 1)),
        pytest.param(Case(2, 2, stage=3, model="llama-tied-meta"), marks=pytest.mark.full_table),
        pytest.param(Case(2, 2, stage=1, model="llama"), marks=pytest.mark.full_table),
        pytest.param(
            Case(3, stage=0, model="llama", sizes=(1, 2, 1), placement="cyclic"), marks=pytest.mark.full_table
        ),
        pytest.param(Case(2, stage=2, neurons=2, model="even-llama", sizes=(1, 2)), marks=pytest.mark.full_table),
        pytest.param(Case(2, 2, stage=3, model="llama-meta", masking="backward"), marks=pytest.mark.full_table),
    ],
    ids=str,
)
def test_the_full_model_is_evaluated(ranks: RankPool, case: Case) -> None:
    expected = _evaluations(case, "reference")
    for full, subnetworks, norm in ranks.run(_evaluations, case, "deepspeed", world=case.world):
        assert full == pytest.approx(expected[0], rel=1e-5)
        assert subnetworks == pytest.approx(expected[1], rel=1e-5)
        assert norm == pytest.approx(expected[2], rel=1e-5)


@pytest.mark.parametrize("stage", [0, 1, pytest.param(3, marks=pytest.mark.full_table)])
def test_bf16_is_near_the_reference(ranks: RankPool, stage: int) -> None:
    case = Case(2, 2, stage=stage, optimizer="adamw", bf16=True, model="llama-tied-meta")
    theirs = reference(case)
    assert theirs.after is not None and theirs.before is not None
    ours = deepspeed(ranks, case)
    assert ours[0].after is not None
    for name, after in theirs.after.items():
        assert ours[0].after[name].dtype == torch.float32
        torch.testing.assert_close(ours[0].after[name], after, rtol=0, atol=0.02 * after.abs().max().item())
        assert not torch.equal(ours[0].after[name], ours[0].after[name].bfloat16().float()), (
            f"{name}: no float32 master"
        )
    assert torch.tensor([r.losses for r in ours]).mean(0).tolist() == pytest.approx(theirs.losses, rel=0.02)
    assert ours[0].norms == pytest.approx(theirs.norms, rel=0.1)


def _with_monitors(folder: str, stage: int) -> tuple[int, int, int]:
    """Bytes between groups that DeepSpeed's communication logger saw, and by our count those of all-reduces and of broadcasts sent."""
    sections = {
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "run"},
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


@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.full_table), pytest.param(3, marks=pytest.mark.full_table)]
)
def test_monitor_flops_profiler_and_comms_logger_work(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    everyone = ranks.run(_with_monitors, str(tmp_path), stage, world=2)
    assert all(reduced > 0 for _, reduced, _ in everyone) and any(sent > 0 for *_, sent in everyone)
    # What one sends the other receives, and logs too.
    assert sum(logged for logged, *_ in everyone) == sum(reduced + 2 * sent for _, reduced, sent in everyone)
    assert "params per" in (tmp_path / "flops.txt").read_text()
    rates = next(tmp_path.rglob("*lr*.csv")).read_text().splitlines()
    assert len(rates) >= 4


def _built_from_huggingface() -> tuple[int, int, int, list[str]]:
    """Bytes of the whole model, at most alive before DeepSpeed cuts this rank's part, and of what it holds; names of units that it has."""
    import sdp
    from sdp.engine.accounting.memory_probe import _LiveStorages
    from sdp.engine.backends.deepspeed.private import load
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": 16,
        "num_attention_heads": 2,
    }
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
    with _LiveStorages(torch.device("cpu")) as live, pytest.MonkeyPatch.context() as patch:
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
    expected = [u.name for u in engine.layout.units if engine.layout.placement.holds(engine._backend.at.sdp, u.index)]
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
