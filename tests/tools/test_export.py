"""``sdp export``: what ``transformers`` makes of the directory, and what it costs to write."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sdp.data.tokenizers import load_tokenizer
from sdp.engine.checkpoint.load import load
from sdp.engine.checkpoint.save import write
from sdp.engine.checkpoint.storage.files import read_state
from sdp.engine.config.load import load_config
from sdp.engine.distributed.agreement import Ranks
from sdp.engine.errors import ConfigError
from sdp.models.llama import Llama
from sdp.models.registry import build_model
from sdp.tests.support.texts import AWKWARD, save_byte_level
from sdp.tools.cli import main
from sdp.tools.export import export as export_model
from sdp.tools.runs import saved_run

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def exported(trained_run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("export") / "model"
    assert main(["export", str(trained_run), "--to", "hf", str(out)]) == 0
    return out


def our_model(run: Path, tag: str = "step-4") -> torch.nn.Module:
    saved = saved_run.use(saved_run.CheckpointChoice(run, tag), lambda saved: saved)
    model = Llama(build_model(saved.config.model, load_tokenizer(saved.data).vocab_size).config)
    tensors = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    load(saved.checkpoint, tensors, saved.state["files"], alone=True)
    return model.eval()


def texts() -> list[str]:
    root = Path(__file__).parent.parent.parent
    return AWKWARD + [
        path.read_text() for path in (root / "README.md", root / "tools" / "shared" / "table.py", Path(__file__))
    ]


def test_what_stands_beside_the_output_is_not_touched(trained_run, tmp_path):
    for name in ("model.old", "model.partial", ".model.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    for more in ([], ["--overwrite"]):
        assert main(["export", str(trained_run), "--to", "hf", str(tmp_path / "model"), *more]) == 0
        (tmp_path / "model" / "README.md").write_text("mine")
        (tmp_path / "model" / "model-00001-of-00002.safetensors").write_text("of an earlier export")
    assert main(["export", str(trained_run), "--to", "hf", str(tmp_path / "model"), *more]) == 0
    assert (tmp_path / "model" / "README.md").read_text() == "mine"
    assert not (tmp_path / "model" / "model-00001-of-00002.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.partial", "model", "model.old", "model.partial"]
    assert len(list(tmp_path.rglob("precious"))) == 3


def test_data_of_another_tokenizer_is_refused(trained_run, tmp_path, capsys):
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"document {number} " * 9}) + "\n" for number in range(40))
    )
    words = ["prepare", "--input", str(tmp_path / "text.jsonl"), "--output", str(tmp_path / "other")]
    assert main([*words, "--tokenizer", "bytes"]) == 0
    for command in (
        ["export", str(trained_run), "--to", "hf", str(tmp_path / "model")],
        ["evaluate", str(trained_run)],
    ):
        capsys.readouterr()
        assert main([*command, "--set", f"data.path={tmp_path / 'other'}"]) == 2
        assert "was trained with another tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_logits_and_generation_are_those_of_our_model(trained_run, exported):
    ours, theirs = our_model(trained_run), transformers.AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert type(theirs) is transformers.LlamaForCausalLM
    assert theirs.dtype == torch.float32
    assert (theirs.config.rope_parameters["rope_theta"], theirs.config.bos_token_id, theirs.config.eos_token_id) == (
        5000.0,
        None,
        1,
    )
    ids = tokenizer(texts()[-1], return_tensors="pt")["input_ids"][:, : 8 * 64].view(8, 64)
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=1e-5, atol=1e-5)
    made = theirs.generate(ids[:1, :8], max_new_tokens=6, do_sample=False)
    expected = ids[:1, :8]
    for _ in range(made.shape[1] - 8):
        expected = torch.cat([expected, ours(expected)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(made, expected)
    assert isinstance(tokenizer.decode(made[0]), str)


def test_shards_dtype_and_overwriting(trained_run, exported, tmp_path, capsys):
    out = tmp_path / "model"
    command = ["export", str(trained_run), "--checkpoint", "step-2", "--to", "hf", str(out)]
    assert main([*command, "--dtype", "bfloat16", "--max-shard-size", "20KB"]) == 0
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert {index["weight_map"][name] for name in index["weight_map"]} == {path.name for path in files}
    whole = {name: tensor for path in files for name, tensor in load_file(path).items()}
    ours = our_model(trained_run, "step-2").state_dict()
    assert whole.keys() == ours.keys() == load_file(exported / "model.safetensors").keys()
    assert all(torch.equal(whole[name], ours[name].bfloat16()) for name in ours)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    for path in files:
        tensors = load_file(path).values()
        assert sum(tensor.nbytes for tensor in tensors) <= 20_000 or len(tensors) == 1
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(tensor, whole[name]) for name, tensor in model.state_dict().items())

    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert main([*command, "--overwrite"]) == 0
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in exported.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "OUT"], "nowhere: neither a run nor a checkpoint of a run"),
        (["run", "OUT", "--checkpoint", "step-9"], "no checkpoint step-9; found: step-2, step-4"),
        (["run", "run", "--overwrite"], "has files that are not from an export"),
        (["run", "OUT", "--to", "gguf"], "invalid choice: 'gguf'"),
        (["run", "OUT", "--max-shard-size", "lots"], "'lots' is not a size"),
        (["run", "OUT", "--set", "data.path=nowhere"], "sdp prepare"),
        (["run", "OUT", "--set", "model.num_hidden_layers=5"], "for another model"),
        (["run", "file/OUT"], "cannot be written"),
    ],
)
def test_what_cannot_be_exported_is_one_line(trained_run, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("run").symlink_to(trained_run)
    Path("file").write_text("")
    assert main(["export", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_a_damaged_checkpoint_is_not_exported(trained_run, tmp_path, capsys):
    run = shutil.copytree(trained_run, tmp_path / "run")
    file = sorted((run / "checkpoints" / "step-4").glob("*.distcp"))[-1]
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    assert f"{file}: damaged, its sha256 is" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED = {"factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("kind", "model", "architecture"),
    [
        ("bytes", {"rope_scaling": SCALED | LLAMA3, "z_loss": 0.01}, "LlamaForCausalLM"),
        ("hf", {"rope_scaling": SCALED | {"rope_type": "yarn"}, "qk_norm": True}, "Qwen3ForCausalLM"),
    ],
)
def test_bytes_and_hugging_face_tokenizers(kind, model, architecture, tmp_path):
    """Also with rotary frequencies for long sequences and normalised heads."""
    name = kind
    if kind == "hf":
        name = f"hf:{save_byte_level(tmp_path / 'tokenizer', texts(), bos_token='<begin>', eos_token='<end>')}"
    plain = [
        f"document {number} of those that make both splits large enough, whatever the others are; " * 4
        for number in range(40)
    ]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text * 4}) + "\n" for text in [*plain, *texts()]))
    data = ["--input", tmp_path / "text.jsonl", "--output", tmp_path / "data", "--tokenizer", name]
    assert main(["prepare", *map(str, data), "--held-out", "0.4", "--workers", "1"]) == 0
    shutil.rmtree(tmp_path / "tokenizer", ignore_errors=True)  # the prepared data is enough
    config = {
        "sdp": {"groups": 1},
        "model": {
            "name": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "tie_word_embeddings": True, "initializer_range": 0.2, **model,
        },
        "data": {"path": str(tmp_path / "data"), "sequence_length": 32},
        "training": {"steps": 1, "save_every": 1, "evaluate_batches": 1},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["train", str(tmp_path / "config.json"), "--dump-dir", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    ours, theirs = load_tokenizer(tmp_path / "data"), transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == architecture
    assert theirs.eos_token_id == ours.end_of_text == model.config.eos_token_id
    assert model.config.bos_token_id == theirs.bos_token_id == (None if kind == "bytes" else 0)
    assert model.config.vocab_size == len(theirs) == ours.vocab_size
    for text in texts():
        found = theirs(text, add_special_tokens=False, split_special_tokens=True)
        assert found["input_ids"] == ours.encode(text)
    ids = torch.tensor([ours.encode(texts()[-1])[:200]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, our_model(tmp_path / "run", "step-1")(ids), rtol=1e-5, atol=1e-5)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


BIG = {
    "name": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8,
}  # fmt: skip
MODELS = {  # the second has one tensor in most files, and in bfloat16 takes half of what the checkpoint holds
    "many tensors a file": BIG,
    "one tensor a file": {**BIG, "intermediate_size": 24576, "num_hidden_layers": 1},
}
MEASURE = """
import sys
import torch
from sdp.engine.accounting.memory import PeakMemory
from sdp.tools.cli import main
import sdp.tools.export
run, out, dtype, big, small = sys.argv[1:]
# The first export imports and caches what is not measured.
assert main(["export", run, out + "-first", "--dtype", dtype, "--max-shard-size", small]) == 0
memory = PeakMemory(torch.device("cpu"))
memory.reset()
before = memory.read()
assert main(["export", run, out, "--dtype", dtype, "--max-shard-size", big]) == 0
print(memory.read() - before)
"""


@pytest.mark.parametrize(
    ("model", "dtype"),
    [("many tensors a file", torch.float32), pytest.param("one tensor a file", torch.bfloat16, marks=pytest.mark.slow)],
    ids=str,
)
def test_the_memory_is_that_of_two_shards_not_of_the_model(trained_run, tmp_path, model, dtype):
    config = json.loads((trained_run / "config.json").read_text())
    state = read_state(trained_run / "checkpoints" / "step-4")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(config | {"model": MODELS[model]}))
    shapes = {f"model/{name}": p.shape for name, p in build_model(MODELS[model], 512).named_parameters()}
    tensors = {name: torch.full(tuple(shape), 0.5) for name, shape in shapes.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert size > 200e6
    write(tmp_path / "run" / "checkpoints", "step-4", tensors, state, Ranks(alone=True))
    del tensors
    arguments = [tmp_path / "run", tmp_path / "out", str(dtype).removeprefix("torch."), "50MB", "12MB"]
    measured = subprocess.run(
        [sys.executable, "-P", "-c", MEASURE, *arguments], capture_output=True, text=True, timeout=300
    )
    assert measured.returncode == 0, measured.stderr
    peak = int(measured.stdout.splitlines()[-1])
    files = [path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(files) > 3
    assert max(files) / 2 < peak <= 2 * max(files)
    shutil.rmtree(tmp_path)


def test_scaled_branches_are_not_exported(tmp_path: Path) -> None:
    saved = saved_run.SavedRun(tmp_path, load_config({"sdp": {"groups": 2, "branch_scale": "eval"}}), tmp_path, {})
    with pytest.raises(ConfigError, match=r'sdp\.branch_scale "eval", and transformers cannot scale branches'):
        export_model(saved, tmp_path / "out", torch.float32, 1 << 30)
