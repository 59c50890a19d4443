"""Finds the user's mistakes before training starts and before files are written."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import torch
from torch import nn

from ...data.image_sets import check_source
from ...data.images import check_packages
from ...engine.batch.loader import evaluation_batches
from ...engine.batch.size import BatchSize
from ...engine.checkpoint.storage.directory import locate
from ...engine.checkpoint.storage.files import read_state
from ...engine.checkpoint.storage.remote import fetch_checkpoint, newest
from ...engine.config.schema import Config
from ...engine.distributed.mesh import Mesh
from ...engine.errors import CheckpointError, ConfigError, shorten
from ...engine.json_files import read_json_file
from ...engine.model_interface import get_config
from ...engine.object_store import is_url
from ...engine.optim.optimizers import make_optimizer
from ...engine.optim.schedules import build_scheduler
from ...engine.placement.layout import Layout
from ...engine.subnetwork.initialisation import WeightFiles, fillers_from
from ...models.registry import build_model, changed_key
from ..runs.dataset import Corpus, check_router, open_prepared, path_of, router_folder
from ..runs.model_inputs import facts_of
from ..runs.run_files import CONFIG
from ..runs.saved_run import check_data


def check(config: Config, mesh: Mesh, dump_dir: Path, checkpoints: str | Path, *, resume: bool) -> None:
    """Raise the :class:`~sdp.engine.errors.SDPError` with which a run under ``config`` would fail.

    Every rank checks the same things before the start, without communication: batch arithmetic,
    model, units and placement (on the meta device), optimizer and schedule, the index of the data,
    and the checkpoint to resume from.
    """
    if not config.model:
        raise ConfigError('model: this section is required to train, for example {"name": "llama", …}')
    if config.training.steps is None:
        raise ConfigError("training.steps: this key is required to train; give the number of optimizer steps")
    batch = BatchSize.resolve(config, mesh)
    if config.data.name is not None:
        check_packages(config.data.name)
    path = path_of(config, dump_dir)
    corpus = (
        None if path == dump_dir / "corpus" else open_prepared(config, path)
    )  # the files that are made for the run do not exist yet
    if corpus is None and config.data.name is not None:
        check_source(config.data.name, Path(config.data.path) if config.data.path is not None else None)
    model = build_model(config.model, **(corpus.facts if corpus is not None else facts_of(config)))
    if config.data.name is None:
        _check_sequence(config, model)
    if corpus is not None:
        for held_out in (corpus.held_out, *corpus.sources.values()):
            evaluation_batches(held_out, batch.micro, data_ranks=mesh.data_ranks)
    layout = Layout.of(model, config, mesh)
    if config.training.init_from is not None:
        directory = Path(config.training.init_from)
        fillers_from(WeightFiles(directory), directory, model, layout)
    _check_optimizer(config)
    if resume:
        _check_checkpoint(config, dump_dir, checkpoints, corpus)


def _check_sequence(config: Config, model: nn.Module) -> None:
    limit = getattr(get_config(model), "max_position_embeddings", None)
    if limit is not None and config.data.sequence_length > limit:
        raise ConfigError(
            f"data.sequence_length: {config.data.sequence_length} is more than model.max_position_embeddings = "
            f"{limit}; lower the first or raise the second"
        )
    if config.data.document_mask and "documents" not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"data.document_mask: the model {config.model.get('name')!r} cannot keep documents apart; set the key to "
            'false, or use the model "llama"'
        )
    tp = config.tensor_parallel.autotp_size
    if config.data.sequence_length % tp:
        raise ConfigError(
            f"data.sequence_length: {config.data.sequence_length} is not divisible by tensor_parallel.autotp_size = "
            f"{tp}, the ranks that share a sequence; choose a multiple of {tp}"
        )


def _check_optimizer(config: Config) -> None:
    placeholder = [{"params": [nn.Parameter(torch.zeros(1))]}]
    optimizer, _ = make_optimizer(config.optimizer, None, placeholder, torch.device("cpu"), grouped=True)
    if config.scheduler is not None:
        build_scheduler(config.scheduler.type, config.scheduler.params, optimizer)


def _check_checkpoint(config: Config, dump_dir: Path, checkpoints: str | Path, corpus: Corpus | None) -> None:
    """Check that the newest checkpoint can be read, and that it has this model and this data."""
    tag = newest(checkpoints)
    if tag is None:
        return
    checkpoints = fetch_checkpoint(str(checkpoints), tag) if is_url(checkpoints) else Path(checkpoints)
    path = locate(checkpoints, tag)
    state = read_state(path)
    if config.training.steps is not None and state["global_steps"] > config.training.steps:
        raise ConfigError(
            f"training.steps: {config.training.steps}, but {path} is from step {state['global_steps']}; raise "
            "training.steps to continue"
        )
    check_data(path, state, path_of(config, dump_dir), config.data.name)
    if corpus is not None and not config.data.sources:  # a source of a mixture has its counts by its hash
        saved = state["client_state"].get("corpus", corpus.sha256)
        if config.data.name is None and saved != corpus.sha256:
            raise CheckpointError(
                f"{path}: was trained with another corpus (sha256 {shorten(saved, 12)}) than {corpus.path} holds "
                f"({corpus.sha256[:12]}…); use the data of that run, or start a new run from its weights with "
                "training.init_from"
            )
    router = router_folder(config, path_of(config, dump_dir))
    if router is not None and router.is_dir():
        check_router(router, state, path)
    file = dump_dir / CONFIG
    try:
        changed = changed_key(config.model, read_json_file(file)["model"]) if file.exists() else None
    except (
        ConfigError,
        OSError,
        ValueError,
        KeyError,
        TypeError,
    ) as error:  # the file is damaged or has another version
        raise ConfigError(
            f"{file}: its model cannot be compared with this run's ({error}); move the file away to resume without "
            "this comparison"
        ) from None
    if changed is not None:
        key, new, old = changed
        raise ConfigError(
            f"model.{key}: {json.dumps(new)}, but {file} has {json.dumps(old)}, with which {path} was trained; set "
            "it back, or start a new run from these weights with sdp export and --init-from"
        )
