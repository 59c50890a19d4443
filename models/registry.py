"""Builds the model that the ``model`` section of a configuration describes, on the meta device."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..engine.config.section import Section, parse_section
from ..engine.errors import ConfigError
from ..engine.model_interface import get_config
from . import huggingface, llama_hf
from .llama import Llama
from .resnet import ResNet
from .sections import SECTIONS, HuggingFaceConfig, LlamaConfig, require_known
from .swin import Swin


@dataclass(frozen=True)
class Entry:
    """What this project knows of a model that a configuration can name.

    Attributes:
        config: The schema of the model's ``model`` section.
        build: Builds the model from a section.
        reads: The kind of data that the model reads.
    """

    config: type[Section]
    build: Callable[[Any], nn.Module]
    reads: Literal["tokens", "images"]


MODELS: Mapping[str, Entry] = {
    "llama": Entry(SECTIONS["llama"], Llama, "tokens"),
    "resnet18": Entry(SECTIONS["resnet18"], ResNet, "images"),
    "swin_t": Entry(SECTIONS["swin_t"], Swin, "images"),
    "huggingface": Entry(SECTIONS["huggingface"], huggingface.build, "tokens"),
}


# Keys that a resumed run may change. They do not change the model's results, or the shapes of its
# weights already show a change.
_FREE = {
    "max_position_embeddings", "initializer_range", "loss_chunk_tokens", "attention_dropout", "residual_dropout",
    "dropout", "stochastic_depth", "z_loss",
    "image_size", "vocab_size", "num_classes", "num_key_value_heads", "head_dim",
}  # fmt: skip


def build_model(
    section: Mapping[str, Any],
    vocab_size: int | None = None,
    *,
    num_classes: int | None = None,
    image_size: int | None = None,
) -> nn.Module:
    """Build the model that ``section`` (``{"name": "llama", …}``) describes, on the meta device.

    Args:
        section: The ``model`` section.
        vocab_size: The data's vocabulary. It is used if the section does not set ``vocab_size``.
        num_classes: The number of classes of image data, used in the same way.
        image_size: The pixels per side of image data, used in the same way.

    Raises:
        ConfigError: A name or key is unknown, a value has the wrong type, the model cannot read
            this kind of data, or the section contradicts the data.
    """
    entry, config = _parse(section, {"vocab_size": vocab_size, "num_classes": num_classes, "image_size": image_size})
    with torch.device("meta"):
        model = entry.build(config)
    if isinstance(config, HuggingFaceConfig) and vocab_size is not None:
        _agreed("vocab_size", vocabulary_of(model), vocab_size, f"sdp prepare --tokenizer hf:{config.path}")
    return model


def vocabulary_of(model: nn.Module) -> int:
    """Return the vocabulary size that a language model's configuration states."""
    config: Any = get_config(model)
    return getattr(config, "get_text_config", lambda: config)().vocab_size


def changed_key(section: Mapping[str, Any], before: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first key that makes the models of two sections compute different results.

    Returns the key and both values, or None if the models compute the same. Raises ConfigError for
    an invalid section.
    """
    now, then = (_parse(given, {})[1].model_dump() for given in (section, before))
    if section["name"] != before["name"]:
        return "name", section["name"], before["name"]
    return next(
        ((key, value, then[key]) for key, value in now.items() if key not in _FREE and value != then[key]), None
    )


def huggingface_config(section: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the ``config.json`` of this model in ``transformers``, without token ids and dtype.

    Raises ConfigError if ``transformers`` has no such model.
    """
    _, config = _parse(section, {"vocab_size": vocab_size})
    if not isinstance(config, LlamaConfig):
        raise ConfigError(f"model.name: {section['name']!r} has no counterpart in transformers; only llama has one")
    return llama_hf.to_huggingface(config)


def section_from_huggingface(directory: Path, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``model`` section for the Hugging Face model in ``directory``.

    ``stated`` has the keys that the user has set. If it names "huggingface", or is empty and the
    model is not this project's LLaMA, the section names "huggingface". Otherwise it names "llama".
    Raises ConfigError if ``stated`` contradicts the model.
    """
    path = directory / "config.json"
    given = {"name": "huggingface", "path": str(directory.absolute())}
    if stated.get("name") == "huggingface":
        return {**given, **stated}
    content = huggingface.read_config(directory)
    try:
        if content["model_type"] not in llama_hf.TYPES:
            raise ValueError(f"model_type {content['model_type']!r} is not a LLaMA")
        found = {"name": "llama", **llama_hf.from_huggingface(content)}
    except ValueError as error:
        if not stated:
            return given
        remedy = 'set model.name to "huggingface", and remove the other keys of model'
        raise ConfigError(f"training.init_from: {path}: {error}; {remedy}") from None
    for key, value in stated.items():
        if value is not None and key in found and value != found[key]:
            raise ConfigError(
                f"model.{key}: {json.dumps(value)}, but {path} has {json.dumps(found[key])}; remove this key "
                "to use the value of that file"
            )
    return {**stated, **found}


def _parse(section: Mapping[str, Any], data: Mapping[str, int | None]) -> tuple[Entry, Section]:
    fields = dict(section)
    name = fields.pop("name", None)
    entry = MODELS[require_known(name)]
    for key, value in data.items():
        if value is None:
            continue
        if entry.reads != _KIND[key]:
            others = ", ".join(other for other, known in MODELS.items() if known.reads != entry.reads)
            raise ConfigError(
                f"model.name: {name} reads {entry.reads}, but the data section describes {_KIND[key]}; "
                f"choose data of the other kind (data.name), or a model for {_KIND[key]}: {others}"
            )
        if key in entry.config.model_fields:
            fields[key] = _agreed(key, fields.get(key), value)
    return entry, parse_section(entry.config, fields, "model")


MOST_PADDING = 1024  # how many more rows a model's vocabulary often has than its tokenizer's
_KIND = {"vocab_size": "tokens", "num_classes": "images", "image_size": "images"}
_ABOUT = {
    "vocab_size": "the data's tokenizer has",
    "num_classes": "the data has",
    "image_size": "the data's images have sides of",
}


def is_padded(stated: int, tokens: int) -> bool:
    """Whether a vocabulary of ``stated`` rows has ``tokens`` tokens and a few unused rows."""
    return tokens < stated <= tokens + min(MOST_PADDING, tokens // 8)


def _agreed(key: str, stated: object, data: int, prepare: str | None = None) -> object:
    if key == "vocab_size" and isinstance(stated, int) and is_padded(stated, data):
        return stated
    # The schema refuses a value that is not an integer.
    if isinstance(stated, int) and stated != data:
        remedy = f"remove model.{key} to take the data's"
        if prepare is not None:
            raise ConfigError(
                f"model.{key}: {stated}, but {_ABOUT[key]} {data}; prepare the data with the model's tokenizer: "
                f"{prepare}"
            )
        if key == "vocab_size":
            remedy = f"prepare the data with the tokenizer that this model was meant for, or, for a new model, {remedy}"
        raise ConfigError(f"model.{key}: {stated}, but {_ABOUT[key]} {data}; {remedy}")
    return data if stated is None else stated
