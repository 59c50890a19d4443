"""The simulator computes what the oracle does, and real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp.data.prepare import prepare
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError, ModelError
from sdp.models.registry import build_model
from sdp.tests.support import models
from sdp.tests.support.cases import CLIP, EPSILON, RELATIVE, Case, masking_of, oracle_of, rate_of
from sdp.tools.cli import main
from sdp.tools.runs.run_files import read_run

from lab.simulator.rows import BlockRows, Rows
from lab.simulator.training import Simulation, require_followed, train
from lab.simulator.workers import Workers, mean_loss, split_rows

CPU = torch.device("cpu")
SCHEDULE = '[{"until": 2, "masking": "forward"}, {"masking": "backward"}]'
# A cover of the pairs of masking, granularity, optimizer, placement, accumulation and rates.
CASES = [
    Case(2, model="llama", clip=True),
    Case(4, model="llama-tied-meta", optimizer="adamw", accumulation=3, placement="cyclic", masking="backward"),
    Case(4, model="llama", optimizer="adamw", lr_scale="0.5", placement="profile", masking=SCHEDULE, steps=4),
    Case(2, model="even-llama", neurons=2, accumulation=3, clip=True, masking="backward", lr_scale="auto"),
    Case(4, model="llama-of-3", neurons=2, optimizer="adamw", lr_scale="0.5"),
    Case(2, model="even-llama-tied-meta", neurons=5, placement="cyclic", masking=SCHEDULE, steps=4),
]


def _batch(case: Case, step: int, micro: int) -> dict[str, torch.Tensor]:
    """A batch of which no label is ignored."""
    batch = models.rows_of_all(case.model, step, micro, case.groups)
    return {**batch, "labels": batch["input_ids"].clone()}


def _simulation(case: Case, compiled: bool = False) -> Simulation:
    config = case.config()
    config["training"] = {**config.get("training", {}), "compile": compiled}
    return Simulation(load_config(config), models.build(case.model), CPU)


@pytest.mark.parametrize(
    ("case", "compiled"), [*((case, False) for case in CASES), (CASES[0], True), (CASES[2], True)], ids=str
)
def test_a_run_is_that_of_the_oracle(case: Case, compiled: bool) -> None:
    ours, theirs = _simulation(case, compiled), oracle_of(case)
    torch._dynamo.utils.counters.clear()
    before = theirs.state_dict()
    for step in range(case.steps):
        batches = [_batch(case, step, micro) for micro in range(case.accumulation)]
        loss, norm = ours.step(batches)
        done = theirs.step(
            [split_rows(batch, case.groups) for batch in batches], rate_of(case, step), masking=masking_of(case, step)
        )
        assert loss == pytest.approx(done.loss, rel=RELATIVE)
        assert norm == pytest.approx(done.norm, rel=RELATIVE)
        assert not case.clip or norm > CLIP, "the clipping does nothing"
    assert mean_loss(ours.model, [batches[0]]) == pytest.approx(theirs.evaluate(batches[0]), rel=RELATIVE)
    assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > 1) == compiled
    assert not torch._dynamo.utils.counters["unimplemented"]
    weights = dict(ours.model.named_parameters())
    for name, after in theirs.state_dict().items():
        if name in weights:
            moved = (after - before[name]).norm()
            rounding = case.steps * EPSILON * after.norm()  # a step rounds each weight once
            assert moved > 100 * rounding and (weights[name] - after).norm() < 1e-4 * moved + rounding, name


def test_a_run_is_that_of_real_processes(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("one thing follows from another, and then\n" * (30 + number))
    options = {"tokenizer": "bytes", "held_out": 0.2, "workers": 1, "progress": False}
    prepare([str(tmp_path / "*.txt")], tmp_path / "shards", **options)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WSD", "params": {"warmup_num_steps": 2, "total_num_steps": 8, "decay_num_steps": 4}},
        "sdp": {"groups": 2, "capacity": 0.5, "masking": "backward", "lr_scale": 0.5},
        "model": {"name": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
                  "num_attention_heads": 2},
        "data": {"path": str(tmp_path / "shards"), "sequence_length": 32},
        "training": {"steps": 8, "evaluate_every": 4, "evaluate_batches": 2},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = train(load_config(config), tmp_path)["evaluations"]
    assert main(["train", str(tmp_path / "config.json"), "--dump-dir", str(tmp_path / "run")]) == 0
    theirs = [line for line in read_run(tmp_path / "run").evaluations if line["step"]]
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == [4, 8]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-4)
    assert ours[0]["loss"] - ours[1]["loss"] > 0.05, "it learns too little to show a difference"


def test_rows_may_be_as_many_as_a_sequence_has_positions() -> None:
    """Tables of positions then have as many entries as the batch has rows."""
    ids = torch.randint(31, (8, 8), generator=torch.Generator().manual_seed(0))
    _simulation(Case(4, model="llama", placement="cyclic", masking="backward")).step(
        [{"input_ids": ids, "labels": ids}]
    )


def test_rows_of_no_group_are_the_full_models() -> None:
    block, rows = torch.nn.Linear(3, 3), Rows()
    with torch.no_grad():
        BlockRows("block", block, [0], rows)
        x = torch.randn(4, 3)
        whole = block(x)
        rows.groups = torch.tensor([0, 0, 1, 1])
        assert torch.equal(block(x)[2:], x[2:]) and torch.equal(block(x)[:2], whole[:2])
        rows.groups = None
        assert torch.equal(block(x), whole)


def _mixes_rows(model: Any) -> None:
    model.model.norm.register_forward_hook(lambda _, __, hidden: hidden + hidden.mean(0, keepdim=True))


def _turns_rows(model: Any) -> None:
    for layer in model.model.layers:
        plain = layer.mlp.forward
        layer.mlp.forward = lambda hidden, plain=plain: plain(hidden.flip(0)).flip(0)


def _moves_rows(model: Any) -> None:
    for layer in model.model.layers:
        plain = layer.mlp.forward
        layer.mlp.forward = lambda hidden, plain=plain: plain(hidden.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize(
    ("change", "neurons", "message"),
    [
        (_mixes_rows, 0, "rows of different groups interact"),
        (_mixes_rows, 2, "rows of different groups interact"),
        (_turns_rows, 2, "rows of different groups interact"),
        (_moves_rows, 2, "needs the 2 rows of the batch in the first dimension"),
    ],
)
def test_a_model_whose_rows_interact_is_refused(change: Any, neurons: int, message: str) -> None:
    case, model = Case(2, model="even-llama", neurons=neurons, masking="backward"), models.build("even-llama")
    change(model)
    with pytest.raises(ModelError, match=message):
        Simulation(load_config(case.config()), model, CPU).step([_batch(case, 0, 0)])


def test_batch_norm_is_refused() -> None:
    model = build_model({"name": "resnet18", "stem": "cifar", "width": 4}, num_classes=10, image_size=8)
    config = load_config({"train_micro_batch_size_per_gpu": 1, "sdp": {"groups": 2, "capacity": 0.5}})
    with pytest.raises(ModelError, match="mixes the rows of all groups"):
        Simulation(config, model, CPU)


def test_groups_with_different_numbers_of_targets_are_refused() -> None:
    case = Case(2, model="llama")
    run, batch = _simulation(case), _batch(case, 0, 0)
    batch["labels"][0] = -100
    with pytest.raises(ModelError, match="different numbers of targets"):
        run.step([batch])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bf16": {"enabled": True}}, r"^bf16: the simulator does not follow this key"),
        ({"sdp": {"groups": 2, "sync": {"every": 8}}}, r"^sdp\.sync: the simulator does not follow this key"),
        ({"training": {}}, "needs a number of steps"),
        ({"optimizer": {"type": "Muon", "params": {"lr": 0.1}}}, "has no Muon"),
        (
            {"sdp": {"groups": 2, "granularity": "neuron"}, "training": {"steps": 1, "compile": True}},
            "compiles blocks only",
        ),
    ],
)
def test_a_key_that_is_not_followed_is_refused(change: dict[str, Any], message: str) -> None:
    base = {"train_micro_batch_size_per_gpu": 1, "training": {"steps": 1}}
    require_followed(load_config(base))
    with pytest.raises(ConfigError, match=message):
        require_followed(load_config(base | change))


def test_in_turn_and_in_one_pass_a_group_alone_has_its_own_gradient() -> None:
    """Forward masking: the gradient of a unit with one holder is that holder's."""
    case = Case(2, model="llama", placement="cyclic")
    run = _simulation(case)
    batch = _batch(case, 0, 0)
    workers = Workers(run.model, run.layout)
    one = workers.gradients([batch], "forward")
    grads = {name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None}
    assert workers.gradients([batch], "forward", in_turn=True) == pytest.approx(one, rel=RELATIVE)
    for name, parameter in run.model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-4, atol=1e-6)
