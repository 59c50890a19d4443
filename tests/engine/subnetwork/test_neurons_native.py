"""Neuron units on ranks: checkpoints, streamed evaluation, and the work that is done."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sdp
import torch
from sdp.engine.config.load import load_config
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.errors import ModelError
from sdp.engine.model_interface import Branch
from sdp.engine.placement.layout import Layout
from sdp.engine.placement.units import find_neuron_units
from sdp.engine.subnetwork.neurons import SlicedConv2d, SlicedLinear, Slices, slice_layers
from sdp.tests.support import models
from sdp.tests.support.cases import Case, data_rank_of, engine_of, evaluations, one_step, oracle_of, whole
from sdp.tests.support.ranks import RankPool
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

SOURCE = Case(2, 2, stage=3, neurons=2, model="even-llama-tied-meta", optimizer="adamw")


def _state(engine: Any) -> tuple[Any, dict[str, torch.Tensor], dict[str, int]]:
    """The full model, this rank's moments, whole, and step counts by parameter or slice."""
    moments, steps = {}, {}
    for name, parameter in engine.parameters_here.items():
        for key in ("exp_avg", "exp_avg_sq"):
            moments[f"{name}/{key}"] = whole(engine, name, engine.optimizer.state[parameter][key]).clone()
        steps[name] = int(engine.optimizer.state[parameter]["step"])
    return engine.full_state_dict(), moments, steps


def _train_and_save(case: Case, folder: str) -> Any:
    engine = engine_of(case)
    for step in range(2):
        one_step(engine, case, step, data_rank=data_rank_of(case))
        engine.step()
    engine.save_checkpoint(folder, background=True)
    engine.wait_for_checkpoint()
    return _state(engine)


def _load(case: Case, folder: str) -> Any:
    engine = engine_of(case)
    assert engine.load_checkpoint(folder)[0] is not None
    return _state(engine)


def check(answers: list[Any], weights: dict[str, torch.Tensor], moments: dict[str, torch.Tensor], target: Case) -> None:
    """Weights, and every moment as the slice that it is of the full model's."""
    slices = {}
    for unit in find_neuron_units(models.build(target.model), target.neurons) if target.neurons else []:
        for part in unit.slices:
            slices[f"{part.parameter}:{part.index}"] = part
    assert all(torch.equal(answers[0][0][name], weights[name]) for name in weights)
    compared = 0
    for _, here, steps in answers:
        assert set(steps.values()) == {2}
        for name, value in here.items():
            parameter, _, key = name.rpartition("/")
            expected = moments[f"{parameter.partition(':')[0]}/{key}"]
            if parameter in slices:
                ((first, last),) = slices[parameter].ranges
                expected = expected.narrow(slices[parameter].dim, first, last - first)
                compared += 1
            assert torch.equal(value, expected), name
    assert bool(compared) == bool(target.neurons)


def test_checkpoints_of_neurons_blocks_and_dense_runs_are_one_format(ranks: RankPool, tmp_path: Path) -> None:
    saved = ranks.run(_train_and_save, SOURCE, str(tmp_path), world=4)
    weights = saved[0][0]
    dense = Case(1, 2, stage=1, model=SOURCE.model, optimizer="adamw", placement="full")
    moments = ranks.run(_load, dense, str(tmp_path), world=2)[0][1]
    assert any(value.abs().max() > 0 for value in moments.values())
    check(saved, weights, moments, SOURCE)
    for target in (
        Case(2, 1, neurons=3, model=SOURCE.model, optimizer="adamw"),
        Case(2, 1, stage=2, model=SOURCE.model, optimizer="adamw", placement="cyclic"),
    ):
        check(ranks.run(_load, target, str(tmp_path), world=target.world), weights, moments, target)


