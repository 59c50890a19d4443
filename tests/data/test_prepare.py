"""Preparing gives the same result with any number of workers, or one clear line."""

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from sdp.data import encode, sources
from sdp.data import prepare as room
from sdp.data.corpus import standard_library
from sdp.data.output import clear, only_writer
from sdp.data.prepare import prepare
from sdp.data.shards import TokenDataset
from sdp.data.tokenizers import load_tokenizer
from sdp.engine.errors import DataError
from sdp.tools.cli import main

TEXTS = [f"Document {i}\n\n" + "\n".join(f"    line {i * j}: some text" for j in range(i % 7 + 1)) for i in range(60)]


def write_json_lines(path: Path, texts=TEXTS) -> str:
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def quiet(inputs, output, **arguments):
    return prepare(
        inputs, output, **{"tokenizer": "bytes", "workers": 1, "progress": False, "held_out": 0.2, **arguments}
    )


def documents_of(directory: Path, split: str) -> list[str]:
    dataset, tokenizer = TokenDataset(directory, split, 1), load_tokenizer(directory)
    ids = [int(dataset[i]["input_ids"]) for i in range(len(dataset))]
    ends = [i for i, token in enumerate(ids) if token == tokenizer.end_of_text]
    assert ends[-1] == len(ids) - 1
    return [tokenizer.decode(ids[a + 1 : b]) for a, b in zip([-1, *ends], ends, strict=False)]


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize(("tokenizer", "vocab_size"), [("bytes", None), ("sentencepiece", 310)])
def test_result_does_not_depend_on_the_workers(tmp_path, monkeypatch, tokenizer, vocab_size):
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 300)
    inputs = [write_json_lines(tmp_path / "a.jsonl"), write_json_lines(tmp_path / "b.jsonl.gz", TEXTS[::-1])]
    for workers in (1, 2):
        arguments = {"tokenizer": tokenizer, "vocab_size": vocab_size, "shard_tokens": 1000, "workers": workers}
        quiet(inputs, tmp_path / str(workers), **arguments)
    assert content(tmp_path / "1") == content(tmp_path / "2")
    assert len(list((tmp_path / "1").glob("train-*.bin"))) > 3


def test_documents_come_back_in_order_and_in_one_split_each(tmp_path):
    index = quiet([write_json_lines(tmp_path / "a.jsonl")], tmp_path / "out", shard_tokens=64)
    train, held_out = documents_of(tmp_path / "out", "train"), documents_of(tmp_path / "out", "held_out")
    assert sorted(train + held_out) == sorted(TEXTS)
    assert [text for text in TEXTS if text in train] == train
    assert 5 <= len(held_out) <= 20
    corpus = index["corpus"]
    assert corpus["documents"] == len(TEXTS)
    assert corpus["text_bytes"] == sum(map(len, TEXTS))
    assert {name: split["documents"] for name, split in index["splits"].items()} == {
        "train": len(train),
        "held_out": len(held_out),
    }
    assert index == json.loads((tmp_path / "out" / "index.json").read_text())


def test_kinds_of_files_give_the_same_tokens(tmp_path):
    (tmp_path / "text").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "text" / f"{i:03d}.txt").write_text(text)
    pyarrow.parquet.write_table(pyarrow.table({"body": TEXTS}), tmp_path / "a.parquet", row_group_size=7)
    quiet([write_json_lines(tmp_path / "a.jsonl")], tmp_path / "1")
    quiet([f"{tmp_path}/text/*.txt"], tmp_path / "2")
    quiet([str(tmp_path / "a.parquet")], tmp_path / "3", text_column="body")
    shards = [{k: v for k, v in content(tmp_path / n).items() if k.endswith(".bin")} for n in "123"]
    assert shards[0] == shards[1] == shards[2]


def test_large_vocabularies_use_uint32():
    assert [room.dtype_name(size) for size in (65535, 65536)] == ["uint16", "uint32"]


