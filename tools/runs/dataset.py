"""The data of a run: tokens or images. The default is Python's standard library as text."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from ...data.clusters import CLUSTERS, load_router, read_clusters, router_hash
from ...data.files import INDEX_FILE
from ...data.image_sets import INDEX_FILE as IMAGE_INDEX
from ...data.image_sets import prepare_images
from ...data.images import Batches, ImageArrays, ImageFolder
from ...data.index import load_index
from ...data.prepare import prepare
from ...data.shards import MixedTokens, TokenDataset
from ...data.tokenizers import request_of
from ...engine.accounting.quantities import format_bytes
from ...engine.batch.sampler import PathSamples
from ...engine.config.schema import Config
from ...engine.distributed.agreement import Ranks
from ...engine.errors import CheckpointError, ConfigError, DataError
from ...engine.files import refuse_link
from ...engine.object_store import fetch, is_url, local_copy

log = logging.getLogger("sdp")

VERIFIED_BYTES = 4_000_000_000  # hashing them takes about 3 s on four cores, or half a minute on a plain disk

_LOOK_SECONDS = 2.0

_ARRAYS = ("digits", "cifar10", "cifar100")  # sets that are made into arrays in the run's own directory
_INDEXES = (INDEX_FILE, IMAGE_INDEX)  # prepared data has one of these
FOLDER_IMAGE_SIZE = 224  # pixels a side of a folder's images, unless the configuration says otherwise


@dataclass(frozen=True)
class Corpus:
    """The training samples and the held-out samples of a run, and what is known about them.

    Attributes:
        train: the training samples.
        held_out: the held-out samples.
        facts: sizes that the model must fit, as :func:`~sdp.models.registry.build_model` takes
            them.
        identity: what a checkpoint records of the data, so that a resume can refuse other data.
        path: the directory of the data.
        sha256: the hash of the data.
        description: one line for the log.
        calibration: training samples without augmentation. None if ``train`` is not augmented.
        collate: makes a batch of training samples. If None, torch's default does.
        collate_held_out: makes a batch of held-out samples. If None, torch's default does.
        measures: what evaluations report in addition to the loss.
        sources: the held-out samples of each source of a mixture, by the source's name.
        masks_labels: whether some labels do not count, so that samples have different numbers of
            them.
    """

    train: Dataset[Any]
    held_out: Dataset[Any]
    facts: dict[str, int]
    identity: dict[str, Any]
    path: Path
    sha256: str
    description: str
    calibration: Dataset[Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    collate_held_out: Callable[[list[Any]], Any] | None = None
    measures: tuple[str, ...] = ()
    sources: Mapping[str, Dataset[Any]] = field(default_factory=dict)
    masks_labels: bool = False
    paths: PathSamples | None = None  # of the held-out samples
    router_prefix: int | None = None  # tokens that the router of the paths reads

    def alone(self, group: int) -> Corpus:
        """Return the same data for a run that has only the ranks of ``group`` (``--service``)."""
        if self.paths is None:
            return self
        self.train.paths = replace(self.train.paths, alone=group)  # pyright: ignore[reportAttributeAccessIssue]
        return replace(self, paths=replace(self.paths, alone=group))


def open_corpus(config: Config, dump_dir: Path) -> Corpus:
    """Open the data of a run. Collective.

    If the run uses the default text, or images that must be converted, rank 0 first prepares them
    in ``dump_dir/corpus``. It also verifies token shards. If one rank finds a mistake, all ranks
    raise DataError or ConfigError.
    """
    path = path_of(config, dump_dir)
    ranks = Ranks(alone=not dist.is_initialized())
    ranks.all_or_none(lambda: _while_rank_0_works(lambda: _make_ready(config, path)))
    return ranks.all_or_none(lambda: dealt(config, open_prepared(config, path)))


def path_of(config: Config, dump_dir: Path) -> Path:
    """Return the directory of a run's data, or of the first source of a mixture."""
    data = config.data
    if data.sources:
        return corpus_folder(data.sources[0].path)
    made_here = data.path is None or data.name in _ARRAYS
    return dump_dir / "corpus" if made_here else corpus_folder(str(data.path))


def corpus_folder(path: str) -> Path:
    """Return the folder of prepared data on this host. For a URL, this is its local copy."""
    return local_copy(path) if is_url(path) else Path(path)


