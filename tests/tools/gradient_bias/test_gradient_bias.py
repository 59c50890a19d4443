"""``sdp gradient-bias``: what is unbiased is found to be, what is not is told from noise, and the
estimator estimates.
"""

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
from sdp.engine.construct import values_to_give
from sdp.engine.distributed.mesh import mesh_of
from sdp.engine.errors import NonFiniteError
from sdp.engine.placement.layout import Layout
from sdp.engine.placement.tensor_info import Shard
from sdp.engine.subnetwork.materialise import give_values
from sdp.models.registry import build_model
from sdp.tools.cli import main
from sdp.tools.gradient_bias.estimate import Bias, Differences, Products, apparent_by_batches, estimate
from sdp.tools.gradient_bias.measure import BACKWARD, FORWARD, OVERALL, compare, gradient, in_one_process

GROUPS, MICRO, TOKENS, VOCABULARY = 4, 2, 12, 31
MODEL = {
    "name": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
    "max_position_embeddings": 32, "initializer_range": 0.2,
}  # fmt: skip


def rows(batches: int, *, same_data: bool, accumulation: int = 1) -> Iterator[list[Any]]:
    """Each token follows from the one before, with some noise, so that there is a gradient to
    estimate.
    """
    generator = torch.Generator().manual_seed(1)
    for _ in range(batches):
        made = []
        for _ in range(accumulation):
            count = MICRO if same_data else MICRO * GROUPS
            steps = torch.randint(1, 3, (count, TOKENS), generator=generator)
            ids = (torch.randint(VOCABULARY, (count, 1), generator=generator) + steps.cumsum(1)) % VOCABULARY
            ids = ids.repeat(GROUPS if same_data else 1, 1)
            made.append({"input_ids": ids, "labels": ids.clone()})
        yield made


def biases(
    batches: int = 8, *, same_data: bool = False, accumulation: int = 1, **section: Any
) -> dict[str, dict[str, Bias]]:
    section = {"groups": GROUPS, "capacity": 0.5, "profile": "uniform"} | section
    config = in_one_process(load_config({"train_micro_batch_size_per_gpu": MICRO, "model": MODEL, "sdp": section}))
    model = build_model(config.model, VOCABULARY)
    layout = Layout.of(model, config, mesh_of(config, 1))
    give_values(model, layout, values_to_give(model, config, layout), torch.device("cpu"), Shard())
    found = compare(config, model, layout, rows(batches, same_data=same_data, accumulation=accumulation))
    return {name: {unit: estimate(products) for unit, products in of_units.items()} for name, of_units in found.items()}


@pytest.mark.parametrize("section", [{}, {"granularity": "neuron", "neuron_groups": 2}], ids=["blocks", "neurons"])
def test_on_the_same_rows_backward_masking_is_the_dense_gradient_and_forward_masking_is_not(
    section: dict[str, Any],
) -> None:
    found = biases(12, same_data=True, **section)
    for unit, bias in found[BACKWARD].items():
        assert bias.apparent is not None and bias.apparent < 1e-6, unit
        assert not bias.shown
    for unit, bias in found[FORWARD].items():
        assert bias.apparent is not None and bias.apparent > 0.05, unit
    assert found[FORWARD][OVERALL].shown


@pytest.mark.parametrize("engine", ["reference", "vectorized"])
def test_at_capacity_1_nothing_differs(engine: str) -> None:
    found = biases(4, capacity=1.0, engine=engine)
    for masking in (FORWARD, BACKWARD):
        for unit, bias in found[masking].items():
            if engine == "vectorized" and masking == BACKWARD:  # which is the reference's: sums in another order
                assert bias.rounding, unit
            else:
                assert (bias.apparent, bias.bias, bias.z) == (0.0, 0.0, 0.0), unit


def test_rows_of_their_own_make_noise_under_backward_masking_and_bias_under_forward_masking() -> None:
    found = biases(16)
    forward, backward = found[FORWARD][OVERALL], found[BACKWARD][OVERALL]
    assert forward.shown and forward.bias is not None and forward.bias > 0.1
    assert backward.apparent is not None and backward.apparent > 0.01
    assert not any(bias.shown for bias in found[BACKWARD].values())
    assert found[BACKWARD]["shared"].rounding  # all groups hold it, and run the dense model


def test_one_pass_and_several_micro_batches_give_the_references_figures() -> None:
    one, other = (biases(4, engine=engine, accumulation=2) for engine in ("reference", "vectorized"))
    for unit, bias in one[FORWARD].items():
        assert other[FORWARD][unit].apparent == pytest.approx(bias.apparent, rel=1e-4)


def products_of(differences: torch.Tensor, dense: torch.Tensor) -> Products:
    total = dense.sum(0)
    return Products(
        differences @ differences.T,
        float(total @ total),
        float(total @ differences.sum(0)),
        float(dense.square().sum()),
    )


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
    assert found.cosine == pytest.approx(1.0)
    assert found.dense_noise == 0.0
    points = dict(apparent_by_batches(products_of(differences, dense)))
    assert points == {1: pytest.approx(math.sqrt(5) / 2), 2: pytest.approx(1 / 2), 4: pytest.approx(1 / 2)}


