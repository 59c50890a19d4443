"""One rank of ``sdp train``: checks the run, builds everything, and starts the trainer."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

import torch.distributed as dist

from ...engine.config.schema import Config
from ...engine.distributed.heartbeat import Heartbeat
from ...engine.distributed.mesh import machine_id, mesh_of, split_tensor_group, told_apart
from ...engine.engine import SDPEngine
from ...engine.environment.detect import detect
from ...engine.errors import ConfigError
from ...engine.service.steps import Membership
from ..runs.run_files import RunFiles
from ..tasks.harness import LoadedTasks
from . import preflight
from .failures import explained
from .loop.training_run import TrainingRun
from .observers.monitors import Monitors, open_monitors
from .observers.observer import Observer
from .observers.probe import MemoryProbe
from .observers.profiler import StepProfiler, parse_steps
from .observers.progress import Progress
from .observers.recorder import Recorder
from .options import TrainOptions
from .service import read_token, settings_of, split_address, trusted
from .startup import build, read_config, started
from .trainer import Trainer

log = logging.getLogger("sdp")


def run(options: TrainOptions, on_stall: Callable[[str], None]) -> int:
    """Run this rank's part of a run.

    Args:
        options: the arguments of the command line.
        on_stall: called with a message, from another thread, when the rank makes no progress.

    Returns:
        The exit code.
    """
    profiled = parse_steps(options.profile) if options.profile is not None else None
    config = read_config(options)
    environment = detect()
    rank, world_size = (environment.rank, environment.world_size) if environment is not None else (0, 1)
    dump_dir = options.dump_dir
    service = _membership(config, options, rank)
    mesh = mesh_of(config, world_size, None if service is None else 0)
    preflight.check(config, mesh, dump_dir, resume=options.resume and service is None)
    resume = options.resume or service is not None  # a group that is started again goes on with its files
    files = RunFiles(dump_dir, resume=resume) if rank == 0 else None
    monitors = open_monitors(config, dump_dir, resume=resume) if rank == 0 else None
    tasks = _load_tasks(config) if rank == 0 else None
    with started(config, options, rank, world_size, on_stall) as beat:
        if service is not None:
            service.join()
            log.info("group %d of the run at %s", service.slot, options.service)
        return _train(config, options, beat, files, monitors, tasks, profiled, service)


def _train(
    config: Config,
    options: TrainOptions,
    beat: Heartbeat,
    files: RunFiles | None,
    monitors: Monitors | None,
    tasks: LoadedTasks | None,
    profiled: tuple[int, int] | None,
    service: Membership | None,
) -> int:
    """Build everything and train. Collective. Only rank 0 has ``files``, ``monitors`` and
    ``tasks``.
    """
    dump_dir = options.dump_dir
    with explained(config, beat, dump_dir=dump_dir):
        corpus, engine, baseline = build(config, dump_dir, beat, service)
    _warn_of_split_groups(engine)
    observers: list[Observer] = [MemoryProbe(engine)] if MemoryProbe.works_with(engine) else []
    if profiled is not None:
        observers.append(StepProfiler(*profiled, dump_dir / "profile", engine.device, records=files is not None))
    if files is not None and monitors is not None:
        counted = "tokens" if config.data.name is None else "images"
        observers += [Recorder(files), monitors, Progress(config.steps_per_print, counted)]
    training_run = TrainingRun(
        config, engine, corpus, dump_dir, baseline=baseline, beat=beat, files=files, observers=observers, tasks=tasks
    )
    try:
        with explained(config, beat, engine, dump_dir=dump_dir):
            status = Trainer(training_run).train(resume=options.resume)
    finally:
        training_run.close()
        if files is not None:
            files.close()
    # This is skipped after a failure. Other ranks may then be inside a collective, and the message
    # must get out.
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


def _membership(config: Config, options: TrainOptions, rank: int) -> Membership | None:
    """Return this rank's connection to the service that keeps the anchors, or None."""
    sync = config.sdp.sync
    if options.service is None:
        return None
    if sync is None or sync.service is None or config.training.steps is None:
        raise ConfigError(f"--service {options.service}: the configuration has no section sdp.sync.service; add it")
    from ...engine.service.client import Client  # imports aiohttp

    split_address(options.service, "--service")
    token, tls = read_token(options.token_file), trusted(options.tls_ca)
    client = Client(options.service, token, sync.service.wait_seconds, tls)
    return Membership(client, sync, config.training.steps, settings_of(config), rank)


def _load_tasks(config: Config) -> LoadedTasks | None:
    """Load the tasks of lm-evaluation-harness, before any rank waits for another."""
    section = config.training.evaluate_tasks
    return LoadedTasks.load(section, preflight.TASKS) if section is not None else None


def _warn_of_split_groups(engine: SDPEngine) -> None:
    """Warn on rank 0 if tensor-parallel ranks are on several hosts. Collective."""
    degree = engine.layout.mesh.tp
    hosts = told_apart(engine.gather_facts((socket.gethostname(), machine_id()))) if degree > 1 else []
    problem = split_tensor_group(hosts, degree)
    if problem is not None and engine.global_rank == 0:
        log.warning("WARNING: %s", problem)
