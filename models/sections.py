"""The ``model`` section of each model that a configuration can name.

This file does not need torch, so that a misspelt key is found before a process starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..engine.config.section import Section, parse_section
from ..engine.errors import ConfigError, shorten, suggestion
from .image_configs import ResNetConfig, SwinConfig
from .llama_config import LlamaConfig

SECTIONS: Mapping[str, type[Section]] = {"llama": LlamaConfig, "resnet18": ResNetConfig, "swin_t": SwinConfig}


def require_known(name: object) -> str:
    """Return the name of a model. Raises ConfigError for any other value."""
    known = ", ".join(SECTIONS)
    if name is None:
        raise ConfigError(f"model.name: this key is required; known: {known}")
    if not isinstance(name, str) or name not in SECTIONS:
        hint = suggestion(str(name), list(SECTIONS)) or f"; known: {known}"
        raise ConfigError(f'model.name: unknown model "{shorten(name)}"{hint}')
    return name


def check_section(section: Mapping[str, Any], init_from: str | None) -> None:
    """Check the ``model`` section of a file. An empty one may belong to a script's own model.

    With ``init_from``, another file completes the section, and only its keys are checked here.

    Raises:
        ConfigError: The name or a key is unknown, or a value has the wrong type.
    """
    if not section:
        return
    fields = dict(section)
    name = fields.pop("name", None)
    if name is None and init_from is not None:
        return
    schema = SECTIONS[require_known(name)]
    if init_from is None or not fields.keys() <= schema.model_fields.keys():
        parse_section(schema, fields, "model")
