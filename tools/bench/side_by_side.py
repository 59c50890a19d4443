"""``sdp bench CONFIG``: ways to train one model, side by side in one run of the same ranks.

Every rank holds all methods at once and lets them take turns, so that a loaded machine slows all alike; a turn begins with a step that is
not timed (caches, weights under way), then ``--steps`` steps are timed together, and rounds run forwards and backwards in alternation. The
seconds of a turn are those of its slowest rank.

*Exposed communication* is the time of a step minus that of the same step with collectives that return at once (``wire.absent``): on
ranks that share cores it has the processor time of the communication too. *Not overlapped* is the same of a step that waits for every
reduction where it starts (``wire.awaited``). *Bytes sent* are counted by the kernel on the rank's TCP connections, where collectives use
these, *collectives* by the process groups. *Peak memory* is that of the method's live tensors in one step (``memory_probe.py``). A DiLoCo
step has a fiftieth of its outer step, timed alone. *Slowest / mean* is of what ranks compute in a step: on CPUs of the processor's seconds,
since ranks may share cores.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import warnings
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...engine.batch.size import BatchSize
from ...engine.config.load import load_config
from ...engine.config.schema import Config
from ...engine.distributed.join import join
from ...engine.distributed.mesh import mesh_of
from ...engine.environment.detect import Environment, detect
from ...engine.errors import ConfigError
from ..runs.run_config import with_initial_model
from . import workers
from .measure import _links, measure
from .methods import DENSE, default_methods, is_sdp, variant, why_not
from .networks import enter, hosts
from .planned import plan_methods
from .report import REPORT, Report, write_report
from .workers import OPTION


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what belongs to CONFIG."""
    group = parser.add_argument_group("side by side, with CONFIG")
    group.add_argument(
        "config", metavar="CONFIG", type=Path, nargs="?", help="compare ways to train this model, on several ranks"
    )
    group.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="override a key of CONFIG; may be repeated",
    )
    group.add_argument("--nproc", metavar="P", type=int, help="ranks to start here (default: sdp.groups)")
    group.add_argument(
        "--workers",
        metavar="N,…",
        help="compare once for each of these numbers of ranks, of as many groups, such as 2,4,8",
    )
    group.add_argument(
        "--methods", metavar="A,B,…", help="which, of: ddp … diloco, sdp, sdp-block-forward-0.5 … (default: all)"
    )
    group.add_argument("--rounds", metavar="N", type=int, default=5, help="turns of every method (default: 5)")
    group.add_argument("--steps", metavar="N", type=int, default=2, help="timed steps of a turn (default: 2)")
    group.add_argument(
        "--network",
        metavar="RATE,…",
        help="ranks are hosts with links of these rates, such as 100mbit,300mbit,1gbit (root)",
    )
    group.add_argument("--hosts", metavar="NAME", help=argparse.SUPPRESS)  # for the ranks: those that were made
    group.add_argument(
        "--out", metavar="DIR", type=Path, help="where report.md, report.json and plots go (default: runs/bench)"
    )


def run(args: argparse.Namespace) -> int:
    """Start the ranks where no launcher did; each measures, rank 0 reports. Raises an :class:`SDPError` for what cannot be compared."""
    place = detect()
    if args.workers is not None:
        if place is not None:
            raise ConfigError(f"{OPTION}: starts ranks itself; start it without a launcher")
        return workers.run(args, _out(args), run, partial(_checked, place=None, speaks=False))
    config, world, names = _checked(args, place, speaks=place is None or place.rank == 0)
    if place is None or place.rank == 0:
        _make_room(_out(args))
    if place is None:
        from ...launcher.local import start_local

        # As a user's own processes: without the settings of glibc that make resident memory honest, and memory slower.
        argv = [*args.argv, "--nproc", str(world), "--methods", ",".join(names)]
        with hosts(world) if args.network is not None else nullcontext() as made:
            return start_local(argv + (["--hosts", made] if made else []), world, _out(args) / "logs", on_cpu=False)
    if args.network is not None and not args.hosts:
        raise ConfigError("--network: makes hosts and starts ranks on them itself; start it without a launcher")
    logging.getLogger("sdp").setLevel(logging.ERROR)  # what a run would say of each method's configuration
    warnings.simplefilter("ignore", FutureWarning)  # torch's deprecated names, called by torch and DeepSpeed
    plans = plan_methods(names, config, world) if place.rank == 0 else {}
    if args.hosts:
        enter(args.hosts, place.rank)
    device = join()
    layers = _from_rank_0({name: plan.config.model.get("num_hidden_layers") for name, plan in plans.items()})
    facts, races = measure({name: variant(name, config, layers[name]) for name in names}, args, config, device)
    dist.destroy_process_group()
    if place.rank == 0:
        write_report(_out(args), Report(_settings(args, config, world, device), plans, facts, races))
        print(f"sdp bench: the report and its plots are in {_out(args)}", file=sys.stderr, flush=True)
    return 0


