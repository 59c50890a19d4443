"""All workers in one pass equal the reference, one after the other; what does not fit into one pass
is refused.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sdp
import torch
from sdp.engine.backends.reference.frozen_rows import FrozenRows
from sdp.engine.backends.reference.vectorized import are_close
from sdp.engine.errors import ConfigError, ModelError
from sdp.models.huggingface import declare_neuron_branches
from sdp.models.registry import build_model
from sdp.tests.support import models
from sdp.tests.support.cases import RELATIVE, Case, assert_same_run, train

SCHEDULE = '[{"until": 2, "masking": "forward"}, {"masking": "backward"}]'
CASES = [
    Case(2, 2, model="llama", clip=True),
    Case(2, model="llama", sizes=(1, 3)),
    Case(4, 1, model="llama-tied-meta", optimizer="adamw", accumulation=3, placement="cyclic", checkpointing="full"),
    Case(4, 2, model="llama-meta", optimizer="adamw", placement="profile"),
    Case(2, 1, model="even-llama", neurons=2, accumulation=3),
    Case(4, 2, model="llama-of-3", neurons=2, optimizer="adamw", clip=True),
    Case(2, 2, model="even-llama-tied-meta", neurons=5, placement="cyclic"),
    Case(2, 2, model="llama", clip=True, masking="backward"),
    Case(2, model="llama", sizes=(1, 3), masking="backward"),
    Case(
        4,
        1,
        model="llama-tied-meta",
        optimizer="adamw",
        accumulation=3,
        placement="cyclic",
        checkpointing="full",
        masking="backward",
    ),
    Case(4, 1, model="llama", steps=4, placement="cyclic", masking=SCHEDULE),
    Case(4, 1, model="llama", optimizer="adamw", lr_scale="0.5"),
    Case(2, 1, model="even-llama", neurons=2, lr_scale="auto"),
    Case(2, 2, model="even-llama", neurons=2, accumulation=3, clip=True, masking="backward"),
    Case(4, 1, model="llama-of-3", neurons=2, optimizer="adamw", masking="backward"),
    Case(2, model="even-llama-tied-meta", neurons=5, sizes=(1, 3), placement="cyclic", masking="backward"),
    Case(2, 2, model="even-llama", neurons=2, steps=4, masking=SCHEDULE),
]


def _rows(kind: str, step: int, micro: int, data_ranks: int) -> dict[str, torch.Tensor]:
    """A batch of which no label is ignored."""
    batch = models.rows_of_all(kind, step, micro, data_ranks)
    return {**batch, "labels": batch["input_ids"].clone()}


def _assert_same_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        atol = RELATIVE * gradient.abs().max().item()
        torch.testing.assert_close(
            ours[name], gradient, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_is_the_references(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdp.tests.support.cases.models", SimpleNamespace(**vars(models) | {"rows_of_all": _rows}))
    ours, theirs = train(case, "vectorized"), train(replace(case, checkpointing="none"), "reference")
    assert_same_run([ours], theirs, case)
    assert ours.gradients is not None and theirs.gradients is not None
    _assert_same_gradients(ours.gradients, theirs.gradients)


def test_evaluations_are_the_references() -> None:
    losses = []
    for engine_name in ("reference", "vectorized"):
        case = Case(4, 1, model="llama", placement="cyclic")
        engine = sdp.initialize(model=models.build(case.model), config=case.config(engine_name))[0]
        batch = _rows(case.model, 0, 0, case.data_ranks)
        engine(batch)  # an evaluation is not of the rows of the pass before
        losses.append([engine.evaluate([batch]), *engine.evaluate_subnetworks([batch])])
    assert losses[1] == pytest.approx(losses[0], rel=RELATIVE)
    assert len(set(losses[0])) == 5


@pytest.mark.parametrize("positions", [8, 6])
def test_a_batch_may_have_as_many_rows_as_a_sequence_has_positions(positions: int) -> None:
    """Tables of positions then have as many entries as the batch has rows."""
    ids = torch.randint(31, (8, positions), generator=torch.Generator().manual_seed(0))
    gradients = []
    for engine_name in ("reference", "vectorized"):
        case = Case(4, 1, model="llama", placement="cyclic", masking="backward")
        engine = sdp.initialize(model=models.build(case.model), config=case.config(engine_name))[0]
        for _ in range(2):
            engine.backward(engine({"input_ids": ids, "labels": ids}))
            gradients.append({name: value.grad.clone() for name, value in engine.parameters_here.items()})
            engine.step()
    for theirs, ours in zip(gradients[:2], gradients[2:], strict=True):
        _assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("granularity", ["block", "neuron"])
def test_later_batches_may_have_other_sizes_and_evaluations_may_come_between(granularity: str) -> None:
    """The second batch has as many rows as one group had in the first."""
    ids = torch.randint(19, (8, 6), generator=torch.Generator().manual_seed(0))
    losses, gradients = [], []
    for engine_name in ("vectorized", "reference"):
        section = {"granularity": granularity, "masking": "backward", "engine": engine_name, "placement": "cyclic"}
        engine = sdp.initialize(model=models.build("even-llama"), config=_config(**section))[0]
        for rows in (ids, ids[:4], ids[:2], ids):
            batch = {"input_ids": rows, "labels": rows}
            engine.backward(engine(batch))
            gradients.append({name: value.grad.clone() for name, value in engine.parameters_here.items()})
            engine.step()
            losses.append(engine.evaluate([batch]))
    assert losses[:4] == pytest.approx(losses[4:], rel=RELATIVE)
    for ours, theirs in zip(gradients[:4], gradients[4:], strict=True):
        _assert_same_gradients(ours, theirs)


def _gradients_with_a_shared_bias(engine_name: str, masking: str) -> dict[str, torch.Tensor]:
    """One step of a LLaMA by neurons, whose projections into a branch's sum have a bias that every
    group holds.
    """
    case = Case(2, 1, model="even-llama", neurons=2, masking=masking)
    model = models.build(case.model)
    for index, layer in enumerate(model.model.layers):
        plain = layer.mlp.down_proj
        layer.mlp.down_proj = torch.nn.Linear(plain.in_features, plain.out_features)
        layer.mlp.down_proj.weight = plain.weight
        torch.nn.init.normal_(layer.mlp.down_proj.bias, generator=torch.Generator().manual_seed(index))
    engine = sdp.initialize(model=model, config=case.config(engine_name))[0]
    engine.backward(engine(_rows(case.model, 0, 0, case.data_ranks)))
    return {name: parameter.grad for name, parameter in engine.parameters_here.items()}


@pytest.mark.parametrize("masking", ["forward", "backward"])
def test_a_bias_that_all_groups_share_is_no_obstacle(masking: str) -> None:
    ours, theirs = (_gradients_with_a_shared_bias(engine, masking) for engine in ("vectorized", "reference"))
    assert any(name.endswith("down_proj.bias") and gradient.abs().max() > 0 for name, gradient in theirs.items())
    _assert_same_gradients(ours, theirs)


def _qwen2() -> torch.nn.Module:
    """Queries, keys and values have a bias."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = sizes | {"vocab_size": 200, "num_key_value_heads": 2, "use_cache": False}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**settings))