def _evaluate(case: Case) -> tuple[float, list[float], float, Any]:
    engine = engine_of(case)
    batches = [models.micro_batch(case.model, 9, index, data_rank_of(case)) for index in range(10)]  # more than a chunk
    loss, own = engine.evaluate(batches), engine.evaluate_subnetworks(batches)
    one_step(engine, case, 0, data_rank=data_rank_of(case))
    engine.step()
    return loss, own, engine.get_loss(), engine.full_state_dict()


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 1, neurons=2, model="even-llama"),
        Case(2, 2, stage=3, neurons=3, model="even-llama-tied-meta"),
        Case(2, 2, stage=2, neurons=2, model="even-llama-meta", bf16=True),
        Case(2, 1, neurons=2, model="swin-meta"),
        Case(2, 1, stage=3, neurons=2, model="wide-llama", tp=2),
    ],
    ids=str,
)
def test_evaluation_streams_slices(ranks: RankPool, case: Case) -> None:
    answers = ranks.run(_evaluate, case, world=case.world)
    oracle, ranks_here, relative = oracle_of(case), range(case.data_ranks), 2e-3 if case.bf16 else 1e-6
    rows = [[models.micro_batch(case.model, 9, index, rank) for index in range(10)] for rank in ranks_here]
    loss, own = evaluations(oracle, rows)
    step = oracle.step([[models.micro_batch(case.model, 0, 0, rank) for rank in ranks_here]], 0.1)
    for found, found_own, trained, _ in answers:
        assert found == pytest.approx(loss, rel=relative)
        assert found_own == pytest.approx(own, rel=relative)
        assert trained == pytest.approx(step.loss, rel=relative)  # no guest stayed
    assert case.bf16 or own[0] != pytest.approx(loss, rel=1e-5)


def sliced(case: Case, group: int) -> nn.Module:
    """What a rank of ``group`` computes with."""
    model = models.build(case.model)
    slice_layers(model, Layout.of(model, load_config(case.config()), Mesh(case.groups, case.fsdp)), group)
    return model


def test_as_much_is_computed_as_by_a_narrower_model() -> None:
    """Operations, and matrix products: one of a projection."""
    case = Case(2, 1, neurons=6, model="even-llama", placement="cyclic")
    narrower = models.even_llama(
        tied=False, device="cpu", num_attention_heads=2, num_key_value_heads=1, intermediate_size=7
    )
    batch = models.micro_batch(case.model, 0, 0, 0)
    counted = {}
    for name, model in {"narrower": narrower, "slices": sliced(case, 0)}.items():
        with FlopCounterMode(display=False) as counter:
            model(**batch).backward()
        counted[name] = counter.get_flop_counts()["Global"]
    widths = [p.shape for name, p in sliced(case, 0).named_parameters() if "layers.0.mlp.gate_proj" in name]
    assert len(widths) == 3 and sum(rows for rows, _ in widths) == 7  # three of six groups
    assert sum(counted["slices"].values()) == sum(counted["narrower"].values()) > 0
    products = []
    for model in (narrower, sliced(case, 0), sliced(replace(case, masking="backward"), 0)):
        calls: list[str] = []
        with torch.profiler.profile() as profile:
            model(**batch).backward()
        calls = [
            event.key
            for event in profile.key_averages()
            for _ in range(event.count)
            if event.key in ("aten::mm", "aten::addmm")
        ]
        products.append(len(calls))
    assert products[0] == products[1] == products[2]


@pytest.mark.parametrize(
    ("dim", "frozen", "kept"), [(0, (1,), 8), (1, (1,), 3), (1, (), 8), (0, (0, 1), 0), (1, (0, 1), 0)]
)
def test_of_an_input_only_what_a_trained_slice_needs_is_kept(dim: int, frozen: tuple[int, ...], kept: int) -> None:
    """Of 5 rows of 8 inputs, the first 3 of which the first slice takes."""
    held = [index for index in (0, 1) if index not in frozen]
    layer = SlicedLinear(
        nn.Linear(8, 8, bias=False), {"weight": Slices("weight", dim, {0: (0, 3), 1: (3, 8)}, held, frozen)}
    )
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y = layer(torch.randn(5, 8, requires_grad=True))
    weights = {parameter.data_ptr() for parameter in layer.parameters()}
    assert (
        sum(tensor.untyped_storage().nbytes() for tensor in saved if tensor.data_ptr() not in weights) == 4 * 5 * kept
    )
    y.sum().backward()
    assert [parameter.grad is not None for parameter in layer.parameters()] == [index not in frozen for index in (0, 1)]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("frozen", [(), (0,), (0, 1)], ids=str)
