"""Paths (``sdp.paths``): every store equals the oracle; with one path, training is dense."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sdp
import torch
from safetensors.torch import save_file
from sdp.engine.config.load import load_config
from sdp.engine.errors import ConfigError, ModelError
from sdp.tests.support import models
from sdp.tests.support.cases import (
    Case,
    Result,
    assert_same_gradients,
    assert_same_run,
    assert_state_as_predicted,
    data_rank_of,
    engine_of,
    native,
    one_step,
    only_parameters,
    oracle,
    oracle_of,
    rate_of,
)
from sdp.tests.support.checkpoints import assert_loaded, load_case, merge_moments, train_and_save
from sdp.tests.support.deepspeed_runs import run_under_deepspeed
from sdp.tests.support.ranks import RankPool

CASES = [
    Case(2, 1, paths="2: 2 3", clip=True, optimizer="adamw"),
    Case(4, 1, accumulation=2, paths="2: 1 3", model="llama-tied-meta", clip=True, lr_scale="auto"),
    Case(2, 2, 3, 2, paths="2: 2 3", model="mlp-meta", optimizer="momentum", clip=True),
    Case(2, 2, 1, paths="2: 0", optimizer="adamw", clip=True),
    Case(4, 1, 2, paths="4: 3", bf16=False, model="llama"),
    Case(2, 1, tp=2, paths="2: 2 3", model="even-llama-tied-meta", clip=True, checkpointing="full"),
    Case(2, 1, paths="2: 1 4", model="resnet-meta"),
]
LOCAL = [
    Case(4, 1, steps=5, paths="2: 1 2", sync='{"every": 4, "fragments": 2, "overlap": 1}', optimizer="adamw"),
    Case(2, 2, 2, steps=4, paths="2: 2 3", sync='{"every": 2, "single_holder": "skip"}', clip=True),
    Case(4, 1, steps=3, paths="2: 1 4", sync='{"every": 2, "fragments": 2}', model="resnet-meta"),
]
DEEPSPEED = [
    Case(4, 1, 1, 2, paths="2: 2 3", optimizer="adamw", clip=True),
    Case(2, 2, 2, paths="2: 1 3", model="llama-tied-meta", clip=True),
    Case(2, 2, 3, 2, paths="2: 2 3", model="mlp-meta", optimizer="adamw", clip=True),
]


def assert_equal(ours: Sequence[Result], case: Case) -> None:
    theirs = oracle(case)  # means in buffers are not exact
    assert_same_run([only_parameters(result, case.model) for result in ours], only_parameters(theirs, case.model), case)
    assert theirs.after is not None and ours[0].after is not None
    for name, value in theirs.after.items():
        torch.testing.assert_close(ours[0].after[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fsdp2_equals_the_oracle(ranks: RankPool, case: Case) -> None:
    ours = native(ranks, case)
    assert_same_gradients(ours, oracle(case))
    assert_equal(ours, case)
    assert_state_as_predicted(ours)


@pytest.mark.parametrize("case", LOCAL, ids=str)
def test_local_steps_equal_the_oracle(ranks: RankPool, case: Case) -> None:
    ours = native(ranks, case)
    assert_equal(ours, case)
    assert_state_as_predicted(ours)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("case", DEEPSPEED, ids=str)
def test_deepspeed_equals_the_oracle(ranks: RankPool, case: Case) -> None:
    ours = run_under_deepspeed(ranks, case)
    assert_equal(ours, case)
    assert_state_as_predicted(ours)


@pytest.mark.parametrize("paths", ["1: 2 3", "2:"])
def test_one_path_or_no_own_unit_is_dense_training_bit_for_bit(ranks: RankPool, paths: str) -> None:
    dense = Case(2, 1, placement="full", clip=True, optimizer="adamw")
    for ours, theirs in zip(native(ranks, replace(dense, paths=paths)), native(ranks, dense), strict=True):
        assert ours.losses == theirs.losses and ours.norms == theirs.norms
        assert (ours.after is None) == (theirs.after is None)
        assert list(ours.after or {}) == list(theirs.after or {})
        assert all(torch.equal((ours.after or {})[name], value) for name, value in (theirs.after or {}).items())


SOURCE = Case(4, 1, paths="2: 2 3", optimizer="adamw", model="even-llama-tied-meta", clip=True)
TARGETS = [replace(SOURCE, groups=2, fsdp=2, stage=3), replace(SOURCE, groups=2, tp=2), replace(SOURCE, groups=2)]


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """The folder of a checkpoint of SOURCE, and what each rank saved."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    return folder, ranks.run(train_and_save, SOURCE, folder, world=SOURCE.world)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_checkpoint_moves_to_any_layout_exactly(ranks: RankPool, saved: tuple[str, Any], target: Case) -> None:
    folder, answers = saved
    loaded = ranks.run(load_case, target, folder, world=target.world)
    weights, moments = answers[0][0], merge_moments(answers)
    own = {"paths.0.model.layers.2.input_layernorm.weight", "paths.1.model.layers.3.mlp.down_proj.weight"}
    assert own <= set(weights)
    assert not any(name.startswith("model.layers.3") for name in weights)
    assert_loaded(loaded, weights, moments)


