"""``sdp train``: sets up one rank of a run, checks what can be checked before anything is computed, and hands over to the trainer."""

from __future__ import annotations

import argparse
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from ...engine.accounting.memory import PeakMemory
from ...engine.config.load import load_config
from ...engine.config.schema import Config
from ...engine.distributed.hosts import machine_id, split_tensor_group, told_apart
from ...engine.distributed.join import join
from ...engine.distributed.mesh import mesh_of
from ...engine.engine import SDPEngine
from ...engine.environment.detect import detect, place_file
from ...engine.errors import PeerLostError
from ...engine.initialize import initialize
from ...launcher.heartbeat import Heartbeat
from ...models.registry import build_model
from ..runs.dataset import open_corpus
from ..runs.run_config import with_initial_model
from ..runs.run_files import RunFiles
from . import preflight
from .monitors import open_monitors
from .out_of_memory import is_out_of_memory, out_of_memory
from .profiler import parse_steps
from .trainer import Trainer

log = logging.getLogger("sdp")

# In what gloo and NCCL say where the process at the other end has ended; with its address where they name it, before or after.
_ADDRESS = r"\[[0-9a-fA-F.:]+\]:\d+"
_GONE = re.compile(
    rf"({_ADDRESS}: )?(Connection (reset|closed) by (remote )?peer|Broken pipe)( {_ADDRESS})?|ncclRemoteError"
)


def run(args: argparse.Namespace) -> int:
    """``sdp train``: this rank's part of a run. ``args`` as made by the command line; returns the exit code.

    ``args.on_stall`` is called with a message, from another thread, when the rank makes no progress; ``args.guarded``: no launcher of ours
    would end one that is stopped. ``args.profile``: steps to
    profile, as text, or None.
    """
    profiled = parse_steps(args.profile) if args.profile is not None else None
    config = _with_absolute_paths(with_initial_model(load_config(args.config, args.overrides)))
    place = detect()
    rank, world_size = (place.rank, place.world_size) if place is not None else (0, 1)
    preflight.check(config, mesh_of(config, world_size), args.dump_dir, resume=args.resume)
    files = RunFiles(args.dump_dir, resume=args.resume) if rank == 0 else None
    monitors = open_monitors(config, args.dump_dir) if rank == 0 else None
    _set_up_logging(rank, args.dump_dir)
    log.info(
        "%d process(es), %d thread(s) each; logs in %s", world_size, torch.get_num_threads(), args.dump_dir / "logs"
    )
    if config.env:
        log.info("environment of every rank: %s", " ".join(f"{name}={value}" for name, value in config.env.items()))
    log_file = args.dump_dir / "logs" / f"rank-{rank}.log"
    beat = Heartbeat(rank, place_file(), log_file, args.on_stall, guarded=args.guarded and world_size > 1)
    beat.at(0, "starting", config.training.start_timeout)
    if not config.sdp.in_one_process:
        training = config.training
        join(max(training.start_timeout, training.save_timeout, training.step_timeout))
    beat.at(0, "preparing data", None)
    corpus = open_corpus(config, args.dump_dir)
    beat.at(0, "building the model", config.training.start_timeout)
    memory = PeakMemory(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    memory.reset()
    baseline = memory.read()
    with explained(config, beat):
        model = build_model(config.model, **corpus.facts)
        engine, *_ = initialize(
            model=model,
            training_data=corpus.train,
            collate_fn=corpus.collate,
            config=config.without_monitors_of_deepspeed(),
        )
    _warn_of_split_groups(engine)
    trainer = Trainer(config, engine, corpus, args.dump_dir, baseline, beat, files, monitors)
    trainer.profile(profiled)
    try:
        with explained(config, beat, engine):
            status = trainer.train(resume=args.resume)
    finally:
        trainer.close()
        if files is not None:
            files.close()
    if (
        dist.is_initialized()
    ):  # not after a failure: other ranks may be inside a collective, and the message must get out
        dist.destroy_process_group()
    return status


def _warn_of_split_groups(engine: SDPEngine) -> None:
    """Say on rank 0 if tensor-parallel ranks are on several hosts. Collective."""
    degree = engine.layout.mesh.tp
    hosts = told_apart(engine.gather_facts((socket.gethostname(), machine_id()))) if degree > 1 else []
    problem = split_tensor_group(hosts, degree)
    if problem is not None and engine.global_rank == 0:
        log.warning("WARNING: %s", problem)


def _with_absolute_paths(config: Config) -> Config:
    """The run's own config.json is read from other directories too."""
    paths = {"data": ("path", config.data.path), "training": ("init_from", config.training.init_from)}
    changed = {
        section: getattr(config, section).model_copy(update={key: str(Path(path).absolute())})
        for section, (key, path) in paths.items()
        if path is not None
    }
    return config.model_copy(update=changed)


@contextmanager
def explained(config: Config, beat: Heartbeat, engine: SDPEngine | None = None) -> Iterator[None]:
    """Turn a failed allocation into an OutOfMemoryError that says what would need less, and a broken connection into a PeerLostError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise out_of_memory(config, str(beat.place), engine) from None
        if (gone := _GONE.search(str(error))) is None:
            raise
        raise PeerLostError(
            f"{beat.place}: another rank is gone ({gone[0]}); its log or its launcher says why"
        ) from None


def _set_up_logging(rank: int, dump_dir: Path) -> None:
    """Rank 0 on the terminal and in its log; the others, warnings and errors, in logs/rank-R.log."""
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    log.propagate = False
    log.handlers.clear()
    if rank == 0:
        terminal = logging.StreamHandler()
        terminal.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(terminal)
    (dump_dir / "logs").mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(dump_dir / "logs" / f"rank-{rank}.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
