"""The oracle equals formulas that use nothing of the package."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sdp.engine.config.load import load_config
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.placement.layout import Layout
from sdp.engine.placement.units import Slice
from sdp.tests.support import models
from sdp.tests.support.cases import Case, oracle_of
from sdp.tests.support.oracle import Oracle


def test_the_specification_shows_the_core_of_the_oracle() -> None:
    root = Path(__file__).parents[2]
    page, program = (root / name for name in ("docs/specification.md", "tests/support/oracle.py"))
    code = page.read_text().rpartition("```python\n")[2].partition("```")[0]
    excerpts, whole = (re.sub(r"\n *", "\n", text) for text in (code, program.read_text()))
    assert len(code.splitlines()) > 18
    assert [excerpt for excerpt in excerpts.split("…\n") if excerpt not in whole] == []


def layout_of_paths(own: set[str], paths: int, groups: int) -> Layout:
    """At the paths of ``own``, group g holds the blocks ``paths.P.NAME``, P = g mod ``paths``."""
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