def test_a_convolution_of_slices(dim: int, frozen: tuple[int, ...]) -> None:
    """Against torch's own convolution of the slices in their order."""
    full = nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False)
    slices = Slices("weight", dim, {0: (0, 3), 1: (3, 8)}, [index for index in (0, 1) if index not in frozen], frozen)
    layer = SlicedConv2d(full, {"weight": slices})
    plain = full.weight.detach().index_select(dim, slices.where(torch.device("cpu"))).requires_grad_()
    x, x_plain = (
        torch.randn(2, 8, 5, 5, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2)
    )
    y, expected = layer(x), nn.functional.conv2d(x_plain, plain, stride=2, padding=1)
    assert torch.equal(y, expected)
    with FlopCounterMode(display=False) as counter:
        y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, x_plain.grad)
    assert plain.grad is not None
    for index, gradient in zip(
        slices.order, plain.grad.split([(3, 5)[index] for index in slices.order], dim), strict=True
    ):
        ours = layer.get_parameter(f"weight:{index}").grad
        assert (ours is None) == (index in frozen)
        if ours is not None:
            torch.testing.assert_close(ours, gradient)
    trained = sum((3, 5)[index] for index in slices.held)
    assert counter.get_total_flops() == 2 * 2 * 9 * 9 * 8 * (8 + trained)  # 2 images of 3 × 3 outputs, 3 × 3 weights


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(4, 4, 3, groups=2, bias=False), nn.Conv2d(4, 4, 3), nn.Linear(4, 4)], ids=str
)
def test_what_cannot_be_cut_into_neurons_is_named(layer: nn.Module) -> None:
    model: Any = models.mlp(2)
    model.layers[0].inner = layer
    model.neuron_branches = lambda: [Branch("layers.0.inner", 4, (("layers.0.inner.weight", 0),))]
    layout = Layout.of(model, load_config({"sdp": {"groups": 2, "granularity": "neuron", "capacity": 0.5}}), Mesh(2))
    with pytest.raises(
        ModelError, match=r'layers.0.inner: sdp.granularity "neuron" cannot cut weight of this .*; only linear'
    ):
        slice_layers(model, layout, 0)


def test_a_branch_of_which_a_group_has_nothing_is_zero() -> None:
    case = Case(2, 1, neurons=2, model="even-llama")
    model = sliced(case, 1)
    assert [name for name, _ in model.named_parameters() if "layers.0.self_attn" in name] == []
    hidden = torch.randn(2, 5, 12, requires_grad=True)
    attention = model.get_submodule("model.layers.0.self_attn")
    output = attention(hidden, torch.ones(5, 6), torch.zeros(5, 6))
    assert output.shape == hidden.shape and not output.any()
    output.sum().backward()
    assert hidden.grad is not None and not hidden.grad.any()


def test_parameter_groups_of_the_user(ranks: RankPool) -> None:
    """Named in the full model: a group gets the slices of its parameters."""
    assert ranks.run(_rates_of_slices, world=2) == [True, True]


def _rates_of_slices() -> bool:
    case = Case(2, 1, neurons=2, model="even-llama")
    model = models.build(case.model)
    matrices = [parameter for name, parameter in model.named_parameters() if "mlp" in name]
    others = [parameter for name, parameter in model.named_parameters() if "mlp" not in name]
    groups = [{"params": matrices, "lr": 0.5}, {"params": others, "lr": 0.25}]
    config = {key: value for key, value in case.config().items() if key != "scheduler"}
    engine, optimizer, *_ = sdp.initialize(model=model, model_parameters=groups, config=config)
    rates = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    named = engine.parameters_here.items()
    return all(rates[id(parameter)] == (0.5 if "mlp" in name else 0.25) for name, parameter in named)
