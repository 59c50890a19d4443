"""The token shards of a run: those that the configuration names, or the standard library's sources, prepared on first use."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ..data.prepare import prepare
from ..data.shards import TokenDataset
from ..engine.config import Config
from ..engine.errors import ConfigError

log = logging.getLogger("sdp")


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
    """Open the data of a run. Collective: rank 0 prepares the default corpus in ``dump_dir/corpus`` while the others wait."""
    data = config.data
    if data.path is not None:
        return open_prepared(config, Path(data.path))
    path = dump_dir / "corpus"
    if not dist.is_initialized() or dist.get_rank() == 0:
        log.info("data.path is not set: taking the sources of Python's standard library")
        prepare(None, path, tokenizer=data.tokenizer, vocab_size=data.vocab_size)
    if dist.is_initialized():
        dist.barrier()
    return open_prepared(config, path)


def open_prepared(config: Config, path: Path) -> Corpus:
    """Both splits of the data prepared in ``path``. Raises DataError, and ConfigError where ``config`` says otherwise than the data."""
    data = config.data
    corpus = Corpus(
        TokenDataset(path, "train", data.sequence_length),
        TokenDataset(path, "held_out", data.sequence_length),
    )
    if data.vocab_size is not None and data.vocab_size != corpus.vocab_size:
        raise ConfigError(
            f"data.vocab_size: {data.vocab_size}, but {path} was prepared with a vocabulary of {corpus.vocab_size}; "
            "remove data.vocab_size, or prepare the data anew"
        )
    return corpus
