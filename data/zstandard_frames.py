"""Reads Zstandard files in small steps, whatever their compression ratio is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

import zstandard

_SKIPPABLE = range(0x184D2A50, 0x184D2A60)  # magic numbers of frames without content (RFC 8878)
_READ_BYTES = 2**17
_RLE = 1  # the type of a block that is one byte, repeated


def decompress_frames(raw: IO[bytes]) -> Iterator[bytes]:
    """Decompress all frames of ``raw``, in pieces of at most 128 KiB.

    The decompressor gets one block of a frame at a time. A block has at most 128 KiB of
    content. A larger input could expand to gigabytes at once: a repeated byte compresses by a
    factor of more than 30,000.

    Raises EOFError if the last frame is cut off, which zstandard's own readers accept silently.
    """
    while magic := raw.read(4):
        if len(magic) == 4 and int.from_bytes(magic, "little") in _SKIPPABLE:
            _skip(raw, int.from_bytes(_read(raw, 4), "little"))
            continue
        frame = zstandard.ZstdDecompressor().decompressobj()
        header, has_checksum = _read_header(raw, magic)
        frame.decompress(header)
        last = False
        while not last:
            start = _read(raw, 3)
            fields = int.from_bytes(start, "little")
            last, kind, size = bool(fields & 1), fields >> 1 & 3, fields >> 3
            data = start + _read(raw, 1 if kind == _RLE else size)
            if last and has_checksum:
                data += _read(raw, 4)
            if content := frame.decompress(data):
                yield content
        if not frame.eof:
            raise EOFError("a Zstandard frame does not end")


def _read_header(raw: IO[bytes], magic: bytes) -> tuple[bytes, bool]:
    """Read the header of a frame, and whether a checksum follows the last block.

    The header includes the magic number.
    """
    descriptor = _read(raw, 1) if len(magic) == 4 else b""
    if not descriptor:
        raise EOFError("the last Zstandard frame does not end")
    flags = descriptor[0]
    single_segment = bool(flags & 0x20)
    window = 0 if single_segment else 1
    dictionary = (0, 1, 2, 4)[flags & 3]
    content_size = (1 if single_segment else 0, 2, 4, 8)[flags >> 6]
    return magic + descriptor + _read(raw, window + dictionary + content_size), bool(flags & 4)


def _read(raw: IO[bytes], size: int) -> bytes:
    data = raw.read(size)
    if len(data) < size:
        raise EOFError("the last Zstandard frame does not end")
    return data


def _skip(raw: IO[bytes], size: int) -> None:
    while size:
        size -= len(_read(raw, min(size, _READ_BYTES)))
