"""Opens a directory that a user names: a checkpoint with its run, or a model of transformers."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...data.files import INDEX_FILE
from ...data.image_sets import INDEX_FILE as IMAGE_INDEX
from ...data.image_sets import load_image_index
from ...data.index import load_index
from ...engine.checkpoint.storage.directory import check_tag, latest, locate
from ...engine.checkpoint.storage.files import STATE, read_state
from ...engine.checkpoint.storage.remote import fetch_checkpoint, newest
from ...engine.config.load import load_config, read_raw
from ...engine.config.removed import without_removed_keys
from ...engine.config.schema import Config
from ...engine.distributed.mesh import Mesh
from ...engine.errors import CheckpointError, ConfigError
from ...engine.object_store import is_url, local_copy
from ..shared.arguments import add_set_option
from .dataset import fetch_corpora, path_of
from .run_files import CONFIG, fetch_files, is_model
from .start_files import START

log = logging.getLogger("sdp")

T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointChoice:
    """The checkpoint that a user chose on the command line.

    Attributes:
        directory: the dump directory of a run, one of its checkpoints, or a Hugging Face model.
        tag: the name of the checkpoint. If None, the newest one.
        overrides: changes of the run's configuration, in the form of ``--set``.
    """

    directory: Path
    tag: str | None = None
    overrides: tuple[str, ...] = ()

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> CheckpointChoice:
        """Read the choice from parsed arguments. A run at a URL is copied to this host."""
        tag = args.checkpoint if args.step is None else f"step-{args.step}"
        if not is_url(args.run):
            return cls(Path(args.run), tag, tuple(args.set))
        return cls(*_fetch(args.run.rstrip("/"), tag), tuple(args.set))


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint and its run, or a model in Hugging Face's format.

    Attributes:
        dump_dir: the directory of the run, or of the model.
        config: the configuration of the run, with the changes that the user asked for.
        checkpoint: the directory of the checkpoint, or of the model.
        state: the content of the checkpoint's ``state.json``.
        is_model: whether this is a model without a run.
    """

    dump_dir: Path
    config: Config
    checkpoint: Path
    state: dict[str, Any]
    is_model: bool = False

    @property
    def step(self) -> int:
        return self.state["global_steps"]

    @property
    def mesh(self) -> Mesh:
        """The mesh of the run that wrote the checkpoint."""
        return Mesh(*self.state["mesh"][:3])

    @property
    def data(self) -> Path:
        """The directory of the prepared data. Raises ConfigError for a model without data."""
        if self.is_model and self.config.data.takes_default_corpus:
            raise ConfigError(
                f"{self.dump_dir}: a model without a run has no data; name prepared data with --set "
                f"data.path=DATA (sdp prepare --tokenizer hf:{self.dump_dir})"
            )
        return path_of(self.config, self.dump_dir)

    @property
    def described_in(self) -> Path:
        """The directory with the model's configuration and tokenizer in Hugging Face's format.

        It exists only for a Hugging Face model, or if the run started from one.
        """
        return self.dump_dir if self.is_model else self.dump_dir / START


def add_arguments(parser: argparse.ArgumentParser, *, models: bool = True) -> None:
    """Declare the arguments that choose a checkpoint, for :meth:`CheckpointChoice.from_args`.

    ``models`` says whether the command also takes a Hugging Face model.
    """
    kinds = ", one of its checkpoints, or a Hugging Face model" if models else ", or one of its checkpoints"
    parser.add_argument("run", metavar="DIR", help=f"the --dump-dir of a run{kinds}")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", metavar="N", type=int, help="the checkpoint of this step (default: the newest)")
    which.add_argument("--checkpoint", metavar="TAG", help="the checkpoint of this name")
    add_set_option(
        parser,
        "override a key of the run's configuration, for example data.path if the data was moved; may be repeated",
    )


def use(choice: CheckpointChoice, action: Callable[[SavedRun], T], overrides: Sequence[str] = ()) -> T:
    """Find the chosen checkpoint, pass it to ``action``, and return the result.

    A run that still trains removes old checkpoints. If the newest checkpoint was chosen and is
    removed meanwhile, ``action`` starts again with the checkpoint that is now the newest.

    Args:
        choice: the checkpoint to use.
        action: reads the checkpoint. It may be called more than once.
        overrides: changes of the configuration that the command needs. The user's changes win.

    Raises:
        ConfigError: the directory does not hold a run.
        CheckpointError: there is no such checkpoint, it is damaged, or the run removed it.
    """
    if is_model(choice.directory):
        return action(_open_model(choice, overrides))
    while True:
        dump_dir, checkpoint = _locate(choice.directory, choice.tag)
        try:
            return action(_open(dump_dir, checkpoint, choice, overrides))
        except (CheckpointError, FileNotFoundError) as error:
            newest = checkpoint
            if choice.tag is None and (choice.directory / CONFIG).is_file():
                newest = _locate(choice.directory, None)[1]
            if newest != checkpoint:
                log.warning("%s cannot be read any more; using the newer %s", checkpoint, newest)
                continue
            if checkpoint.is_dir() and isinstance(error, CheckpointError):
                raise
            if isinstance(error, FileNotFoundError) and not Path(str(error.filename)).is_relative_to(checkpoint):
                raise
        raise CheckpointError(
            f"{checkpoint}: was removed while it was read, because a run keeps only its newest training.keep "
            "checkpoints; choose a newer checkpoint, or raise training.keep"
        )


