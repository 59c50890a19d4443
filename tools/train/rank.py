"""One rank of ``sdp train``: checks the run, joins other ranks, builds the engine, and trains."""

from __future__ import annotations

import argparse
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from ...engine.accounting.memory import PeakMemory
from ...engine.config.load import load_config
from ...engine.config.schema import Config
from ...engine.distributed.heartbeat import Heartbeat
from ...engine.distributed.join import join
from ...engine.distributed.mesh import machine_id, mesh_of, split_tensor_group, unique_host_names
from ...engine.engine import SDPEngine
from ...engine.environment.detect import detect, position_file
from ...engine.errors import ConfigError, shorten
from ...engine.initialize import initialize
from ...engine.service.steps import Membership
from ...models.registry import build_model
from ..runs.dataset import Corpus, fetch_corpora, open_corpus, refuse_own_data
from ..runs.run_files import RunFiles, fetch_files
from ..runs.start_files import with_absolute_paths, with_initial_model
from . import preflight
from .check import check_run
from .failures import explained
from .observer import MemoryProbe, Observer, Progress, RemoteFiles, open_monitors
from .process import set_up_logging
from .profiler import StepProfiler, parse_steps
from .service import encryption, read_token, settings_of, split_address
from .trainer import Trainer

log = logging.getLogger("sdp")


@contextlib.contextmanager
def started(
    config: Config, options: argparse.Namespace, rank: int, world_size: int, on_stall: Callable[[str], None]
) -> Iterator[Heartbeat]:
    """A context in which this rank has joined the other ranks. Collective.

    The rank is also watched, so that a rank that hangs is reported. If there are several ranks, a
    rank is watched until its process has ended, because other ranks would wait for a hanging exit.
    A single rank is watched only inside the context, because the process may do other work
    afterwards.

    Args:
        config: the configuration, which was checked.
        options: the arguments of the command line.
        rank: the number of this rank in the run.
        world_size: the number of ranks.
        on_stall: called with a message, from another thread, when the rank makes no progress.
    """
    set_up_logging(rank, options.dump_dir)
    logs = options.dump_dir / "logs"
    log.info("%d process(es), %d thread(s) each; logs in %s", world_size, torch.get_num_threads(), logs)
    if config.env:
        log.info("environment of every rank: %s", " ".join(f"{name}={value}" for name, value in config.env.items()))
    beat = Heartbeat(rank, position_file(), logs / f"rank-{rank}.log", on_stall)
    training = config.training
    beat.at(0, "starting", training.start_timeout)
    try:
        join(max(training.start_timeout, training.save_timeout, training.step_timeout))
        yield beat
    finally:
        if world_size == 1:
            beat.stop()


