"""An array in a ``.npy`` file, read entry by entry."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from ...engine.batch.positioned_file import PositionedFile
from ...engine.errors import DataError
from .files import read_at, require_regular


class ArrayFile:
    """An array in a file, read entry by entry.

    Raises DataError if the file is not the array that the index describes, or is cut off.
    """

    def __init__(self, path: Path, samples: int, dtype: str) -> None:
        self._path = path
        remedy = f"remove {path.parent} to have it made again"
        require_regular(path, remedy)
        try:
            with path.open("rb") as file:
                if (version := np.lib.format.read_magic(file)) != (1, 0):
                    raise ValueError(f"version {version}")
                shape, is_fortran, found = np.lib.format.read_array_header_1_0(file)
                self._start = file.tell()
            self._file = PositionedFile(path)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path}: cannot be read ({error}); {remedy}") from None
        if not shape or is_fortran or found != np.dtype(dtype):
            raise DataError(f"{path}: not an array of {dtype} with a sample in each row; {remedy}")
        if shape[0] != samples:
            raise DataError(f"{path}: {shape[0]} samples instead of {samples}; {remedy}")
        self._shape, self._dtype = shape[1:], found
        self._size = math.prod(self._shape) * found.itemsize
        if samples:
            self[samples - 1]

    def __getitem__(self, item: int) -> np.ndarray:
        read = read_at(self._file, self._start + item * self._size, self._size)
        if len(read) < self._size:
            raise DataError(f"{self._path}: is cut off; remove {self._path.parent} to have it made again")
        # The copy can be written to, as torch wants it.
        return np.frombuffer(read, self._dtype).reshape(self._shape).copy()