def _fetch(url: str, tag: str | None) -> tuple[Path, str]:
    """Copy a run and one of its checkpoints to this host. Return its directory and the tag.

    Raises ConfigError if there is no run at ``url``, and CheckpointError if there is no checkpoint.
    """
    folder, checkpoints = local_copy(url), f"{url}/checkpoints"
    fetch_files(url, folder)
    if not (folder / CONFIG).is_file() or is_model(folder):
        raise ConfigError(f"{url}: no run of sdp train here; give its --dump-dir, or copy a model to this host")
    tag = newest(checkpoints) if tag is None else tag
    if tag is None:
        raise CheckpointError(f"{url}: this run has no checkpoint; training.save_every sets when one is written")
    fetch_checkpoint(checkpoints, tag)
    return folder, tag


def _open_model(choice: CheckpointChoice, overrides: Sequence[str]) -> SavedRun:
    if choice.tag is not None:
        raise ConfigError(f"{choice.directory} is a model without checkpoints; leave {choice.tag} out")
    model = {"name": "huggingface", "path": str(choice.directory)}
    config = load_config({"model": model, "sdp": {"groups": 1}}, [*overrides, *choice.overrides])
    state = {"global_steps": 0, "mesh": [1, 1, 1], "files": {}}
    return SavedRun(choice.directory, config, choice.directory, state, is_model=True)


def _open(dump_dir: Path, checkpoint: Path, choice: CheckpointChoice, overrides: Sequence[str]) -> SavedRun:
    state = read_state(checkpoint)
    written = without_removed_keys(read_raw(dump_dir / CONFIG))
    config = load_config(written, [] if overrides else choice.overrides)
    if overrides:  # They may allow settings that the run's own engine refuses.
        config = load_config(config.model_dump(mode="json"), [*overrides, *choice.overrides])
    if config.model.get("name") == "huggingface":  # its folder may be gone
        config = config.model_copy(update={"model": {**config.model, "path": str(dump_dir / START)}})
    fetch_corpora(config)
    saved = SavedRun(dump_dir, config, checkpoint, state)
    check_data(checkpoint, state, saved.data)
    return saved


def check_data(checkpoint: Path, state: Mapping[str, Any], data: Path, name: str | None = None) -> None:
    """Raise CheckpointError if a checkpoint was trained with other data than ``data``.

    Args:
        checkpoint: the directory of the checkpoint, for the message.
        state: the content of the checkpoint's ``state.json``.
        data: the directory of prepared data. Nothing is checked if it does not exist.
        name: the image set (``data.name``) of a run that resumes. If None, names are not compared.
    """
    trained_with, images = (state["client_state"].get(key) for key in ("tokenizer", "images"))
    has_names = images is None or (isinstance(images, dict) and images.keys() >= {"name", "sha256"})
    if not has_names or not isinstance(trained_with, dict | None):
        raise CheckpointError(
            f"{checkpoint}: damaged, its client state does not describe the data; use another checkpoint"
        )
    if trained_with is not None and (data / INDEX_FILE).is_file():
        found = load_index(data).tokenizer
        if found != trained_with:
            raise CheckpointError(
                f"{checkpoint}: was trained with another tokenizer ({_named(trained_with)}) than {data} was prepared "
                f"with ({_named(found)}); use the data of that run, or data prepared with its tokenizer"
            )
    if images is not None and name not in (None, "folder", images["name"]):
        raise CheckpointError(
            f"{checkpoint}: was trained with images of {images['name']!r}, but data.name is {name!r}; set data.name "
            "back"
        )
    if images is not None and (data / IMAGE_INDEX).is_file():
        index = load_image_index(data)
        if index.sha256 != images["sha256"]:
            raise CheckpointError(
                f"{checkpoint}: was trained with other images ({_named(images)}) than {data} holds "
                f"({_named({**vars(index)})}); use the data of that run"
            )


def _named(tokenizer: Mapping[str, Any]) -> str:
    return " ".join(str(tokenizer[key])[:12] for key in ("kind", "name", "sha256") if key in tokenizer)


def _locate(directory: Path, tag: str | None) -> tuple[Path, Path]:
    if (directory / STATE).is_file():
        if tag is not None:
            raise ConfigError(f"{directory} is one checkpoint; give the directory of the run to choose {tag} in it")
        dump_dir = directory.absolute().parent.parent
        if not (dump_dir / CONFIG).is_file():
            raise _written_by_a_script(directory, "this checkpoint", dump_dir)
        return dump_dir, directory
    if not (directory / CONFIG).is_file():
        if latest(directory) is not None:
            raise _written_by_a_script(directory, "these checkpoints", directory)
        found = f"no {CONFIG} in it" if directory.is_dir() else "no such directory"
        raise ConfigError(
            f"{directory}: neither a run nor a checkpoint of a run ({found}); give the --dump-dir of sdp train"
        )
    checkpoints = directory / "checkpoints"
    tag = latest(checkpoints) if tag is None else check_tag(tag)
    if tag is None:
        raise CheckpointError(f"{directory}: this run has no checkpoint; training.save_every sets when one is written")
    checkpoint = locate(checkpoints, tag)
    if not checkpoint.is_dir():
        there = ", ".join(sorted(path.name for path in checkpoints.glob("[!.]*") if path.is_dir())) or "none"
        raise CheckpointError(f"{checkpoints}: no checkpoint {tag}; found: {there}")
    return directory, checkpoint


def _written_by_a_script(directory: Path, what: str, dump_dir: Path) -> ConfigError:
    return ConfigError(
        f"{directory}: a script wrote {what}, not sdp train, so the model is unknown (no {dump_dir / CONFIG}); call "
        "engine.load_checkpoint and engine.full_state_dict() in the script to get the weights"
    )
