"""Checks of a whole configuration before a process starts. They need no torch."""

from __future__ import annotations

from ...engine.config.named_params import check_named_params
from ...engine.config.schema import Config
from ...models.sections import check_section


def check_names(config: Config) -> None:
    """Check the sections whose keys depend on a name: optimizer, scheduler and model.

    Only the command line does this. A script may pass its own optimizer, and then the section has
    no effect.

    Raises:
        ConfigError: A name or a key is unknown, or a value has the wrong type.
    """
    check_named_params(config.optimizer, config.scheduler)
    check_section(config.model, config.training.init_from)
