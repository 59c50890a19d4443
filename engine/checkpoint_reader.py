"""Read a checkpoint's files without trusting them.

Nothing in them is run, and nothing outside the directory is opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from .checkpoint_files import file_sizes, open_regular, read_state
from .checkpoint_metadata import METADATA, build_metadata
from .checkpoint_pickle import read_pickled_metadata
from .errors import CheckpointError

PICKLED_METADATA = ".metadata"  # of checkpoints of format 2


class _RegularFiles(FileSystem):
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode != "rb":
            raise ValueError(f"a checkpoint is opened to read it, not in mode {mode!r}")
        with open_regular(Path(path)) as file:
            yield file


class SafeReader(FileSystemReader):
    """DCP's reader of a directory. It raises :class:`CheckpointError` for files that are not what this engine writes.

    DCP reads the tensors themselves with ``torch.load(weights_only=True)``.
    """

    def __init__(self, path: Path):
        super().__init__(str(path))
        self.fs = _RegularFiles()
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, read once. All of the checkpoint's files are checked, but not their hashes."""
        if self._metadata is None:
            self._metadata = self._read()
        return self._metadata

    def _read(self) -> Metadata:
        path = Path(self.path)
        state = read_state(path)
        sizes = file_sizes(path, state["files"])
        name = METADATA if state["format"] >= 3 else PICKLED_METADATA
        try:
            if name not in sizes:
                raise ValueError("it is missing")
            with open_regular(path / name) as file:
                content = file.read()
            decoded = json.loads(content) if name == METADATA else read_pickled_metadata(content)
            return build_metadata(decoded, sizes, self.load_id)
        except (OSError, ValueError, RecursionError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            where = path / name
            raise CheckpointError(f"{where}: damaged or forged ({reason}); resume from an older checkpoint") from None
