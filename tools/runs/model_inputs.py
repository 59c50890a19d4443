"""Builds the model of a configuration, and micro-batches of the right shape, without data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ...data.image_sets import facts_of_set
from ...data.tokenizers import DEFAULT_VOCAB_SIZE, BytesTokenizer
from ...engine.config.schema import Config
from ...engine.errors import ConfigError
from ...models.registry import build_model
from .dataset import FOLDER_IMAGE_SIZE, open_prepared, path_of


def model_and_batch(config: Config) -> tuple[Callable[[], nn.Module], Callable[[int], dict[str, torch.Tensor]]]:
    """Return a function that builds the model, and a function that makes a micro-batch of zeros.

    The second function takes the number of samples. If prepared data exists, it determines the
    model's sizes. Raises ConfigError.
    """
    if not config.model:
        raise ConfigError('model: this section is required to plan, for example {"name": "llama", …}')
    facts = facts_of(config)
    build = lambda: build_model(config.model, **facts)  # noqa: E731
    if config.data.name is None:
        tokens = config.data.sequence_length

        def of_tokens(samples: int) -> dict[str, torch.Tensor]:
            ids = torch.zeros(samples, tokens, dtype=torch.int64)
            batch = {"input_ids": ids, "labels": ids.clone()}
            return batch | ({"documents": ids.to(torch.int32)} if config.data.document_mask else {})

        return build, of_tokens
    side = facts["image_size"]

    def of_images(samples: int) -> dict[str, torch.Tensor]:
        return {"images": torch.zeros(samples, 3, side, side), "labels": torch.zeros(samples, dtype=torch.int64)}

    return build, of_images


def facts_of(config: Config) -> dict[str, int]:
    """Return the sizes that the model must fit, from the data if possible, else from ``config``."""
    data, model = config.data, config.model
    if data.name in ("digits", "cifar10", "cifar100"):
        return facts_of_set(data.name)
    path = path_of(config, Path())
    if (data.path is not None or data.sources) and path.is_dir():
        return open_prepared(config, path).facts
    if data.name is None:
        if model.get("name") == "huggingface":
            return {}
        fixed = BytesTokenizer.vocab_size if data.tokenizer == "bytes" else None
        return {"vocab_size": data.vocab_size or fixed or model.get("vocab_size") or DEFAULT_VOCAB_SIZE}
    if "num_classes" not in model:
        raise ConfigError(
            f"model.num_classes: {path} does not exist, so its classes cannot be counted; set it, for example --set "
            "model.num_classes=1000"
        )
    return {"num_classes": model["num_classes"], "image_size": data.image_size or FOLDER_IMAGE_SIZE}
