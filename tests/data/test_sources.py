"""Every supported kind of file gives its documents, and damage is named by file and place."""

import csv
import gzip
import json
import os
import shutil

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from sdp.data.sources import expand_inputs, read_documents
from sdp.engine.errors import DataError
from sdp.tools.cli import main

TEXTS = ["one\n  two\t", "é漢字😀", "third"]


def json_lines(texts, column="text") -> bytes:
    return "".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)).encode()


def write_parquet(path, texts, column="text", kind=None) -> None:
    table = pyarrow.table({"id": list(range(len(texts))), column: pyarrow.array(texts, type=kind)})
    pyarrow.parquet.write_table(table, path, row_group_size=2)


def texts_of(path, column="text") -> list[str]:
    return [document.text for document in read_documents(path, column)]


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.jsonl", bytes),
        ("a.jsonl.gz", gzip.compress),
        ("a.jsonl.zst", zstandard.ZstdCompressor().compress),
        # Two frames, as parallel compressors write them.
        ("b.jsonl.zst", lambda data: b"".join(zstandard.ZstdCompressor().compress(p) for p in (data[:30], data[30:]))),
    ],
)
def test_json_lines(tmp_path, name, pack):
    path = tmp_path / name
    path.write_bytes(pack(json_lines([*TEXTS[:2], "", TEXTS[2]]) + b"\n"))
    assert texts_of(path) == [*TEXTS[:2], "", TEXTS[2]]
    assert sum(document.source_bytes for document in read_documents(path)) <= path.stat().st_size


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), "str")])
def test_parquet(tmp_path, kind):
    write_parquet(tmp_path / "a.parquet", TEXTS, kind=kind)
    assert texts_of(tmp_path / "a.parquet") == TEXTS


def test_text_and_its_byte_order_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfline\r\n\tend\n")
    (tmp_path / "empty.txt").write_bytes(b"")
    assert texts_of(tmp_path / "a.txt") == ["line\r\n\tend\n"]
    assert texts_of(tmp_path / "empty.txt") == [""]


def test_other_columns(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS, "content"))
    write_parquet(tmp_path / "a.parquet", TEXTS, "content")
    assert texts_of(tmp_path / "a.jsonl", "content") == texts_of(tmp_path / "a.parquet", "content") == TEXTS


