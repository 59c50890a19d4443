"""Find the user's mistakes before anything is started: no process waits for another yet, and nothing was printed or written."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ..engine.batch_size import BatchSize
from ..engine.checkpoint import latest, read_state
from ..engine.config import Config, NamedParams
from ..engine.errors import ConfigError
from ..engine.layout import Layout
from ..engine.mesh import Mesh
from ..engine.optim import build_optimizer
from ..engine.schedules import build_scheduler
from ..models.registry import build_model
from .corpus import open_prepared

_SOME_VOCABULARY = 256  # stands for that of a corpus not made yet: where units are cut does not depend on it


def check(config: Config, mesh: Mesh, dump_dir: Path, *, resume: bool) -> None:
    """Raise the :class:`~sdp.engine.errors.SDPError` that a run under ``config`` would end with at its start.

    Every rank checks alike, without communication: batch arithmetic, model, units and placement (on the meta device), optimizer
    and schedule, the index of the data, the checkpoint to resume from.
    """
    _check_length(config)
    BatchSize.resolve(config, mesh)
    model = build_model(config.model, _vocabulary(config))
    _check_sequence(config, model)
    Layout.of(model, config, mesh)
    _check_optimizer(config)
    checkpoints = dump_dir / "checkpoints"
    if resume and (tag := latest(checkpoints)) is not None:
        read_state(checkpoints / tag)


def _check_length(config: Config) -> None:
    if not config.model:
        raise ConfigError('model: this section is required to train, for example {"name": "llama", …}')
    if (config.training.steps is None) == (config.training.tokens is None):
        raise ConfigError("training: give the length of the run as either training.steps or training.tokens")


def _vocabulary(config: Config) -> int:
    data = config.data
    if data.path is None:
        return data.vocab_size or config.model.get("vocab_size") or _SOME_VOCABULARY
    return open_prepared(config, Path(data.path)).vocab_size


def _check_sequence(config: Config, model: nn.Module) -> None:
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if limit is not None and config.data.sequence_length > limit:
        raise ConfigError(
            f"data.sequence_length: {config.data.sequence_length} is more than model.max_position_embeddings = {limit}; "
            "raise the one or lower the other"
        )


def _check_optimizer(config: Config) -> None:
    stand_in = [nn.Parameter(torch.zeros(1))]
    section = config.optimizer or NamedParams(type="AdamW")
    optimizer, _ = build_optimizer(section.type, section.params, stand_in, torch.device("cpu"))
    if config.scheduler is not None:
        build_scheduler(config.scheduler.type, config.scheduler.params, optimizer)
