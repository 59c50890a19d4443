"""The token shards of a run: those that the configuration names, or the standard library's sources, prepared on first use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, cast

import torch
import torch.distributed as dist

from ..data.index import load_index
from ..data.prepare import prepare
from ..data.shards import TokenDataset
from ..data.tokenizers import request_of
from ..engine.config import Config
from ..engine.errors import ConfigError, SDPError

log = logging.getLogger("sdp")

T = TypeVar("T")

VERIFIED_BYTES = 4_000_000_000  # some 3 s of four cores, or half a minute of a plain disk

_LOOK_SECONDS = 2.0


@dataclass(frozen=True)
class Corpus:
    """Training and held-out split of one prepared corpus."""

    train: TokenDataset
    held_out: TokenDataset

    @property
    def vocab_size(self) -> int:
        return self.train.vocab_size

    def describe(self) -> str:
        index = self.train.index
        return (
            f"{self.train.directory} ({self.train.tokens:,} tokens to train on, {self.held_out.tokens:,} held out, "
            f"vocabulary {self.vocab_size}, corpus sha256 {index.corpus.sha256[:12]}…)"
        )


def open_corpus(config: Config, dump_dir: Path) -> Corpus:
    """Open the data of a run. Collective: rank 0 prepares the default corpus in ``dump_dir/corpus``, and verifies the shards.

    Raises DataError or ConfigError on all ranks where any rank finds something wrong.
    """
    path = Path(config.data.path) if config.data.path is not None else dump_dir / "corpus"
    _on_all_or_none(lambda: _while_rank_0_works(lambda: _make_ready(config, path)))
    return _on_all_or_none(lambda: open_prepared(config, path))


def _while_rank_0_works(action: Callable[[], None]) -> None:
    """Run ``action`` on rank 0 in a thread while all ranks meet every few seconds: no collective waits longer, however long it takes."""
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
    """Prepare the default corpus, and verify what is read."""
    data = config.data
    if data.path is None:
        log.info("data.path is not set: taking the sources of Python's standard library")
        prepare(None, path, tokenizer="sentencepiece" if data.tokenizer is None else data.tokenizer, vocab_size=data.vocab_size)
    _verify(path, data.verify)


def _verify(path: Path, when: Literal["auto", "always", "never"]) -> None:
    index = load_index(path)
    if when == "auto" and index.bytes > VERIFIED_BYTES:
        log.info(
            'data: the %.1f GB in %s are not hashed at each start (data.verify "always" does); to check them now: '
            "sdp prepare --output %s --verify", index.bytes / 1e9, path, path,
        )  # fmt: skip
    elif when != "never":
        index.verify(path)


def _on_all_or_none(action: Callable[[], T]) -> T:
    """What ``action`` returns here; the first rank's error is raised on every rank, so that none waits for another in a collective."""
    result, error = None, None
    try:
        result = action()
    except SDPError as caught:
        error = caught
    if dist.is_initialized():
        errors: list[SDPError | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        error = next((found for found in errors if found is not None), None)
    if error is not None:
        raise error
    return cast(T, result)


def open_prepared(config: Config, path: Path) -> Corpus:
    """Both splits of the data prepared in ``path``. Raises DataError, and ConfigError where ``config`` says otherwise than the data."""
    data = config.data
    corpus = Corpus(
        TokenDataset(path, "train", data.sequence_length),
        TokenDataset(path, "held_out", data.sequence_length),
    )
    prepared_with = request_of(corpus.train.index.tokenizer)
    if data.tokenizer not in (None, prepared_with):
        raise ConfigError(
            f"data.tokenizer: {data.tokenizer}, but {path} was prepared with {prepared_with}; "
            "remove data.tokenizer, or prepare the data anew"
        )
    if data.vocab_size is not None and data.vocab_size != corpus.vocab_size:
        raise ConfigError(
            f"data.vocab_size: {data.vocab_size}, but {path} was prepared with a vocabulary of {corpus.vocab_size}; "
            "remove data.vocab_size, or prepare the data anew"
        )
    return corpus