def test_half_a_surrogate_pair_is_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\\ud800b"}\n')
    assert texts_of(tmp_path / "a.jsonl") == ["a?b"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2: not valid JSON"),
        ("a.jsonl", b'{"text": "a"}\n\n[1]\n', r"line 3: a JSON object is expected, this is a list"),
        ("a.jsonl", b'{"body": "a", "id": 1}\n',
            r"line 1: no column 'text' \(there are: body, id\); choose one with --te"),
        ("a.jsonl", b'{"text": 5}\n', r"line 1: 'text' must be a string, but is int"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"line 1: not text in UTF-8 \(byte 10\); convert the file"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b"}\n'.encode("utf-16"), r"line 1: not text in UTF-8"),
        ("a.json", b'[{"text": "a"}]', r"this is a list; give one JSON object per line \(jq"),
        ("a.jsonl.gz", gzip.compress(json_lines(TEXTS), mtime=0)[:-9],
            r"a\.jsonl\.gz, after line \d: damaged or cut off"),
        ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz, after line 0: damaged or cut off"),
        ("a.jsonl.gz", b"", r"a\.jsonl\.gz, after line 0: damaged or cut off \(the file is empty\)"),
        ("a.jsonl.zst", b"", r"a\.jsonl\.zst, after line 0: damaged or cut off \(the file is empty\)"),
        ("a.jsonl", b"[" * 100_000 + b"\n", r"a\.jsonl, line 1: not valid JSON"),
        ("a.jsonl", b'{"text": "a", "n": ' + b"1" * 5000 + b"}\n", r"a\.jsonl, line 1: not valid JSON"),
        ("a.jsonl.zst", b"no zstd", r"a\.jsonl\.zst, after line 0: damaged or cut off"),
        ("a.txt", b"ab\xff", r"a\.txt: byte 2 is not UTF-8"),
        ("a.parquet", b"no parquet at all", r"a\.parquet: not a readable Parquet file"),
    ],
)  # fmt: skip
def test_damage_is_named(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        texts_of(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_cut_off_stream_never_passes_for_a_shorter_one(tmp_path, suffix):
    pack = gzip.compress if suffix == "gz" else zstandard.ZstdCompressor().compress
    frames = [pack(json_lines([text])) for text in ("first", os.urandom(200_000).hex(), "last")]
    whole, path = b"".join(frames), tmp_path / f"a.jsonl.{suffix}"
    ends = {len(frames[0]), len(frames[0]) + len(frames[1]), len(whole)}
    for size in (
        {1, 9, len(frames[0]) // 2, len(frames[0]) + 1, 100_000, len(whole) - 1} | {end - 1 for end in ends} | ends
    ):
        path.write_bytes(whole[:size])
        if size in ends:
            assert texts_of(path)
            continue
        with pytest.raises(DataError, match=rf"a\.jsonl\.{suffix}, after line \d: damaged or cut off"):
            texts_of(path)


def test_empty_and_null_texts_are_documents_without_text(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["a", None, "", "b"])
    write_parquet(tmp_path / "b.parquet", [None, None])
    (tmp_path / "a.jsonl").write_bytes(json_lines(["a", None, "", "b"]))
    assert texts_of(tmp_path / "a.parquet") == texts_of(tmp_path / "a.jsonl") == ["a", "", "", "b"]
    assert texts_of(tmp_path / "b.parquet") == ["", ""]


def test_parquet_columns_are_checked(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, ["a", "b"])
    with pytest.raises(DataError, match=r"a\.parquet: no column 'body' \(there are: id, text\)"):
        texts_of(path, "body")
    with pytest.raises(DataError, match="column 'id' must contain strings, but contains int64"):
        texts_of(path, "id")
    pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), path)
    with pytest.raises(DataError, match="2 columns are named 'text'"):
        texts_of(path)


def test_globs_are_expanded_sorted_and_unique(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    paths = expand_inputs([f"{tmp_path}/*.txt", f"{tmp_path}/**/*.txt", f"{tmp_path}/sub/d.jsonl"])
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == ["a.txt", "b.txt", "sub/c.txt", "sub/d.jsonl"]


def test_names_with_brackets_and_folders(tmp_path):
    for name in ("a[1].jsonl", "a1.jsonl", "sub/b.md", "sub/c.py", "sub/image.png", ".git/d.txt", "sub/.hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}\n')
    names = [path.name for path in expand_inputs([str(tmp_path)])]
    assert names == ["a1.jsonl", "a[1].jsonl", "b.md", "c.py"]
    assert [path.name for path in expand_inputs([f"{tmp_path}/a[1].jsonl"])] == ["a[1].jsonl"]
    assert [path.name for path in expand_inputs([f"{tmp_path}/a[0-9].jsonl"])] == ["a1.jsonl"]
    (tmp_path / "s[1]/b[2]").mkdir(parents=True)
    (tmp_path / "s[1]/b[2]/c.txt").touch()
    assert [path.name for path in expand_inputs([f"{tmp_path}/s[1]/*/[a-d].txt"])] == ["c.txt"]


@pytest.mark.parametrize("name", ["a.json", "a.ndjson", "A.JSON", "a.json.gz", "a.ndjson.gz", "a.json.zst"])
def test_json_lines_under_other_names(tmp_path, name):
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get((tmp_path / name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(json_lines(TEXTS)))
    assert texts_of(tmp_path / name) == TEXTS


def test_bad_inputs_are_named(tmp_path):
    (tmp_path / "a.xml").write_text("x")
    with pytest.raises(DataError, match=r"no file matches '.*\*\.jsonl'"):
        expand_inputs([f"{tmp_path}/*.jsonl"])
    with pytest.raises(DataError, match=r"a\.xml: files of this kind cannot be read; supported are \.txt"):
        expand_inputs([f"{tmp_path}/*"])
    with pytest.raises(DataError, match="no file of a supported kind in this folder"):
        expand_inputs([str(tmp_path)])
    with pytest.raises(DataError, match="which has the character NUL"):
        expand_inputs(["a\0b.txt"])
    with pytest.raises(DataError, match="no input is named"):
        expand_inputs([])


def test_special_files_are_named_as_what_they_are(tmp_path, capsys):
    os.mkfifo(tmp_path / "fifo.txt")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "gone.jsonl")
    for name, kind in (
        ("/dev/zero", "a device"),
        (tmp_path / "fifo.txt", "a FIFO"),
        (tmp_path / "link.jsonl", f"a dangling link to {tmp_path}/gone.jsonl"),
        (tmp_path / "*.txt", "a FIFO"),
    ):
        assert main(["prepare", "--input", str(name), "--output", str(tmp_path / "out")]) == 2
        printed = capsys.readouterr().err
        assert f": is {kind}; give regular files as input" in printed
        assert printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_csv(tmp_path):
    path = tmp_path / "a.csv"
    texts = ["one", "two\nlines, and a comma", 'a "quote"', "", "ü文"]
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *enumerate(texts)])
    assert texts_of(path) == texts
    assert sum(document.source_bytes for document in read_documents(path)) == path.stat().st_size
    for content, match in [
        (b"id,text\n1\n", r"a\.csv, line 2: has 1 columns, but the first line has 2"),
        (b'id,text\n1,"open\n', r"a\.csv, line 2: not readable as CSV \(unexpected end of data\)"),
        (b"id,text\n1,\xff\n", r"a\.csv, line 2: not text in UTF-8"),
        (b"id,body\n1,x\n", r"a\.csv: no column 'text' \(there are: id, body\)"),
        (b"", r"a\.csv: no column 'text' \(there are: none\)"),
        (b"text,text\n1,x\n", r"a\.csv: 2 columns are named 'text'; rename one of them"),
    ]:
        path.write_bytes(content)
        with pytest.raises(DataError, match=match):
            texts_of(path)
    path.write_text("text\n" + "x" * 100)
    with pytest.raises(DataError, match="larger than field limit"):
        list(read_documents(path, max_document_bytes=50))
    assert len(list(read_documents(path, max_document_bytes=10**30))) == 1


def test_a_folder_that_datasets_saved(tmp_path):
    table = pyarrow.table({"text": ["a", None, "", "b"], "number": [1, 2, 3, 4]})
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        with pyarrow.ipc.new_stream(str(tmp_path / split / "data-00000-of-00001.arrow"), table.schema) as stream:
            stream.write_table(table, max_chunksize=3)
        for name in ("dataset_info.json", "state.json", "../dataset_dict.json"):
            (tmp_path / split / name).write_text("{\n}")
    with pytest.raises(DataError, match=f"{tmp_path}: holds several splits; name .* {tmp_path}/test {tmp_path}/train"):
        expand_inputs([str(tmp_path)])
    (path,) = expand_inputs([str(tmp_path / "train")])
    shutil.rmtree(tmp_path / "test")
    assert expand_inputs([str(tmp_path)]) == (path,)
    assert texts_of(path) == ["a", "", "", "b"]
    with pytest.raises(DataError, match="column 'number' must contain strings, but contains int64"):
        texts_of(path, "number")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="not a readable Arrow stream"):
        texts_of(path)
