"""The configuration of a run, completed by the model that it starts from, with absolute paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...engine.config.schema import Config
from ...engine.object_store import is_url
from ...engine.subnetwork.initialisation import refuse_zero_checkpoint
from ...models.registry import section_from_huggingface


def with_initial_model(config: Config) -> Config:
    """Complete the model section from the model that the run starts from.

    A model of transformers starts from its own folder. Data that the run itself prepares gets the
    tokenizer of the folder.
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
    """Make the paths of the configuration absolute.

    Other commands may read config.json from other directories.
    """
    paths = {"data": ("path", config.data.path), "training": ("init_from", config.training.init_from)}
    changed: dict[str, Any] = {
        section: getattr(config, section).model_copy(update={key: _absolute(path)})
        for section, (key, path) in paths.items()
        if path is not None
    }
    if config.model.get("name") == "huggingface":
        changed["model"] = {**config.model, "path": str(Path(config.model["path"]).absolute())}
    if config.data.sources:
        sources = [source.model_copy(update={"path": _absolute(source.path)}) for source in config.data.sources]
        changed["data"] = config.data.model_copy(update={"sources": sources})
    if config.sdp.paths is not None and config.sdp.paths.router is not None:
        paths = config.sdp.paths.model_copy(update={"router": str(Path(config.sdp.paths.router).absolute())})
        changed["sdp"] = config.sdp.model_copy(update={"paths": paths})
    tasks = config.training.evaluate_tasks
    if tasks is not None and tasks.include_path is not None:
        tasks = tasks.model_copy(update={"include_path": str(Path(tasks.include_path).absolute())})
        training = changed.get("training", config.training)
        changed["training"] = training.model_copy(update={"evaluate_tasks": tasks})
    return config.model_copy(update=changed)


def _absolute(path: str) -> str:
    return path if is_url(path) else str(Path(path).absolute())