def test_a_dense_gradient_of_zero_has_nothing_relative_to_it() -> None:
    found = estimate(products_of(torch.ones(4, 2, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)))
    assert (found.apparent, found.bias, found.cosine) == (None, None, None)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration with data of its own."""
    folder = tmp_path_factory.mktemp("bias")
    for number in range(10):
        (folder / f"{number}.txt").write_text("one thing follows from another, and then\n" * (30 + number))
    options = {"tokenizer": "bytes", "held_out": 0.2, "workers": 1, "progress": False}
    prepare([str(folder / "*.txt")], folder / "shards", **options)
    path = folder / "small.json"
    path.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                "bf16": {"enabled": True},  # rounding is no bias: measured in float32 all the same
                "sdp": {"groups": GROUPS, "capacity": 0.5},
                "model": MODEL,
                "data": {"path": str(folder / "shards"), "sequence_length": 32},
                "training": {"steps": 2, "save_every": 2},
            }
        )
    )
    return path


def test_the_command_writes_table_plot_and_figures(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, figures = tmp_path / "out", tmp_path / "figures.json"
    assert (
        main(["gradient-bias", str(config), "--batches", "4", "--same-data", "--out", str(out), "--json", str(figures)])
        == 0
    )
    printed = capsys.readouterr().out
    assert "| model.layers.0 | 4 |" in printed and "| overall |  |" in printed
    verdict = next(line for line in printed.splitlines() if line.startswith("backward: "))
    assert "the dense gradient on every batch" in verdict
    assert (out / "gradient_bias.md").read_text() in printed
    assert (out / "gradient_bias.png").stat().st_size > 10_000
    found = json.loads(figures.read_text())
    assert found["holders"]["model.layers.0"] == 4 and found["same_data"] is True
    assert found["biases"]["forward"]["overall"]["bias"] > 0.01
    assert [size for size, _ in found["by_batches"]["forward"]] == [1, 2, 4]


def test_weights_of_a_run_are_its_checkpoints(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, here = tmp_path / "run", ["--out", str(tmp_path / "out"), "--json", str(tmp_path / "figures.json")]
    assert (
        main(["train", str(config), "--set", "sdp.engine=reference", "bf16.enabled=false", "--dump-dir", str(run)]) == 0
    )
    found = []
    for more in ([], ["--checkpoint", str(run)], ["--checkpoint", str(run / "checkpoints" / "step-2")]):
        assert main(["gradient-bias", str(config), "--batches", "4", *more, *here]) == 0
        found.append(json.loads((tmp_path / "figures.json").read_text()))
    assert found[0]["weights"] == "initial, seed 0"
    assert found[1]["weights"] == f"step 2 of {run}"
    assert found[1] == found[2]
    assert found[1]["biases"] != found[0]["biases"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batches", "3"], "--batches 3: at least 4 are needed"),
        (["--batches", "4000"], "independent batches need 16,000 samples"),
        (["--set", "sdp.groups=1", "sdp.capacity=1"], "sdp.groups 1: the one group has the dense model's gradient"),
        (["--checkpoint", "nowhere"], "nowhere: neither a run nor a checkpoint of a run"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["gradient-bias", str(config), *arguments, "--out", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_gradients_with_nan_are_an_error() -> None:
    model = {
        "name": "llama",
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = load_config({"train_micro_batch_size_per_gpu": 1, "sdp": {"groups": 2, "capacity": 0.5}, "model": model})
    differences = Differences(Layout.of(build_model(config.model), config, mesh_of(config, 2)))
    with pytest.raises(NonFiniteError, match="is NaN or infinite on a batch"):
        differences.add({"w": torch.ones(2)}, {FORWARD: {"w": torch.tensor([1.0, float("nan")])}})


def test_outputs_are_tried_before_anything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "a.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "sdp": {"groups": 2, "capacity": 0.5}}))
    for option, path, message in (
        ("--out", config, "cannot be made a folder"),
        ("--json", tmp_path, "is a folder; name a file"),
    ):
        words = ["--out", str(tmp_path / "out")] if option == "--json" else []
        assert main(["gradient-bias", str(config), *words, option, str(path)]) == 2
        assert message in capsys.readouterr().err


def test_convolutions_are_in_float32_while_gradients_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN takes TF32 for them by default, 10 bits, which masking would be blamed for."""
    seen: list[bool] = []

    def watched(*args: Any) -> dict[str, torch.Tensor]:
        seen.append(torch.backends.cudnn.allow_tf32)
        return gradient(*args)

    monkeypatch.setattr("sdp.tools.gradient_bias.measure.gradient", watched)
    before = torch.backends.cudnn.allow_tf32
    biases(2)
    assert seen == [False] * 6
    assert torch.backends.cudnn.allow_tf32 == before
