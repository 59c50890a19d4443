"""Groups of hidden neurons: the oracle against narrower models, cut by hand."""

import copy
import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from sdp.engine.config.load import load_config
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.errors import ConfigError, ModelError, PlacementError
from sdp.engine.model_interface import Branch
from sdp.engine.placement.layout import Layout
from sdp.engine.placement.units import find_neuron_units, find_units
from sdp.engine.subnetwork.neurons import SlicedBatchNorm, Slices
from sdp.tests.support import models
from sdp.tests.support.cases import Case, oracle_for, rate_of
from torch import nn

GROUPS = 2
RELATIVE = 1e-5  # of the largest element, as in the table of equality
LLAMA = {
    "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 15, "vocab_size": models.VOCABULARY,
    "qk_norm": True,
}  # fmt: skip
# Of three groups in every branch: some with one holder, some with two, and two branches of which a
# group has nothing.
HOLDERS = [[0], [0, 1], [1], [0, 1], [1], [0]] * 3 + [[0], [0], [0], [1], [1], [1]]


def llama(**fields: Any) -> nn.Module:
    return models.even_llama(tied=True, device="cpu", **LLAMA | fields)


def config(case: Case = Case(GROUPS), **section: Any) -> dict[str, Any]:  # noqa: B008 - frozen
    """With neuron units placed by hand."""
    names = [unit.name for unit in find_neuron_units(llama(), 3)]
    placement = dict(zip(names, HOLDERS, strict=True))
    neuron = {
        "granularity": "neuron", "neuron_groups": 3, "placement": placement, "groups": GROUPS,
    }  # fmt: skip
    return case.config() | {"sdp": neuron | section}


