"""The configuration of a run, completed by the model that it starts from."""

from __future__ import annotations

from pathlib import Path

from ...engine.backends.deepspeed.zero_checkpoint import is_zero_checkpoint
from ...engine.config.schema import Config
from ...models.registry import section_from_huggingface


def with_initial_model(config: Config) -> Config:
    """Complete the model section from the model that the run starts from.

    A DeepSpeed checkpoint holds only weights, so it does not change the section.
    """
    if config.training.init_from is None or is_zero_checkpoint(Path(config.training.init_from)):
        return config
    return config.model_copy(update={"model": section_from_huggingface(Path(config.training.init_from), config.model)})
