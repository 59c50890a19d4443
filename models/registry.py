"""The ``model`` section of the configuration → a model on the meta device."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..engine.errors import ConfigError, suggestion
from ..engine.section import Section, parse_section
from . import llama_hf
from .llama import Llama, LlamaConfig


@dataclass(frozen=True)
class Entry:
    """A model that can be named in the configuration: the schema of its section, how to build it, and the ``config.json`` of its
    counterpart in ``transformers``, which has the same names and numerics, where there is one.
    """

    config: type[Section]
    build: Callable[[Any], nn.Module]
    to_huggingface: Callable[[Any], dict[str, Any]] | None = None
    from_huggingface: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None  # the section of such a config.json


MODELS: Mapping[str, Entry] = {"llama": Entry(LlamaConfig, Llama, llama_hf.to_huggingface, llama_hf.from_huggingface)}


def build_model(section: Mapping[str, Any], vocab_size: int | None = None) -> nn.Module:
    """The model that ``section`` (``{"name": "llama", …}``) describes, on the meta device.

    ``vocab_size`` is that of the data (None: the model reads no tokens, or the section alone decides); it fills in a
    section that names none. Raises :class:`ConfigError` for an unknown name or key, an ill-typed value, or vocabularies
    that differ.
    """
    entry, config = _parse(section, vocab_size)
    with torch.device("meta"):
        return entry.build(config)


def huggingface_config(section: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The ``config.json`` with which ``transformers`` builds the model of ``section``, without tokens and dtype.

    Raises :class:`ConfigError` where ``transformers`` has no such model.
    """
    entry, config = _parse(section, vocab_size)
    if entry.to_huggingface is None:
        known = ", ".join(name for name, other in MODELS.items() if other.to_huggingface is not None)
        raise ConfigError(f"model.name: {section['name']!r} has no counterpart in transformers; there is one for: {known}")
    return entry.to_huggingface(config)


def section_from_huggingface(directory: Path, stated: Mapping[str, Any]) -> dict[str, Any]:
    """The ``model`` section of the model in ``directory``, from its ``config.json``; what is ``stated`` must agree.

    Raises :class:`ConfigError` naming the key that differs, or what this model cannot do.
    """
    path = directory / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        name = content["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"training.init_from: {path} is no model's configuration; give a directory in Hugging Face's format") from None
    entry = MODELS.get(name)
    if entry is None or entry.from_huggingface is None:
        known = ", ".join(other for other, entry in MODELS.items() if entry.from_huggingface is not None)
        raise ConfigError(f"training.init_from: {path}: model_type {name!r} cannot be a start; known: {known}")
    try:
        found = {"name": name, **entry.from_huggingface(content)}
    except ValueError as error:
        raise ConfigError(f"training.init_from: {path}: {error}") from None
    for key, value in stated.items():
        if value is not None and key in found and value != found[key]:
            raise ConfigError(
                f"model.{key}: {json.dumps(value)}, but {path} has {json.dumps(found[key])}; remove it to take the value from there"
            )
    return {**stated, **found}


def _parse(section: Mapping[str, Any], vocab_size: int | None) -> tuple[Entry, Section]:
    fields = dict(section)
    entry = _entry(fields.pop("name", None))
    if vocab_size is not None and "vocab_size" in entry.config.model_fields:
        fields["vocab_size"] = _agreed_vocabulary(fields.get("vocab_size"), vocab_size)
    return entry, parse_section(entry.config, fields, "model")


def _entry(name: object) -> Entry:
    known = ", ".join(MODELS)
    if name is None:
        raise ConfigError(f"model.name: this key is required; known: {known}")
    if not isinstance(name, str) or name not in MODELS:
        hint = suggestion(str(name), list(MODELS)) or f"; known: {known}"
        raise ConfigError(f'model.name: unknown model "{name}"{hint}')
    return MODELS[name]


def _agreed_vocabulary(stated: object, data: int) -> object:
    # A stated value that is no integer is left for the schema to refuse.
    if isinstance(stated, int) and stated != data:
        raise ConfigError(
            f"model.vocab_size: {stated}, but the data's tokenizer has {data}; prepare the data with the tokenizer "
            "that this model was meant for, or, for one that starts anew, remove model.vocab_size to take the data's"
        )
    return data if stated is None else stated