def fetch_corpora(config: Config) -> None:
    """Copy a run's data from object stores to this host. Raises DataError if data is missing."""
    for path in [config.data.path, *(source.path for source in config.data.sources or ())]:
        if path is not None and is_url(path) and fetch(path, INDEX_FILE) is None:
            raise DataError(
                f"{path}: no prepared data here (no {INDEX_FILE}); make it with: sdp prepare --input FILES --output "
                f"{path}"
            )


def refuse_own_data(config: Config, dump_dir: Path, url: str) -> None:
    """Raise ConfigError if rank 0 would prepare data in a folder that other hosts cannot read."""
    path = path_of(config, dump_dir)
    if path == dump_dir / "corpus" and not any((path / name).is_file() for name in _INDEXES):
        raise ConfigError(
            f"--dump-dir {url}: a run on several hosts cannot prepare data in this folder; prepare the data first (sdp "
            "prepare) and give data.path, or name a folder that all hosts share"
        )


def _while_rank_0_works(action: Callable[[], None]) -> None:
    """Run ``action`` in a thread of rank 0.

    All ranks communicate every few seconds, so that no collective times out.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        action()
        return
    with ThreadPoolExecutor(1) as thread:
        work = thread.submit(action) if dist.get_rank() == 0 else None
        done = torch.zeros(1)
        while not done:
            if work is not None:
                wait([work], timeout=_LOOK_SECONDS)
                done.fill_(work.done())
            dist.broadcast(done, src=0)
    if work is not None:
        work.result()


def _make_ready(config: Config, path: Path) -> None:
    """Prepare the data if the run makes it, and verify token shards."""
    data = config.data
    if (data.takes_default_corpus or data.name in _ARRAYS) and not any((path / name).is_file() for name in _INDEXES):
        for entry in (path, *path.glob("*")):
            refuse_link(entry)
    if data.name in _ARRAYS:
        prepare_images(data.name, Path(data.path) if data.path is not None else None, path)
    if data.name is not None:
        return
    if data.takes_default_corpus:
        log.info("data.path is not set: using the sources of Python's standard library")
        prepare(
            None,
            path,
            tokenizer="sentencepiece" if data.tokenizer is None else data.tokenizer,
            vocab_size=data.vocab_size,
        )
    verify(config, path)


def verify(config: Config, path: Path) -> None:
    """Check the token shards of a run by their hashes, unless that would take minutes.

    Raises DataError if a shard is damaged. Images are not checked.
    """
    sources = [corpus_folder(source.path) for source in config.data.sources or ()]
    for directory in () if config.data.name else sources or [path]:
        index = load_index(directory)
        if index.bytes <= VERIFIED_BYTES:
            index.verify(directory)
        else:
            log.info(
                "data: the %s in %s are not hashed at each start; to check them now: sdp prepare --output %s --verify",
                format_bytes(index.bytes, "GB", 1), directory, directory,
            )  # fmt: skip


def open_prepared(config: Config, path: Path) -> Corpus:
    """Open the training samples and the held-out samples in ``path``.

    Raises DataError, and ConfigError if ``config`` contradicts the data.
    """
    return _open_tokens(config, path) if config.data.name is None else _open_images(config, path)


def _open_tokens(config: Config, path: Path) -> Corpus:
    data, mixed = config.data, config.data.sources or ()
    paths, weights = [corpus_folder(source.path) for source in mixed], [source.weight for source in mixed]
    train, held_out = (
        MixedTokens(paths, weights, split, data.sequence_length, document_mask=data.document_mask)
        if mixed
        else TokenDataset(path, split, data.sequence_length, document_mask=data.document_mask)
        for split in ("train", "held_out")
    )
    index = train.index
    prepared_with = request_of(index.tokenizer)
    if data.tokenizer not in (None, prepared_with):
        raise ConfigError(
            f"data.tokenizer: {data.tokenizer}, but {path} was prepared with {prepared_with}; "
            "remove data.tokenizer, or prepare the data again"
        )
    if data.vocab_size is not None and data.vocab_size != train.vocab_size:
        raise ConfigError(
            f"data.vocab_size: {data.vocab_size}, but {path} was prepared with a vocabulary of {train.vocab_size}; "
            "remove data.vocab_size, or prepare the data again"
        )
    if isinstance(train, MixedTokens) and isinstance(held_out, MixedTokens):
        digest = hashlib.sha256("".join(source.key for source in train.sources).encode()).hexdigest()
        names = [source.name for source in train.sources]
        shares = ", ".join(f"{name} {weight / sum(weights):.1%}" for name, weight in zip(names, weights, strict=True))
        sources, where = dict(zip(names, held_out.parts, strict=True)), f"{shares} of"
    else:
        digest, sources, where = index.corpus.sha256, {}, str(path)
    return Corpus(
        train,
        held_out,
        facts={"vocab_size": train.vocab_size},
        identity={"tokenizer": index.tokenizer, "corpus": digest},
        path=path,
        sha256=digest,
        sources=sources,
        masks_labels=any(part.index.masks_labels for part in getattr(train, "parts", (train,))),
        description=f"{where} ({train.tokens:,} tokens to train on, {held_out.tokens:,} held out, "
        f"vocabulary {train.vocab_size}, corpus sha256 {digest[:12]}…)",
    )


def router_folder(config: Config, data: Path) -> Path | None:
    """Return the folder of the router that assigns samples to paths, or None without a router."""
    paths = config.sdp.paths
    if paths is None or paths.count == 1 or config.data.sources:
        return None
    return Path(paths.router) if paths.router is not None else data / CLUSTERS


def check_router(folder: Path, state: Mapping[str, Any], checkpoint: Path) -> None:
    """Raise CheckpointError if the checkpoint's paths were trained with another router."""
    saved = state["client_state"].get("router")
    if saved is not None and saved != router_hash(folder):
        raise CheckpointError(
            f"{checkpoint}: the paths were trained with another router than the one in {folder}; name the folder of "
            "the old router in sdp.paths.router"
        )