def build(config: Config, dump_dir: Path, beat: Heartbeat, service: Membership | None) -> tuple[Corpus, SDPEngine, int]:
    """Prepare the data, and build the model and its engine. Collective.

    Returns:
        The data, the engine, and the bytes of memory that the process had before the model.
    """
    beat.at(0, "preparing data", None)
    corpus = open_corpus(config, dump_dir)
    corpus = corpus if service is None else corpus.alone(service.slot)
    beat.at(0, "building the model", config.training.start_timeout)
    memory = PeakMemory(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    memory.reset()
    baseline = memory.read()
    engine, *_ = initialize(
        model=build_model(config.model, **corpus.facts),
        training_data=corpus.train,
        collate_fn=corpus.collate,
        config=with_loss_weighting(config, corpus).without_monitors(),
        service=service,
    )
    if engine.calls is not None:  # the heartbeat watches in its place
        engine.calls.stop()
        engine.calls = None
    return corpus, engine, baseline


def with_loss_weighting(config: Config, corpus: Corpus) -> Config:
    """Return ``config`` with ``training.loss_weighting`` "tokens" if some labels do not count.

    Then samples have different numbers of labels. A weighting in ``config`` stays.
    """
    if config.training.loss_weighting is not None or not corpus.masks_labels:
        return config
    training = config.training.model_copy(update={"loss_weighting": "tokens"})
    return config.model_copy(update={"training": training})


def run(options: argparse.Namespace, on_stall: Callable[[str], None]) -> int:
    """Train as one rank of a run, and return the exit code.

    Args:
        options: the arguments of the command line.
        on_stall: called with a message, from another thread, when the rank makes no progress.
    """
    profiled = parse_steps(options.profile) if options.profile is not None else None
    # In the form that is written to config.json.
    config = with_absolute_paths(with_initial_model(load_config(options.config, options.set)))
    environment = detect()
    rank, world_size = (environment.rank, environment.world_size) if environment is not None else (0, 1)
    dump_dir = options.dump_dir
    service = _membership(config, options, rank)
    mesh = mesh_of(config, world_size, None if service is None else 0)
    files = None
    if options.url is not None and options.resume:
        files = RunFiles(dump_dir, resume=True, url=options.url) if rank == 0 and not options.check else None
        fetch_files(options.url, dump_dir, of_run=rank == 0, goes_on=True)
    if options.url is not None and environment is not None and environment.local_world_size not in (None, world_size):
        refuse_own_data(config, dump_dir, options.url)
    fetch_corpora(config)
    preflight.check(config, mesh, dump_dir, options.checkpoints, resume=options.resume and service is None)
    resume = options.resume or service is not None  # a group that is started again goes on with its files
    if options.check:
        with started(config, options, rank, world_size, on_stall) as beat, explained(config, beat, options.checkpoints):
            status = check_run(config, dump_dir, beat)
            if dist.is_initialized():
                dist.destroy_process_group()
            return status
    if rank == 0 and files is None:
        files = RunFiles(dump_dir, resume=resume, url=options.url)
    monitors = open_monitors(config, dump_dir, resume=resume) if rank == 0 else None
    with started(config, options, rank, world_size, on_stall) as beat:
        if service is not None:
            service.join()
            log.info("group %d of the run at %s", service.slot, options.service)
        with explained(config, beat, options.checkpoints):
            corpus, engine, baseline = build(config, dump_dir, beat, service)
        _warn_of_split_groups(engine)
        observers: list[Observer] = [MemoryProbe(engine)] if MemoryProbe.works_with(engine) else []
        if profiled is not None:
            observers.append(StepProfiler(*profiled, dump_dir / "profile", engine.device, records=rank == 0))
        if monitors is not None:
            counted = "tokens" if config.data.name is None else "images"
            evaluated = "full model" if engine.layout.paths == 1 else "routed"
            observers += [monitors, Progress(config.steps_per_print, counted, evaluated)]
        if options.url is not None and rank == 0:
            observers.append(RemoteFiles(options.url, dump_dir, config.training.save_every))
        trainer = Trainer(
            config, engine, corpus, dump_dir, options.checkpoints, baseline=baseline, beat=beat, files=files,
            observers=observers,
        )  # fmt: skip
        try:
            with explained(config, beat, options.checkpoints, engine):
                status = trainer.train(resume=options.resume)
        finally:
            trainer.close()
            if files is not None:
                files.close()
        # Not after a failure: other ranks may be inside a collective, so this rank could hang
        # before it prints its error.
        if dist.is_initialized():
            dist.destroy_process_group()
        return status


def _membership(config: Config, options: argparse.Namespace, rank: int) -> Membership | None:
    """Return this rank's connection to the service that keeps the anchors, or None."""
    sync = config.sdp.sync
    if options.service is None:
        return None
    if sync is None or sync.service is None or config.training.steps is None:
        raise ConfigError(f"--service {options.service}: the configuration has no section sdp.sync.service; add it")
    from ...engine.service.client import Client  # imports aiohttp

    split_address(options.service, "--service")
    token, tls = read_token(options.token_file), encryption(options.tls_ca, serves=False)
    try:
        client = Client(options.service, token, sync.service.wait_seconds, tls)
    except ValueError:  # a host that no URL can have, such as ::1 without brackets
        raise ConfigError(f"--service {shorten(options.service)}: is not HOST:PORT, such as 10.0.0.1:7777") from None
    return Membership(client, sync, config.training.steps, settings_of(config), rank)


def _warn_of_split_groups(engine: SDPEngine) -> None:
    """Warn on rank 0 if tensor-parallel ranks are on several hosts. Collective."""
    degree = engine.layout.mesh.tp
    hosts = unique_host_names(engine.gather_facts((socket.gethostname(), machine_id()))) if degree > 1 else []
    problem = split_tensor_group(hosts, degree)
    if problem is not None and engine.global_rank == 0:
        log.warning("WARNING: %s", problem)
