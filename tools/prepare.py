"""``sdp prepare``: turn text files into the token shards that training reads."""

from __future__ import annotations

import argparse
import contextlib
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..data.files import INDEX_FILE
from ..data.index import SHARDS, load_index
from ..data.prepare import prepare
from ..data.sources import MAX_DOCUMENT_BYTES
from ..data.tokenizers import DEFAULT_VOCAB_SIZE, load_tokenizer
from ..engine.accounting.quantities import format_bytes
from ..engine.environment.process import cache_folder
from ..engine.errors import DataError, escape
from ..engine.object_store import Store, fetch, is_url, local_copy, upload
from ..launcher.signals import handled

# The options that sdp.data.prepare.prepare takes under the same names.
_SETTINGS = (
    "tokenizer", "vocab_size", "bos", "separator", "text_column", "held_out", "workers", "seed", "overwrite",
    "max_document_bytes",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input",
        nargs="+",
        action="extend",
        metavar="GLOB",
        help="files or folders to read: .txt, .md, .py (one document per file), .jsonl, .ndjson, .json (one document "
        "per line; also .gz, .zst), .csv, .parquet, .arrow (default: the standard library of this Python)",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="the directory for shards and tokenizer")
    parser.add_argument(
        "--tokenizer",
        default="sentencepiece",
        metavar="NAME",
        help="sentencepiece (trained on the input), bytes or hf:NAME",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="V",
        help=f"number of tokens of a trained tokenizer (default: {DEFAULT_VOCAB_SIZE})",
    )
    parser.add_argument(
        "--bos", action="store_true", help="put the beginning-of-sequence token of hf:NAME before each text"
    )
    parser.add_argument(
        "--separator", metavar="TOKEN", help="the token of hf:NAME that ends a document (default: end of sequence)"
    )
    parser.add_argument(
        "--text-column",
        default="text",
        metavar="C",
        help="the column with the text in .jsonl, .csv, .parquet and .arrow",
    )
    parser.add_argument(
        "--held-out", type=float, default=0.05, metavar="X", help="fraction of the documents for evaluations"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="number of processes (default: one per core)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed for the choice of the documents that the tokenizer is trained on"
    )
    parser.add_argument(
        "--max-document-bytes",
        type=int,
        default=MAX_DOCUMENT_BYTES,
        metavar="N",
        help="refuse a larger document: a text file, a line of .jsonl, a text of .parquet (default: 1 GiB)",
    )
    parser.add_argument(
        "--clusters",
        type=int,
        metavar="K",
        help="train a router that assigns each sequence to one of K clusters, one for each of sdp.paths; without "
        "--input, use the data in the output directory",
    )
    parser.add_argument(
        "--router-prefix", type=int, default=128, metavar="N", help="the router reads the first N tokens of a sequence"
    )
    parser.add_argument(
        "--sequence-length", type=int, metavar="N", help="with --clusters: the data.sequence_length of the training"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace other data in the output directory")
    parser.add_argument(
        "--verify", action="store_true", help="only check the shards in the output directory against their hashes"
    )


def run(args: argparse.Namespace) -> int:
    """Prepare or verify the data, and print a summary. Raises DataError."""
    if args.verify:
        _verify(args.output)
        return 0
    if args.clusters is not None and args.sequence_length is None:
        raise DataError("--clusters: also give --sequence-length, the data.sequence_length of the training")
    if args.clusters is not None and args.sequence_length is not None:
        from ..data.clusters import check_request  # imports torch

        check_request(args.clusters, args.router_prefix, args.sequence_length)
    with handled((signal.SIGTERM,), _stop), _on_this_host(args) as (inputs, output):
        if args.clusters is None or args.input or not (output / INDEX_FILE).exists():
            index = prepare(inputs, output, names=args.input, **{name: getattr(args, name) for name in _SETTINGS})
            _print_summary(index, args.output)
        if args.clusters is not None and args.sequence_length is not None:
            from ..data.clusters import make_clusters  # imports torch, which the reading processes do not need

            found = make_clusters(output, args.clusters, args.router_prefix, args.sequence_length, args.seed)
            _print_clusters(found, args.clusters)
    return 0


@contextlib.contextmanager
def _on_this_host(args: argparse.Namespace) -> Iterator[tuple[list[str] | None, Path]]:
    """Copy inputs that are in object stores to this host, and the output to its object store."""
    urls = [path for path in args.input or () if is_url(path)]
    inputs = None if args.input is None else [path for path in args.input if path not in urls]
    if urls:
        cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="input-", dir=cache_folder() if urls else None) as made:
        copies = [f"{made}/{number:04d}" for number in range(len(urls))]
        places = {copy: Store(url).get_all(Path(copy)) for copy, url in zip(copies, urls, strict=True)}
        inputs = [*(inputs or ()), made] if urls else inputs
        if not is_url(args.output):
            with _named(places):
                yield inputs, Path(args.output)
            return
        output = fetch(args.output, INDEX_FILE) or local_copy(args.output)
        before = Store(args.output).read(INDEX_FILE)
        with _named({**places, str(output): args.output}):
            yield inputs, output
        if args.clusters is not None or (output / INDEX_FILE).read_bytes() != before:
            upload(output, args.output, INDEX_FILE, SHARDS)


