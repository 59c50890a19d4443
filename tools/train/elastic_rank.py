"""One rank of an elastic ``sdp train``: builds its group's part, finds the coordinator, and
trains.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from ...engine.config.schema import Config
from ...engine.distributed import world
from ...engine.distributed.mesh import mesh_of
from ...engine.distributed.world import World
from ...engine.elastic.abort import WaitLimits
from ...engine.elastic.activity import ProcessActivity
from ...engine.elastic.bringing_back import LOADING
from ...engine.elastic.coordination.addresses import address_towards, serve_meeting_store
from ...engine.elastic.coordination.assembly import Identity
from ...engine.elastic.coordination.member import CoordinatorClient
from ...engine.elastic.coordination.progress import Progress
from ...engine.elastic.inside import share_inside
from ...engine.elastic.session import LAST_CHECKPOINT, Session
from ...engine.environment.detect import Environment, detect
from ...engine.environment.elastic import ElasticEnvironment, elastic_environment, gloo_interface, hidden_loopback
from ...engine.errors import LaunchError
from ...launcher.heartbeat import Heartbeat
from ..runs.run_files import has_begun
from . import preflight
from .elastic import COMPARISON, MEETING, RECALIBRATION, ElasticTrainer
from .elastic_rounds import AVERAGE, COPYING, RoundsTrainer
from .failures import explained
from .loop.changed_settings import keep_holders
from .loop.checkpointer import AWAITING, CHECKPOINT, LOAD
from .loop.evaluator import EVALUATION
from .loop.meter import PARTS
from .loop.training_run import THE_END, TrainingRun
from .options import TrainOptions
from .startup import build, longest_phase, read_config, started

log = logging.getLogger("sdp")

# Seconds until all groups of a generation are connected. A loss is noticed long before.
_LONGEST_CONNECTION = 300.0
# The limits in the configuration are those of waits for other groups. A rank may wait inside its
# group for one that waits for other groups. So waits there, and the watch of a rank, end later.
_PATIENCE = 2.0


def run(options: TrainOptions, on_stall: Callable[[str], None]) -> int:
    """Run this rank's part of an elastic run.

    Args:
        options: the arguments of the command line.
        on_stall: called with a message, from another thread, when the rank makes no progress.

    Returns:
        The exit code.
    """
    config = read_config(options)
    found, told = detect(), elastic_environment()
    interface = gloo_interface()  # before the rank joins its group, which sets it
    if found is None or told is None:
        raise LaunchError(
            "a rank of an elastic run needs RANK and WORLD_SIZE of its group; start the run with sdp train"
        )
    ranks, dump_dir = found.world_size, options.dump_dir
    if told.slot >= config.sdp.groups:
        raise LaunchError(
            f"SDP_ELASTIC_GROUP={told.slot}: the run has {config.sdp.groups} groups, numbered from 0 (sdp.groups)"
        )
    rank, size = told.slot * ranks + found.rank, config.sdp.groups * ranks
    config = keep_holders(config, dump_dir)  # also for a group that returns
    config = preflight.check(config, mesh_of(config, size), dump_dir, resume=options.resume)
    with started(config, options, rank, size, on_stall, patience=_PATIENCE) as beat:
        world.enter(World(rank, size))
        return _train(config, options, beat, found, told, interface)


def _train(
    config: Config,
    options: TrainOptions,
    beat: Heartbeat,
    found: Environment,
    told: ElasticEnvironment,
    interface: str | None,
) -> int:
    """Build everything, find the coordinator, and train.

    ``interface`` is what the user chose for gloo.
    """
    dump_dir = options.dump_dir
    # The trainer checks holders itself, when no group is about to be lost in the middle of a step.
    unchecked = config.model_copy(update={"sdp": config.sdp.model_copy(update={"check_interval": 0})})
    with explained(config, beat, dump_dir=dump_dir):
        corpus, engine, baseline = build(unchecked, dump_dir, beat)
    beat.at(0, "reaching the coordinator", None)
    # A group that returns may find its host's link still down. That is no mistake.
    here = address_towards(told.host, seconds=config.sdp.elastic.wait_seconds if has_begun(dump_dir) else 0.0)
    if (warning := hidden_loopback(told.host, here)) is not None:
        log.warning("SDP_ELASTIC_COORDINATOR: %s", warning)
    store, address = serve_meeting_store(here) if found.rank == 0 else (None, "")
    told = replace(told, life=share_inside(told.life or secrets.token_hex(8)))
    who = Identity(
        told.slot, found.rank, found.world_size, told.life, socket.gethostname(), share_inside(address),
        here if interface is None else None,
    )  # fmt: skip
    client = _find_coordinator(told, who, config, beat, dump_dir)
    # Each batch of an evaluation is progress. Otherwise a longer evaluation would look like a hang.
    engine.module.register_forward_pre_hook(lambda *_: client.progress.note())
    limits, wait_seconds = _wait_limits(config, beat), config.sdp.elastic.wait_seconds
    session = Session(client, engine, limits, dump_dir / "checkpoints", wait_seconds)
    training_run = TrainingRun(config, engine, corpus, dump_dir, baseline=baseline, beat=beat)
    trainer_class = ElasticTrainer if session.rounds is None else RoundsTrainer
    trainer = trainer_class(training_run, session, resume=options.resume)
    try:
        with explained(config, beat, engine, dump_dir=dump_dir):
            status = trainer.train()
    finally:
        trainer.close()
    del store
    dist.destroy_process_group()
    return status


def _wait_limits(config: Config, beat: Heartbeat) -> WaitLimits:
    """Return how long this rank waits for other groups: as long as they may take for the phase.

    After that, all groups try again. Several waits in a phase may take longer together, but not so
    long that the watch of this rank ends it.
    """
    training = config.training

    def given_up(began: float) -> bool:
        seconds = beat.seconds
        if seconds is None:  # in a meeting, or a last checkpoint
            return time.monotonic() - began > max(training.start_timeout, training.save_timeout)
        return time.monotonic() - began > seconds or beat.elapsed > (1 + _PATIENCE) / 2 * seconds

    return WaitLimits(min(_LONGEST_CONNECTION, training.step_timeout), given_up, _PATIENCE * longest_phase(config))


def _find_coordinator(
    told: ElasticEnvironment, who: Identity, config: Config, beat: Heartbeat, dump_dir: Path
) -> CoordinatorClient:
    section, training = config.sdp.elastic, config.training
    varied = dict.fromkeys((CHECKPOINT, AWAITING, RECALIBRATION, LAST_CHECKPOINT), training.save_timeout)
    varied |= {MEETING: training.start_timeout, LOADING: training.start_timeout, COMPARISON: training.step_timeout}
    steady = (*PARTS, AVERAGE, EVALUATION)
    # Not "data", because the first reading of data may wait for a network, and not what only the
    # writer of the run's files does, because it may wait for a server that shows curves.
    busy = {*steady, *varied, COPYING, LOAD, THE_END} - {"data"}
    here = ProcessActivity()
    progress = Progress(
        section.heartbeat_seconds, steady, varied,
        busy=busy, quiet_process=here.quiet_seconds, is_sending=here.is_sending,
    )  # fmt: skip
    beat.on_phase = progress.begin
    return CoordinatorClient(
        (told.host, told.port),
        told.token,
        who,
        heartbeat_seconds=section.heartbeat_seconds,
        wait_seconds=section.wait_seconds,
        progress=progress,
        on_hang=beat.end,
        longest_pause=_PATIENCE * max(training.start_timeout, training.step_timeout, training.save_timeout),
        has_begun=lambda: has_begun(dump_dir),
    )