# -- evaluation ------------------------------------------------------------------------------------


def held_out(case: Case, rank: int) -> list[Any]:
    """1 to 11 batches by rank, which is more than what ranks exchange at once."""
    return [
        models.micro_batch(case.model, 50 + index, index % 9, rank, rows=2 + (index + rank) % 3)
        for index in range(1 + 5 * (rank % 3))
    ]


def paths_of(batches: Sequence[Any], rank: int, count: int) -> list[Any]:
    """A path for some of the batches, and one for each row of the others."""
    rows = [len(next(iter(batch.values()))) for batch in batches]
    return [
        (index + rank) % count if index % 2 else [(index + row) % count for row in range(rows[index])]
        for index in range(len(batches))
    ]


def evaluate(case: Case) -> tuple[float, float, list[float]]:
    engine = engine_of(case)
    one_step(engine, case, 0, data_rank=data_rank_of(case))
    engine.step()
    rank = data_rank_of(case)
    batches = held_out(case, rank)
    routed = engine.evaluate(batches, paths=paths_of(batches, rank, 2))
    weighted = engine.evaluate(batches, [1.0 + rank] * len(batches), paths=[rank % 2] * len(batches))
    of_copies = []
    for path in range(2):
        with engine.full_model(torch.float32, path=path) as model, torch.no_grad():
            of_copies.append(model(**batches[0]).item())
    return routed, weighted, of_copies