def test_tokenizer_is_trained_on_training_documents_only(tmp_path):
    path = write_json_lines(tmp_path / "a.jsonl")
    quiet([path], tmp_path / "out")
    corpus = sources.FileCorpus((Path(path),), "text")
    arguments = room.Settings("sentencepiece", 310, "text", 0.2, 0, 1000, None, None)
    sample = list(room.sample_texts(corpus, corpus.sources(), arguments))
    assert sample == documents_of(tmp_path / "out", "train")


def test_tokenizer_sample_is_spread_over_the_files(tmp_path, monkeypatch):
    paths = tuple(Path(write_json_lines(tmp_path / f"{i}.jsonl", [f"{i} {t}" for t in TEXTS])) for i in range(3))
    corpus = sources.FileCorpus(paths, "text")
    arguments = room.Settings("sentencepiece", 310, "text", 0.01, 0, 1000, None, None)
    monkeypatch.setattr(room, "TOKENIZER_SAMPLE_BYTES", 3_000)
    sample = list(room.sample_texts(corpus, corpus.sources(), arguments))
    assert {text[0] for text in sample} == {"0", "1", "2"}
    assert 1_500 < sum(map(len, sample)) < 4_500
    assert room.quota([5, 1, 100, 100], 40) == 17
    assert room.quota([5, 5], 40) == float("inf")


def test_same_preparation_is_not_repeated_and_another_is_refused(tmp_path, capsys):
    path, out = write_json_lines(tmp_path / "a.jsonl"), tmp_path / "out"
    first = quiet([path], out)
    before = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    assert quiet([path], out, progress=True) == first
    assert "already has this corpus with these settings" in capsys.readouterr().err
    assert {file.name: file.stat().st_mtime_ns for file in out.iterdir()} == before
    with pytest.raises(DataError, match=r"data that was made in another way .*held_out changed.* --overwrite"):
        quiet([path], out, held_out=0.3)
    write_json_lines(tmp_path / "a.jsonl", TEXTS[:40])
    with pytest.raises(DataError, match=r"made in another way \(the corpus changed\)"):
        quiet([path], out)
    assert quiet([path], out, overwrite=True)["corpus"]["documents"] == 40


def test_overwriting_leaves_no_old_shard(tmp_path):
    path, out = write_json_lines(tmp_path / "a.jsonl"), tmp_path / "out"
    quiet([path], out, shard_tokens=100)
    (out / "notes.bin").write_text("the user's")
    quiet([path], out, overwrite=True)
    assert sorted(file.name for file in out.iterdir()) == [
        "held_out-00000.bin", "index.json", "notes.bin", "train-00000.bin",
    ]  # fmt: skip


def test_damaged_output_is_named_and_can_be_made_again(tmp_path):
    path, out = write_json_lines(tmp_path / "a.jsonl"), tmp_path / "out"
    first = quiet([path], out)
    (out / "train-00000.bin").write_bytes(b"xx")
    with pytest.raises(DataError, match=r"train-00000\.bin: 2 bytes instead of"):
        quiet([path], out)
    assert quiet([path], out, overwrite=True) == first
    TokenDataset(out, "train", 8).verify()


