"""``sdp train --init-from``: an export is the start of another run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sdp.data.shards import TokenDataset
from sdp.tests.support.foreign import given_models
from sdp.tools.cli import main

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def exported(trained_run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("start") / "model"
    assert main(["export", str(trained_run), str(out)]) == 0
    return out


@pytest.fixture
def config(trained_run, tmp_path) -> Path:
    """Of one rank, with the batches of the run that was exported, and without a model section."""
    whole = json.loads((trained_run / "config.json").read_text())
    short = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": whole["optimizer"],
        "sdp": {"groups": 1},
        "data": whole["data"],
        "training": {"steps": 2, "evaluate_batches": 8, "save_every": 1},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(short))
    return path


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_it_starts_where_the_export_ended_and_a_checkpoint_wins(trained_run, exported, config, tmp_path, capsys):
    start = shutil.copytree(exported, tmp_path / "start")
    run = ["train", str(config), "--init-from", str(start), "--dump-dir"]
    assert main([*run, str(tmp_path / "whole")]) == 0
    assert f"weights: training starts from the files in {start}" in capsys.readouterr().err
    ended = lines(trained_run / "evaluations.jsonl")[-1]["loss"]
    assert lines(tmp_path / "whole" / "evaluations.jsonl")[0]["loss"] == pytest.approx(ended, rel=1e-5)
    recorded = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert recorded["training"]["init_from"] == str(start)
    assert (recorded["model"]["name"], recorded["model"]["hidden_size"], recorded["model"]["rope_theta"]) == (
        "llama",
        32,
        5000.0,
    )

    assert main([*run, str(tmp_path / "halves"), "--set", "training.steps=1"]) == 0
    assert main([*run, str(tmp_path / "halves"), "--resume"]) == 0
    whole, halves = (lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "halves"))
    assert [line["loss"] for line in halves] == [line["loss"] for line in whole]
    assert whole[1]["loss"] != whole[0]["loss"]

    shutil.rmtree(start)  # what was trained stands by itself
    assert main(["evaluate", str(tmp_path / "whole"), "--json"]) == 0
    loss = json.loads(capsys.readouterr().out.splitlines()[-1])["loss"]
    assert loss == pytest.approx(lines(tmp_path / "whole" / "evaluations.jsonl")[-1]["loss"], rel=1e-5)


def change_config(folder: Path, **keys: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


BAD = {
    "a key that differs": (lambda _: None, ["--set", "model.hidden_size=64"], "model.hidden_size: 64, but"),
    "another model": (lambda _: None, ["--set", "model.name=resnet"], 'model.name: "resnet", but'),
    "an unknown key": (lambda _: None, ["--set", "model.hiden_size=32"], "model.hiden_size: unknown key"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), [], "is not a model's configuration"),
    "another kind": (
        lambda folder: change_config(folder, model_type="gpt2"), ["--set", "model.name=llama"],
        "model_type 'gpt2' is not a LLaMA; set model.name to \"huggingface\"",
    ),
    "a bias": (
        lambda folder: change_config(folder, attention_bias=True), ["--set", "model.name=llama"],
        "attention_bias True is not supported, only False; set",
    ),
    "a missing bias": (
        lambda folder: change_config(folder, attention_bias=True), [],
        "has no 'model.layers.0.self_attn.q_proj.bias'",
    ),
    "stretched positions": (
        lambda folder: change_config(folder, rope_parameters={"rope_type": "linear", "factor": 2.0}),
        ["--set", "model.name=llama"], "rope_scaling.rope_type: input should be 'llama3' or 'yarn'",
    ),
    "another vocabulary": (lambda folder: change_config(folder, vocab_size=577), [], "vocab_size: 577, but the "
                                                                                     "data's tokenizer has 512"),
    "another shape": (lambda folder: change_config(folder, intermediate_size=49), [], "shape (48, 32) in the files"),
    "a pickle": (only_a_pickle, [], "pytorch_model.bin, a pickle"),
}  # fmt: skip


@pytest.mark.parametrize("how", BAD)
def test_what_cannot_be_a_start_is_one_line_before_anything_is_written(exported, config, tmp_path, capsys, how):
    spoil, arguments, message = BAD[how]
    start = shutil.copytree(exported, tmp_path / "start")
    spoil(start)
    assert main(["train", str(config), "--init-from", str(start), "--dump-dir", str(tmp_path / "run"), *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_padded_beyond_the_tokenizer_keeps_its_rows(config, exported, tmp_path, capsys):
    start = shutil.copytree(exported, tmp_path / "start")
    change_config(start, vocab_size=576)
    tensors = load_file(start / "model.safetensors")
    names = [name for name, tensor in tensors.items() if tensor.shape[0] == 512]
    assert names
    for name in names:
        tensors[name] = torch.cat([tensors[name], torch.full((64, tensors[name].shape[1]), -0.5)])
    save_file(tensors, start / "model.safetensors")
    run, again = str(tmp_path / "run"), tmp_path / "again"
    assert main(["train", str(config), "--init-from", str(start), "--dump-dir", run, "--set", "training.steps=1"]) == 0
    assert "64 of the model's 576 tokens are padding" in capsys.readouterr().err
    assert main(["export", run, str(again)]) == 0
    assert json.loads((again / "config.json").read_text())["vocab_size"] == 576
    assert load_file(again / "model.safetensors")[names[0]][512:].mean() == pytest.approx(-0.5, abs=0.01)


def test_a_start_of_transformers_4_and_its_loss(config, exported, tmp_path):
    """Its config.json has rope_theta at the top."""
    start = shutil.copytree(exported, tmp_path / "start")
    old = json.loads((start / "config.json").read_text())
    del old["rope_parameters"], old["head_dim"]
    (start / "config.json").write_text(json.dumps(old))
    words = ["train", str(config), "--init-from", str(start), "--dump-dir", str(tmp_path / "run")]
    assert main([*words, "--set", "training.steps=1"]) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["rope_theta"] == 5000.0


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama-yarn", torch.bfloat16), ("gpt2", torch.float32), ("mixtral", torch.bfloat16)]
)
def test_a_folder_of_any_family_is_trained_and_exported_as_it_was(config, tmp_path, family, dtype):
    """The tensors' names and types and all other files are those of the start."""
    start = given_models.add_tokenizer(given_models.make(tmp_path / "start", family, dtype=dtype))
    before = load_file(start / "model.safetensors")
    fine = [name for name in before if family == "mixtral" and (".experts.1." in name or "norm" in name)]
    before |= {name: before[name].float() + 1e-5 for name in fine}
    save_file(before, start / "model.safetensors", metadata={"format": "pt"})
    data = given_models.prepared(tmp_path, start)
    settings = [f"data.path={data}", "data.sequence_length=32", "sdp.groups=1", "training.steps=2"]
    run, out = str(tmp_path / "run"), tmp_path / "out"
    command = ["train", str(config), "--init-from", str(start), "--dump-dir", run]
    (start / "additional_chat_templates").mkdir()
    (start / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    assert main([*command, "--set", *settings]) == 0

    def described(folder: Path) -> dict[str, bytes]:
        files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors")
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}

    kept = described(start)
    assert main([*command, "--resume", "--set", *settings[:-1], "training.steps=3"]) == 0
    shutil.rmtree(start)
    assert main(["evaluate", run]) == 0
    assert main(["export", run, str(out)]) == 0
    assert described(out) == kept
    after = load_file(out / "model.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in after.items()} == {n: (t.shape, t.dtype) for n, t in before.items()}
    assert any(not torch.equal(after[name], before[name]) for name in before)
    for name in fine:
        assert not torch.equal(after[name], after[name].bfloat16().float()), name
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert model.dtype == dtype
    assert model.generation_config.temperature == 0.7
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w1"}], tokenize=False) == "w1</s>"
    held_out = TokenDataset(data, "held_out", 32)
    rows = torch.stack([held_out[index * len(held_out) // 16]["input_ids"] for index in range(16)])
    with torch.no_grad():
        loss = model.float()(rows, labels=rows).loss.item()
    ended = lines(Path(run) / "evaluations.jsonl")[-1]["loss"]
    assert loss == pytest.approx(ended, rel=1e-5 if dtype == torch.float32 else 3e-3)
    assert main(["export", run, str(out), "--overwrite", "--dtype", "float16", "--max-shard-size", "20KB"]) == 0
    assert transformers.AutoModelForCausalLM.from_pretrained(out).dtype == torch.float16