@contextlib.contextmanager
def _named(places: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the places in object stores instead of their copies."""
    try:
        yield
    except DataError as error:
        text = str(error)
        for copy, place in places.items():
            text = text.replace(copy, place)
        raise DataError(text) from None


def _print_clusters(found: dict[str, Any], count: int) -> None:
    print("cluster       train  held out  nats a token  typical tokens")
    rows = zip(*found["sizes"].values(), found["losses"], found["tokens"], strict=True)
    for number, (train, held_out, loss, tokens) in enumerate(rows):
        shown = escape(" ".join(map(repr, tokens)))
        print(f"{number:<7} {train:>11,} {held_out:>9,} {loss:>13.3f}  {shown}")
    gain = found["loss_of_one"] - found["loss"]
    print(
        f"router     {count} models: {found['loss']:.3f} nats a token of held-out prefixes, {abs(gain):.3f} "
        f"{'less' if gain >= 0 else 'more'} than one model for all"
    )


def _stop(number: int, _: Any) -> NoReturn:
    """End with an exception after a signal, so that workers end and no file is left."""
    raise SystemExit(128 + number)


def _verify(output: str) -> None:
    if not is_url(output):
        _verify_folder(Path(output), output)
        return
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=cache_folder()) as made:  # not the copy in the cache
        folder = Path(made) / "data"
        fetch(output, INDEX_FILE, folder)
        with _named({str(folder): output}):
            _verify_folder(folder, output)


def _verify_folder(folder: Path, output: str) -> None:
    index = load_index(folder)
    index.verify(folder)
    tokenizer = load_tokenizer(folder)
    if (tokenizer.vocab_size, tokenizer.end_of_text) != (index.vocab_size, index.end_of_text):
        raise DataError(f"{output}: the vocabulary in the index is not that of its tokenizer; prepare the data again")
    print(f"{output}: every shard and the tokenizer are sound")
    _print_summary(index.model_dump(), output)


def _print_summary(index: dict[str, Any], output: str) -> None:
    corpus, splits = index["corpus"], index["splits"]
    tokens = sum(split["tokens"] for split in splits.values())
    shards = sum(len(split["shards"]) for split in splits.values())
    print(f"corpus     {corpus['documents']:,} documents, {format_bytes(corpus['text_bytes'], 'MB', 1)} of text")
    print(f"           sha256 {escape(corpus['sha256'])}")
    print(f"tokenizer  {escape(str(index['tokenizer']['kind']))}, {index['vocab_size']:,} tokens")
    each = "some labels do not count" if index["masks_labels"] else f"{corpus['text_bytes'] / tokens:.2f} bytes each"
    print(f"tokens     {tokens:,} ({each}) in {shards} shard(s)")
    for name, split in splits.items():
        print(f"  {escape(name):<8} {split['tokens']:,} tokens of {split['documents']:,} documents")
    print(f"output     {escape(output)}")