@pytest.mark.parametrize("tokenizer", ["bytes", "sentencepiece"])
def test_empty_corpus(tmp_path, tokenizer):
    path = write_json_lines(tmp_path / "a.jsonl", [""])
    with pytest.raises(DataError, match="the corpus is empty"):
        quiet([path], tmp_path / "out", tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()


def test_empty_split_says_what_to_do(tmp_path):
    path = write_json_lines(tmp_path / "one.jsonl", TEXTS[:1])
    with pytest.raises(
        DataError, match=r"the corpus is one document, but each of the splits train and held_out needs one; give more"
    ):
        quiet([path], tmp_path / "out", held_out=0.5)
    path = write_json_lines(tmp_path / "same.jsonl", TEXTS[:1] * 40)
    with pytest.raises(DataError, match=r"40 document.* in the same split.*; give more different"):
        quiet([path], tmp_path / "out", held_out=0.5)
    assert not (tmp_path / "out").exists()


def test_documents_without_text_are_left_out_and_counted_once(tmp_path, capsys):
    table = pyarrow.table({"text": [TEXTS[i] if i % 3 else [None, ""][i % 2] for i in range(60)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    index = quiet([str(tmp_path / "a.parquet")], tmp_path / "out", progress=True)
    assert capsys.readouterr().err.count("left out 20 document(s) without text (empty or null)") == 1
    assert index["corpus"]["documents"] == 40
    assert sorted(documents_of(tmp_path / "out", "train") + documents_of(tmp_path / "out", "held_out")) == sorted(
        text for i, text in enumerate(TEXTS) if i % 3
    )


def test_full_disk_is_one_line_and_leaves_nothing_that_passes_for_complete(tmp_path):
    path = write_json_lines(tmp_path / "a.jsonl", TEXTS * 50)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # bytes in a file; the corpus has about 600 kB
    try:
        with pytest.raises(DataError, match=r"out: cannot be written: .*File too large"):
            quiet([path], tmp_path / "out", overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "out").exists()
    quiet([path], tmp_path / "out")


def test_two_at_once_are_refused(tmp_path):
    path, out = write_json_lines(tmp_path / "a.jsonl"), tmp_path / "out"
    with only_writer(out), pytest.raises(DataError, match="out: another sdp prepare is writing here"):
        quiet([path], out)
    assert not list(out.iterdir())
    quiet([path], out)
    with pytest.raises(DataError, match="another sdp prepare has written data here meanwhile"):
        clear(out, overwrite=False)
    assert load_tokenizer(out).vocab_size == 257


def test_interrupted_run_is_silent_and_can_be_repeated(tmp_path):
    inputs, out = write_json_lines(tmp_path / "a.jsonl", TEXTS * 1500), tmp_path / "out"
    arguments = ["prepare", "--input", inputs, "--output", str(out), "--tokenizer", "bytes", "--workers", "2"]
    command_line = [sys.executable, "-P", "-m", "sdp", *arguments]
    process = subprocess.Popen(command_line, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not list(out.glob("*.tmp")):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: to the workers too
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == f"reading {inputs}\n"
    assert not list(out.glob("*.tmp")) + list(out.glob("index.json"))
    write_json_lines(tmp_path / "a.jsonl")  # fewer documents are read sooner
    assert quiet([inputs], out)["corpus"]["documents"] == 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "nothing.jsonl"], "no file matches 'nothing.jsonl'"),
        (["--text-column", "body"], "no column 'body' (there are: text)"),
        (["--tokenizer", "gpt2"], "unknown tokenizer 'gpt2'"),
        (["--tokenizer", "hf:./nothing"], "tokenizer 'hf:./nothing' cannot be loaded"),
        (["--vocab-size", "260"], "the vocabulary size must be more than 260"),
        (["--workers", "0"], "at least 1, but is 0"),
        (["--output", "a.jsonl"], "a.jsonl: cannot be written: "),
        (["--output", "a.jsonl/out"], "a.jsonl/out: cannot be written: "),
        (["--held-out", "1"], "the held-out fraction must be between 0 and 1"),
        (["--held-out", "0"], "must be between 0 and 1, but is 0"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_json_lines(tmp_path / "a.jsonl")
    assert main(["prepare", "--input", "a.jsonl", "--output", "out", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_hub_that_cannot_be_reached_is_one_line_within_seconds(tmp_path):
    arguments = ["prepare", "--output", str(tmp_path / "out"), "--tokenizer", "hf:some/name"]
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-P", "-m", "sdp", *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(
        "sdp: error: tokenizer 'hf:some/name' cannot be loaded: no such directory, not in the cache, and"
    )
    assert result.stderr.count("\n") == 1
    assert time.monotonic() - started < 40  # the hub's own retries take 50 s on top of the imports


@pytest.fixture(scope="module")
def much_text(tmp_path_factory):
    texts = (f"{number} " + "some text " * 400 for number in range(20_000))
    return write_json_lines(tmp_path_factory.mktemp("much") / "a.jsonl", texts)


@pytest.mark.parametrize("victim", ["worker", "command"])
def test_a_killed_worker_or_command_leaves_nothing(much_text, tmp_path, victim):
    arguments = ["--input", much_text, "--output", str(tmp_path / "out")]
    command = [sys.executable, "-P", "-m", "sdp", "prepare", *arguments, "--tokenizer", "bytes", "--workers", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline, workers = time.monotonic() + 60, []
    while time.monotonic() < deadline and not (len(workers) == 2 and [*tmp_path.glob("out/train-*.tmp")]):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        workers = [int(pid) for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
        time.sleep(0.02)
    os.kill(workers[0] if victim == "worker" else process.pid, signal.SIGKILL if victim == "worker" else signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    if victim == "worker":
        assert process.returncode == 2 and "a worker process ended unexpectedly" in err
    else:
        assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in err
    assert not [*tmp_path.iterdir()]
    alive = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert all(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z" for pid in alive)


def test_workers_need_no_torch():
    code = "import sys, sdp.tools.prepare, sdp.data.encode; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_command_prepares_and_verifies(tmp_path, capsys):
    path, out = write_json_lines(tmp_path / "a.jsonl"), str(tmp_path / "out")
    common = ["--output", out, "--tokenizer", "bytes", "--workers", "1"]
    assert main(["prepare", "--input", path, *common, "--held-out", "0.2"]) == 0
    printed = capsys.readouterr().out
    for part in ("60 documents", "sha256", "bytes, 257 tokens", "(0.99 bytes each) in 2 shard(s)", "held_out"):
        assert part in printed
    assert main(["prepare", "--output", out, "--verify"]) == 0
    assert "every shard and the tokenizer are sound" in capsys.readouterr().out
    (tmp_path / "out" / "train-00000.bin").write_bytes(bytes((tmp_path / "out" / "train-00000.bin").stat().st_size))
    assert main(["prepare", "--output", out, "--verify"]) == 2
    assert "sha256" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("splits", {}, "splits: "),
        ("vocab_size", 300, "the vocabulary in the index"),
        ("end_of_text", 3, "the vocabulary in the index"),
    ],
)
def test_an_index_edited_by_hand_does_not_verify(tmp_path, capsys, key, value, message):
    out = tmp_path / "out"
    index = quiet([write_json_lines(tmp_path / "a.jsonl")], out)
    (out / "index.json").write_text(json.dumps({**index, key: value}))
    assert main(["prepare", "--output", str(out), "--verify"]) == 2
    assert message in capsys.readouterr().err


def test_command_without_input_reads_the_standard_library(tmp_path, capsys):
    assert main(["prepare", "--output", str(tmp_path), "--tokenizer", "bytes", "--workers", "1"]) == 0
    assert "reading the standard library of Python 3" in capsys.readouterr().err
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["corpus"]["text_bytes"] >= 10_000_000
    share = index["splits"]["held_out"]["tokens"] / index["splits"]["train"]["tokens"]
    assert 0.01 < share < 0.2


# -- the default corpus ----------------------------------------------------------------------------


def test_standard_library_is_a_deterministic_corpus():
    modules = set(sys.modules)
    corpus = standard_library()
    assert set(sys.modules) - modules == set()
    names = [name for name, _ in corpus.files]
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    assert sum(len(data) for _, data in corpus.files) >= 10_000_000
    assert "argparse.py" in names
    assert "asyncio/tasks.py" in names
    assert not [n for n in names if {"test", "tests", "idle_test", "site-packages", "__pycache__"} & set(n.split("/"))]
    assert not [n for n in names if "_sysconfigdata" in n or n.startswith("config-")]
    assert standard_library() == corpus


def test_doc_strings_of_compiled_modules_are_documents():
    files = dict(standard_library().files)
    assert b"math.acosh\n\nReturn the inverse hyperbolic cosine of x." in files["doc-strings/math"]
    assert "doc-strings/builtins" in files
    assert not [name for name in files if name.startswith("doc-strings/_test")]


def test_documents_are_split_by_name():
    corpus = standard_library()
    documents = list(corpus.documents())
    assert [document.split_key for document in documents] == [name for name, _ in corpus.files]
    assert [source.bytes for source in corpus.sources()] == [document.source_bytes for document in documents]
    assert next(corpus.documents(5)) == documents[5]