def _bert() -> torch.nn.Module:
    """A BERT. The bias of its keys adds the same number to all scores of a query, so softmax is
    unchanged and the gradient of this bias is zero.
    """
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = sizes | {"vocab_size": 200, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**settings))


@pytest.mark.parametrize(
    ("build", "bias", "masking"),
    [(_qwen2, "q_proj", "forward"), (_qwen2, "q_proj", "backward"), (_bert, "value", "backward")],
)
def test_a_bias_of_neurons_trains_with_them(build: Any, bias: str, masking: str) -> None:
    gradients = []
    for engine_name in ("vectorized", "reference"):
        torch.manual_seed(0)
        section = {"granularity": "neuron", "neuron_groups": 2, "masking": masking, "engine": engine_name}
        engine = sdp.initialize(model=declare_neuron_branches(build()), config=_config(**section))[0]
        engine.backward(engine(_rows("llama", 0, 0, 2)))
        found = {name: value.grad for name, value in engine.parameters_here.items()}
        assert any(name.endswith(f"{bias}.bias") and gradient.abs().max() > 0 for name, gradient in found.items())
        gradients.append({name: gradient for name, gradient in found.items() if not name.endswith("key.bias")})
    _assert_same_gradients(*gradients)


def _config(**sdp_section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "sdp": {"groups": 2, "capacity": 0.5, "engine": "vectorized", **sdp_section},
    }


