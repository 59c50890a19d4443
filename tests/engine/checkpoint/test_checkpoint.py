"""Checkpoints move between layouts with weights and moments exact; what is damaged or foreign is refused on every rank."""

from __future__ import annotations

import importlib.util
import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.checkpoint import dcp
from sdp.engine.checkpoint.dcp import PIECE_BYTES, SafeReader
from sdp.engine.checkpoint.files import encode_state, hash_files, read_state
from sdp.engine.errors import CheckpointError
from sdp.tests.support import models
from sdp.tests.support.cases import Case, data_rank_of, engine_of, one_step, whole
from sdp.tests.support.ranks import RankPool

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")

SOURCE = Case(2, 2, stage=3, optimizer="adamw", placement="mixed")


def _moments(engine: Any) -> dict[str, torch.Tensor]:
    """Optimizer state of this rank's parameters, whole."""
    return {
        f"{name}/{key}": (whole(engine, name, value) if value.shape == parameter.shape else value).clone()
        for name, parameter in engine.parameters_here.items()
        for key, value in sorted(engine.optimizer.state[parameter].items())
        if isinstance(value, torch.Tensor)
    }


def _train_and_save(case: Case, folder: str) -> tuple[Any, Any]:
    engine = engine_of(case)
    for step in range(2):
        one_step(engine, case, step, data_rank=data_rank_of(case))
        engine.step()
    engine.save_checkpoint(folder, client_state={"note": "kept"})
    return engine.full_state_dict(), _moments(engine)


def _load(case: Case, folder: str) -> tuple[Any, Any, Any, Any]:
    engine = engine_of(case)
    path, client = engine.load_checkpoint(folder)
    assert path == f"{folder}/step-2"
    assert engine.global_steps == 2
    return engine.full_state_dict(), _moments(engine), client, engine.get_lr()


def _merged(answers: list[tuple[Any, ...]]) -> dict[str, torch.Tensor]:
    return {name: tensor for answer in answers for name, tensor in answer[1].items()}