@pytest.mark.parametrize(
    "case",
    [
        Case(4, 1, paths="2: 1 3", optimizer="adamw"),
        Case(2, 2, 3, paths="2: 2 3", model="llama-meta"),
        Case(2, 1, tp=2, paths="2: 2 3", model="even-llama-tied-meta", sync='{"every": 1}'),
    ],
    ids=str,
)
def test_each_batch_or_row_is_evaluated_by_its_path(ranks: RankPool, case: Case) -> None:
    specification = oracle_of(case)
    specification.step(
        [[models.micro_batch(case.model, 0, 0, rank) for rank in range(case.data_ranks)]], rate_of(case, 0)
    )
    state = specification.state_dict()
    module = specification.model

    def loss_of(batch: Any, path: int) -> float:
        names = {name: name if name in state else f"paths.{path}.{name}" for name, _ in module.named_parameters()}
        values = {name: state[canonical] for name, canonical in names.items()}
        with torch.no_grad():
            return torch.func.functional_call(module, values, kwargs=batch).item()

    def count(batch: Any) -> float:
        return float((batch["labels"][:, 1:] != -100).sum() if "labels" in batch else batch["y"].numel())

    total = weight = given = of_given = 0.0
    for rank in range(case.data_ranks):
        batches = held_out(case, rank)
        for batch, ids in zip(batches, paths_of(batches, rank, 2), strict=True):
            rows = len(next(iter(batch.values())))
            for row, path in enumerate([ids] * rows if isinstance(ids, int) else ids):
                one = {key: value[row : row + 1] for key, value in batch.items()}
                if count(one):
                    total, weight = total + count(one) * loss_of(one, path), weight + count(one)
            given, of_given = given + (1 + rank) * loss_of(batch, rank % 2), of_given + 1 + rank
    answers = ranks.run(evaluate, case, world=case.world)
    for rank, (routed, weighted, copies) in enumerate(answers):
        assert routed == pytest.approx(total / weight, rel=1e-5)
        assert weighted == pytest.approx(given / of_given, rel=1e-5)
        first = held_out(case, rank // case.tp)[0]
        assert copies == pytest.approx([loss_of(first, path) for path in range(2)], rel=1e-5)
    assert abs(loss_of(first, 0) - loss_of(first, 1)) > 1e-4, "the paths do not differ"


def refusals() -> list[str]:
    engine = engine_of(Case(2, 1, paths="2: 3"))
    batch = models.micro_batch("mlp", 0, 0, 0)
    found = []
    for arguments in (
        {},
        {"paths": [0, 1]},
        {"paths": [2]},
        {"paths": [[0, 1, 0]]},
        {"paths": [[0, 1]], "weights": [1.0]},
    ):
        with pytest.raises(ConfigError) as error:
            engine.evaluate([batch], **arguments)
        found.append(str(error.value))
    with pytest.raises(ConfigError) as error, engine.full_model():
        pass
    with pytest.raises(ModelError, match="several paths"):
        engine.save_pretrained("nowhere")
    return [*found, str(error.value)]


def test_an_evaluation_needs_the_paths(ranks: RankPool) -> None:
    messages = ranks.run(refusals, world=2)[0]
    expected = [
        "evaluate: the model has 2 paths; give paths",
        "evaluate: 2 paths for 1 batches",
        "evaluate: path 2 does not exist; there are paths 0 to 1",
        "evaluate: if the rows of a batch take several paths, give a path for each row",
        "evaluate: if the rows of a batch take several paths, give a path for each row, and no weights",
        "full_model: path None does not exist; give one from 0 to 1",
    ]
    assert all(message.startswith(start) for message, start in zip(messages, expected, strict=True))


# -- the start, and settings -----------------------------------------------------------------------


def start_from(folder: str) -> Any:
    case = Case(2, 2, 3, paths="2: 2 3", model="llama-meta")
    return engine_of(case, training={"init_from": folder}).full_state_dict()


def test_given_weights_are_those_of_every_path(ranks: RankPool, tmp_path: Path) -> None:
    weights = {name: value.clone() for name, value in models.build("llama").state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    state = ranks.run(start_from, str(tmp_path), world=4)[0]
    assert len(state) == len(weights) + sum(name.startswith(("model.layers.2.", "model.layers.3.")) for name in weights)
    for name, value in state.items():
        assert torch.equal(value, weights[re.sub(r"^paths\.\d+\.", "", name)]), name


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"masking": "backward"}, "sdp.masking: a group runs no unit of another path (sdp.paths)"),
        ({"granularity": "neuron"}, "sdp.granularity: paths (sdp.paths) have blocks of their own"),
        ({"capacity": 0.5}, "sdp.capacity: 0.5 has no meaning with sdp.paths"),
        ({"profile": "uniform"}, 'sdp.profile: "uniform" has no meaning with sdp.paths'),
        ({"placement": {"layers.0": [0, 1]}}, "sdp.placement: "),
        ({"protect": ["layers.0"]}, "sdp.protect: "),
        ({"groups": 3}, "sdp.groups: 3 is not a multiple of sdp.paths.count 2"),
        ({"paths": {"count": 0}}, "sdp.paths.count: input should be greater than 0"),
        ({"paths": {"counts": 2}}, "sdp.paths.counts: "),
    ],
)
def test_what_paths_cannot_be_combined_with(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"train_batch_size": 12, "sdp": {"groups": 2, "paths": {"count": 2}, **section}})
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_resolved_configuration_gives_the_same_paths() -> None:
    config = load_config({"train_batch_size": 4, "sdp": {"groups": 2, "paths": {"count": 2, "own": ["layers.*"]}}})
    assert load_config(config.resolved()) == config


@pytest.mark.usefixtures("one_rank")
def test_a_pattern_that_matches_no_unit_is_refused() -> None:
    with pytest.raises(ModelError, match=r"sdp\.paths\.own: 'layers\.9' matches no"):
        sdp.initialize(
            model=models.mlp(), config={"train_batch_size": 2, "sdp": {"paths": {"count": 1, "own": ["layers.9"]}}}
        )
