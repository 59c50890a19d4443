"""A checkpoint and the run that wrote it, found from the directory that a user names."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...data.files import INDEX_FILE
from ...data.image_sets import INDEX_FILE as IMAGE_INDEX
from ...data.image_sets import load_image_index
from ...data.index import load_index
from ...engine.checkpoint.directory import check_tag, latest, locate
from ...engine.checkpoint.files import STATE, read_state
from ...engine.config.load import load_config
from ...engine.config.schema import Config
from ...engine.errors import CheckpointError, ConfigError
from ..shared.arguments import add_set_option
from .dataset import path_of
from .run_files import CONFIG


@dataclass(frozen=True)
class SavedRun:
    """``config`` is the run's own with the user's changes; ``state`` is the checkpoint's ``state.json``."""

    dump_dir: Path
    config: Config
    checkpoint: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return self.state["global_steps"]

    @property
    def data(self) -> Path:
        """The prepared data of the run."""
        return path_of(self.config, self.dump_dir)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how a checkpoint is named on the command line."""
    parser.add_argument("run", metavar="DIR", type=Path, help="the --dump-dir of a run, or one of its checkpoints")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", metavar="N", type=int, help="the checkpoint of this step (default: the newest)")
    which.add_argument("--checkpoint", metavar="TAG", help="the checkpoint of this name")
    add_set_option(
        parser, "override a key of the run's configuration, such as data.path of data that was moved; may be repeated"
    )


def find(args: argparse.Namespace, overrides: Sequence[str] = ()) -> SavedRun:
    """The checkpoint that ``args`` name; ``overrides`` go before the user's own, and in place of what DeepSpeed alone acts on.

    Raises ConfigError where ``DIR`` is no run, CheckpointError where the run has no such checkpoint or it is damaged.
    """
    tag = args.checkpoint if args.step is None else f"step-{args.step}"
    dump_dir, checkpoint = _locate(args.run, tag)
    state = read_state(checkpoint)
    config = load_config(dump_dir / CONFIG, [] if overrides else args.set)
    if overrides:  # which may allow what the run's own engine does not
        config = load_config(config.model_dump(mode="json"), [*overrides, *args.set])
    saved = SavedRun(dump_dir, config, checkpoint, state)
    check_data(checkpoint, state, saved.data)
    return saved


def open_run(directory: Path) -> SavedRun:
    """The run in ``directory`` with its newest checkpoint, or the run of that one checkpoint; raises as :func:`find` does."""
    dump_dir, checkpoint = _locate(directory, None)
    return SavedRun(dump_dir, load_config(dump_dir / CONFIG), checkpoint, read_state(checkpoint))


def check_data(checkpoint: Path, state: Mapping[str, Any], data: Path, name: str | None = None) -> None:
    """Raise CheckpointError where ``data``, if it is there, is of another tokenizer or other images than the checkpoint; ``name``: the
    set of images that a run is to go on with.
    """
    trained_with = state["client_state"].get("tokenizer")
    if trained_with is not None and (data / INDEX_FILE).is_file():
        found = load_index(data).tokenizer
        if found != trained_with:
            raise CheckpointError(
                f"{checkpoint}: was trained with another tokenizer ({_named(trained_with)}) than {data} was prepared with "
                f"({_named(found)}); use the data of that run, or data prepared with its tokenizer"
            )
    images = state["client_state"].get("images")
    if images is not None and name not in (None, "folder", images["name"]):
        raise CheckpointError(
            f"{checkpoint}: was trained with images of {images['name']!r}, and data.name is {name!r}; use the former"
        )
    if images is not None and (data / IMAGE_INDEX).is_file():
        index = load_image_index(data)
        if index.sha256 != images["sha256"]:
            raise CheckpointError(
                f"{checkpoint}: was trained with other images ({_named(images)}) than {data} holds ({_named({**vars(index)})}); "
                "use the data of that run"
            )


def _named(tokenizer: Mapping[str, Any]) -> str:
    return " ".join(str(tokenizer[key])[:12] for key in ("kind", "name", "sha256") if key in tokenizer)


def _locate(directory: Path, tag: str | None) -> tuple[Path, Path]:
    if (directory / STATE).is_file():
        if tag is not None:
            raise ConfigError(f"{directory} is one checkpoint; name the run's directory to choose {tag} in it")
        dump_dir = directory.absolute().parent.parent
        if not (dump_dir / CONFIG).is_file():
            raise ConfigError(f"{directory}: a checkpoint of a script, no run of sdp train: no {dump_dir / CONFIG} says what the model is; "
                              "in the script engine.load_checkpoint and engine.full_state_dict() give its weights")  # fmt: skip
        return dump_dir, directory
    if not (directory / CONFIG).is_file():
        if latest(directory) is not None:
            raise ConfigError(f"{directory}: checkpoints of a script, no run of sdp train: nothing says what the model is; in the script "
                              "engine.load_checkpoint and engine.full_state_dict() give its weights")  # fmt: skip
        found = f"no {CONFIG} in it" if directory.is_dir() else "no such directory"
        raise ConfigError(
            f"{directory}: neither a run nor a checkpoint of one ({found}); give the --dump-dir of sdp train"
        )
    checkpoints = directory / "checkpoints"
    tag = latest(checkpoints) if tag is None else check_tag(tag)
    if tag is None:
        raise CheckpointError(f"{directory}: this run has no checkpoint; training.save_every says when one is written")
    checkpoint = locate(checkpoints, tag)
    if not checkpoint.is_dir():
        there = ", ".join(sorted(path.name for path in checkpoints.glob("[!.]*") if path.is_dir())) or "none"
        raise CheckpointError(f"{checkpoints}: no checkpoint {tag}; there: {there}")
    return directory, checkpoint
