"""The section ``data`` of the configuration: what a run reads."""

from __future__ import annotations

import json
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .section import NonNegativeInt, PathText, Pixels, Section, Tokens, Width


class SourceSection(Section):
    """One source of a mixture: token shards, and their share of the samples relative to other
    weights.
    """

    path: PathText
    weight: Annotated[float, Field(ge=0, le=1e9)]  # the sum of all weights must be finite


class DataSection(Section):
    """The data to train on: token shards, or images if ``name`` is given.

    ``sources``: several directories of token shards, in place of ``path``, which are mixed by
    weight.
    ``path``: the token shards. Without it, the sources of Python's standard library are prepared.
    ``document_mask``: attention does not cross the borders of documents in a sample.
    ``tokenizer`` (None: sentencepiece) and ``vocab_size`` say how. Shards at ``path`` must have
    been prepared with the same values. ``verify``: hash the shards at the start of a run. "auto"
    skips this if the shards are so large that hashing takes minutes.
    ``name``: "digits" comes with scikit-learn. "cifar10" and "cifar100" are read from their binary
    archive at ``path``. "folder" has one directory of images per class in ``path``, and reads
    squares of ``image_size`` pixels (224). ``augment``: crop and mirror the images at random.
    """

    name: Literal["digits", "cifar10", "cifar100", "folder"] | None = None
    path: PathText | None = None
    sources: Annotated[list[SourceSection], Field(min_length=1, max_length=1000)] | None = None
    sequence_length: Tokens = 512
    document_mask: bool = False
    tokenizer: PathText | None = None
    vocab_size: Width | None = None
    num_workers: NonNegativeInt = 0
    verify: Literal["auto", "always", "never"] = "auto"
    image_size: Pixels | None = None
    augment: bool | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        of_tokens, of_images = (
            (
                "sources",
                "sequence_length",
                "document_mask",
                "tokenizer",
                "vocab_size",
                "verify",
            ),
            ("image_size", "augment"),
        )
        for key in of_images if self.name is None else of_tokens:
            # Compare with the default, because a run's own configuration file sets every key.
            if getattr(self, key) != type(self).model_fields[key].default:
                whose = (
                    "images (data.name)" if self.name is None else f"tokens, and data.name is {json.dumps(self.name)}"
                )
                raise ValueError(f"{key} is for {whose}; remove it")
        if self.sources is not None and self.path is not None:
            raise ValueError("path and sources are both given; remove path, or name it as one of the sources")
        if self.sources is not None and not any(source.weight for source in self.sources):
            raise ValueError("sources: every weight is 0; give at least one source a larger weight")
        if self.name == "digits" and self.path is not None:
            raise ValueError(
                'path has no meaning for "digits", which scikit-learn brings; remove it, or name another set'
            )
        if self.name not in (None, "digits") and self.path is None:
            raise ValueError(f"path is required for {json.dumps(self.name)}: {_WHERE[self.name]}")
        if self.name != "folder" and self.image_size is not None:
            raise ValueError(
                f'image_size is for "folder"; the images of {json.dumps(self.name)} have a size of their own, remove it'
            )
        return self

    @property
    def takes_default_corpus(self) -> bool:
        """Whether the run prepares the default corpus, because nothing is named."""
        return self.name is None and self.path is None and self.sources is None

    @property
    def tokens_per_sample(self) -> int:
        """The number of tokens in one sample. An image counts as one token."""
        return 1 if self.name is not None else self.sequence_length


_WHERE = {
    "cifar10": "cifar-10-binary.tar.gz, or the directory that it was unpacked to",
    "cifar100": "cifar-100-binary.tar.gz, or the directory that it was unpacked to",
    "folder": "the directory with train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg",
}
