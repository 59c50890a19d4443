"""The command line ``sdp``: parses arguments, starts processes where none were started, turns errors into exit codes.

Exit codes: 0 done, 2 the user's mistake (one line, no traceback), 1 a failure of the program, 130 interrupted, 141 nobody reads the output
any more. Commands are imported only when they are used: ``sdp --help``, ``sdp config`` and ``sdp launch`` do not import torch, nor does
``sdp train`` that refuses its arguments, unless it must count devices.
"""

from __future__ import annotations

import argparse
import atexit
import errno
import importlib
import json
import logging
import os
import platform
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from configparser import ConfigParser
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..engine.environment.detect import Supervision, detect, export, supervision
from ..engine.environment.exit import leaves_at_once
from ..engine.errors import ConfigError, PeerLostError, SDPError
from ..tools.shared.arguments import _add_config_arguments, _one_value_per_set, _Parser, _positive
from .supervision import report_fatal, tie_to_parent

if TYPE_CHECKING:
    from ..engine.config.schema import Config

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
STOP_SECONDS = 300.0  # from a signal to the command until its ranks are killed: the step at hand, and a checkpoint


@dataclass(frozen=True)
class _Command:
    """A sub-command: its own arguments and what runs it."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def entry() -> NoReturn:
    """The process ``sdp``: run its command line, and end it."""
    code: int | None = None

    def leave() -> None:
        if code is not None and "torch.distributed" in sys.modules:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    leaves_at_once()
    atexit.register(leave)  # the first registered, so the last called
    code = main()
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: this process's) and return its exit code."""
    above = supervision()  # the launcher of ours that started this process
    if above is not None:
        tie_to_parent(above.parent_pid)
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv), above)
        sys.stdout.flush()  # here, where a reader that left is noticed, not while the interpreter ends
        return code
    except KeyboardInterrupt:
        return 130
    except SDPError as error:
        report_fatal("sdp: error: " + " ".join(str(error).split()), error.exit_code, above, follows=isinstance(error, PeerLostError))
        return error.exit_code
    except BrokenPipeError:
        if above is None and _reader_left():
            return 128 + signal.SIGPIPE  # as a shell reports programs that the signal ends
        report_fatal(traceback.format_exc().rstrip(), 1, above)
        return 1
    except OSError as error:
        if above is None and error.filename is None and error.errno in _NO_ROOM and _output_fails():
            report_fatal(f"sdp: error: standard output cannot be written ({error.strerror})", 2, above)
            return 2
        report_fatal(traceback.format_exc().rstrip(), 1, above)
        return 1
    except Exception:
        report_fatal(traceback.format_exc().rstrip(), 1, above)
        return 1


def _reader_left() -> bool:
    """Whether nobody reads standard output any more (``sdp plan … | head``); what is left of it then goes nowhere."""
    output = select.poll()
    try:
        output.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # it is no file, but an object of whoever called
        return False
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in output.poll(0)):
        return False
    _discard_output()
    return True