def indices(name: str, group: int) -> tuple[int, torch.Tensor] | None:
    """The dimension that is cut in three, and the indices that ``group`` holds of it."""
    layer, branch, projection = (name.split(".") + [""] * 6)[2:5]
    if branch not in ("self_attn", "mlp") or projection.endswith("norm"):
        return None
    dim = 1 if projection in ("o_proj", "down_proj") else 0
    size = {"mlp": 15, "self_attn": 36 if projection in ("q_proj", "o_proj") else 18}[branch]
    held = [group in holders for holders in HOLDERS[6 * int(layer) + 3 * (branch == "mlp") :][:3]]
    return dim, torch.arange(size)[torch.tensor(held).repeat_interleave(size // 3)]


def narrow(full: nn.Module, group: int) -> nn.Module:
    model = copy.deepcopy(full)
    for name, parameter in list(model.named_parameters()):
        if (cut := indices(name, group)) is not None:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(parameter.detach().index_select(*cut)))
    return model


def by_hand(
    full: nn.Module, batches: Mapping[int, list[Any]], masking: str
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Gradients of the full model, and every worker's loss; ``batches`` by worker.

    With backward masking they are, of every slice, the mean of dense gradients over its holders.
    """
    total = {name: torch.zeros_like(p) for name, p in full.named_parameters()}
    workers = {name: torch.zeros_like(p) for name, p in full.named_parameters()}
    losses = []
    for worker, micro_batches in batches.items():
        group = worker * GROUPS // len(batches)
        model = narrow(full, group) if masking == "forward" else copy.deepcopy(full)
        loss = torch.stack([model(**batch) for batch in micro_batches]).mean()
        loss.backward()
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            dim, where = indices(name, group) or (0, torch.arange(parameter.shape[0]))
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            gradient = gradient if masking == "forward" else gradient.index_select(dim, where)
            total[name].index_add_(dim, where, gradient)
            workers[name].index_add_(dim, where, torch.ones_like(gradient))
    return {name: total[name] / workers[name] for name in total}, losses


@pytest.mark.parametrize("masking", ["forward", "backward"])
@pytest.mark.parametrize("case", [Case(GROUPS), Case(GROUPS, 2, accumulation=3)], ids=str)
def test_the_oracle_trains_as_by_hand(case: Case, masking: str) -> None:
    full = llama()
    oracle = oracle_for(llama(), config(case, masking=masking), case.data_ranks)
    for step in range(3):
        batches = {
            worker: [models.micro_batch("llama", step, micro, worker) for micro in range(case.accumulation)]
            for worker in range(case.data_ranks)
        }
        gradients, losses = by_hand(full, batches, masking)
        rate = rate_of(case, step)
        done = oracle.step([list(micros) for micros in zip(*batches.values(), strict=True)], rate)
        for name, gradient in done.gradients.items():
            piece = oracle.pieces[name]
            whole = gradients[piece.canonical]
            torch.testing.assert_close(
                gradient, piece.of(whole), rtol=0, atol=RELATIVE * whole.abs().max().item(), msg=name
            )
        assert done.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
        norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt().item()
        assert done.norm == pytest.approx(norm, rel=1e-5)
        with torch.no_grad():
            for name, parameter in full.named_parameters():
                parameter -= rate * gradients[name]
    state = oracle.state_dict()
    assert list(state) == list(full.state_dict())
    for name, weight in full.state_dict().items():
        torch.testing.assert_close(state[name], weight, rtol=0, atol=1e-5 * weight.abs().max().item())


def test_losses_of_the_full_model_and_of_the_subnetworks() -> None:
    oracle = oracle_for(llama(), config(), GROUPS)
    batch = models.rows_of_all("llama", 0, 0, GROUPS)
    assert oracle.evaluate(batch) == pytest.approx(llama()(**batch).item(), rel=1e-6)
    rows = [models.micro_batch("llama", 0, 0, group) for group in range(GROUPS)]
    own = [narrow(llama(), group)(**rows[group]).item() for group in range(GROUPS)]
    assert [oracle.evaluate(rows[group], group) for group in range(GROUPS)] == pytest.approx(own, rel=1e-6)
    assert own[0] != pytest.approx(llama()(**models.micro_batch("llama", 0, 0, 0)).item(), rel=1e-3)


def test_units_are_cut_as_the_branch_allows() -> None:
    units = find_neuron_units(llama(), 4)
    assert [unit.name for unit in units[:3]] == [
        f"model.layers.0.self_attn.neurons.{group}" for group in range(3)
    ]  # 3 key/value heads
    assert len(units) == 4 * (3 + 4)
    attention = find_neuron_units(models.build("swin-meta"), 2)[
        1
    ]  # the second of two heads of 3 channels, beside queries, keys, values
    assert [part.ranges[0] for part in attention.slices] == [(1, 2), *[(3, 6), (9, 12), (15, 18)] * 2, (3, 6)]
    assert [part.index for part in attention.slices] == [1, *[1, 3, 5] * 2, 1]


@pytest.mark.parametrize(
    ("model", "cut"),
    [
        (llama, "_proj"),
        (functools.partial(models.resnet, "cpu"), r"layer(1\.0|\d\.1)\.(conv1|bn1|conv2)"),
        (functools.partial(models.swin, "cpu"), r"table|qkv|proj.weight|mlp\.0|mlp\.3\.weight"),
    ],
)
def test_units_cover_every_branch_once(model: Any, cut: str) -> None:
    model = model()
    units = find_neuron_units(model, 4)
    for block in find_units(model, "auto"):
        of_block = sum(unit.flops for unit in units if unit.name.startswith(f"{block.name}."))
        assert block.flops - len(units) < of_block <= block.flops  # rounded down
    parameters = dict(model.named_parameters())
    counts = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for unit in units:
        sizes = {part: parameters[part.parameter] for part in unit.slices}
        assert unit.numel == sum(
            (last - first) * of.numel() // of.shape[part.dim]
            for part, of in sizes.items()
            for first, last in part.ranges
        )
        for part in unit.slices:
            ((first, last),) = part.ranges
            counts[part.parameter].narrow(part.dim, first, last - first).add_(1)
    for name, count in counts.items():
        assert (count == (1 if re.search(cut, name) else 0)).all(), name


def test_patterns_beside_neurons_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sdp\.units: patterns name blocks"):
        load_config(config(units=["model.layers.*"]))


def test_groups_of_neurons_that_tensor_parallel_ranks_cannot_share_are_named() -> None:
    case, model = Case(2, neurons=4, model="wide-llama-meta", placement="cyclic", tp=2), models.build("wide-llama-meta")
    message = (
        r"model\.layers\.0\.self_attn\.neurons\.0: 1 neurons .* tensor_parallel\.autotp_size = 2 ranks; choose "
        r"sdp\.neuron_groups"
    )
    with pytest.raises(ModelError, match=message):
        Layout.of(model, load_config(case.config()), Mesh(2, 1, 2))
    assert Layout.of(model, load_config(replace(case, neurons=2).config()), Mesh(2, 1, 2)).units[0].neurons == 2


class NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = models.Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x).square().mean()

    def neuron_branches(self) -> list[Branch]:
        return [Branch("mlp", models.HIDDEN, (("mlp.up.weight", 0), ("mlp.down.weight", 1)))]


def layout_of(model: nn.Module, **section: Any) -> Layout:
    return Layout.of(model, load_config(config(**section)), Mesh(GROUPS))


def test_a_branch_outside_of_the_blocks() -> None:
    with pytest.raises(ModelError, match=r"mlp.neurons.0: is in none of the blocks"):
        layout_of(NoBlocks(), placement="cyclic", capacity=0.5)


def test_a_model_without_stated_branches_and_a_wrong_name() -> None:
    with pytest.raises(ModelError, match='"neuron" needs a model that states its residual branches'):
        layout_of(models.mlp(), placement="cyclic", capacity=0.5)
    with pytest.raises(PlacementError, match="is not a module of the model, did you mean"):
        layout_of(llama(), placement={"layers.0.mlp.neuron.1": [0]})


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("tracks", [True, False])
def test_a_sliced_batch_norm_is_the_whole_one_on_its_channels(tracks: bool, training: bool) -> None:
    """Without running statistics those of the batch are used in evaluation too, as torch does."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(6, track_running_stats=tracks)
    slices = {key: Slices(key, 0, {0: (0, 2), 1: (2, 4), 2: (4, 6)}, held=[0, 2]) for key in ("weight", "bias")}
    sliced, here = SlicedBatchNorm(copy.deepcopy(norm), slices).train(training), [0, 1, 4, 5]
    images = torch.randn(4, 6, 3, 3)
    torch.testing.assert_close(sliced(images[:, here]), norm.train(training)(images)[:, here])
    if tracks:
        torch.testing.assert_close(sliced.running_mean[here], norm.running_mean[here])  # type: ignore[index]
