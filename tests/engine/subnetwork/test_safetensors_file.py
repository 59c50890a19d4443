"""One safetensors file is read at positions: equal to the library's reading, and safe if it is cut
off.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sdp.engine.errors import ModelError
from sdp.engine.subnetwork import safetensors_file
from sdp.engine.subnetwork.safetensors_file import SafetensorsFile
from sdp.engine.subnetwork.weight_files import WeightFiles

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
)  # fmt: skip


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_rows_are_those_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(safetensors_file, "READ_BYTES", piece)
    made = {str(dtype): torch.randint(0, 2, (5, 3, 2)).to(dtype) for dtype in DTYPES}
    made |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "vector": torch.arange(7.0)}
    save_file(made, tmp_path / "t.safetensors", metadata={"format": "pt"})
    theirs, ours = load_file(tmp_path / "t.safetensors"), SafetensorsFile(tmp_path / "t.safetensors")
    assert ours.entries.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert ours.entries[key].shape == tuple(tensor.shape)
        read = ours.read_rows(key, 0, tensor.shape[0] if tensor.dim() else 1)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)
        if tensor.dim():
            assert torch.equal(ours.read_rows(key, 2, 3), tensor[2:5]) or not len(tensor)


def test_a_file_that_is_cut_off_after_it_was_opened_is_one_line(tmp_path: Path) -> None:
    """A memory map would end the process by SIGBUS."""
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(1 << 16)}, path)
    files = WeightFiles(tmp_path)
    os.truncate(path, 4096)
    with pytest.raises(ModelError, match=r"model\.safetensors: was cut off while it was read; download or export"):
        files.fill(torch.empty(1 << 16), 0, "weight")


def test_a_file_that_is_removed_after_it_was_opened_is_read(tmp_path: Path) -> None:
    path, value = tmp_path / "model.safetensors", torch.empty(2)
    save_file({"weight": torch.ones(2)}, path)
    files = WeightFiles(tmp_path)
    path.unlink()
    files.fill(value, 0, "weight")
    assert value.tolist() == [1.0, 1.0]


def entry(**changes: Any) -> dict[str, Any]:
    return {"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


FORGED: dict[str, tuple[Any, bytes, str]] = {
    "not an object": ([], b"", "its header is not an object"),
    "not JSON": (b"{", b"", "not valid JSON"),
    "not text": (b'{"\xff": 1}', b"", "can't decode"),
    "deep": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", "nested more than 200 levels"),
    "a long number": (entry(shape=[10**400]), bytes(8), "400|digits"),
    "one key twice": (b'{"a": 1, "a": 2}', b"", "this key twice"),
    "no offsets": ({"weight": {"dtype": "F32", "shape": [2]}}, bytes(8), "the header's entry for 'weight' is damaged"),
    "a list as entry": ({"weight": [1]}, bytes(8), "the header's entry for 'weight' is damaged"),
    "a negative size": (entry(shape=[-2]), bytes(8), "the header's entry for 'weight' is damaged"),
    "a size that is true": (entry(shape=[True, 2]), bytes(8), "the header's entry for 'weight' is damaged"),
    "too many dimensions": (entry(shape=[1] * 65), bytes(8), "the header's entry for 'weight' is damaged"),
    "a huge size": (entry(shape=[2**61, 2**61]), bytes(8), "which its shape and type do not need"),
    "another size": (entry(shape=[3]), bytes(8), "has 8 bytes, which its shape and type do not need"),
    "the end before the begin": (entry(data_offsets=[8, 0]), bytes(8), "ends after byte"),
    "the end after the file's": (entry(data_offsets=[0, 8]), bytes(7), "ends after byte"),
    "a gap": (entry(data_offsets=[4, 12]), bytes(12), "does not begin where the tensor before it ends"),
    "bytes at the end": (entry(), bytes(9), "and its tensors end after"),
    "two tensors in one place": (
        {**entry(), "other": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(8), "does not begin where",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", FORGED)
def test_a_forged_header_is_one_line(tmp_path: Path, how: str) -> None:
    header, data, message = FORGED[how]
    path = write(tmp_path / "model.safetensors", header, data)
    with pytest.raises(ModelError, match=message) as error:
        WeightFiles(tmp_path)
    assert str(error.value).startswith(f"{path}: cannot be read (")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content", [b"", b"1234567", (1 << 40).to_bytes(8, "little"), (9).to_bytes(8, "little") + b"{}"]
)
def test_a_file_without_a_whole_header_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="and no header of safetensors"):
        WeightFiles(tmp_path)


def test_a_type_that_torch_does_not_have_is_one_line(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", entry(dtype="F4\x1b"), bytes(8))
    files = WeightFiles(tmp_path)
    with pytest.raises(ModelError, match=r"'weight' is 'F4\\x1b', which torch cannot read here"):
        files.fill(torch.empty(2), 0, "weight")
