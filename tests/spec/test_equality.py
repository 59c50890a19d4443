"""The native backend equals the reference."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.engine.placement import buckets
from sdp.engine.placement.buckets import LEAST_BYTES
from sdp.engine.placement.units import find_neuron_units
from sdp.tests.support import models
from sdp.tests.support.case_tables import FACTORS, TENSOR_FACTORS, full_table, mostly_slow, pairwise_cover
from sdp.tests.support.cases import (
    RELATIVE,
    STEPS,
    Case,
    Result,
    assert_bytes_as_planned,
    assert_same_run,
    engine_of,
    native,
    one_step,
    reference,
    train,
)
from sdp.tests.support.ranks import RankPool

COVER, TENSOR_COVER = pairwise_cover(FACTORS), pairwise_cover(TENSOR_FACTORS)


# Backward masking: what the cover has at few stages only, and empty shards of copies, because 6
# rows are cut in four.
SHARDED_COPIES = [
    Case(2, 2, 2, 3, clip=True, optimizer="adamw", model="llama-tied", masking="backward"),
    Case(2, 2, 3, 1, model="llama-tied-meta", masking="backward"),
    Case(2, 4, 1, 3, optimizer="adamw", model="llama-meta", masking="backward"),
    Case(2, 2, 3, 3, model="even-llama-tied-meta", tp=2, masking="backward"),
]


def test_clipping_acts_above_its_value_only() -> None:
    plain = reference(Case(2, 2, model="llama-tied"))
    engine = engine_of(Case(2, 2, model="llama-tied"), "reference", gradient_clipping=2 * max(plain.norms))
    for step in range(STEPS):
        one_step(engine, Case(2, 2, model="llama-tied"), step, data_rank=None)
        engine.step()
    state = engine.full_state_dict()
    assert plain.after is not None
    assert state is not None
    assert all(torch.equal(state[name], weight) for name, weight in plain.after.items())


def test_the_cover_holds_every_pair() -> None:
    for cover, size in ((COVER, 30), (TENSOR_COVER, 25)):
        assert len(cover) < size
        assert {(case.neurons > 0, case.masking) for case in cover} == set(
            itertools.product((False, True), FACTORS["masking"])
        )
        assert {(case.neurons > 0, case.placement) for case in cover} == set(
            itertools.product((False, True), FACTORS["placement"])
        )
        assert {(case.masking, case.placement) for case in cover} >= set(
            itertools.product(FACTORS["masking"], FACTORS["placement"][:3])
        )


NEURONS = [
    Case(2, 1, neurons=2, model="even-llama"),
    Case(2, 2, stage=3, neurons=2, model="even-llama-tied-meta", optimizer="adamw", accumulation=3, clip=True),
    Case(4, 1, neurons=2, model="llama-of-3", optimizer="adamw"),
    Case(2, 1, neurons=2, model="even-llama", masking="backward"),
    Case(
        2,
        2,
        stage=3,
        neurons=3,
        model="even-llama-tied-meta",
        optimizer="adamw",
        accumulation=3,
        clip=True,
        masking="backward",
    ),
    Case(4, 1, neurons=2, model="llama-of-3", stage=2, optimizer="adamw", masking="backward", placement="balanced"),
    Case(2, 2, stage=1, neurons=5, model="even-llama-tied", placement="cyclic", accumulation=3, masking="backward"),
    Case(2, 2, stage=3, neurons=2, model="wide-llama-tied-meta", tp=2, clip=True, accumulation=3, placement="random"),
    Case(
        2,
        1,
        neurons=2,
        model="wide-llama",
        tp=2,
        optimizer="adamw",
        masking="backward",
        checkpointing="selective",
        placement="balanced",
    ),
]


IMAGE_NEURONS = [  # the width of the first stage is 3, and so are the heads of the second
    Case(2, 1, neurons=3, model="resnet-meta", accumulation=3),
    Case(2, 2, stage=3, neurons=2, model="resnet-meta", optimizer="adamw", clip=True),
    Case(2, 2, stage=1, neurons=4, model="resnet-meta", placement="cyclic", masking="backward", accumulation=3),
    Case(4, 1, stage=2, neurons=3, model="resnet-meta", optimizer="momentum", masking="backward", placement="random"),
    Case(4, 1, neurons=2, model="swin-meta", optimizer="adamw", placement="balanced"),
    Case(2, 2, stage=3, neurons=3, model="swin-meta", placement="cyclic", clip=True, accumulation=3),
    Case(2, 2, stage=2, neurons=4, model="swin-meta", optimizer="adamw", masking="backward"),
    Case(
        2, 2, stage=3, neurons=2, model="swin-meta", optimizer="momentum", masking="backward", checkpointing="selective"
    ),
]


@pytest.mark.parametrize("case", mostly_slow(NEURONS), ids=str)
def test_native_neurons_equal_the_reference(ranks: RankPool, case: Case) -> None:
    ours = native(ranks, case)
    assert_same_run(ours, reference(replace(case, checkpointing="none")), case)
    assert_bytes_as_planned(ours)


@pytest.mark.parametrize(
    ("mode", "masking"),
    [
        ("full", "forward"),
        pytest.param("selective", "forward", marks=pytest.mark.slow),
        pytest.param("full", "backward", marks=pytest.mark.slow),
        ("selective", "backward"),
    ],
)
def test_activation_checkpointing_of_neurons_changes_nothing(ranks: RankPool, mode: Any, masking: Any) -> None:
    plain = replace(NEURONS[4 if masking == "backward" else 1], masking=masking)
    case = replace(plain, checkpointing=mode)
    assert_same_run(native(ranks, case), reference(plain), case)


@pytest.mark.parametrize(
    "case",
    [
        *mostly_slow(COVER),
        *mostly_slow(TENSOR_COVER),
        *(pytest.param(case, marks=pytest.mark.slow) for case in SHARDED_COPIES[:2]),
        *SHARDED_COPIES[2:],
    ],
    ids=str,
)
def test_native_equals_reference(ranks: RankPool, case: Case) -> None:
    """In weights, losses and norms. State and traffic are those of the plan."""
    assert_same_run(native(ranks, case), reference(case), case)
    assert_bytes_as_planned(native(ranks, case))


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, accumulation=3, model="resnet-meta"),
        pytest.param(
            Case(2, 2, 3, clip=True, optimizer="adamw", model="resnet-meta", checkpointing="full"),
            marks=pytest.mark.slow,
        ),
        Case(4, 1, optimizer="momentum", model="resnet-meta"),
        Case(2, 2, 1, accumulation=3, model="resnet-meta", masking="backward", checkpointing="selective"),
        Case(2, 1, accumulation=3, model="swin-meta", optimizer="momentum"),
        Case(2, 2, 1, optimizer="adamw", model="swin-meta", masking="backward", checkpointing="full"),
        pytest.param(
            Case(2, 2, 2, 3, clip=True, optimizer="adamw", model="swin-meta", checkpointing="selective"),
            marks=pytest.mark.slow,
        ),
        pytest.param(Case(2, 4, 3, model="swin-meta", masking="backward"), marks=pytest.mark.full_table),
        pytest.param(
            Case(4, 1, optimizer="adamw", model="swin-meta", masking="backward"), marks=pytest.mark.full_table
        ),
        # Either model under either masking, two of them slow. The others are in the full table.
        *IMAGE_NEURONS[1::6],
        *(pytest.param(case, marks=pytest.mark.slow) for case in IMAGE_NEURONS[3:6:2]),
        *(pytest.param(case, marks=pytest.mark.full_table) for case in IMAGE_NEURONS[::2]),
    ],
    ids=str,
)
def test_native_images_equal_the_reference(ranks: RankPool, case: Case) -> None:
    """Weights do, and running statistics, which are bit for bit the same on all ranks that have
    them.
    """
    parameters = set(dict(models.build(case.model).named_parameters()))

    def weights_alone(result: Result) -> Result:
        states = {"before": result.before, "after": result.after}
        assert all(state is None or len(state) > len(parameters) for state in states.values())
        weights = {
            part: state and {name: state[name] for name in state if name in parameters}
            for part, state in states.items()
        }
        return replace(result, **weights)

    expected = reference(replace(case, checkpointing="none"))
    ours = native(ranks, case)
    assert_same_run([weights_alone(result) for result in ours], weights_alone(expected), case)
    assert ours[0].after is not None and expected.after is not None
    for name in set(expected.after) - parameters:
        largest = expected.after[name].abs().max().item()
        torch.testing.assert_close(ours[0].after[name], expected.after[name], rtol=0, atol=RELATIVE * largest, msg=name)
    for rank, result in enumerate(ours):
        assert set(result.buffers) <= set(expected.buffers)
        assert all(torch.equal(buffer, ours[0].after[name]) for name, buffer in result.buffers.items()), f"rank {rank}"
    assert_bytes_as_planned(ours)


@pytest.mark.parametrize("case", mostly_slow(TENSOR_COVER), ids=str)
def test_gradients_of_tensor_parallel_parts_are_g_u(ranks: RankPool, case: Case) -> None:
    """Those of the first step, by parameter, on every rank; tensor-parallel ranks have the same
    losses.
    """
    results, expected = native(ranks, case), dict(reference(case).gradients or {})
    units = find_neuron_units(models.build(case.model), case.neurons) if case.neurons else []
    for part in (part for unit in units for part in unit.slices):
        assert part.dim is not None
        ((first, last),) = part.ranges
        expected[f"{part.parameter}:{part.index}"] = expected[part.parameter].narrow(part.dim, first, last - first)
    expected = {name: gradient for name, gradient in expected.items() if f"{name}:0" not in expected}
    seen: set[str] = set()
    for rank, result in enumerate(results):
        assert result.losses == results[rank - rank % case.tp].losses
        assert result.gradients is not None
        seen |= set(result.gradients)
        for name, gradient in result.gradients.items():
            largest = expected[name].abs().max().item()
            torch.testing.assert_close(
                gradient,
                expected[name],
                rtol=0,
                atol=RELATIVE * largest,
                msg=lambda text, at=(rank, name): f"{at}: {text}",
            )
    assert seen == set(expected)


@pytest.mark.full_table
@pytest.mark.parametrize("case", full_table(FACTORS) + full_table(TENSOR_FACTORS), ids=str)
def test_native_equals_reference_everywhere(ranks: RankPool, case: Case) -> None:
    assert_same_run(native(ranks, case), reference(case), case)


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 2, 3, 3, clip=True, placement="balanced", model="llama-tied-meta"),
        Case(4, 1, 0, clip=True, placement="balanced", optimizer="adamw"),
        pytest.param(Case(4, 2, 1, 3, placement="random", model="llama-meta"), marks=pytest.mark.slow),
        Case(2, 1, 0, placement="random"),
    ],
    ids=str,
)
def test_made_placements_train_alike(ranks: RankPool, case: Case) -> None:
    """Unequal capacities and drawn holders, of one, some and all groups."""
    counts = {len(holders) for holders in engine_of(case, "reference").layout.placement.holders}
    assert len(counts) > 1, "every unit has as many holders"
    assert_same_run(native(ranks, case), reference(case), case)


def _in_pieces(case: Case, least: int) -> tuple[Result, int]:
    """The run with buckets of ``least`` bytes or more, and the reductions that it started."""
    started, all_reduce = 0, dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal started
        started += bool(kwargs.get("async_op"))
        return all_reduce(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "LEAST_BYTES", least)
        patch.setattr(dist, "all_reduce", counted)
        return train(case), started


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 2, 3, 3, clip=True, model="llama-tied-meta"),
        Case(4, 1, 0, optimizer="adamw", placement="balanced"),
        Case(2, 1, 0, clip=True, neurons=2, masking="backward", model="even-llama"),
    ],
    ids=str,
)
def test_units_that_are_reduced_in_pieces_train_alike(ranks: RankPool, case: Case) -> None:
    """The tests' units are smaller than the smallest bucket; here they are cut as large ones
    are.
    """
    whole, pieces = (ranks.run(_in_pieces, case, least, world=case.world) for least in (LEAST_BYTES, 1))
    for (_, few), (_, many) in zip(whole, pieces, strict=True):
        assert many > 1.5 * few
    assert_same_run([result for result, _ in pieces], reference(case), case)
    assert_bytes_as_planned([result for result, _ in pieces])


@pytest.mark.parametrize(
    ("model", "tp", "masking", "mode"),
    [
        ("mlp", 1, "forward", "full"),
        ("even-llama", 2, "forward", "selective"),
        ("llama-tied-meta", 1, "backward", "full"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("mlp", 1, "forward", "selective"),
                ("even-llama", 2, "forward", "full"),
                ("llama-tied-meta", 1, "backward", "selective"),
                ("llama-tied-meta", 1, "forward", "full"),
                ("llama-tied-meta", 1, "forward", "selective"),
            )
        ),
    ],
)
def test_activation_checkpointing_changes_nothing(
    ranks: RankPool, model: str, tp: int, masking: Any, mode: Any
) -> None:
    plain = Case(2, 2, stage=3, accumulation=3, model=model, tp=tp, masking=masking)
    case = Case(2, 2, stage=3, accumulation=3, model=model, checkpointing=mode, tp=tp, masking=masking)
    assert_same_run(native(ranks, case), reference(plain), case)
    assert_same_run(native(ranks, case), reference(case), case)
    assert_bytes_as_planned(native(ranks, case))


@functools.cache
def _float32_run(case: Case) -> Result:
    return reference(Case(**{**vars(case), "bf16": False}))


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, 0, 1, bf16=True),
        Case(2, 2, 1, 3, bf16=True, model="llama-tied"),
        pytest.param(Case(2, 2, 3, 1, bf16=True, model="llama"), marks=pytest.mark.slow),
        pytest.param(Case(4, 2, 2, 3, bf16=True, placement="profile"), marks=pytest.mark.slow),
        Case(2, 2, 3, 1, bf16=True, model="llama", checkpointing="full"),
        Case(2, 2, 3, 3, bf16=True, model="even-llama-tied", tp=2),
        pytest.param(Case(2, 1, 0, 1, bf16=True, model="even-llama", tp=2), marks=pytest.mark.slow),
        pytest.param(Case(2, 2, 3, 3, bf16=True, model="even-llama-tied-meta", neurons=2), marks=pytest.mark.slow),
        Case(2, 1, 0, 1, bf16=True, model="even-llama", neurons=3),
        pytest.param(
            Case(2, 1, 0, 1, bf16=True, model="even-llama", neurons=3, masking="backward"), marks=pytest.mark.slow
        ),
        Case(2, 2, 3, 3, bf16=True, model="even-llama-tied-meta", neurons=2, masking="backward"),
        Case(2, 1, 0, 1, bf16=True, model="llama", masking="backward"),
        pytest.param(Case(2, 2, 3, 3, bf16=True, model="llama-tied-meta", masking="backward"), marks=pytest.mark.slow),
        Case(2, 1, 0, 1, bf16=True, model="resnet-meta"),
        Case(2, 2, 3, 1, bf16=True, model="swin-meta"),
    ],
    ids=str,
)
def test_bf16_native_equals_reference(ranks: RankPool, case: Case) -> None:
    """Both compute in bfloat16 from the same weights, so they differ by round-off of 2⁻⁹ per
    operation, and less than from float32.
    """
    ours, theirs, exact = native(ranks, case), reference(case), _float32_run(case)
    assert_bytes_as_planned(ours)
    assert (
        ours[0].after is not None and theirs.after is not None and theirs.before is not None and exact.after is not None
    )
    assert ours[0].norms == pytest.approx(theirs.norms, rel=2e-2)
    squared = {"backends": 0.0, "rounding": 0.0, "update": 0.0}
    for name in dict(models.build(case.model).named_parameters()):
        after = theirs.after[name]
        assert ours[0].after[name].dtype == torch.float32, "master weights stay float32"
        squared["backends"] += (ours[0].after[name] - after).square().sum().item()
        squared["rounding"] += (exact.after[name] - after).square().sum().item()
        squared["update"] += (after - theirs.before[name]).square().sum().item()
    backends, rounding, update = (squared[key] ** 0.5 for key in ("backends", "rounding", "update"))
    assert backends < 1e-2 * update
    assert backends < 2 * rounding, "the backends differ from each other more than bfloat16 differs from float32"


def test_train_runs_in_this_process_too() -> None:
    """``train`` with the reference leaves no gradients behind and is deterministic."""
    case = Case(2, 1, model="llama-tied-meta")
    first, second = train(case, "reference"), train(case, "reference")
    assert first.losses == second.losses
    assert one_step.__module__ == "sdp.tests.support.cases"
