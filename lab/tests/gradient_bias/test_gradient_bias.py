"""What is unbiased is found to be, what is not is told from noise, and the estimator estimates."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.data.prepare import prepare
from sdp.engine.config.load import load_config
from sdp.engine.errors import NonFiniteError
from sdp.models.registry import build_model

from lab.gradient_bias.__main__ import main
from lab.gradient_bias.estimate import Bias, Differences, Products, apparent_by_batches, estimate
from lab.gradient_bias.measure import OVERALL, compare
from lab.simulator.training import with_first_values

GROUPS, MICRO, TOKENS, VOCABULARY = 4, 2, 12, 31
MODEL = {
    "name": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
    "max_position_embeddings": 32, "initializer_range": 0.2,
}  # fmt: skip


def rows(batches: int, *, same_data: bool) -> Iterator[list[Any]]:
    """Each token follows from the one before, with some noise, so that there is a gradient."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(batches):
        count = MICRO if same_data else MICRO * GROUPS
        steps = torch.randint(1, 3, (count, TOKENS), generator=generator)
        ids = (torch.randint(VOCABULARY, (count, 1), generator=generator) + steps.cumsum(1)) % VOCABULARY
        ids = ids.repeat(GROUPS if same_data else 1, 1)
        yield [{"input_ids": ids, "labels": ids.clone()}]


def biases(batches: int, *, same_data: bool = False, **section: Any) -> dict[str, dict[str, Bias]]:
    section = {"groups": GROUPS, "capacity": 0.5, "profile": "uniform"} | section
    config = load_config({"train_micro_batch_size_per_gpu": MICRO, "model": MODEL, "sdp": section})
    model = build_model(config.model, VOCABULARY)
    layout = with_first_values(config, model, torch.device("cpu"))
    found = compare(model, layout, rows(batches, same_data=same_data))
    return {name: {unit: estimate(products) for unit, products in of_units.items()} for name, of_units in found.items()}


@pytest.mark.parametrize("section", [{}, {"granularity": "neuron", "neuron_groups": 2}], ids=["blocks", "neurons"])
def test_on_the_same_rows_backward_masking_is_the_dense_gradient_and_forward_masking_is_not(
    section: dict[str, Any],
) -> None:
    found = biases(12, same_data=True, **section)
    for unit, bias in found["backward"].items():
        assert bias.apparent is not None and bias.apparent < 1e-6, unit
        assert not bias.shown
    for unit, bias in found["forward"].items():
        assert bias.apparent is not None and bias.apparent > 0.05, unit
    assert found["forward"][OVERALL].shown


def test_at_capacity_1_nothing_differs() -> None:
    for of_units in biases(4, capacity=1.0).values():
        for unit, bias in of_units.items():
            assert (bias.apparent, bias.bias, bias.z) == (0.0, 0.0, 0.0), unit


def test_rows_of_their_own_make_noise_under_backward_masking_and_bias_under_forward_masking() -> None:
    found = biases(16)
    forward, backward = found["forward"][OVERALL], found["backward"][OVERALL]
    assert forward.shown and forward.bias is not None and forward.bias > 0.1
    assert backward.apparent is not None and backward.apparent > 0.01
    assert not any(bias.shown for bias in found["backward"].values())
    assert found["backward"]["shared"].rounding  # all groups hold it, and run the dense model


def products_of(differences: torch.Tensor, dense: torch.Tensor) -> Products:
    total = dense.sum(0)
    gram = differences @ differences.T
    return Products(gram, float(total @ total), float(total @ differences.sum(0)), float(dense.square().sum()))


def drawn(bias: float, generator: torch.Generator, batches: int = 8, size: int = 40) -> Products:
    """Unit noise in every element, and a bias of this norm; the dense gradient is of norm 10."""
    noise = torch.randn(batches, size, generator=generator, dtype=torch.float64)
    dense = torch.zeros(batches, size, dtype=torch.float64)
    dense[:, 0] = 10
    return products_of(noise + bias / math.sqrt(size), dense)


def test_the_estimate_is_unbiased_and_noise_alone_is_seldom_called_a_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    for true in (0.0, 3.0):
        found = [drawn(true, generator) for _ in range(400)]
        squares = [float(one.gram.sum() - one.gram.trace()) / 56 for one in found]
        assert sum(squares) / 400 == pytest.approx(true**2, abs=0.4)  # its deviation is about 0.1 and 0.15
        floors = [estimate(one).floor or 0.0 for one in found]
        assert sum(floors) / 400 == pytest.approx(math.sqrt(40 / 8) / 10, rel=0.05)
        shown = sum(estimate(one).shown for one in found)
        assert shown <= 8 if true == 0 else shown >= 220


def test_figures_of_gradients_worked_out_by_hand() -> None:
    differences = torch.tensor([[1.0, 2.0], [1.0, -2.0], [1.0, 2.0], [1.0, -2.0]], dtype=torch.float64)
    dense = torch.tensor([[2.0, 0.0]] * 4, dtype=torch.float64)
    found = estimate(products_of(differences, dense))
    assert found.apparent == pytest.approx(1 / 2)  # the mean difference is (1, 0)
    assert found.floor == pytest.approx(math.sqrt(16 / 3 / 4) / 2)  # trace of the sample covariance: 4 · 4 / 3
    assert found.bias == 0.0  # 1 − 4 / 3 is negative
    assert found.error is None and not found.shown
    assert found.cosine == pytest.approx(1.0) and found.dense_noise == 0.0
    points = dict(apparent_by_batches(products_of(differences, dense)))
    assert points == {1: pytest.approx(math.sqrt(5) / 2), 2: pytest.approx(1 / 2), 4: pytest.approx(1 / 2)}


def test_gradients_with_nan_are_an_error() -> None:
    config = load_config({"train_micro_batch_size_per_gpu": 1, "model": MODEL, "sdp": {"groups": 2, "capacity": 0.5}})
    layout = with_first_values(config, build_model(config.model, VOCABULARY), torch.device("cpu"))
    with pytest.raises(NonFiniteError, match="is NaN or infinite on a batch"):
        Differences(layout).add({"w": torch.ones(2)}, {"forward": {"w": torch.tensor([1.0, float("nan")])}})


def test_the_command_writes_table_plot_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("one thing follows from another, and then\n" * (30 + number))
    options = {"tokenizer": "bytes", "held_out": 0.2, "workers": 1, "progress": False}
    prepare([str(tmp_path / "*.txt")], tmp_path / "shards", **options)
    config, out = tmp_path / "small.json", tmp_path / "out"
    section = {"groups": GROUPS, "capacity": 0.5}
    text = {"path": str(tmp_path / "shards"), "sequence_length": 32}
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "sdp": section, "model": MODEL, "data": text}))
    assert main([str(config), str(out), "--batches", "4", "--same-data"]) == 0
    printed = capsys.readouterr().out
    assert "| model.layers.0 | 4 |" in printed and "| overall |  |" in printed
    verdict = next(line for line in printed.splitlines() if line.startswith("backward: "))
    assert "the dense gradient on every batch" in verdict
    assert (out / "results.md").read_text() in printed and (out / "plot.png").stat().st_size > 10_000
    found = json.loads((out / "results.json").read_text())
    assert found["holders"]["model.layers.0"] == 4 and found["same_data"] is True
    assert found["biases"]["forward"]["overall"]["bias"] > 0.01
    assert main([str(config), str(out), "--batches", "4000"]) == 2
    assert "independent batches need 16,000 samples" in capsys.readouterr().err
