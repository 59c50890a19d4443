"""``sdp train`` end to end: real processes, real text, real files."""

import fcntl
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sdp.data.prepare import prepare
from sdp.tools.cli import main

STEPS = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A few hundred small documents, as bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    words = random.Random(0)
    for number in range(60):
        text = " ".join(words.choice(["alpha", "beta", "gamma", "delta"]) for _ in range(80))
        (folder / f"{number}.txt").write_text(text)
    prepare([str(folder / "*.txt")], folder / "shards", tokenizer="bytes", held_out=0.2, workers=1, progress=False)
    return folder / "shards"


@pytest.fixture
def config(corpus) -> dict:
    return {
        "train_batch_size": 8,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
        "scheduler": {"type": "WSD", "params": {"warmup_num_steps": 2, "total_num_steps": STEPS, "decay_num_steps": 2}},
        "csv_monitor": {"enabled": True},
        "sdp": {"groups": 2, "capacity": 0.75, "check_interval": 2},
        "model": {
            "name": "llama",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
        },
        "data": {"path": str(corpus), "sequence_length": 32},
        "training": {"steps": STEPS, "evaluate_every": 3, "evaluate_batches": 2, "save_every": 3},
    }


def write(config: dict, tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


def sdp(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-P", "-m", "sdp", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def metrics(dump_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (dump_dir / "metrics.jsonl").read_text().splitlines()]


def losses(dump_dir: Path) -> list[float]:
    return [line["loss"] for line in metrics(dump_dir)]


def test_a_run_of_four_processes_its_files_and_its_resume_on_two(config, tmp_path):
    path = write(config, tmp_path)
    whole = sdp("train", path, "--fsdp", 2, "--dump-dir", tmp_path / "whole", "--set", "zero_optimization.stage=2")
    assert whole.returncode == 0, whole.stderr
    check_files(tmp_path / "whole")

    shutil.copytree(tmp_path / "whole", tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved/checkpoints/step-6")
    # The same groups and the same samples a step on half the processes: the same run to rounding.
    second = sdp("train", path, "--dump-dir", tmp_path / "moved", "--resume")
    assert second.returncode == 0, second.stderr
    assert f"resumed from {tmp_path / 'moved/checkpoints/step-3'}" in second.stderr
    assert [line["step"] for line in metrics(tmp_path / "moved")] == list(range(1, STEPS + 1))
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def check_files(dump_dir: Path) -> None:
    lines = metrics(dump_dir)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for key in (
        "tokens",
        "loss",
        "grad_norm",
        "lr",
        "tokens_per_second",
        "step_seconds",
        "peak_memory_bytes",
        "comm_bytes",
    ):
        assert all(isinstance(line[key], int | float) for line in lines), key
    for line in lines:
        parts = [line[f"{part}_seconds"] for part in ("data", "forward", "backward", "exposed_reduction", "optimizer")]
        assert min(parts) >= 0 and line["exposed_reduction_seconds"] > 0
        assert sum(parts) <= line["step_seconds"]
    assert lines[-1]["tokens"] == STEPS * 8 * 32
    assert lines[-1]["loss"] < lines[0]["loss"]
    summary = json.loads((dump_dir / "summary.json").read_text())
    assert len(summary["ranks"]) == 4
    for rank in summary["ranks"]:
        assert rank["comm_bytes_per_step"] == rank["comm_bytes_planned"]
        assert rank["state_measured"] == rank["state_predicted"]
        assert 0 < rank["state_measured"]["optimizer"] < summary["dense_state_bytes"]["optimizer"]
        assert rank["peak_tensor_bytes"] > sum(rank["state_measured"].values())
    evaluations = [json.loads(line) for line in (dump_dir / "evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in evaluations] == [0, 3, 6]
    assert all(len(line["subnetwork_losses"]) == 2 for line in evaluations)
    assert summary["held_out"] == {"before": evaluations[0]["loss"], "after": evaluations[-1]["loss"]}
    assert json.loads((dump_dir / "placement.json").read_text())["groups"] == 2
    assert json.loads((dump_dir / "config.json").read_text())["zero_optimization"]["stage"] == 2
    assert (dump_dir / "plots" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(p.name for p in (dump_dir / "checkpoints").glob("step-*")) == ["step-3", "step-6"]
    assert {f"rank-{rank}.log" for rank in range(4)} <= {p.name for p in (dump_dir / "logs").iterdir()}
    assert list((dump_dir / "csv").rglob("*.csv"))


def test_a_run_goes_on_under_tensor_parallelism(trained_run, tmp_path):
    """2 groups × fsdp 2 before; 2 groups × tp 2, and the reference, after: the same samples, the same run."""
    for name in ("tp", "reference"):
        shutil.copytree(trained_run, tmp_path / name)
    batch = ["train_batch_size=8", "training.steps=6", "training.evaluate_every=0"]
    command = ["train", trained_run / "config.json", "--resume", "--set", *batch, "gradient_accumulation_steps=2"]
    cut = sdp(*command, "--tp", 2, "--dump-dir", tmp_path / "tp")
    assert cut.returncode == 0, cut.stderr
    assert main([*map(str, command), "sdp.engine=reference", "--dump-dir", str(tmp_path / "reference")]) == 0
    assert losses(tmp_path / "tp")[:4] == losses(trained_run)
    assert losses(tmp_path / "tp")[4:] == pytest.approx(losses(tmp_path / "reference")[4:], rel=1e-5)
    assert len(losses(tmp_path / "tp")) == 6
    for rank in json.loads((tmp_path / "tp" / "summary.json").read_text())["ranks"]:
        assert rank["state_measured"] == rank["state_predicted"]


@pytest.mark.parametrize("engine", ["reference", "fsdp2"])
def test_neurons_train_resume_and_go_on_as_blocks(config, tmp_path, engine):
    section = {"groups": 2, "capacity": 0.5, "granularity": "neuron", "neuron_groups": 4, "engine": engine}
    path = write(config | {"sdp": section, "train_micro_batch_size_per_gpu": 4}, tmp_path)
    start = (
        (lambda *words: sdp(*words))
        if engine == "fsdp2"
        else (lambda *words: SimpleNamespace(returncode=main([*map(str, words)])))
    )
    assert start("train", path, "--dump-dir", tmp_path / "whole").returncode == 0
    if engine == "reference":
        assert start("train", path, "--dump-dir", tmp_path / "halves", "--set", "training.steps=3").returncode == 0
        assert start("train", path, "--dump-dir", tmp_path / "halves", "--resume").returncode == 0
        assert losses(tmp_path / "halves") == losses(tmp_path / "whole")
    last = json.loads((tmp_path / "whole" / "evaluations.jsonl").read_text().splitlines()[-1])
    assert last["subnetwork_losses"][0] != pytest.approx(last["loss"], rel=1e-4)
    for rank in json.loads((tmp_path / "whole" / "summary.json").read_text())["ranks"] if engine == "fsdp2" else ():
        assert (
            rank["state_measured"] == rank["state_predicted"]
            and rank["comm_bytes_per_step"] == rank["comm_bytes_planned"]
        )
    # The same run goes on in blocks: names and shapes are those of the full model.
    blocks = ["sdp.granularity=block", "sdp.neuron_groups=8", "sdp.engine=reference", "training.steps=7"]
    assert main(["train", str(path), "--dump-dir", str(tmp_path / "whole"), "--resume", "--set", *blocks]) == 0
    assert len(losses(tmp_path / "whole")) == 7


def test_reference_engine_trains_the_same_run_and_resumes_bit_for_bit(config, tmp_path):
    path = write(config, tmp_path)
    native = sdp("train", path, "--dump-dir", tmp_path / "native")
    assert native.returncode == 0, native.stderr
    reference = ["train", str(path), "--set", "sdp.engine=reference"]
    assert main([*reference, "--dump-dir", str(tmp_path / "whole")]) == 0
    assert losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "native"), rel=1e-5)
    assert main([*reference, "--dump-dir", str(tmp_path / "halves"), "--set", "training.steps=3"]) == 0
    assert main([*reference, "--dump-dir", str(tmp_path / "halves"), "--resume"]) == 0
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")


def test_backward_masking_trains_and_resumes_as_the_reference_does(config, tmp_path):
    command = [
        "train",
        write(config, tmp_path),
        "--set",
        "sdp.masking=backward",
        "sdp.profile=uniform",
        "training.evaluate_every=0",
    ]
    native = ["--dump-dir", tmp_path / "native"]
    first = sdp(*command, "training.steps=3", *native)
    assert first.returncode == 0, first.stderr
    assert "masking: units that a group does not hold run from frozen copies" in first.stderr
    second = sdp(*command, *native, "--resume")
    assert second.returncode == 0, second.stderr
    assert "frozen copies" in second.stdout
    assert main([*map(str, command), "sdp.engine=reference", "--dump-dir", str(tmp_path / "reference")]) == 0
    assert losses(tmp_path / "native") == pytest.approx(losses(tmp_path / "reference"), rel=1e-5)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("native", "reference")]
    assert summaries[0]["held_out"] == pytest.approx(summaries[1]["held_out"], rel=1e-5)
    for rank in summaries[0]["ranks"]:
        assert rank["state_measured"] == rank["state_predicted"]
        assert rank["comm_bytes_per_step"] == rank["comm_bytes_planned"]
    # Group 0 holds all four blocks, and sends two to group 1.
    assert [rank["state_measured"]["frozen"] > 0 for rank in summaries[0]["ranks"]] == [False, True]
    assert ["between groups/broadcast" in rank["comm_bytes_per_step"] for rank in summaries[0]["ranks"]] == [
        True,
        False,
    ]


def test_a_run_that_diverges_names_its_last_checkpoint_and_keeps_it(config, tmp_path, capsys):
    # After one step of this rate the weights are so large that every later pass overflows.
    config |= {"optimizer": {"type": "SGD", "params": {"lr": 1e30}}, "scheduler": None}
    config["training"] |= {"save_every": 1, "keep": 1, "evaluate_every": 0, "max_skips": 2}
    config["sdp"]["engine"] = "reference"
    assert main(["train", str(write(config, tmp_path)), "--dump-dir", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert f"the last good one: {tmp_path / 'run' / 'checkpoints' / 'step-1'}" in error.splitlines()[-1]
    assert "Traceback" not in error
    assert error.count("was skipped by all groups") == 2
    assert [line["skipped_steps"] for line in metrics(tmp_path / "run")] == [0, 1, 2]


def test_a_resume_with_another_tokenizer_or_a_damaged_checkpoint_changes_nothing(config, corpus, tmp_path, capsys):
    config["sdp"]["engine"] = "reference"
    config["training"] |= {"steps": 2, "save_every": 1}
    run = tmp_path / "run"
    resume = ["train", str(write(config, tmp_path)), "--dump-dir", str(run), "--resume"]
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
    assert last.endswith("remove this directory to resume from an older checkpoint")
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == written


def test_a_resume_with_another_model_changes_nothing(config, tmp_path, capsys):
    config["sdp"]["engine"] = "reference"
    config["training"] |= {"steps": 2, "save_every": 1}
    run = tmp_path / "run"
    resume = ["train", str(write(config, tmp_path)), "--dump-dir", str(run), "--resume"]
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


def test_an_existing_run_is_not_overwritten(config, tmp_path, capsys):
    path = write(config, tmp_path)
    arguments = [
        "train",
        str(path),
        "--set",
        "sdp.engine=reference",
        "--set",
        "training.steps=2",
        "--dump-dir",
        str(tmp_path / "run"),
    ]
    assert main(arguments) == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert main(arguments) == 2
    assert "--resume" in capsys.readouterr().err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


BAD = [
    ({"gradient_clipp1ng": 1.0}, "gradient_clipp1ng: unknown key, did you mean gradient_clipping?"),
    ({"sdp.groups": "2"}, "sdp.groups: input should be a valid integer"),
    ({"sdp.capacity": 1.5}, "sdp.capacity: 1.5 is out of range"),
    ({"sdp.capacity": 0.25}, "use a capacity of at least 0.5"),
    ({"sdp.units": ["model.layer.*"]}, "matches no module"),
    ({"sdp.placement": {}}, "sdp.placement"),
    ({"sdp.placement": {"layers.0": [0, 2]}}, "is given to group 2"),
    ({"optimizer.type": "AdmW"}, "did you mean AdamW?"),
    ({"optimizer.params.bettas": [0.9, 0.95]}, "optimizer.params.bettas: unknown key, did you mean betas?"),
    ({"train_batch_size": 7}, "data ranks 2 (sdp.groups 2 × fsdp 1)"),
    ({"model.vocab_size": 512}, "model.vocab_size: 512, but the data's tokenizer has 257"),
    ({"data.vocab_size": 512}, "was prepared with a vocabulary of 257"),
    ({"model.hiden_size": 8}, "model.hiden_size: unknown key, did you mean hidden_size?"),
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
    ({"training.tokens": 4096}, "either training.steps or training.tokens"),
    ({"wandb.enabled": True}, "wandb"),
]


def test_a_sequence_that_tensor_parallel_ranks_cannot_share_is_refused_in_one_line(config, tmp_path, capsys):
    command = ["train", str(write(config, tmp_path)), "--groups", "1", "--tp", "2", "--dump-dir", str(tmp_path / "run")]
    assert main([*command, "--set", "sdp.capacity=1.0", "data.sequence_length=33"]) == 2
    assert "data.sequence_length: 33 is not divisible by tensor_parallel.autotp_size = 2" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "message"), BAD, ids=[next(iter(change)) for change, _ in BAD])
def test_bad_input_is_one_line_and_exit_code_2(config, tmp_path, capsys, change, message):
    config["sdp"]["engine"] = "reference"
    for dotted, value in change.items():
        *parents, key = dotted.split(".")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = value
    assert main(["train", str(write(config, tmp_path)), "--dump-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("sdp: error: ")
    assert said.err.count("\n") == 1
    assert message in said.err


def test_bad_input_found_in_several_processes_is_one_line(config, tmp_path):
    config["optimizer"]["type"] = "AdmW"
    result = sdp("train", write(config, tmp_path), "--dump-dir", tmp_path / "run")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1, result.stderr
    assert "did you mean AdamW?" in result.stderr


def test_a_corrupt_shard_is_named(config, corpus, tmp_path, capsys):
    copy = tmp_path / "shards"
    copy.mkdir()
    for file in corpus.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    shard = next(copy.glob("train-*.bin"))
    shard.write_bytes(shard.read_bytes()[:-10])
    config["data"]["path"] = str(copy)
    config["sdp"]["engine"] = "reference"
    assert main(["train", str(write(config, tmp_path)), "--dump-dir", str(tmp_path / "run")]) == 2
    assert shard.name in capsys.readouterr().err


def test_world_must_be_divisible(config, tmp_path):
    result = sdp("train", write(config, tmp_path), "--nproc", 3, "--dump-dir", tmp_path / "run")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "multiple of" in result.stderr


def test_two_runs_cannot_write_to_one_directory(config, tmp_path, capsys):
    config["sdp"]["engine"] = "reference"
    path = write(config, tmp_path)
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main(["train", str(path), "--dump-dir", str(tmp_path / "run")]) == 2
    assert "another run is writing here at this moment" in capsys.readouterr().err
    assert main(["train", str(path), "--dump-dir", str(tmp_path / "run"), "--set", "training.steps=1"]) == 0


def test_a_budget_of_tokens_holds_over_a_change_of_batch(config, tmp_path, capsys):
    config["sdp"]["engine"] = "reference"
    config["scheduler"] = None
    config["training"] |= {"steps": None, "tokens": 3 * 8 * 32, "save_every": 1}
    run = ["train", str(write(config, tmp_path)), "--dump-dir", str(tmp_path / "run")]
    assert main(run) == 0
    # The same number of tokens again in batches twice as large: one step of 512, and one that goes over.
    assert main([*run, "--resume", "--set", f"training.tokens={6 * 8 * 32}", "train_batch_size=16"]) == 0
    assert [line["tokens"] for line in metrics(tmp_path / "run")] == [256, 512, 768, 1280, 1792]
    capsys.readouterr()
    assert main([*run, "--resume", "--set", "training.tokens=null", "training.steps=4"]) == 2
    assert "training.steps: 4, but" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "config.json").read_text())["training"]["tokens"] == 6 * 8 * 32


def test_a_run_is_found_again_from_another_directory(config, corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(corpus.parent)
    config["data"]["path"] = corpus.name
    config["sdp"]["engine"] = "reference"
    config["training"] |= {"steps": 1, "save_every": 1}
    assert main(["train", str(write(config, tmp_path)), "--dump-dir", str(tmp_path / "run")]) == 0
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "run"]) == 0
