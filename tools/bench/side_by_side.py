"""``sdp bench CONFIG``: compares ways to train one model in one run of the same ranks.

Every rank holds all methods and lets them take turns, so that a busy machine slows all of them. A
turn begins with a step that is not timed (caches, running transfers); then ``--steps`` steps are
timed together. Rounds alternate between forward and reverse order. The seconds of a turn are those
of its slowest rank.

- *Exposed communication*: the time of a step minus that of the same step with collectives that
  return at once (``wire.absent``). On ranks that share cores it includes the communication's
  processor time.
- *Bytes sent*: planned.
- *Collectives*: counted by the process groups.
- *Peak memory*: that of the method's live tensors in one step (``memory_probe.py``).
- *DiLoCo*: local steps of the engine; the seconds are the mean over a round.
- *Slowest / mean*: compares the ranks' computation in a step. On CPUs it counts processor seconds,
  since ranks may share cores.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
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
from ...launcher.degrees import visible_devices
from ...launcher.local import start_local
from ..runs.run_config import with_initial_model
from .measure import measure
from .methods import DENSE, default_methods, is_sdp, variant, why_not
from .options import BenchOptions
from .planned import plan_methods
from .report import REPORT, Report, write_report


def run(options: BenchOptions) -> int:
    """Start the ranks, unless a launcher did. Each rank measures, and rank 0 reports.

    Raises an :class:`SDPError` for what cannot be compared.
    """
    environment = detect()
    is_first = environment is None or environment.rank == 0
    config, world, names = _check(options, environment, speaks=is_first)
    if is_first:
        _make_folder(options.out)
    if environment is None:
        return _start(options, world, names)
    logging.getLogger("sdp").setLevel(logging.ERROR)  # without the notes about each method's configuration
    warnings.simplefilter("ignore", FutureWarning)  # torch and DeepSpeed call deprecated names of torch
    plans = plan_methods(names, config, world) if is_first else {}
    device = join()
    configs = {name: variant(name, config, world) for name in names}
    facts, race = measure(configs, options, config, device)
    dist.destroy_process_group()
    if is_first:
        write_report(options.out, Report(_settings(options, config, world, device), plans, facts, race))
        print(f"sdp bench: the report and its plot are in {options.out}", file=sys.stderr, flush=True)
    return 0


def _start(options: BenchOptions, world: int, names: Sequence[str]) -> int:
    """Start the ranks on this machine."""
    argv = [*options.argv, "--nproc", str(world), "--methods", ",".join(names)]
    # Like a user's processes: the glibc settings that make resident memory exact also make it
    # slower.
    return start_local(argv, world, options.out / "logs", on_cpu=False)


def _check(options: BenchOptions, environment: Environment | None, *, speaks: bool) -> tuple[Config, int, list[str]]:
    """Return the configuration, the number of ranks and the methods in order. Starts nothing.

    A rank that ``speaks`` says which methods are left out. Raises an :class:`SDPError` for what
    cannot be compared.
    """
    config = _load_config(options)
    world = environment.world_size if environment is not None else options.nproc or config.sdp.groups
    names = choose_methods(options.methods, config, world, speaks=speaks)
    if environment is None:
        devices = visible_devices()
        if 0 < devices < world:
            raise ConfigError(
                f"{world} ranks: {devices} devices are visible; use fewer, or CUDA_VISIBLE_DEVICES= for the CPU"
            )
    if environment is None or environment.rank == 0:
        _require_no_report(options.out)
    return config, world, names


def _require_no_report(folder: Path) -> None:
    if (folder / REPORT).exists():
        raise ConfigError(
            f"--out {folder}: holds the report of an earlier run; name another directory, or move the report"
        )


def _make_folder(folder: Path) -> None:
    """Make the folder of the report before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be made ({error.strerror})") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {folder}: cannot be written")


def _load_config(options: BenchOptions) -> Config:
    config = with_initial_model(load_config(options.config, options.settings))
    if config.bf16.enabled:
        raise ConfigError(
            "bf16.enabled: methods are compared in float32, where all compute the same; add --set bf16.enabled=false"
        )
    if config.tensor_parallel.autotp_size > 1:
        raise ConfigError(
            "tensor_parallel.autotp_size: other methods have no tensor parallelism here; add "
            "--set tensor_parallel.autotp_size=1"
        )
    if config.sdp.engine != "fsdp2":
        raise ConfigError(f'sdp.engine: "{config.sdp.engine}" is not compared; add --set sdp.engine=fsdp2')
    if config.sdp.groups == 1:
        raise ConfigError("sdp.groups: 1 group has nothing of SDP to compare; add --set sdp.groups=4")
    return config.model_copy(update={"scheduler": None})


def choose_methods(asked: Sequence[str] | None, config: Config, world: int, *, speaks: bool) -> list[str]:
    """Choose the methods that are compared.

    Args:
        asked: Their names. None: all that can run.
        config: The run.
        world: Number of ranks.
        speaks: Print the methods that are left out because they cannot run.

    Raises:
        ConfigError: A method that was asked for cannot run, or nothing of SDP is left.
    """
    if asked is not None and "" in asked:
        raise ConfigError(
            f'--methods "{",".join(asked)}": a name is empty; write some of {", ".join(DENSE)}, sdp, or leave it out'
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
            f"{world} ranks leave nothing of SDP to compare: "
            f"{next(why for name, why in reasons.items() if is_sdp(name))}"
        )
    for name, reason in reasons.items() if speaks else ():
        print(f"sdp bench: {name} is left out: {reason}", file=sys.stderr)
    return names


def _settings(options: BenchOptions, config: Config, world: int, device: torch.device) -> dict[str, Any]:
    batch = BatchSize.resolve(config, mesh_of(config, world))
    return {
        "config": str(options.config),
        "model": config.model,
        "world": world,
        "groups": config.sdp.groups,
        "batch": asdict(batch),
        "tokens_per_sample": config.data.tokens_per_sample,
        "activation_checkpointing": config.activation_checkpointing.mode,
        "compile": config.training.compile,
        "rounds": options.rounds,
        "steps_per_turn": options.steps,
        "dtype": "float32",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
