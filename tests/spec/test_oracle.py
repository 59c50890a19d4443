"""The oracle equals the reference engine, and formulas that use nothing of the package."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from sdp.engine.config.load import load_config
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.placement.layout import Layout
from sdp.engine.placement.units import Slice
from sdp.tests.spec import test_equality, test_local_steps, test_rate_scale
from sdp.tests.support import models
from sdp.tests.support.cases import Case, oracle, oracle_of, run_oracle, train
from sdp.tests.support.oracle import Oracle


def plain(table: list[Any]) -> list[Case]:
    """The cases of a table, as the oracle distinguishes them."""
    return [replace(getattr(row, "values", [row])[0], stage=0, tp=1, checkpointing="none") for row in table]


TABLE = plain(
    [
        *test_equality.COVER,
        *test_equality.MORE,
        *test_local_steps.COVER,
        test_local_steps.BATCH_NORM,
        *test_rate_scale.SCALED,
        Case(2, 1, model="llama-tied", branch_scale="train"),
        Case(4, 1, model="llama-of-3", neurons=2, branch_scale="train"),
        Case(4, 1, model="llama-of-3", neurons=2, branch_scale="eval"),
        Case(2, 1, model="experts", accumulation=2),
        Case(2, 1, model="experts-by-rank", accumulation=2),
    ]
)


@pytest.mark.parametrize("case", list(dict.fromkeys(TABLE)), ids=str)
def test_the_oracle_equals_the_reference_engine(
    case: Case, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """In float64, to a few units in the last place.

    The two add up gradients in different orders. The reference has one backward pass for all
    workers, in which autograd adds up, and multiplies slices by masks. In float32 the rounding
    would hide errors of 1e-7, so all float32 numbers of both programs are float64 here.
    """
    filled, micro_batch = oracle_of(case).model.double(), models.micro_batch

    def doubled(*args: Any) -> dict[str, torch.Tensor]:
        batch = micro_batch(*args)
        return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}

    monkeypatch.setattr(models, "build", lambda _: copy.deepcopy(filled))
    monkeypatch.setattr(models, "micro_batch", doubled)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float))
    torch.set_default_dtype(torch.float64)
    theirs, ours = train(case, "reference"), run_oracle(case)
    assert theirs.rates == ours.rates
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-14)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-14)
    for name, weight in theirs.after.items():
        assert torch.equal(theirs.before[name], ours.before[name])
        assert not weight.is_floating_point() or weight.dtype == torch.float64
        torch.testing.assert_close(ours.after[name], weight, rtol=0, atol=1e-13 * weight.abs().max().item())


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, bf16=True),
        Case(2, 1, bf16=True, model="llama", masking="backward"),
        Case(2, 2, bf16=True, model="llama"),
        Case(2, 1, bf16=True, model="even-llama", neurons=3),
        Case(2, 1, bf16=True, model="even-llama", neurons=3, masking="backward"),
        Case(2, 1, bf16=True, model="resnet-meta"),
        Case(1, 2, bf16=True, model="experts-by-rank"),
    ],
    ids=str,
)
def test_the_oracle_equals_the_reference_engine_in_bf16(case: Case) -> None:
    """Bit for bit: without accumulation, which divides losses, both round in the same places."""
    theirs, ours = train(case, "reference"), oracle(case)
    assert ours.after.keys() == theirs.after.keys()
    assert all(torch.equal(ours.after[name], weight) for name, weight in theirs.after.items())


# -- several canonical tensors at one path ---------------------------------------------------------


def layout_of_paths(own: set[str], paths: int, groups: int) -> Layout:
    """A layout of the MLP in which group g holds, at the paths of ``own``, the blocks
    ``paths.P.NAME`` with P = g mod ``paths``.
    """
    config = load_config(Case(groups, placement="full").config())
    layout = Layout.of(models.mlp(), config, Mesh(groups))
    units, holders, parameters = [], [], {}
    for unit in layout.units:
        for path in range(paths if unit.name in own else 1):
            prefix = f"paths.{path}." if unit.name in own else ""
            held = tuple(group for group in range(groups) if not prefix or group % paths == path)
            slices = tuple(Slice(prefix + part.parameter) for part in unit.slices)
            units.append(replace(unit, index=len(units), name=prefix + unit.name, slices=slices))
            holders.append(held)
            for part in unit.slices:
                info, name = layout.parameters[part.parameter], prefix + part.parameter
                parameters[name] = replace(info, name=name, unit=prefix + unit.name, holders=held)
    shared = {name: info for name, info in layout.parameters.items() if info.unit == "shared"}
    costs = tuple(unit.numel for unit in units)
    placement = replace(
        layout.placement, units=tuple(unit.name for unit in units), holders=tuple(holders), costs=costs, flops=()
    )
    return replace(layout, units=tuple(units), placement=placement, parameters=shared | parameters)


def test_groups_have_different_tensors_at_one_path() -> None:
    """Two paths of two groups each: own blocks learn from their path, all else from all groups."""
    own, limit, rate = {"layers.1", "layers.2"}, 0.5, 0.3
    oracle = Oracle(
        models.mlp(),
        layout_of_paths(own, 2, 4),
        torch.optim.SGD,
        clip=limit,
        place_of=lambda name: re.sub(r"^paths\.\d\.", "", name),
    )
    paths = [models.mlp(), models.mlp()]
    for name, module in paths[0].named_children():
        for key, block in module.named_children() if name == "layers" else [("", module)]:
            if f"{name}.{key}" not in own:
                paths[1].set_submodule(f"{name}.{key}".rstrip("."), block)
    parameters = list(dict.fromkeys([*paths[0].parameters(), *paths[1].parameters()]))
    for step in range(3):
        batches = [models.micro_batch("mlp", step, 0, rank) for rank in range(4)]
        done = oracle.step([batches], rate)
        sum((paths[group % 2](**batch) for group, batch in enumerate(batches)), torch.zeros(())).backward()
        for name, parameter in paths[0].named_parameters():
            groups = 2 if name.rsplit(".", 2)[0] in own else 4
            for tensor in {parameter, paths[1].get_parameter(name)}:
                tensor.grad /= groups
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        assert done.norm == pytest.approx(norm.item(), rel=1e-6)
        assert norm > limit
        for parameter in parameters:
            parameter.data -= rate * parameter.grad
            parameter.grad = None
    for name in dict(paths[0].named_parameters()):
        first, second = (path.get_parameter(name) for path in paths)
        assert torch.equal(first, second) == (name.rsplit(".", 2)[0] not in own)
        for index, tensor in enumerate((first, second)):
            ours = oracle.full[f"paths.{index}.{name}" if name.rsplit(".", 2)[0] in own else name]
            torch.testing.assert_close(ours, tensor.detach(), rtol=0, atol=1e-6)


def test_losses_weigh_what_they_count() -> None:
    """g_u = Σ n_f ∂ℓ_f / Σ n_f over the micro-batches of the holders, with two holders or one."""
    case = Case(2, 1, accumulation=2)
    batches = [[models.micro_batch("mlp", 0, micro, rank) for rank in range(2)] for micro in range(2)]
    weights = [[3.0, 1.0], [2.0, 5.0]]
    ours = oracle_of(case).step(batches, 0.1, weights=weights).gradients
    single = [[oracle_of(case).step([[batch, batch]], 0.1).gradients for batch in of_ranks] for of_ranks in batches]
    for name, held_by, others in (("layers.0.up.weight", 0, 1), ("layers.3.up.weight", 1, 0)):
        total = sum(weights[micro][held_by] for micro in range(2))
        mean = sum(weights[micro][held_by] * single[micro][held_by][name] for micro in range(2)) / total
        torch.testing.assert_close(ours[name], mean)
        assert not torch.allclose(ours[name], sum(single[micro][others][name] for micro in range(2)) / 2)