def _checked(args: argparse.Namespace, place: Environment | None, *, speaks: bool) -> tuple[Config, int, list[str]]:
    """Of the comparison: configuration, ranks, and the methods in order. Raises an :class:`SDPError` for what cannot be compared; starts
    nothing.
    """
    config = _config(args)
    _links(args)
    world = place.world_size if place is not None else args.nproc or config.sdp.groups
    names = _names(args, config, world, speaks=speaks)
    if place is None:
        from ...launcher.degrees import visible_devices

        devices = visible_devices()
        if 0 < devices < world:
            raise ConfigError(
                f"{world} ranks: {devices} devices are visible; use fewer, or CUDA_VISIBLE_DEVICES= for the CPU"
            )
    if place is None or place.rank == 0:
        _require_no_report(_out(args))
    return config, world, names


def _require_no_report(folder: Path) -> None:
    if (folder / REPORT).exists():
        raise ConfigError(
            f"--out {folder}: holds the report of an earlier run; name another directory, or move that away"
        )


def _make_room(folder: Path) -> None:
    """For the report, before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be made ({error.strerror})") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {folder}: cannot be written")


def _config(args: argparse.Namespace) -> Config:
    config = with_initial_model(load_config(args.config, args.set))
    for name in ("rounds", "steps", "nproc"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name}: {value} is not a positive whole number")
    if config.bf16.enabled:
        raise ConfigError(
            "bf16.enabled: methods are compared in float32, in which they all compute alike; add --set bf16.enabled=false"
        )
    if config.tensor_parallel.autotp_size > 1:
        raise ConfigError(
            "tensor_parallel.autotp_size: other methods have no tensor parallelism here; add --set tensor_parallel.autotp_size=1"
        )
    if config.sdp.engine != "fsdp2":
        raise ConfigError(f'sdp.engine: "{config.sdp.engine}" is not compared; add --set sdp.engine=fsdp2')
    if config.sdp.groups == 1:
        raise ConfigError("sdp.groups: 1 group has nothing of SDP to compare; add --set sdp.groups=4")
    return config.model_copy(update={"scheduler": None})


def _names(args: argparse.Namespace, config: Config, world: int, *, speaks: bool) -> list[str]:
    """Of the methods, in order; those that cannot be run are left out unless they were asked for, and a rank that ``speaks`` says so."""
    asked = None if args.methods is None else list(dict.fromkeys(args.methods.split(",")))
    if asked is not None and "" in asked:
        raise ConfigError(
            f'--methods "{args.methods}": a name is empty; write some of {", ".join(DENSE)}, sdp, or leave the option out'
        )
    names, reasons = [], {}
    for name in default_methods(config) if asked is None else asked:
        reason = why_not(name, config, world)
        if reason is None:
            names.append(name)
        elif asked is not None:
            raise ConfigError(f"--methods {name}: {reason}")
        else:
            reasons[name] = reason
    if asked is None and not any(map(is_sdp, names)):
        raise ConfigError(
            f"{world} ranks leave nothing of SDP to compare: {next(why for name, why in reasons.items() if is_sdp(name))}"
        )
    for name, reason in reasons.items() if speaks else ():
        print(f"sdp bench: {name} is left out: {reason}", file=sys.stderr)
    return names


def _out(args: argparse.Namespace) -> Path:
    return args.out or Path("runs/bench")


def _settings(args: argparse.Namespace, config: Config, world: int, device: torch.device) -> dict[str, Any]:
    batch = BatchSize.resolve(config, mesh_of(config, world))
    return {
        "config": str(args.config),
        "model": config.model,
        "world": world,
        "groups": config.sdp.groups,
        "batch": asdict(batch),
        "tokens_per_sample": config.data.tokens_per_sample,
        "activation_checkpointing": config.activation_checkpointing.mode,
        "compile": config.training.compile,
        "rounds": args.rounds,
        "steps_per_turn": args.steps,
        "dtype": "float32",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _from_rank_0(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


# -- measuring -------------------------------------------------------------------------------------------------------------------