def dealt(config: Config, corpus: Corpus) -> Corpus:
    """Return ``corpus`` with each sample assigned to a path, if the run has several paths."""
    section, groups = config.sdp.paths, config.sdp.groups
    if section is None or section.count == 1:
        return corpus
    train, held_out = corpus.train, corpus.held_out
    if isinstance(train, MixedTokens) and isinstance(held_out, MixedTokens):
        if len(train.parts) != section.count:
            raise ConfigError(
                f"sdp.paths.count: {section.count}, but data.sources has {len(train.parts)} sources; name one source "
                "for each path, or use data.path with a corpus that was prepared with --clusters"
            )
        if len({source.weight for source in train.sources}) > 1:
            raise ConfigError(
                "data.sources: weights differ, but every path reads the same number of samples; set equal weights"
            )
        of_train, of_held_out = (
            [np.arange(end - len(part), end) for part, end in zip(mixed.parts, mixed.ends, strict=True)]
            for mixed in (train, held_out)
        )
        train.paths = PathSamples(of_train, groups)
        return replace(corpus, paths=PathSamples(of_held_out, groups))
    if not isinstance(train, TokenDataset) or not isinstance(held_out, TokenDataset):
        raise ConfigError("sdp.paths: images cannot be assigned to paths; use tokens, or a script with sdp.initialize")
    folder = router_folder(config, train.directory)
    assert folder is not None
    router = load_router(folder)
    if router.count != section.count:
        raise ConfigError(
            f"sdp.paths.count: {section.count}, but the router in {folder} has {router.count} clusters; make as many "
            "clusters as paths with sdp prepare --clusters, or change the count"
        )
    clusters = {dataset.split: read_clusters(dataset, folder) for dataset in (train, held_out)}
    train.paths, paths = (
        PathSamples([np.flatnonzero(clusters[split] == path) for path in range(section.count)], groups)
        for split in ("train", "held_out")
    )
    identity = {**corpus.identity, "router": router_hash(folder)}
    return replace(corpus, identity=identity, paths=paths, router_prefix=router.prefix)


def _open_images(config: Config, path: Path) -> Corpus:
    data = config.data
    seed = config.training.seed if data.augment is not False else None
    if data.name == "folder":
        size = data.image_size or FOLDER_IMAGE_SIZE
        train, held_out, calibration = (
            ImageFolder(path, split, size, draw)
            for split, draw in (("train", seed), ("held_out", None), ("train", None))
        )
    else:
        train, held_out, calibration = ImageArrays(path, "train"), ImageArrays(path, "held_out"), None
    about = train.about
    return Corpus(
        train,
        held_out,
        facts={"num_classes": about.num_classes, "image_size": about.image_size},
        identity={"images": {"name": about.name, "sha256": about.sha256}},
        path=path,
        sha256=about.sha256,
        description=f"{about.name} ({len(train):,} images to train on, {len(held_out):,} held out, "
        f"{about.num_classes} classes, {about.image_size} × {about.image_size} pixels, sha256 "
        f"{about.sha256[:12]}…)",
        calibration=calibration,
        collate=Batches(about, len(train), seed),
        collate_held_out=Batches(about, len(held_out)),
        measures=("accuracy",),
    )
