"""``sdp prepare``: text files → token shards that training reads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..data.index import load_index
from ..data.prepare import prepare
from ..data.sources import MAX_DOCUMENT_BYTES
from ..data.tokenizers import DEFAULT_VOCAB_SIZE, load_tokenizer
from ..engine.errors import DataError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--input",
        nargs="+",
        action="extend",
        metavar="GLOB",
        help="files to read: .txt (one document a file), .jsonl, .jsonl.gz, .jsonl.zst, .parquet"
        " (default: the standard library of this Python)",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="the directory for shards and tokenizer")
    parser.add_argument(
        "--tokenizer", default="sentencepiece", metavar="NAME", help="sentencepiece (trained here), bytes or hf:NAME"
    )
    parser.add_argument(
        "--vocab-size", type=int, metavar="V", help=f"tokens of a trained tokenizer (default: {DEFAULT_VOCAB_SIZE})"
    )
    parser.add_argument("--text-column", default="text", metavar="C", help="the column of .jsonl and .parquet")
    parser.add_argument(
        "--held-out", type=float, default=0.05, metavar="X", help="fraction of the documents for evaluation"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one a core)")
    parser.add_argument("--seed", type=int, default=0, help="picks the documents that the tokenizer is trained on")
    parser.add_argument(
        "--max-document-bytes",
        type=int,
        default=MAX_DOCUMENT_BYTES,
        metavar="N",
        help="refuse a larger document: a .txt file, a line of .jsonl, a text of .parquet (default: 1 GiB)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace other data in the output directory")
    parser.add_argument(
        "--verify", action="store_true", help="only check the shards in the output directory against their hashes"
    )


def run(args: argparse.Namespace) -> int:
    """Prepare (or verify) the data and print a summary; raises DataError for what the user must mend."""
    if args.verify:
        index = load_index(args.output)
        index.verify(Path(args.output))
        tokenizer = load_tokenizer(args.output)
        if (tokenizer.vocab_size, tokenizer.end_of_text) != (index.vocab_size, index.end_of_text):
            raise DataError(
                f"{args.output}: the vocabulary in the index is not that of its tokenizer; prepare the data again"
            )
        print(f"{args.output}: every shard and the tokenizer are sound")
        _print_summary(index.model_dump(), args.output)
        return 0
    index = prepare(
        args.input,
        args.output,
        tokenizer=args.tokenizer,
        vocab_size=args.vocab_size,
        text_column=args.text_column,
        held_out=args.held_out,
        workers=args.workers,
        seed=args.seed,
        overwrite=args.overwrite,
        max_document_bytes=args.max_document_bytes,
    )
    _print_summary(index, args.output)
    return 0


def _print_summary(index: dict[str, Any], output: str) -> None:
    corpus, splits = index["corpus"], index["splits"]
    tokens = sum(split["tokens"] for split in splits.values())
    shards = sum(len(split["shards"]) for split in splits.values())
    print(f"corpus     {corpus['documents']:,} documents, {corpus['text_bytes'] / 1e6:,.1f} MB of text")
    print(f"           sha256 {corpus['sha256']}")
    print(f"tokenizer  {index['tokenizer']['kind']}, {index['vocab_size']:,} tokens")
    print(f"tokens     {tokens:,} ({corpus['text_bytes'] / tokens:.2f} bytes each) in {shards} shard(s)")
    for name, split in splits.items():
        print(f"  {name:<8} {split['tokens']:,} tokens of {split['documents']:,} documents")
    print(f"output     {output}")
