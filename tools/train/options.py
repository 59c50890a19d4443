"""The arguments of ``sdp train``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ...engine.object_store import is_url, local_copy
from ..shared.arguments import Parser, add_config_arguments, positive_int

RESTARTS_HELP = "start again from the newest checkpoint after the loss of a rank or host, N times at most (default: 0)"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse and :func:`complete` the ``words`` that follow ``sdp train``. Raises ConfigError."""
    parser = Parser(prog="sdp train")
    add_arguments(parser)
    return complete(parser.parse_args(words, argparse.Namespace(argv=["train", *words], above=None)))


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Put everything that changes the configuration into ``args.set``, and set the places of the
    run's files.

    ``dump_dir`` is the folder on this host, ``url`` its copy in an object store or None, and
    ``checkpoints`` the folder of the checkpoints or its URL.
    """
    args.set += [f"sdp.groups={args.groups}"] if args.groups else []
    args.set += [f"tensor_parallel.autotp_size={args.tp}"] if args.tp else []
    args.set += [f"training.init_from={json.dumps(str(args.init_from))}"] if args.init_from else []
    args.url = args.dump_dir.rstrip("/") if args.dump_dir is not None and is_url(args.dump_dir) else None
    folder = Path(args.dump_dir or Path("runs") / args.config.stem)
    args.dump_dir = folder if args.url is None else local_copy(f"runs/{args.url}")
    args.checkpoints = args.dump_dir / "checkpoints" if args.url is None else f"{args.url}/checkpoints"
    return args


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(parser, "the run's JSON file")
    parser.add_argument("--groups", metavar="N", type=positive_int, help="SDP groups (sdp.groups)")
    parser.add_argument(
        "--fsdp", metavar="F", type=positive_int, help="ranks that share a group's state (default: all that are left)"
    )
    parser.add_argument(
        "--tp", metavar="T", type=positive_int, help="tensor-parallel degree (tensor_parallel.autotp_size)"
    )
    parser.add_argument(
        "--nproc", metavar="P", type=positive_int, help="processes to start here, if no launcher started any"
    )
    parser.add_argument(
        "--dump-dir", metavar="DIR", help="where the run's files go, also s3://… (default: runs/NAME of CONFIG)"
    )
    parser.add_argument(
        "--init-from",
        metavar="DIR",
        type=Path,
        help="start from the Hugging Face model in DIR (training.init_from)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in the dump directory"
    )
    parser.add_argument("--restarts", metavar="N", type=positive_int, default=0, help=RESTARTS_HELP)
    parser.add_argument(
        "--profile",
        metavar="STEPS",
        nargs="?",
        const="3-5",
        help="record these steps of rank 0 in DIR/profile (default: 3-5)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="train nothing: take 3 steps that are compared with plain torch, and 3 in which holders are compared",
    )
    parser.add_argument(
        "--service",
        metavar="HOST:PORT",
        help="be one group of the run whose anchors this service keeps (sdp serve)",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", type=Path, help="the secret of the service (default: SDP_SERVICE_TOKEN)"
    )
    parser.add_argument("--tls-ca", metavar="FILE", type=Path, help="encrypt, and trust the certificates in FILE")