def test_a_model_whose_rows_meet_is_refused() -> None:
    model = build_model({"name": "resnet18", "stem": "cifar", "width": 4}, num_classes=10, image_size=8)
    with pytest.raises(ModelError, match="mixes the rows of all groups"):
        sdp.initialize(model=model, config=_config())


def _adds_a_bias(model: Any) -> None:
    """Of zeros at first, so that nothing shows before it is trained."""
    for layer in model.model.layers:
        layer.bias = torch.nn.Parameter(torch.zeros(12))
        layer.register_forward_hook(lambda layer, _, hidden: hidden + layer.bias)


def _compares_neurons(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(
            lambda _, args: (args[0] / (1 + args[0].norm(dim=-1, keepdim=True)),)
        )


def _goes_past_a_branch(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.__class__ = type("Mlp", (type(layer.mlp),), {"__call__": lambda mlp, hidden: mlp.forward(hidden)})


def _mixes_rows(model: Any) -> None:
    model.model.norm.register_forward_hook(lambda _, __, hidden: hidden + hidden.mean(0, keepdim=True))


def _reads_a_weight_elsewhere(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(
            lambda mlp, args, hidden: hidden + args[0] @ mlp.up_proj.weight.mean(0, keepdim=True).T
        )


def _turns_the_rows(model: Any) -> None:
    for layer in model.model.layers:
        plain = layer.mlp.forward
        layer.mlp.forward = lambda hidden, plain=plain: plain(hidden.flip(0)).flip(0)


def _moves_the_rows(model: Any) -> None:
    """Give every feed-forward block an input that has the rows in its second dimension."""
    for layer in model.model.layers:
        plain = layer.mlp.forward
        layer.mlp.forward = lambda hidden, plain=plain: plain(hidden.transpose(0, 1)).transpose(0, 1)


OF_NEURONS = {"granularity": "neuron", "masking": "backward"}
REFUSED = {
    "a branch is no block": (
        lambda _: None,
        {"units": ["model.layers.*.mlp"]},
        r"model\.layers\.0\.mlp adds more than sums",
    ),
    "a norm is no block": (
        lambda _: None,
        {"units": ["model.layers.*.input_layernorm"]},
        "0.input_layernorm adds more than sums",
    ),
    "more than branches": (_adds_a_bias, {}, r"model\.layers\.0 adds more than sums"),
    "neurons that meet": (_compares_neurons, {"granularity": "neuron"}, r"model\.layers\.0\.mlp adds more than sums"),
    "not a call": (_goes_past_a_branch, {"granularity": "neuron"}, "mlp is not called as a module"),
    "rows that meet": (_mixes_rows, {}, "rows of different groups interact"),
    "a weight with two uses": (
        _reads_a_weight_elsewhere,
        OF_NEURONS,
        r"gradient of model\.layers\.0\.mlp\.up_proj differs",
    ),
    "rows elsewhere": (_moves_the_rows, OF_NEURONS, r"gate_proj must have the 4 rows .* has the shape \(6, 4, 12\)"),
    "rows in another order": (_turns_the_rows, OF_NEURONS, r"gate_proj differs from the reference's"),
    "neurons of rows that meet": (_mixes_rows, OF_NEURONS, "rows of different groups interact"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_the_reference_in_one_pass_is_refused(why: str) -> None:
    change, section, message = REFUSED[why]
    model = models.build("even-llama")
    change(model)
    engine = sdp.initialize(model=model, config=_config(**section))[0]
    with pytest.raises(ModelError, match=message) as error:
        engine(_rows("llama", 0, 0, 2))
    assert "\n" not in str(error.value)


def test_rows_elsewhere_are_found_in_a_square_batch_too() -> None:
    model, ids = models.build("even-llama"), torch.randint(19, (4, 4), generator=torch.Generator().manual_seed(0))
    _moves_the_rows(model)
    engine = sdp.initialize(model=model, config=_config(**OF_NEURONS))[0]
    with pytest.raises(ModelError, match=r"gate_proj differs from the reference's"):
        engine({"input_ids": ids, "labels": ids})


def test_gradients_are_compared_even_if_the_first_call_has_none() -> None:
    model, batch = models.build("even-llama"), _rows("llama", 0, 0, 2)
    _turns_the_rows(model)
    engine = sdp.initialize(model=model, config=_config(**OF_NEURONS))[0]
    with torch.no_grad():
        engine(batch)
    with pytest.raises(ModelError, match=r"gate_proj differs from the reference's"):
        engine(batch)


class _Masked(torch.nn.Module):
    """A block with an optional mask for each row, and a table that is the same for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: torch.Tensor, table: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return self.weight * x * table.sum() * (1 if mask is None else mask)


def test_an_argument_may_be_none_at_first() -> None:
    block, groups = _Masked(), torch.tensor([0, 0, 1, 1])
    of_rows: list[torch.Tensor | None] = [None]
    frozen = FrozenRows(block, [0], lambda: of_rows[0])
    x, table, mask = torch.arange(1.0, 5.0), torch.arange(4.0), torch.tensor([1.0, 0.0, 1.0, 1.0])
    with frozen.learning(), torch.no_grad():
        block(x[:2], table, None)
        of_rows[0] = groups
        block(x, table, None)
    block(x, table, mask).sum().backward()
    assert block.weight.grad is not None
    assert block.weight.grad.item() == table.sum().item()  # of the first row: the second is masked


def test_a_layer_of_neurons_of_another_type_is_refused() -> None:
    model = models.build("even-llama")
    model.model.layers[0].mlp.up_proj.__class__ = type("Adapted", (torch.nn.Linear,), {})
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.up_proj must be an nn\.Linear and is a Adapted; use"):
        sdp.initialize(model=model, config=_config(**OF_NEURONS))
    model = models.build("even-llama")
    plain = model.model.layers[0].mlp.up_proj.forward
    model.model.layers[0].mlp.up_proj.forward = lambda hidden: 3 * plain(hidden)
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.up_proj has a forward of its own"):
        sdp.initialize(model=model, config=_config(**OF_NEURONS))


def test_a_model_that_states_no_branches_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"Mlp does not declare its residual branches \(neuron_branches\(\)\); use \"reference\""
    ):
        sdp.initialize(model=models.build("mlp"), config=_config())


def test_shares_of_unequal_weight_are_refused() -> None:
    engine = sdp.initialize(model=models.build("llama"), config=_config())[0]
    batch = _rows("llama", 0, 0, 2)
    engine(batch)
    labels = batch["labels"].clone()
    labels[0, 1] = -100
    with pytest.raises(ModelError, match="different numbers of targets"):
        engine({**batch, "labels": labels})


def test_scales_of_branches_have_no_meaning_in_one_pass() -> None:
    with pytest.raises(ConfigError, match=r'sdp\.branch_scale: "train" is not available with sdp\.engine "vectorized"'):
        sdp.initialize(model=models.build("llama"), config=_config(branch_scale="train"))


def test_outputs_that_are_no_finite_numbers_compare_too() -> None:
    masked = torch.tensor([1.0, -torch.inf, torch.nan])
    assert are_close(masked, masked * 1.00001, 1e-4)
    assert not are_close(masked, torch.tensor([1.0, 2.0, torch.nan]), 1e-4)
    assert not are_close(masked, masked * 1.001, 1e-4)
    assert are_close(torch.empty(0), torch.empty(0), 1e-4) and are_close(
        torch.tensor([True]), torch.tensor([True]), 1e-4
    )
    assert not are_close(torch.tensor([1]), torch.tensor([2]), 1e-4)