@pytest.fixture(scope="module")
def saved(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    answers = ranks.run(_train_and_save, SOURCE, folder, world=4)
    return folder, answers[0][0], _merged(answers)


TARGETS = [
    SOURCE,
    Case(2, 1, stage=0, optimizer="adamw", placement="mixed"),
    Case(2, 2, stage=0, optimizer="adamw", placement="cyclic"),
    Case(4, 1, stage=0, optimizer="adamw", placement="profile"),
    Case(4, 2, stage=3, optimizer="adamw", placement="mixed"),
    Case(1, 4, stage=2, optimizer="adamw", placement="full"),
    Case(2, 2, stage=1, optimizer="adamw", placement="full"),
]


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_a_checkpoint_moves_to_any_layout_exactly(ranks: RankPool, saved: Any, target: Case) -> None:
    folder, weights, moments = saved
    answers = ranks.run(_load, target, folder, world=target.world)
    state = answers[0][0]
    assert set(state) == set(weights)
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    loaded = _merged(answers)
    assert set(loaded) == set(moments)
    assert all(torch.equal(loaded[name], moments[name]) for name in moments)
    assert all(answer[2] == {"note": "kept"} for answer in answers)


PAIRS = [
    (
        Case(1, 4, stage=2, optimizer="adamw", placement="full"),
        Case(2, 2, stage=3, optimizer="adamw", placement="mixed"),
    ),
    (
        Case(2, 1, stage=0, optimizer="adamw", placement="full"),
        Case(4, 1, stage=1, optimizer="adamw", placement="profile"),
    ),
    (
        Case(4, 1, stage=0, optimizer="momentum", placement="cyclic"),
        Case(1, 2, stage=3, optimizer="momentum", placement="full"),
    ),
    (Case(2, 2, stage=3, optimizer="adamw", masking="backward"), Case(4, 1, optimizer="adamw", placement="profile")),
    (Case(2, 1, optimizer="adamw", placement="cyclic"), Case(2, 2, stage=2, optimizer="adamw", masking="backward")),
    (  # running statistics are those of first holders
        Case(2, 2, stage=3, optimizer="adamw", model="resnet-meta"),
        Case(1, 2, optimizer="adamw", placement="full", model="resnet-meta"),
    ),
    (
        Case(2, 1, optimizer="adamw", masking="backward", bf16=True, model="llama-tied"),
        Case(1, 2, optimizer="adamw", placement="full", model="llama-tied"),
    ),
]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_runs_of_other_regimes_continue_each_other(ranks: RankPool, tmp_path: Path, source: Case, target: Case) -> None:
    saved = ranks.run(_train_and_save, source, str(tmp_path), world=source.world)
    loaded = ranks.run(_load, target, str(tmp_path), world=target.world)
    assert all(torch.equal(loaded[0][0][name], value) for name, value in saved[0][0].items())
    before = {name: tensor for answer in saved for name, tensor in answer[1].items()}
    assert all(torch.equal(value, before[name]) for name, value in _merged(loaded).items())


def _save_in_pieces(case: Case, folder: str, piece_bytes: int) -> tuple[Any, Any]:
    limit, dcp.PIECE_BYTES = PIECE_BYTES, piece_bytes
    try:
        return _train_and_save(case, folder)
    finally:
        dcp.PIECE_BYTES = limit


@pytest.mark.parametrize("source", [SOURCE, Case(2, 1, optimizer="adamw", neurons=2, model="llama")], ids=str)
def test_large_tensors_are_written_in_pieces_and_read_as_wholes(ranks: RankPool, tmp_path: Path, source: Case) -> None:
    limit = 128
    saved = ranks.run(_save_in_pieces, source, str(tmp_path), limit, world=source.world)
    tensors = SafeReader(tmp_path / "step-2").read_metadata().state_dict_metadata
    chunks = [(chunk, entry.properties.dtype.itemsize) for entry in tensors.values() for chunk in entry.chunks]  # type: ignore[union-attr]
    assert all(chunk.sizes.numel() * itemsize <= limit or chunk.sizes[0] == 1 for chunk, itemsize in chunks)
    assert len(chunks) > 2 * len(tensors)
    loaded = ranks.run(_load, Case(4, 1, optimizer="adamw", model=source.model), str(tmp_path), world=4)
    assert all(torch.equal(loaded[0][0][name], value) for name, value in saved[0][0].items())
    before = {name: tensor for answer in saved for name, tensor in answer[1].items()}
    assert all(torch.equal(value, before[name]) for name, value in _merged(loaded).items() if name in before)


TENSOR_SOURCES = [
    Case(2, 1, stage=3, optimizer="adamw", model="even-llama-tied", tp=2),
    Case(1, 2, stage=3, optimizer="adamw", model="even-llama", placement="full", tp=2),
    Case(2, 1, optimizer="adamw", model="even-llama-tied-meta"),
]


@pytest.mark.parametrize("source", TENSOR_SOURCES, ids=str)
def test_tensor_parallel_parts_become_wholes_and_back(ranks: RankPool, source: Case, tmp_path: Path) -> None:
    """Weights and moments exact, from cut matrices to whole ones and the other way, sharded further or not."""
    answers = ranks.run(_train_and_save, source, str(tmp_path), world=source.world)
    weights, moments = answers[0][0], _merged(answers)
    for groups, fsdp, tp, stage in [(2, 1, 1, 0), (2, 1, 2, 0), (1, 2, 2, 3), (1, 4, 1, 2)]:
        placement = "cyclic" if groups > 1 else "full"
        target = Case(groups, fsdp, stage, optimizer="adamw", model=source.model, placement=placement, tp=tp)
        answers = ranks.run(_load, target, str(tmp_path), world=target.world)
        assert set(answers[0][0]) == set(weights)
        assert all(torch.equal(answers[0][0][name], weights[name]) for name in weights), target
        loaded = _merged(answers)
        assert set(loaded) == set(moments)
        assert all(torch.equal(loaded[name], moments[name]) for name in moments), target
    reference = engine_of(source, "reference")
    reference.load_checkpoint(tmp_path)
    state = reference.full_state_dict()
    assert all(torch.equal(state[name], weights[name]) for name in weights)


def test_the_reference_reads_it_too(saved: Any) -> None:
    folder, weights, moments = saved
    engine = engine_of(SOURCE, "reference")
    engine.load_checkpoint(folder)
    state = engine.full_state_dict()
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    loaded = _moments(engine)
    assert all(torch.equal(loaded[name], moments[name]) for name in moments)


def _damage(folder: Path, how: str) -> None:
    checkpoint = folder / "step-1"
    if how == "no state":
        (checkpoint / "state.json").unlink()
    elif how == "truncated state":
        (checkpoint / "state.json").write_text("{")
    elif how == "state without steps":
        (checkpoint / "state.json").write_text(json.dumps({"format": 1}))
    elif how == "other format":
        (checkpoint / "state.json").write_text(json.dumps({"format": 99}))
    elif how == "no metadata":
        (checkpoint / "metadata.json").unlink()
    elif how == "truncated metadata":
        (checkpoint / "metadata.json").write_bytes((checkpoint / "metadata.json").read_bytes()[:50])
    elif how == "no tensors":
        next(checkpoint.glob("*.distcp")).unlink()
    elif how == "truncated tensors":
        data = next(checkpoint.glob("*.distcp"))
        data.write_bytes(data.read_bytes()[:100])
    elif how == "one flipped bit":
        data = next(checkpoint.glob("*.distcp"))
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif how == "changed step":
        state = (checkpoint / "state.json").read_text()
        (checkpoint / "state.json").write_text(state.replace('"global_steps": 1', '"global_steps": 2'))


def _reseal(checkpoint: Path) -> None:
    """Make the hashes those of the files as they are: what somebody who plants a file would do."""
    state = json.loads((checkpoint / "state.json").read_text())
    state = {key: value for key, value in state.items() if key not in ("sha256", "format")}
    files = hash_files(path for path in checkpoint.iterdir() if path.name != "state.json")
    (checkpoint / "state.json").write_text(encode_state({**state, "files": files}))


DAMAGES = [
    "no state", "truncated state", "state without steps", "other format", "no metadata", "truncated metadata", "no tensors",
    "truncated tensors", "one flipped bit", "changed step",
]  # fmt: skip


@pytest.fixture
def small(tmp_path: Path) -> Path:
    engine = engine_of(SOURCE, "reference")
    one_step(engine, SOURCE, 0, data_rank=None)
    engine.step()
    engine.save_checkpoint(tmp_path)
    return tmp_path


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_one_line(small: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small)
    _damage(small, how)
    with pytest.raises(CheckpointError) as error:
        engine_of(SOURCE, "reference").load_checkpoint(small)
    assert "step-1" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("how", ["truncated metadata", "truncated tensors"])
def test_right_hashes_do_not_make_a_file_trusted(small: Path, how: str) -> None:
    _damage(small, how)
    _reseal(small / "step-1")
    with pytest.raises(CheckpointError, match="step-1"):
        engine_of(SOURCE, "reference").load_checkpoint(small)


def test_a_pointer_to_nothing_falls_back_and_says_so(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(SOURCE, "reference")
    engine.load_checkpoint(small)
    engine.save_checkpoint(small, "step-9")
    shutil.rmtree(small / "step-9")
    assert engine.load_checkpoint(small)[0] == f"{small}/step-1"
    assert "step-9, which is gone: taking step-1" in caplog.text
    shutil.rmtree(small / "step-1")
    with pytest.raises(CheckpointError, match="step-9: is gone"):
        engine.load_checkpoint(small)


def test_the_newest_are_kept_and_the_one_just_written_always(small: Path) -> None:
    engine = engine_of(SOURCE, "reference")
    for tag in ("step-5", "step-7", "best"):
        engine.save_checkpoint(small, tag, keep=3)
    engine.save_checkpoint(small, "step-3", keep=2)
    assert sorted(path.name for path in small.glob("[a-z]*")) == ["best", "latest.json", "step-3", "step-7"]


def _save_in_the_background(case: Case, folder: str) -> Any:
    """Train on while the checkpoint of the second step is written, and return the weights of that step."""
    engine = engine_of(case)
    for step in range(4):
        one_step(engine, case, step, data_rank=data_rank_of(case))
        engine.step()
        if step == 1:
            engine.save_checkpoint(folder, background=True)
            weights, moments = engine.full_state_dict(), _moments(engine)
    engine.wait_for_checkpoint()
    return weights, moments


@pytest.mark.parametrize("case", [SOURCE, TENSOR_SOURCES[0]], ids=str)
def test_a_background_save_holds_the_step_at_which_it_began(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    answers = ranks.run(_save_in_the_background, case, str(tmp_path), world=4)
    loaded = ranks.run(_load, case, str(tmp_path), world=4)
    assert all(torch.equal(loaded[0][0][name], value) for name, value in answers[0][0].items())
    moments = _merged(answers)
    assert all(torch.equal(value, moments[name]) for name, value in _merged(loaded).items())


def _save_without_room(case: Case, folder: str) -> tuple[str, str]:
    """The errors of a save and of one in the background under a file size limit that the tensors exceed."""
    engine = engine_of(case)
    one_step(engine, case, 0, data_rank=dist.get_rank())
    engine.step()
    engine.save_checkpoint(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    errors = []
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        for background in (False, True):
            try:
                engine.save_checkpoint(folder, "step-2", background=background)
                engine.wait_for_checkpoint()
            except CheckpointError as error:
                errors.append(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return errors[0], errors[1]


def test_a_save_without_room_leaves_the_one_before(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(_save_without_room, Case(2, 1, optimizer="adamw"), str(tmp_path), world=2)
    for errors in answers:
        assert errors == answers[0]
        assert all("cannot write the checkpoint" in error for error in errors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "step-1"]
    assert read_state(tmp_path / "step-1")["global_steps"] == 1


def test_a_checkpoint_of_another_model_is_refused(small: Path) -> None:
    with pytest.raises(CheckpointError, match="another model"):
        engine_of(Case(2, 2, stage=3, optimizer="adamw", model="llama"), "reference").load_checkpoint(small)


def test_no_checkpoint_is_no_error_but_a_named_one_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(SOURCE, "reference")
    assert engine.load_checkpoint(tmp_path) == (None, {})
    assert [f"no checkpoint in {tmp_path}; starting from the beginning"] == [
        r.message for r in caplog.records if r.levelname == "WARNING"
    ]
    with pytest.raises(CheckpointError, match="step-7"):
        engine.load_checkpoint(tmp_path, "step-7")


def _trained(optimizer: str, model: str, folder: str, engine: str = "fsdp2", stage: int = 0, steps: int = 1) -> None:
    case = Case(2, 1, optimizer=optimizer, placement="cyclic", model=model, stage=stage)  # type: ignore[arg-type]
    trained = engine_of(case, engine)
    for index in range(steps):
        one_step(trained, case, index, data_rank=dist.get_rank())
        trained.step()
    trained.save_checkpoint(folder)


def _refused(optimizer: str, model: str, folder: str, engine: str = "fsdp2", stage: int = 0) -> tuple[str, int, bool]:
    """The error, the steps that the engine then has, and whether its optimizer has state."""
    case = Case(2, 1, optimizer=optimizer, placement="cyclic", model=model, stage=stage)  # type: ignore[arg-type]
    loaded = engine_of(case, engine)
    message = ""
    try:
        loaded.load_checkpoint(folder)
    except CheckpointError as error:
        message = str(error)
    found = message, loaded.global_steps, bool(loaded.optimizer.state)
    one_step(loaded, case, 1, data_rank=dist.get_rank())
    loaded.step()  # either way it can go on
    return found


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (("adamw", "mlp"), ("adamw", "mlp-of-3"), "holds 'model/layers.3.{}', which this model has not"),
        (("adamw", "mlp-of-3"), ("adamw", "mlp"), "holds no 'model/layers.3.{}'"),
        (("adamw", "mlp"), ("sgd", "mlp"), "holds 'optimizer/{}/exp_avg', which this optimizer does not keep"),
        (("momentum", "mlp"), ("adamw", "mlp"), "holds no 'optimizer/{}/step'"),
        (("sgd", "mlp"), ("adamw", "mlp"), "holds no 'optimizer/{}/"),
        (("sgd", "mlp"), ("sgd", "mlp"), ""),
    ],
)
def test_nothing_of_a_checkpoint_is_left_out(
    ranks: RankPool, tmp_path: Path, saved: tuple[str, str], loaded: tuple[str, str], message: str
) -> None:
    """A model of fewer layers, or another optimizer, would go on from a part of it, and its saves would replace the whole one."""
    ranks.run(_trained, *saved, str(tmp_path), world=2)
    for error, steps, has_state in ranks.run(_refused, *loaded, str(tmp_path), world=2):
        if message:
            start, _, end = message.partition("{}")
            assert start in error
            assert end in error
            assert (steps, has_state) == (0, False)
        else:
            assert (error, steps) == ("", 1)


@needs_deepspeed
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_under_deepspeed_neither(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    ranks.run(_trained, "adamw", "mlp", str(tmp_path / "adamw"), "deepspeed", stage, world=2)
    for error, steps, has_state in ranks.run(
        _refused, "sgd", "mlp", str(tmp_path / "adamw"), "deepspeed", stage, world=2
    ):
        assert "exp_avg', which this optimizer does not keep" in error
        assert (steps, has_state) == (0, False)
    ranks.run(_trained, "momentum", "mlp", str(tmp_path / "momentum"), "deepspeed", stage, world=2)
    for error, steps, has_state in ranks.run(
        _refused, "adamw", "mlp", str(tmp_path / "momentum"), "deepspeed", stage, world=2
    ):
        assert "holds no 'optimizer/" in error
        assert (steps, has_state) == (0, False)


@needs_deepspeed
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("saved", "loaded"), [("deepspeed", "deepspeed"), ("deepspeed", "fsdp2"), ("fsdp2", "deepspeed")]
)
def test_a_checkpoint_of_no_step_goes_on_under_any_engine(
    ranks: RankPool, tmp_path: Path, saved: str, loaded: str, stage: int
) -> None:
    ranks.run(_trained, "adamw", "mlp", str(tmp_path), saved, stage, 0, world=2)
    assert ranks.run(_refused, "adamw", "mlp", str(tmp_path), loaded, stage, world=2) == [("", 0, False)] * 2


def _refused_once_trained(folder: str, tag: str) -> tuple[str, bool]:
    """The error, and whether all of the engine is as before."""
    case = Case(2, 1, optimizer="adamw", placement="cyclic")
    samples = [{"x": torch.zeros(1)}] * (24 if tag == "step-0" else 48)
    model = models.build("mlp-of-3" if tag == "step-0" else "mlp")
    engine = sdp.initialize(model=model, config=case.config("fsdp2"), training_data=samples)[0]
    one_step(engine, case, 0, data_rank=dist.get_rank())
    engine.step()

    def everything() -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in [*engine.module.parameters(), *_moments(engine).values()]]

    before = everything()
    try:
        engine.load_checkpoint(folder, tag)
    except CheckpointError as error:
        same = all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
        return str(error), same and engine.global_steps == 1
    return "", False


def _of_24_samples(folder: str) -> None:
    case = Case(2, 1, optimizer="adamw", placement="cyclic")
    engine = sdp.initialize(
        model=models.mlp(), config=case.config("fsdp2"), training_data=[{"x": torch.zeros(1)}] * 24
    )[0]
    for index in range(2):
        engine.save_checkpoint(folder)
        one_step(engine, case, index, data_rank=dist.get_rank())
        engine.step()
    engine.save_checkpoint(folder)


@pytest.mark.parametrize(
    ("tag", "message"), [("step-0", "'model/layers.3."), ("step-2", "a data set of 24 samples, this one has 48")]
)
def test_a_refusal_changes_nothing(ranks: RankPool, tmp_path: Path, tag: str, message: str) -> None:
    ranks.run(_of_24_samples, str(tmp_path), world=2)
    for error, same in ranks.run(_refused_once_trained, str(tmp_path), tag, world=2):
        assert message in error
        assert same


def _freezing(folder: str) -> str:
    case, messages = Case(2, 1, optimizer="adamw", placement="cyclic"), []
    for frozen in (0, 2):
        model = models.mlp()
        model.layers[:frozen].requires_grad_(False)
        engine = sdp.initialize(model=model, config=case.config("fsdp2"))[0]
        try:
            engine.load_checkpoint(folder)
        except CheckpointError as error:
            messages.append(str(error))
        one_step(engine, case, 0, data_rank=dist.get_rank())
        engine.step()
        if not frozen:
            engine.save_checkpoint(folder)
    return "".join(messages)


def test_state_of_what_is_frozen_now_is_not_dropped(ranks: RankPool, tmp_path: Path) -> None:
    for message in ranks.run(_freezing, str(tmp_path), world=2):
        assert "holds 'optimizer/layers.0." in message
        assert "or with that parameter trained" in message


def _with_state_from_the_start(folder: str) -> int:
    config = Case(2, 1, placement="cyclic").config("fsdp2")
    del config["optimizer"], config["scheduler"]
    for _ in range(2):
        engine = sdp.initialize(model=models.mlp(), config=config, optimizer=lambda p: torch.optim.Adagrad(p, lr=0.01))[
            0
        ]
        engine.load_checkpoint(folder)
        engine.save_checkpoint(folder)
    return len(engine.optimizer.state)


def test_an_optimizer_that_makes_its_state_as_it_is_made_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    assert all(ranks.run(_with_state_from_the_start, str(tmp_path), world=2))


def _rates_of_layers(folder: str, engine: str, groups: int) -> tuple[dict[str, float], dict[str, float], list[bool]]:
    """Rates of parameters before a save and after a load, and whether those of the optimizer's groups are as before."""
    case = Case(groups, 2 // groups, placement="cyclic" if groups == 2 else "full")
    rates = [0.1, 0.05, 0.025, 0.0125, 0.00625]

    def build() -> sdp.SDPEngine:
        model = models.mlp()
        members: list[dict[str, Any]] = [{"params": [*model.stem.parameters(), *model.head.parameters()]}]
        members += [{"params": list(layer.parameters())} for layer in model.layers]
        params = {"warmup_min_lr": [0.0] * 5, "warmup_max_lr": rates, "warmup_num_steps": 2, "warmup_type": "linear"}
        config = case.config(engine) | {"scheduler": {"type": "WarmupLR", "params": params}}
        return sdp.initialize(model=model, model_parameters=members, config=config)[0]

    saved = build()
    for index in range(2):
        one_step(saved, case, index, data_rank=dist.get_rank())
        saved.step()
    saved.save_checkpoint(folder)
    loaded = build()
    loaded.load_checkpoint(folder)
    same = [
        a["lr"] == b["lr"]
        for a, b in zip(saved.optimizer.param_groups, loaded.optimizer.param_groups, strict=True)
        if a["params"]
    ]
    return saved.rates_of_parameters(), loaded.rates_of_parameters(), same


@pytest.mark.parametrize("groups", [2, 1])
@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("deepspeed", marks=needs_deepspeed)])
def test_every_layer_keeps_its_learning_rate(ranks: RankPool, tmp_path: Path, engine: str, groups: int) -> None:
    for saved, loaded, same in ranks.run(_rates_of_layers, str(tmp_path), engine, groups, world=2):
        assert saved == loaded
        assert len(set(saved.values())) == 5
        assert same
        assert all(same)


def test_a_checkpoint_in_place_of_its_directory_is_said(small: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"step-1: is a checkpoint itself; name the directory it is in, with the tag 'step-1'"
    ):
        engine_of(SOURCE, "reference").load_checkpoint(small / "step-1")


def test_a_checkpoint_from_before_the_first_update_brings_that_back(tmp_path: Path) -> None:
    engine = engine_of(SOURCE, "reference", training={"max_skips": 3})
    engine.save_checkpoint(tmp_path)
    engine.backward(engine(models.rows_of_all(SOURCE.model, 0, 0, SOURCE.world)) * float("nan"))
    engine.step()
    engine.save_checkpoint(tmp_path)  # the only step so far was skipped: there is no optimizer state
    before = engine.full_state_dict()
    trained = []
    for tag in ("step-0", "step-1"):
        engine.load_checkpoint(tmp_path, tag)
        assert not engine.optimizer.state
        assert all(torch.equal(engine.full_state_dict()[name], value) for name, value in before.items())
        one_step(engine, SOURCE, 0, data_rank=None)
        engine.step()
        trained.append(engine.full_state_dict())
    # From step 1 the schedule is one skip behind, not a step ahead: the same update.
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in before)


@pytest.mark.parametrize("tag", ["", ".", "../up", "a/b", ".hidden"])
def test_a_tag_is_one_name(small: Path, tag: str) -> None:
    engine = engine_of(SOURCE, "reference")
    with pytest.raises(CheckpointError, match="no name of one directory"):
        engine.save_checkpoint(small, tag)
    assert sorted(path.name for path in small.iterdir()) == ["latest.json", "step-1"]


def _resume_here(case: Case, folder: str) -> tuple[int, Any]:
    engine = engine_of(case)
    engine.load_checkpoint(folder)
    return engine.global_steps, engine.full_state_dict()


def test_ranks_resume_what_the_reference_wrote_on_the_same_mesh(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(2, 1, optimizer="adamw")
    engine = engine_of(case, "reference")
    one_step(engine, case, 0, data_rank=None)
    engine.step()
    engine.save_checkpoint(tmp_path)
    answers = ranks.run(_resume_here, case, str(tmp_path), world=2)
    assert [answer[0] for answer in answers] == [1, 1]
    assert all(torch.equal(answers[0][1][name], value) for name, value in engine.full_state_dict().items())


def test_a_tag_is_replaced_and_client_state_must_be_json(small: Path) -> None:
    engine = engine_of(SOURCE, "reference")
    engine.load_checkpoint(small)
    with pytest.raises(CheckpointError, match="not JSON"):
        engine.save_checkpoint(small, "step-1", client_state={"bad": object()})
    engine.save_checkpoint(small, "step-1", client_state={"good": 1})
    assert engine.load_checkpoint(small)[1] == {"good": 1}
    assert sorted(path.name for path in small.iterdir()) == ["latest.json", "step-1"]


def _missing_on_one_rank(case: Case, folder: str) -> str:
    """The error of every rank, when a tensor that only some ranks need is not in the checkpoint."""
    engine = engine_of(case)
    try:
        engine.load_checkpoint(folder)
    except CheckpointError as error:
        return str(error)
    return ""


def test_what_one_rank_lacks_stops_all(ranks: RankPool, saved: Any, tmp_path: Path) -> None:
    # The llama has other names than the checkpointed model; group 0 and group 1 look for different ones.
    messages = ranks.run(
        _missing_on_one_rank, Case(2, 1, optimizer="adamw", model="llama"), saved[0], world=2, timeout=60
    )
    assert len(set(messages)) == 1
    assert "another model" in messages[0]