def _output_fails() -> bool:
    """Whether what is still to be written to standard output cannot be (``sdp plan … > plan.txt`` on a full disk); it goes nowhere then."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")  # unbuffered, nothing is left to flush; where this works a traceback follows
    except ValueError:  # it is no file, but an object of whoever called
        return False
    except OSError:
        _discard_output()
        return True
    return False


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str], above: Supervision | None) -> int:
    parser = _Parser(prog="sdp", description="Subnetwork Data Parallelism: pre-train with a part of the network per device group.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, command in _COMMANDS.items():
        own = commands.add_parser(name, help=command.help, description=command.help)
        if name == chosen:
            command.add_arguments(own)
    args = parser.parse_args(_one_value_per_set(argv))
    args.argv, args.above = argv, above
    return _COMMANDS[args.command].run(args)


def _add_train_arguments(parser: argparse.ArgumentParser) -> None:
    _add_config_arguments(parser, "the run's JSON file")
    parser.add_argument("--groups", metavar="N", type=_positive, help="SDP groups (sdp.groups)")
    parser.add_argument("--fsdp", metavar="F", type=_positive, help="ranks that share a group's state (default: what is left)")
    parser.add_argument("--tp", metavar="T", type=_positive, help="tensor-parallel degree (tensor_parallel.autotp_size)")
    parser.add_argument("--nproc", metavar="P", type=_positive, help="processes to start here where no launcher did")
    parser.add_argument("--dump-dir", metavar="DIR", type=Path, help="where the run's files go (default: runs/NAME of CONFIG)")
    parser.add_argument(
        "--init-from",
        metavar="DIR",
        type=Path,
        help="start from the Hugging Face LLaMA or DeepSpeed checkpoint in DIR (training.init_from)",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in the dump directory")
    parser.add_argument(
        "--profile", metavar="STEPS", nargs="?", const="3-5", help="record these steps of rank 0 in DIR/profile (default: 3-5)"
    )


def _train(args: argparse.Namespace) -> int:
    """Train in this process where a launcher started it, or where one process is enough; else start the processes.

    Adds to ``args``, for ``tools.train``: ``overrides``, all that changes CONFIG in the form of ``--set``, ``on_stall`` and ``guarded``.
    """
    from ..engine.config.load import load_config
    from .degrees import Degrees, visible_devices

    _complete_train_arguments(args)
    config = load_config(args.config, args.overrides)
    export({name: str(value) for name, value in config.env.items()})  # before torch is imported, and for the processes started here
    degrees = Degrees(config, args.fsdp)
    args.on_stall, args.guarded = partial(_end_stalled, args.above), args.above is None
    place = detect()
    if place is not None:
        if args.nproc not in (None, place.world_size):
            raise ConfigError(f"--nproc {args.nproc}: {place.source} started {place.world_size} processes; leave it out")
        degrees.check(place.world_size, place.source)
        from ..tools.train import run

        return run(args)
    devices = visible_devices()
    processes = degrees.processes(args.nproc, devices)
    if processes > 1:
        from .local import start_local

        _check_files(config, args)
        return start_local(args.argv, processes, args.dump_dir / "logs", on_cpu=devices == 0, stop_seconds=STOP_SECONDS)
    from .local import become_single

    become_single(on_cpu=devices == 0)
    from ..tools.train import run

    return run(args)


def _check_files(config: Config, args: argparse.Namespace) -> None:
    """Find here, once, what every rank would find only after it has imported torch: another run in the dump directory, no data."""
    from ..tools.runs.run_files import require_no_other_run

    require_no_other_run(args.dump_dir, resume=args.resume)
    if config.data.name is None and config.data.path is not None:
        from ..data.index import load_index

        load_index(config.data.path)


def _complete_train_arguments(args: argparse.Namespace) -> None:
    args.overrides = [*args.set]
    args.overrides += [f"sdp.groups={args.groups}"] if args.groups else []
    args.overrides += [f"tensor_parallel.autotp_size={args.tp}"] if args.tp else []
    args.overrides += [f"training.init_from={json.dumps(str(args.init_from))}"] if args.init_from else []
    args.dump_dir = args.dump_dir or Path("runs") / args.config.stem


def _launch(args: argparse.Namespace) -> int:
    """Find the mistakes in the words for ``sdp train`` here, once, and start it on every rank."""
    from ..engine.config.load import load_config
    from .cluster.launch import check, run
    from .cluster.slurm import status
    from .degrees import Degrees

    check(args)
    if args.status is not None:
        print(status(args.status))
        return 0
    parser = _Parser(prog="sdp train")
    _add_train_arguments(parser)
    words = [*args.words, *(word for setting in args.env for word in ("--set", _env_override(setting)))]
    train = parser.parse_args(words)
    if train.nproc is not None:
        raise ConfigError("--nproc: sdp launch counts the processes itself; give --gpus-per-node before CONFIG")
    _complete_train_arguments(train)
    config = load_config(train.config, train.overrides)
    if args.launcher in ("local", "slurm"):  # rank 0 has the dump directory of this host; a job would find so after its time in the queue
        from ..tools.runs.run_files import require_no_other_run

        require_no_other_run(train.dump_dir, resume=train.resume)
    return run(args, ["train", *words], train.dump_dir, Degrees(config, train.fsdp))


def _env_override(setting: str) -> str:
    name, equals, value = setting.partition("=")
    if not equals:
        raise ConfigError(f"--env {setting}: expected NAME=VALUE")
    return f"env.{name}={json.dumps(value)}"


def _end_stalled(above: Supervision | None, text: str) -> None:
    """End this process from whatever thread finds that it makes no progress; its main thread may never return."""
    report_fatal(f"sdp: error: {text}", 1, above, stalled=True)
    os._exit(1)


def _add_show_config_arguments(parser: argparse.ArgumentParser) -> None:
    _add_config_arguments(parser, "the JSON file to resolve", nargs="?")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of all keys instead")


def _show_config(args: argparse.Namespace) -> int:
    from ..engine.config.load import json_schema, load_config

    if args.schema == (args.config is not None):
        raise ConfigError("give either a CONFIG to resolve or --schema; see sdp config --help")
    shown = json_schema() if args.schema else load_config(args.config, args.set).resolved()
    print(json.dumps(shown, indent=2, ensure_ascii=False))
    return 0


def _show_version(_: argparse.Namespace) -> int:
    print(f"sdp {_own_version()}, Python {platform.python_version()}, torch {_version_of('torch')}")
    return 0


def _own_version() -> str:
    """A checkout's setup.cfg goes first: another release may be installed beside it."""
    metadata = ConfigParser()
    metadata.read(Path(__file__).absolute().parent.parent / "setup.cfg", encoding="utf-8")
    return metadata.get("metadata", "version", fallback="") or _version_of("sdp-engine")


def _version_of(distribution: str) -> str:
    try:
        return installed_version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _tool(name: str) -> Any:
    return importlib.import_module(f"..tools.{name}", __package__)


def _tool_command(name: str, help_text: str) -> _Command:
    """A command whose arguments stand in its own module, imported when it is used."""
    return _Command(help_text, lambda parser: _tool(name).add_arguments(parser), lambda args: _tool(name).run(args))


def _add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    from .cluster.launch import add_arguments

    add_arguments(parser)


_COMMANDS = {
    "train": _Command("train a model from one JSON file", _add_train_arguments, _train),
    "launch": _Command("start sdp train on this host or a cluster: local, deepspeed, mpirun, slurm", _add_launch_arguments, _launch),
    "prepare": _tool_command("prepare", "turn text into memory-mapped token shards"),
    "config": _Command("print a configuration with all defaults, or the schema", _add_show_config_arguments, _show_config),
    "plan": _tool_command("plan", "what a run will need, compute and send, before anything is started"),
    "bench": _tool_command("bench", "compare ways to train a model side by side, or one rank with a hand-written loop"),
    "gpu-check": _tool_command("gpu_check", "measure a rank's share of dense and SDP runs on this GPU"),
    "gradient-bias": _tool_command("gradient_bias", "bias of SDP's gradient against the dense model's, told from sampling noise"),
    "evaluate": _tool_command("evaluate", "held-out loss of the full model of a checkpoint"),
    "export": _tool_command("export", "write a checkpoint's model and tokenizer for transformers"),
    "report": _tool_command("report", "summarise and compare finished runs"),
    "version": _Command("print versions", lambda _: None, _show_version),
}


if __name__ == "__main__":
    entry()
