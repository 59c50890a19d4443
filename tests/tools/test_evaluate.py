"""``sdp evaluate``: the run's own figures from its checkpoints alone."""

import json
import shutil
from pathlib import Path

import pytest
from sdp.engine.checkpoint.storage.dcp import SafeReader
from sdp.engine.checkpoint.storage.files import encode_state, hash_files, read_state
from sdp.tools.cli import main
from sdp.tools.runs import saved_run


def evaluated(capsys, *arguments: object) -> dict:
    assert main(["evaluate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def own_losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "evaluations.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_checkpoint_gives_the_loss_of_the_run_and_nothing_is_written(trained_run, capsys):
    own, before = own_losses(trained_run), contents(trained_run)
    newest = evaluated(capsys, trained_run)
    assert newest["step"] == 4
    assert newest["loss"] == pytest.approx(own[4], rel=1e-5)
    assert newest["in_training"] == own[4]
    assert (
        newest["targets"] == newest["sequences"] * 47 == 2 * 2 * 4 * 47
    )  # 2 batches of 2 sequences for each of 4 data ranks
    assert own[2] != pytest.approx(own[4], rel=1e-3)
    for arguments in (["--step", 2], ["--checkpoint", "step-2"]):
        assert evaluated(capsys, trained_run, *arguments)["loss"] == pytest.approx(own[2], rel=1e-5)
    assert evaluated(capsys, trained_run / "checkpoints" / "step-2")["loss"] == pytest.approx(own[2], rel=1e-5)
    assert contents(trained_run) == before


def test_the_table_and_another_number_of_batches(trained_run, capsys):
    assert main(["evaluate", str(trained_run)]) == 0
    printed = capsys.readouterr().out
    assert f"{own_losses(trained_run)[4]:.6f} at this step" in printed
    fewer = evaluated(capsys, trained_run, "--batches", 1)
    assert fewer["sequences"] == 8
    assert fewer["loss"] != pytest.approx(own_losses(trained_run)[4], rel=1e-6)


FAST = {
    "training": {"compile": True}, "activation_checkpointing": {"mode": "full"},
    "sdp": {"granularity": "neuron", "capacity": 0.5},
}  # fmt: skip
OF_AN_EARLIER_VERSION = {"sdp": {"survive": None}, "data": {"verify": "auto"}, "training": {"tokens": None}}
OF_DEEPSPEED = {
    "sdp": {"engine": "deepspeed"}, "fp16": {"enabled": True}, "comms_logger": {"enabled": True},
    "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        (FAST, []),
        (OF_AN_EARLIER_VERSION, []),
        (OF_DEEPSPEED, []),
        (OF_DEEPSPEED, ["--set", "sdp.branch_scale=train"]),
    ],  # a plain model is built
    ids=["what made the run fast", "an earlier version's", "DeepSpeed's own", "what DeepSpeed refuses"],
)
def test_settings_of_training_are_not_needed(trained_run, tmp_path, capsys, changes, settings):
    copy = shutil.copytree(trained_run, tmp_path / "run")
    config = json.loads((copy / "config.json").read_text())
    config |= {name: config.get(name, {}) | section for name, section in changes.items()}
    (copy / "config.json").write_text(json.dumps(config))
    assert evaluated(capsys, copy, *settings)["loss"] == pytest.approx(own_losses(trained_run)[4], rel=1e-5)


def test_optimizer_state_is_not_read(trained_run, tmp_path, capsys):
    copy = shutil.copytree(trained_run, tmp_path / "run")
    checkpoint = copy / "checkpoints" / "step-4"
    spoiled = 0
    for index, place in SafeReader(checkpoint).read_metadata().storage_data.items():
        if index.fqn.startswith("optimizer/"):
            with (checkpoint / place.relative_path).open("r+b") as file:
                file.seek(place.offset)
                file.write(b"\xff" * place.length)
            spoiled += 1
    assert spoiled > 100
    state = read_state(checkpoint) | {
        "files": hash_files(path for path in checkpoint.iterdir() if path.name != "state.json")
    }
    (checkpoint / "state.json").write_text(
        encode_state({key: value for key, value in state.items() if key != "format"})
    )
    assert evaluated(capsys, copy)["loss"] == pytest.approx(own_losses(trained_run)[4], rel=1e-5)


def test_a_checkpoint_whose_replacement_was_cut_short_is_found(trained_run, tmp_path, capsys):
    copy = shutil.copytree(trained_run, tmp_path / "run")
    (copy / "checkpoints" / "step-4").rename(copy / "checkpoints" / ".step-4.sdp-replaced")
    for arguments in ([], ["--step", 4]):
        assert evaluated(capsys, copy, *arguments)["loss"] == pytest.approx(own_losses(trained_run)[4], rel=1e-5)
    assert main(["evaluate", str(copy), "--checkpoint", "../checkpoints/step-2"]) == 2
    assert "is not the name of one directory" in capsys.readouterr().err


def remove_after_reading_the_state(monkeypatch, tag: str) -> None:
    """Remove the checkpoint ``tag`` after its state was read, as a run may."""
    read_state = saved_run.read_state

    def read_and_remove(path: Path) -> dict:
        state = read_state(path)
        if path.name == tag:
            shutil.rmtree(path)
        return state

    monkeypatch.setattr(saved_run, "read_state", read_and_remove)


def test_the_newest_checkpoint_is_taken_again_when_the_run_removes_it(trained_run, tmp_path, monkeypatch, capsys):
    copy = shutil.copytree(trained_run, tmp_path / "run")
    newer = shutil.copytree(copy / "checkpoints" / "step-4", tmp_path / "step-4")
    shutil.rmtree(copy / "checkpoints" / "step-4")
    (copy / "checkpoints" / "latest.json").write_text('{"tag": "step-2"}')
    remove_after_reading_the_state(monkeypatch, "step-2")
    remove = shutil.rmtree

    def save_and_prune(path: Path) -> None:
        newer.rename(copy / "checkpoints" / "step-4")
        (copy / "checkpoints" / "latest.json").write_text('{"tag": "step-4"}')
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", save_and_prune)
    assert main(["evaluate", str(copy), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"] == 4
    assert result["loss"] == pytest.approx(own_losses(trained_run)[4], rel=1e-5)


def test_a_named_checkpoint_that_the_run_removes_is_one_line(trained_run, tmp_path, monkeypatch, capsys):
    copy = shutil.copytree(trained_run, tmp_path / "run")
    remove_after_reading_the_state(monkeypatch, "step-2")
    assert main(["evaluate", str(copy), "--step", "2"]) == 2
    printed = capsys.readouterr().err
    assert "step-2: was removed while it was read" in printed
    assert printed.count("\n") == 1


def test_a_damaged_held_out_shard_has_no_loss(trained_run, tmp_path, capsys):
    data = Path(json.loads((trained_run / "config.json").read_text())["data"]["path"])
    shutil.copytree(data, tmp_path / "data")
    shard = tmp_path / "data" / "held_out-00000.bin"
    content = bytearray(shard.read_bytes())
    content[0] ^= 1
    shard.write_bytes(content)
    assert main(["evaluate", str(trained_run), "--set", f"data.path={tmp_path / 'data'}"]) == 2
    printed = capsys.readouterr()
    assert "held_out-00000.bin" in printed.err and not printed.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: neither a run nor a checkpoint of a run (no such directory)"),
        (["empty"], "neither a run nor a checkpoint of a run (no config.json in it)"),
        (["run", "--step", "3"], "no checkpoint step-3; found: step-2, step-4"),
        (["run/checkpoints/step-2", "--step", "2"], "is one checkpoint"),
        (["unsaved"], "this run has no checkpoint"),
        (["llama"], "llama: a model without a run has no data; name prepared data with --set data.path"),
        (["llama", "--step", "2"], "llama is a model without checkpoints; leave step-2 out"),
        (["alone/checkpoints/step-4"], "a script wrote this checkpoint, not sdp train"),
        (["run", "--set", "data.path=nowhere"], "nowhere: no prepared data here"),
        (["run", "--set", "model.hidden_size=64"], "it belongs to another model"),
        (["run", "--batches", "0"], "give 1 or more"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(trained_run, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("run").symlink_to(trained_run)
    Path("empty").mkdir()
    Path("unsaved").mkdir()
    Path("llama").mkdir()
    Path("llama/config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    shutil.copy(trained_run / "config.json", "unsaved")
    shutil.copytree(trained_run / "checkpoints" / "step-4", "alone/checkpoints/step-4")
    assert main(["evaluate", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out
