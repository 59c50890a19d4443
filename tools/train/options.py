"""The arguments of ``sdp train``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...engine.environment.detect import Supervision
from ...engine.object_store import is_url, local_copy
from ..shared.arguments import Parser, add_config_arguments, positive_int

RESTARTS_HELP = "start again from the newest checkpoint after the loss of a rank or host, N times at most (default: 0)"


@dataclass(frozen=True)
class TrainOptions:
    """The arguments of ``sdp train``.

    Attributes:
        config: the run's JSON file.
        overrides: everything that changes ``config``, in the form of ``--set``.
        dump_dir: where the run's files go.
        url: the copy of these files in an object store, or None.
        resume: continue from the newest checkpoint.
        fsdp: ranks that share a group's state, None for all that are left.
        nproc: processes to start, None to count them from the configuration.
        restarts: how often a run that loses a rank starts again.
        profile: the steps to profile, as text, or None.
        check: take a few steps that are compared with plain torch, and train nothing.
        service: HOST:PORT of the service that keeps the anchors, or None.
        token_file: the file with the token of the service, or None.
        tls_ca: the file with the certificates to trust, or None for no encryption.
        argv: the words of the command line, for the processes that this one starts.
        above: the launcher of this package that started this process, or None.
    """

    config: Path
    overrides: tuple[str, ...]
    dump_dir: Path
    url: str | None = None
    resume: bool = False
    fsdp: int | None = None
    nproc: int | None = None
    restarts: int = 0
    profile: str | None = None
    check: bool = False
    service: str | None = None
    token_file: Path | None = None
    tls_ca: Path | None = None
    argv: tuple[str, ...] = ()
    above: Supervision | None = None

    @property
    def checkpoints(self) -> str | Path:
        """The directory of the checkpoints, or its URL."""
        return self.dump_dir / "checkpoints" if self.url is None else f"{self.url}/checkpoints"

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> TrainOptions:
        """Make the options from the parsed arguments ``args``."""
        overrides = [*args.set]
        overrides += [f"sdp.groups={args.groups}"] if args.groups else []
        overrides += [f"tensor_parallel.autotp_size={args.tp}"] if args.tp else []
        overrides += [f"training.init_from={json.dumps(str(args.init_from))}"] if args.init_from else []
        dump_dir, url = Path(args.dump_dir or Path("runs") / args.config.stem), None
        if args.dump_dir is not None and is_url(args.dump_dir):
            url = args.dump_dir.rstrip("/")
            dump_dir = local_copy(f"runs/{url}")
        return cls(
            config=args.config,
            overrides=tuple(overrides),
            dump_dir=dump_dir,
            url=url,
            resume=args.resume,
            fsdp=args.fsdp,
            nproc=args.nproc,
            restarts=args.restarts,
            profile=args.profile,
            check=args.check,
            service=args.service,
            token_file=args.token_file,
            tls_ca=args.tls_ca,
            argv=tuple(args.argv),
            above=args.above,
        )

    @classmethod
    def parse(cls, words: Sequence[str]) -> TrainOptions:
        """Parse the ``words`` that follow ``sdp train``. Raises ConfigError."""
        parser = Parser(prog="sdp train")
        add_arguments(parser)
        return cls.from_args(parser.parse_args(words, argparse.Namespace(argv=["train", *words], above=None)))


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
