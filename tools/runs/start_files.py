"""Prepares a run that starts from another model.

The other model completes the configuration. The files that describe it, without weights, are copied
to the run, because an evaluation builds the model again, and an export writes the same files.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from ...engine.config.schema import Config
from ...engine.errors import ConfigError, WriteError
from ...engine.json_files import read_json_file
from ...engine.object_store import is_url
from ...engine.subnetwork.initialisation import INDEX, WeightFiles, refuse_zero_checkpoint
from ...models.registry import section_from_huggingface

START = "start"  # below the directory of the run
TENSORS = "tensors.json"  # name and type of the tensors in the weight files
MORE_TEMPLATES = "additional_chat_templates"  # a folder in which transformers keeps further templates
DESCRIBES = re.compile(r".*\.(json|txt|model|jinja|tiktoken)")  # configuration, tokenizer, chat template


def with_initial_model(config: Config) -> Config:
    """Return ``config``, completed by the model that the run starts from (``init_from``).

    The model section gets the sizes of that model. A model of transformers starts from the weights
    in its folder, and if the run prepares its own data, it uses the tokenizer in that folder.
    """
    start, model = config.training.init_from, config.model
    if start is None and model.get("name") == "huggingface":
        start = model.get("path")
    if start is None:
        return config
    directory = Path(start)
    refuse_zero_checkpoint(directory)
    model = section_from_huggingface(directory, model)
    changed: dict[str, Any] = {"model": model, "training": config.training.model_copy(update={"init_from": start})}
    if model["name"] == "huggingface" and config.data.takes_default_corpus and config.data.tokenizer is None:
        changed["data"] = config.data.model_copy(update={"tokenizer": f"hf:{model['path']}"})
    return config.model_copy(update=changed)


def with_absolute_paths(config: Config) -> Config:
    """Return ``config`` with absolute paths, because commands in other directories read it."""
    for keys in _PATHS:
        config = _with_absolute_path(config, *keys.split("."))
    if config.model.get("name") == "huggingface":
        model = {**config.model, "path": str(Path(config.model["path"]).absolute())}
        config = config.model_copy(update={"model": model})
    if config.data.sources:
        sources = [_with_absolute_path(source, "path") for source in config.data.sources]
        config = config.model_copy(update={"data": config.data.model_copy(update={"sources": sources})})
    return config


_PATHS = ("data.path", "training.init_from", "sdp.paths.router")
_Section = TypeVar("_Section", bound=BaseModel)


def _with_absolute_path(section: _Section, key: str, *rest: str) -> _Section:
    """Return ``section`` with an absolute path at ``key``, or below it. None and URLs stay."""
    value = getattr(section, key)
    if value is None:
        return section
    if rest:
        new = _with_absolute_path(value, *rest)
    else:
        new = value if is_url(value) else str(Path(value).absolute())
    return section.model_copy(update={key: new})


def keep_start_files(config: Config, dump_dir: Path) -> None:
    """Copy the files that describe the model of ``init_from`` to the run's directory.

    Without ``init_from``, this does nothing. Raises WriteError if the files cannot be written.
    """
    if config.training.init_from is None:
        return
    start = Path(config.training.init_from)
    folder = Path(config.model.get("path", start))
    kept = dump_dir / START
    try:
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        for path in (*folder.iterdir(), *(folder / MORE_TEMPLATES).glob("*")):
            if DESCRIBES.fullmatch(path.name) and path.name != INDEX and path.is_file():
                target = kept / path.relative_to(folder)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
        tensors = WeightFiles(start).dtypes()
        (kept / TENSORS).write_text(json.dumps(tensors, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise WriteError.of(kept, error) from None


def kept_tensors(dump_dir: Path) -> dict[str, Any] | None:
    """Return name and type of each tensor in the model that the run started from.

    Returns None if the run started with new weights. Raises ConfigError if the file is damaged.
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
