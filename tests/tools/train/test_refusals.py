"""What ``sdp train`` refuses: bad input, other models, existing runs, damaged data."""

import fcntl
import json
import threading

import pytest
from sdp.data.prepare import prepare
from sdp.tests.support.small_runs import read_metrics, run_sdp, write_config
from sdp.tools.cli import main


def test_a_run_that_diverges_names_its_last_checkpoint_and_keeps_it(config, tmp_path, capsys):
    # After one step of this rate the weights are so large that every later pass overflows.
    config |= {"optimizer": {"type": "SGD", "params": {"lr": 1e30}}, "scheduler": None}
    config["training"] |= {"save_every": 1, "keep": 1, "evaluate_every": 0, "max_skips": 2}
    config["sdp"] = {"groups": 1}
    assert main(["train", str(write_config(config, tmp_path)), "--dump-dir", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert f"the newest checkpoint: {tmp_path / 'run' / 'checkpoints' / 'step-1'}" in error.splitlines()[-1]
    assert "Traceback" not in error
    assert error.count("was skipped by all groups") == 2
    assert [line["skipped_steps"] for line in read_metrics(tmp_path / "run")] == [0, 1, 2]
    # A process that goes on after a run of one process is not ended by the limits of that run.
    assert "heartbeat" not in {thread.name for thread in threading.enumerate()}


def test_a_resume_with_another_tokenizer_or_a_damaged_checkpoint_changes_nothing(config, corpus, tmp_path, capsys):
    config["sdp"] = {"groups": 1}
    config["training"] |= {"steps": 2, "save_every": 1}
    run = tmp_path / "run"
    resume = ["train", str(write_config(config, tmp_path)), "--dump-dir", str(run), "--resume"]
    assert main(resume) == 0
    written = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}

    texts = str(corpus.parent / "*.txt")
    prepare(
        [texts], tmp_path / "other", tokenizer="sentencepiece", vocab_size=300, held_out=0.2, workers=1, progress=False
    )
    index = json.loads((run / "checkpoints" / "step-2" / "state.json").read_text())
    assert index["client_state"]["tokenizer"] == {"kind": "bytes"}
    capsys.readouterr()
    assert main([*resume, "--set", f"data.path={tmp_path / 'other'}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{run}/checkpoints/step-2: was trained with another tokenizer (bytes)" in error

    shard = next((run / "checkpoints" / "step-2").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main([*resume, "--set", "training.steps=4"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"sdp: error: {shard}: damaged, its sha256 is ")
    assert last.endswith("remove this checkpoint to resume from an older one")
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == written


def test_a_resume_with_another_model_changes_nothing(config, tmp_path, capsys):
    config["sdp"] = {"groups": 1}
    config["training"] |= {"steps": 2, "save_every": 1}
    run = tmp_path / "run"
    resume = ["train", str(write_config(config, tmp_path)), "--dump-dir", str(run), "--resume"]
    assert main(resume) == 0
    written = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    layers = config["model"]["num_hidden_layers"]
    for key, value, before in (("num_hidden_layers", layers - 1, layers), ("rope_theta", 99.0, 10000.0)):
        assert main([*resume, "--set", f"model.{key}={value}", "training.steps=4"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(
            f"sdp: error: model.{key}: {value}, but {run}/config.json has {before}, with which {run}/checkpoints/"
        )
        assert error.count("\n") == 1
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == written
    own = run / "config.json"
    own.write_text("{")
    assert main([*resume, "--set", "training.steps=4"]) == 2
    assert capsys.readouterr().err.startswith(f"sdp: error: {own}: its model cannot be compared with this run's (")
    own.write_bytes(written[own].replace(b"{", b'{"of_another_version": 1,', 1))
    assert main([*resume, "--set", "model.loss_chunk_tokens=64", "training.steps=3"]) == 0


BAD = [
    ({"sdp.capacity": 1.5}, "sdp.capacity: 1.5 is out of range"),
    ({"sdp.groups": 2, "sdp.capacity": 0.25}, "use a capacity of at least 0.5"),
    ({"sdp.units": ["model.layer.*"]}, "matches no module"),
    ({"sdp.placement": {}}, "sdp.placement"),
    ({"sdp.placement": {"layers.0": [0, 2]}}, "has the holder 2"),
    ({"sdp.groups": 2, "train_batch_size": 7}, "data ranks 2 (sdp.groups 2 × fsdp 1)"),
    ({"model.vocab_size": 512}, "model.vocab_size: 512, but the data's tokenizer has 257"),
    ({"data.vocab_size": 512}, "was prepared with a vocabulary of 257"),
    ({"data.path": "nowhere"}, "nowhere"),
    ({"data.sequence_length": 10**7}, "fewer than one sequence"),
    ({"data.sequence_length": 1024}, "the evaluation data has"),
    ({"data.tokenizer": "sentencepiece"}, "was prepared with bytes; remove data.tokenizer"),
    (
        {"data.sequence_length": 4096, "model.max_position_embeddings": 2048},
        "more than model.max_position_embeddings = 2048",
    ),
    ({"scheduler.params.total_num_steps": -1}, "scheduler.params.total_num_steps"),
    ({"training.seed": 10**25}, "training.seed"),
    ({"training.steps": None}, "training.steps: this key is required to train"),
    ({"wandb.enabled": True}, "wandb"),
]


def test_a_sequence_that_tensor_parallel_ranks_cannot_share_is_refused_in_one_line(config, tmp_path):
    words = ["train", write_config(config, tmp_path), "--groups", 1, "--tp", 2, "--dump-dir", tmp_path / "run"]
    result = run_sdp(*words, "--set", "sdp.capacity=1.0", "data.sequence_length=33")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert "data.sequence_length: 33 is not divisible by tensor_parallel.autotp_size = 2" in result.stderr


@pytest.mark.parametrize(("change", "message"), BAD, ids=["+".join(change) for change, _ in BAD])
def test_bad_input_is_one_line_and_exit_code_2(config, tmp_path, capsys, change, message):
    config["sdp"] = {"groups": 1}
    for dotted, value in change.items():
        *parents, key = dotted.split(".")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = value
    assert main(["train", str(write_config(config, tmp_path)), "--dump-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("sdp: error: ")
    assert said.err.count("\n") == 1
    assert message in said.err


def test_two_runs_cannot_write_to_one_directory(config, tmp_path, capsys):
    config["sdp"] = {"groups": 1}
    path = write_config(config, tmp_path)
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main(["train", str(path), "--dump-dir", str(tmp_path / "run")]) == 2
    assert "another run is writing here" in capsys.readouterr().err
    assert main(["train", str(path), "--dump-dir", str(tmp_path / "run"), "--set", "training.steps=1"]) == 0


def test_a_check_refuses_what_it_would_ignore(config, tmp_path, capsys):
    assert main(["train", str(write_config(config, tmp_path)), "--check", "--resume"]) == 2
    assert "--check: trains nothing, so --resume has no effect" in capsys.readouterr().err
