"""Long documents need bounded memory, and give the same tokens as in one piece."""

import base64
import gzip
import json
import random
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from sdp.data import encode
from sdp.data.prepare import prepare
from sdp.data.sources import decompress_frames, read_documents
from sdp.data.tokenizers import BytesTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, train_sentencepiece
from sdp.engine.errors import DataError
from sdp.tests.support.texts import save_byte_level
from sdp.tools.cli import main

MIB = 2**20
WORDS = "the quick  brown fox\tjumps 1234 over é漢字😀 lazy dogs\n\n    and indents\n"


def write_lines(path, long: str) -> str:
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in [*"abcdefghij", long, *"klmnopqrst"]]
    path.write_bytes(zstandard.compress("\n".join(lines).encode()))
    return str(path)


def arguments(path: str, out, **more):
    return {
        "inputs": [path],
        "output": out,
        "tokenizer": "bytes",
        "workers": 1,
        "held_out": 0.3,
        "progress": False,
    } | more


def peak_of(path: str, out, **more) -> int:
    """Peak memory in bytes of a process that prepares ``path``, whether it succeeds or not."""
    code = (
        "from sdp.data.prepare import prepare\n"
        f"try:\n    prepare(**{arguments(path, str(out), **more)!r})\n"
        "except Exception as error:\n    print(error)\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(result.stdout.split()[-1]) * 1024


@pytest.mark.parametrize(
    "text",
    [pytest.param("a", marks=pytest.mark.slow), pytest.param("some text\n", marks=pytest.mark.slow), "é"],
    ids=["one letter", "lines", "not ascii"],
)
def test_memory_is_at_most_three_times_the_longest_document(tmp_path, text):
    size = 48 * MIB
    path = write_lines(tmp_path / "a.jsonl.zst", text * (size // len(text.encode())))
    assert (tmp_path / "a.jsonl.zst").stat().st_size < 64_000
    grown = peak_of(path, tmp_path / "out") - peak_of(write_lines(tmp_path / "b.jsonl.zst", "short"), tmp_path / "b")
    assert size < grown < 3 * size + 32 * MIB


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "zstd"},
        pytest.param({"compression": "zstd", "use_dictionary": False}, marks=pytest.mark.slow),
        pytest.param({"compression": "snappy"}, marks=pytest.mark.slow),
        pytest.param({"compression": "none", "data_page_version": "2.0"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_memory_is_at_most_three_times_the_longest_document_of_parquet(tmp_path, options):
    size = 48 * MIB
    text = base64.b64encode(random.Random(0).randbytes(size // 4 * 3)).decode()
    for name, long in (("a", text), ("b", "text")):
        table = pyarrow.table({"text": ["short", long, "last"]})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet", **options)
    grown, least = (peak_of(str(tmp_path / f"{name}.parquet"), tmp_path / name) for name in "ab")
    assert size < grown - least < 3 * size + 32 * MIB
    documents = read_documents(tmp_path / "a.parquet")
    assert [len(document.text) for document in documents] == [5, size, 4]


def test_a_block_that_expands_is_read_in_small_pieces(tmp_path):
    path = tmp_path / "a.zst"
    path.write_bytes(zstandard.compress(bytes(64 * MIB)) + zstandard.compress(b"end"))
    with path.open("rb") as raw:
        sizes = [len(piece) for piece in decompress_frames(raw)]
    assert sum(sizes) == 64 * MIB + 3
    assert max(sizes) <= 8 * MIB


def test_frames_of_every_form_are_read(tmp_path):
    data = random.Random(0).randbytes(300_000) + b"text" * 100_000
    skippable = (0x184D2A53).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"12345"
    frames = b""
    for checksum in (False, True):
        for size in (False, True):
            for part in (data, b"", b"short"):
                made = zstandard.ZstdCompressor(write_checksum=checksum, write_content_size=size)
                frames += skippable + made.compress(part)
    streamed = zstandard.ZstdCompressor(threads=2).compressobj()
    frames += streamed.compress(data) + streamed.flush()
    path = tmp_path / "a.zst"
    path.write_bytes(frames)
    with path.open("rb") as raw:
        assert b"".join(decompress_frames(raw)) == (data + b"short") * 4 + data


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    made = {"bytes": BytesTokenizer(), "sentencepiece": SentencePieceTokenizer(train_sentencepiece([WORDS] * 50, 340))}
    for name, prefix in (("hf", False), ("hf with a prefix", True)):
        folder = tmp_path_factory.mktemp("hf")
        save_byte_level(folder, [WORDS] * 50, 340, prefix=prefix, eos_token="<|endoftext|>")
        made[name] = HuggingFaceTokenizer(str(folder))
    return made


@pytest.mark.parametrize("name", ["bytes", "sentencepiece", "hf", "hf with a prefix"])
def test_pieces_have_the_tokens_of_the_whole(monkeypatch, tokenizers, name):
    monkeypatch.setattr(encode, "PIECE_CHARACTERS", 60)
    draw, tokenizer = random.Random(1), tokenizers[name]
    for _ in range(20):
        text = "".join(draw.choices([*WORDS, " the", " over", "\n", "12"], k=800))
        pieces = list(encode.cut_text(text, tokenizer))
        assert "".join(pieces) == text
        assert [token for piece in pieces for token in tokenizer.encode(piece)] == tokenizer.encode(text)
        assert len(pieces) > 5 or name == "hf with a prefix"


@pytest.mark.parametrize("name", ["bytes", "sentencepiece", "hf"])
def test_a_text_without_any_boundary_is_cut_and_comes_back(monkeypatch, tokenizers, name):
    monkeypatch.setattr(encode, "PIECE_CHARACTERS", 60)
    tokenizer, text = tokenizers[name], "x" * 1000
    pieces = list(encode.cut_text(text, tokenizer))
    assert max(map(len, pieces)) <= 60
    assert tokenizer.decode([token for piece in pieces for token in tokenizer.encode(piece)]) == text


@pytest.mark.parametrize(("tokenizer", "vocab_size"), [("bytes", None), ("sentencepiece", 300)])
@pytest.mark.parametrize("workers", [1, 2])
def test_shards_are_those_of_documents_in_one_piece(tmp_path, monkeypatch, tokenizer, vocab_size, workers):
    path = write_lines(tmp_path / "a.jsonl.zst", WORDS * 100)
    more = {"tokenizer": tokenizer, "vocab_size": vocab_size}
    whole = prepare(**arguments(path, tmp_path / "whole", **more))
    monkeypatch.setattr(encode, "LONG_CHARACTERS", 1000)
    monkeypatch.setattr(encode, "PIECE_CHARACTERS", 500)
    cut = prepare(**arguments(path, tmp_path / "cut", **more, workers=workers))
    assert cut == whole
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "cut" / file.name).read_bytes() == file.read_bytes()


def write_document(path, size: int) -> None:
    text = "x" * size
    if path.suffix == ".txt":
        path.write_text(text)
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": ["short", text]}), path)
    else:
        data = f'{{"text": "short"}}\n{{"text": "{text}"}}\n'.encode()
        pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
        path.write_bytes(pack(data))


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("a.txt", r"a\.txt"),
        ("a.jsonl", r"a\.jsonl, line 2"),
        ("a.jsonl.gz", r"a\.jsonl\.gz, line 2"),
        ("a.jsonl.zst", r"a\.jsonl\.zst, line 2"),
        ("a.parquet", r"a\.parquet, row 2"),
    ],
)
def test_a_document_over_the_limit_is_refused(tmp_path, name, where):
    write_document(tmp_path / name, 5000)
    with pytest.raises(DataError, match=rf"{where}: a document has more than 4,000 bytes; .*--max-document-bytes"):
        list(read_documents(tmp_path / name, max_document_bytes=4000))
    assert max(len(document.text) for document in read_documents(tmp_path / name, max_document_bytes=6000)) == 5000


def test_the_command_names_the_file_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "a.jsonl.zst", "a" * 5000)
    command = "prepare --input a.jsonl.zst --output new/out --workers 1 --tokenizer bytes --max-document-bytes"
    assert main([*command.split(), "4000"]) == 2
    printed = capsys.readouterr().err
    assert printed.splitlines()[-1].startswith("sdp: error: a.jsonl.zst, line 11: a document has more than 4,000 bytes")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl.zst"]
    assert main([*command.split(), "0"]) == 2
    assert main([*command.split(), "6000"]) == 0
