"""The files of the model that a run starts from. The run keeps those that describe the model.

Later commands need them: an evaluation builds the model again, and an export writes the same files.
The weights stay where they are.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from ...engine.config.schema import Config
from ...engine.errors import ConfigError
from ...engine.json_files import read_json_file
from ...engine.subnetwork.initialisation import INDEX, WeightFiles
from ..shared.files import WriteError

START = "start"  # below the directory of the run
TENSORS = "tensors.json"  # name and type of the tensors in the weight files
DESCRIBES = re.compile(r".*\.(json|txt|model|jinja|tiktoken)")  # configuration, tokenizer, chat template


def keep_start_files(config: Config, dump_dir: Path) -> None:
    """Copy the files that describe the model, as they are. A no-op for a run that starts anew.

    Raises WriteError if they cannot be written.
    """
    if config.training.init_from is None:
        return
    start = Path(config.training.init_from)
    folder = Path(config.model.get("path", start))
    kept = dump_dir / START
    try:
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        for path in folder.iterdir():
            if DESCRIBES.fullmatch(path.name) and path.name != INDEX and path.is_file():
                shutil.copyfile(path, kept / path.name)
        tensors = WeightFiles(start).dtypes()
        (kept / TENSORS).write_text(json.dumps(tensors, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise WriteError.of(kept, error) from None


def kept_tensors(dump_dir: Path) -> dict[str, Any] | None:
    """Return name and type of each tensor in the files that the run started from.

    None: the run started anew. Raises ConfigError if the file is damaged.
    """
    path = dump_dir / START / TENSORS
    if not path.is_file():
        return None
    try:
        return dict(read_json_file(path))
    except (OSError, ValueError, TypeError):
        raise ConfigError(f"{path}: damaged; copy {START}/ from another run that started from the same model") from None


def has_tokenizer(directory: Path) -> bool:
    """Whether ``directory`` has the files of a tokenizer of transformers."""
    return any(any(directory.glob(pattern)) for pattern in ("tokenizer*", "vocab.*"))
