"""The command line ``sdp``: parses arguments, runs the chosen command, and turns errors into exit
codes.

Exit codes:

- 0: the command is done.
- 1: the program failed.
- 2: the user made a mistake. The message is one line, without a traceback.
- 130: the command was interrupted.
- 141: the program that reads the output has ended, as in ``sdp plan … | head``.

A command is imported only when it is used, so that ``sdp --help``, ``sdp config`` and ``sdp
launch`` do not import torch. ``sdp train`` checks its arguments before it imports torch, unless it
must count devices.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import importlib
import logging
import os
import platform
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, NoReturn

from ..engine.config.removed import refuse_removed_words
from ..engine.environment.detect import Supervision, supervision
from ..engine.environment.process import leaves_at_once
from ..engine.errors import NO_ROOM, PeerLostError, SDPError, format_error, shorten
from ..launcher.fatal_errors import report_fatal, tie_to_parent
from .shared.arguments import Parser, split_set_values


def entry() -> NoReturn:
    """Run the command line of this process as the program ``sdp``, and end the process."""
    code: int | None = None

    def leave() -> None:
        if code is not None and "torch.distributed" in sys.modules:
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):  # it is gone, or was closed
                    stream.flush()
            os._exit(code)

    leaves_at_once()
    atexit.register(leave)  # registered first, so called last
    code = main()
    _discard_messages_that_nobody_reads()
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``sdp`` with the words ``argv`` (default: ``sys.argv[1:]``), and return the exit code."""
    above = supervision()  # the launcher of this package that started this process
    if above is not None:
        tie_to_parent(above.parent_pid)
    try:
        words, code = list(sys.argv[1:] if argv is None else argv), 0
        if words == ["--version"]:
            print(_versions())
        else:
            args = _parse(words, above)
            _refuse_long_names([*vars(args).get("runs", ()), *(vars(args).get(name, "") for name in ("run", "output"))])
            code = module_of(args.command).run(args)
        # Not at the exit of the interpreter, so that the handler below sees if the reader has left.
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except SDPError as error:
        report_fatal(
            "sdp: error: " + format_error(error), error.exit_code, above, follows=isinstance(error, PeerLostError)
        )
        return error.exit_code
    except BrokenPipeError:
        if above is None and _reader_left():
            return 128 + signal.SIGPIPE  # the code that a shell reports for SIGPIPE
        report_fatal(traceback.format_exc().rstrip(), 1, above)
        return 1
    except OSError as error:
        if above is None and error.filename is None and error.errno in NO_ROOM and _output_fails():
            report_fatal(f"sdp: error: standard output cannot be written ({error.strerror})", 2, above)
            return 2
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP) and error.filename is not None:
            report_fatal(f"sdp: error: {shorten(error.filename)}: {error.strerror}; give another path", 2, above)
            return 2
        report_fatal(traceback.format_exc().rstrip(), 1, above)
        return 1
    except Exception:
        report_fatal(traceback.format_exc().rstrip(), 1, above)
        return 1


def _refuse_long_names(paths: Sequence[str | Path]) -> None:
    """Raise OSError if a name is too long. From Python 3.14 on, pathlib says that it is missing."""
    for path in paths:
        try:
            os.lstat(path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise
        except ValueError:  # a NUL; the command refuses it
            pass


def _reader_left() -> bool:
    """Check whether the reader of standard output has ended, as in ``sdp plan … | head``.

    If so, the rest of the output is discarded.
    """
    output = select.poll()
    try:
        output.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # the caller replaced standard output by something else
        return False
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in output.poll(0)):
        return False
    _discard_output()
    return True


def _discard_messages_that_nobody_reads() -> None:
    """Flush standard error. If it is gone, discard the rest, which would change the exit code."""
    if (messages := sys.stderr) is None:
        return
    try:
        messages.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), messages.fileno())


def _output_fails() -> bool:
    """Check whether standard output cannot be written, as in ``sdp plan … > file`` on a full disk.

    If so, the rest of the output is discarded.
    """
    try:
        sys.stdout.flush()
        # Unbuffered output leaves nothing to flush, so this write tests it. If the write works, a
        # traceback follows.
        os.write(sys.stdout.fileno(), b"\n")
    except ValueError:  # the caller replaced standard output by something else
        return False
    except OSError:
        _discard_output()
        return True
    return False


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parse(argv: list[str], above: Supervision | None) -> argparse.Namespace:
    refuse_removed_words(argv)
    parser = Parser(
        prog="sdp", description="Subnetwork Data Parallelism: every group of devices trains a part of the network."
    )
    parser.add_argument("--version", action="store_true", help="print the versions of this package, Python and torch")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, (_, text) in COMMANDS.items():
        subparser = commands.add_parser(name, help=text, description=text)
        if name == chosen:
            module_of(name).add_arguments(subparser)
    return parser.parse_args(split_set_values(argv), argparse.Namespace(argv=argv, above=above))


def _versions() -> str:
    # The version in the checkout's setup.cfg, because another release may be installed as well.
    metadata = ConfigParser()
    metadata.read(Path(__file__).absolute().parent.parent / "setup.cfg", encoding="utf-8")
    version = metadata.get("metadata", "version", fallback="") or _version_of("sdp-engine")
    return f"sdp {version}, Python {platform.python_version()}, torch {_version_of('torch')}"


def _version_of(distribution: str) -> str:
    try:
        return installed_version(distribution)
    except PackageNotFoundError:
        return "not installed"


def module_of(command: str) -> Any:
    """Import and return the module of a command. It has functions ``add_arguments`` and ``run``."""
    return importlib.import_module(f".{COMMANDS[command][0]}", __package__)


# The module of each command, and its help.
COMMANDS = {
    "train": ("train.command", "train a model from one JSON file"),
    "serve": ("serve", "run the service that keeps the averaged weights of a run whose groups come and go"),
    "launch": ("launch", "start sdp train on this host or a cluster: local, deepspeed, mpirun, slurm"),
    "prepare": ("prepare", "turn text into token shards"),
    "config": ("config", "print a configuration with all defaults, or the JSON schema"),
    "plan": ("plan.command", "predict memory, computation, traffic and time of a run before it starts"),
    "bench": ("bench.command", "measure ways to train a model side by side, or one rank's share on one device"),
    "evaluate": ("evaluate", "compute the held-out loss of a checkpoint's full model"),
    "generate": ("generate", "continue a text with a checkpoint's full model"),
    "export": ("export", "write a checkpoint's full model and tokenizer for transformers"),
    "report": ("report.render", "summarise and compare finished runs"),
}


if __name__ == "__main__":
    entry()
