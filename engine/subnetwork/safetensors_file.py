"""One safetensors file, whose tensors are read row by row.

The format: 8 bytes with the length of the header, the header in JSON, and the tensors without gaps
(https://huggingface.co/docs/safetensors). The safetensors library maps the file into memory. If the
file is then cut off, the process ends by SIGBUS, which names no file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from ..batch.positioned_file import PositionedFile
from ..errors import ModelError, quote
from ..json_files import parse_json

MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
READ_BYTES = 64 << 20  # at a time
_MOST_DIMS = 64
_REMEDY = "download or export the model again"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """What the header says about one tensor. ``start`` and ``end`` are positions in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """The tensors of the file at ``path``.

    Raises:
        OSError: The file cannot be opened.
        ModelError: It is not a whole safetensors file.
    """

    def __init__(self, path: Path):
        self._file = PositionedFile(path)
        try:
            self.entries = _read_header(self._file)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read ({error}); {_REMEDY}") from None

    def read_rows(self, key: str, start: int, rows: int) -> torch.Tensor:
        """Return rows [start, start + rows) of the tensor ``key``, or the whole of a scalar.

        Raises:
            ModelError: The file was cut off since it was opened, or cannot be read.
        """
        entry, path = self.entries[key], self._file.path
        if entry.dtype not in _DTYPES:
            raise ModelError(f"{path}: {quote(key)} is {quote(entry.dtype)}, which torch cannot read here; {_REMEDY}")
        shape = (rows, *entry.shape[1:]) if entry.shape else ()
        dtype = _DTYPES[entry.dtype]
        row_bytes = math.prod(entry.shape[1:]) * dtype.itemsize
        out = torch.empty(shape, dtype=dtype)
        size = out.numel() * dtype.itemsize
        into = out.reshape(-1).view(torch.uint8).numpy() if size else None
        position = entry.start + start * row_bytes
        for done in range(0, size, READ_BYTES):
            count = min(READ_BYTES, size - done)
            try:
                read = self._file.read(position + done, count)
            except OSError as error:
                raise ModelError(f"{path}: cannot be read ({error.strerror}); {_REMEDY}") from None
            if len(read) < count:
                raise ModelError(f"{path}: was cut off while it was read; {_REMEDY}")
            assert into is not None
            into[done : done + count] = memoryview(read)
        return out


def _read_header(file: PositionedFile) -> dict[str, Entry]:
    """Return the tensors of ``file`` by name. Raises ValueError if the header is damaged."""
    size = file.size
    length = int.from_bytes(file.read(0, 8), "little")
    if size < 8 or length > min(MOST_HEADER_BYTES, size - 8):
        raise ValueError(f"it has {size:,} bytes, and no header of safetensors")
    decoded = parse_json(file.read(8, length).decode("utf-8"), unique_keys=True)
    if not isinstance(decoded, dict):
        raise ValueError("its header is not an object")
    begin = 8 + length
    entries = {key: _entry(key, value, begin, size) for key, value in decoded.items() if key != "__metadata__"}
    position = begin
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            raise ValueError(f"{quote(key)} does not begin where the tensor before it ends")
        position = entry.end
    if position != size:
        raise ValueError(f"it has {size:,} bytes, and its tensors end after {position:,}")
    return entries


def _entry(key: str, value: Any, begin: int, size: int) -> Entry:
    """Check the header's entry for one tensor of a file of ``size`` bytes."""
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise ValueError(f"the header's entry for {quote(key)} is damaged")
    start, end = offsets
    if not begin + start <= begin + end <= size:
        raise ValueError(f"{quote(key)} ends after byte {begin + end:,}, and the file has {size:,}")
    if dtype in _DTYPES and math.prod(shape) * _DTYPES[dtype].itemsize != end - start:
        raise ValueError(f"{quote(key)} has {end - start:,} bytes, which its shape and type do not need")
    return Entry(dtype, tuple(shape), begin + start, begin + end)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    is_short = isinstance(value, list) and len(value) <= _MOST_DIMS
    return is_short and all(type(each) is int and 0 <= each < 2**62 for each in value)
