"""One rank of ``sdp train``: checks the run, builds everything, and starts the trainer."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from ...engine.accounting.memory import PeakMemory
from ...engine.config.load import load_config
from ...engine.config.noise import NoiseProfile
from ...engine.config.schema import Config
from ...engine.distributed.hosts import machine_id, split_tensor_group, told_apart
from ...engine.distributed.join import join
from ...engine.distributed.mesh import mesh_of
from ...engine.engine import SDPEngine
from ...engine.environment.detect import detect
from ...engine.environment.supervision import whereabouts_file
from ...engine.errors import PeerLostError
from ...engine.initialize import initialize
from ...launcher.heartbeat import Heartbeat
from ...models.registry import build_model
from ..runs.dataset import Corpus, open_corpus
from ..runs.run_config import with_initial_model
from ..runs.run_files import RunFiles
from ..shared.files import NO_ROOM, WriteError, refuse_link
from ..tasks.harness import LoadedTasks
from . import preflight
from .changed_settings import keep_holders
from .checkpointer import newest_checkpoint
from .observers.monitors import open_monitors
from .observers.observer import Observer
from .observers.probe import MemoryProbe
from .observers.profiler import StepProfiler, parse_steps
from .observers.progress import Progress
from .observers.recorder import Recorder
from .options import TrainOptions
from .out_of_memory import is_out_of_memory, out_of_memory
from .process.log_file import LogFile
from .trainer import Trainer

log = logging.getLogger("sdp")

# Messages of gloo and NCCL if the process at the other end is gone. Some messages name its address
# at the start or at the end.
_ADDRESS = r"\[[0-9a-fA-F.:]+\]:\d+"
_GONE = re.compile(
    rf"({_ADDRESS}: )?(Connection (reset|closed) by (remote )?peer|Broken pipe)( {_ADDRESS})?|ncclRemoteError"
)


def run(options: TrainOptions, on_stall: Callable[[str], None]) -> int:
    """Run this rank's part of a run.

    Args:
        options: the arguments of the command line.
        on_stall: called with a message, from another thread, when the rank makes no progress.

    Returns:
        The exit code.
    """
    profiled = parse_steps(options.profile) if options.profile is not None else None
    config = with_absolute_paths(with_initial_model(load_config(options.config, options.overrides)))
    environment = detect()
    rank, world_size = (environment.rank, environment.world_size) if environment is not None else (0, 1)
    dump_dir = options.dump_dir
    if options.resume:
        config = keep_holders(config, dump_dir)
    config = preflight.check(config, mesh_of(config, world_size), dump_dir, resume=options.resume)
    files = RunFiles(dump_dir, resume=options.resume) if rank == 0 else None
    monitors = open_monitors(config, dump_dir, resume=options.resume) if rank == 0 else None
    tasks = _load_tasks(config) if rank == 0 else None
    set_up_logging(rank, dump_dir)
    log_start(config, world_size, dump_dir)
    beat = start_heartbeat(config, options, rank, world_size, on_stall)
    join_ranks(config)
    with explained(config, beat, dump_dir=dump_dir):
        corpus, engine, baseline = build(config, dump_dir, beat)
    _warn_of_split_groups(engine)
    observers: list[Observer] = [MemoryProbe(engine)] if MemoryProbe.works_with(engine) else []
    if profiled is not None:
        observers.append(StepProfiler(*profiled, dump_dir / "profile", engine.device, records=rank == 0))
    if files is not None and monitors is not None:
        observers += [Recorder(files), monitors, Progress(config.steps_per_print)]
    trainer = Trainer(
        config, engine, corpus, dump_dir, baseline=baseline, beat=beat, files=files, observers=observers, tasks=tasks
    )
    try:
        with explained(config, beat, engine, dump_dir=dump_dir):
            status = trainer.train(resume=options.resume)
    finally:
        trainer.close()
        if files is not None:
            files.close()
    # This is skipped after a failure. Other ranks may then be inside a collective, and the message
    # must get out.
    if dist.is_initialized():
        dist.destroy_process_group()
    return status


def _load_tasks(config: Config) -> LoadedTasks | None:
    """Load the tasks of lm-evaluation-harness, before any rank waits for another."""
    section = config.training.evaluate_tasks
    return LoadedTasks.load(section, preflight.TASKS) if section is not None else None


def log_start(config: Config, world_size: int, dump_dir: Path) -> None:
    log.info("%d process(es), %d thread(s) each; logs in %s", world_size, torch.get_num_threads(), dump_dir / "logs")
    if config.env:
        log.info("environment of every rank: %s", " ".join(f"{name}={value}" for name, value in config.env.items()))


def start_heartbeat(
    config: Config, options: TrainOptions, rank: int, world_size: int, on_stall: Callable[[str], None]
) -> Heartbeat:
    """Start to tell the launcher where this rank is."""
    # Without a launcher of this package, nothing else would end a stopped rank.
    guarded = options.above is None and world_size > 1
    log_file = options.dump_dir / "logs" / f"rank-{rank}.log"
    beat = Heartbeat(rank, whereabouts_file(), log_file, on_stall, guarded=guarded)
    beat.at(0, "starting", config.training.start_timeout)
    return beat


def join_ranks(config: Config) -> None:
    """Make the process group of all ranks. The engines of one process need none."""
    if not config.sdp.in_one_process:
        training = config.training
        join(max(training.start_timeout, training.save_timeout, training.step_timeout))


def build(config: Config, dump_dir: Path, beat: Heartbeat) -> tuple[Corpus, SDPEngine, int]:
    """Prepare the data, and build the model and its engine. Collective.

    Returns:
        The data, the engine, and the bytes of memory that the process had before the model.
    """
    beat.at(0, "preparing data", None)
    corpus = open_corpus(config, dump_dir)
    beat.at(0, "building the model", config.training.start_timeout)
    memory = PeakMemory(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    memory.reset()
    baseline = memory.read()
    engine, *_ = initialize(
        model=build_model(config.model, **corpus.facts),
        training_data=corpus.train,
        collate_fn=corpus.collate,
        config=config.without_monitors_of_deepspeed(),
    )
    return corpus, engine, baseline


def _warn_of_split_groups(engine: SDPEngine) -> None:
    """Warn on rank 0 if tensor-parallel ranks are on several hosts. Collective."""
    degree = engine.layout.mesh.tp
    hosts = told_apart(engine.gather_facts((socket.gethostname(), machine_id()))) if degree > 1 else []
    problem = split_tensor_group(hosts, degree)
    if problem is not None and engine.global_rank == 0:
        log.warning("WARNING: %s", problem)


def with_absolute_paths(config: Config) -> Config:
    """Make the paths of the configuration absolute.

    Other commands may read config.json from other directories.
    """
    paths = {"data": ("path", config.data.path), "training": ("init_from", config.training.init_from)}
    changed = {
        section: getattr(config, section).model_copy(update={key: str(Path(path).absolute())})
        for section, (key, path) in paths.items()
        if path is not None
    }
    if isinstance(profile := config.sdp.profile, NoiseProfile):
        profile = profile.model_copy(update={"noise": str(Path(profile.noise).absolute())})
        changed["sdp"] = config.sdp.model_copy(update={"profile": profile})
    if config.data.sources:
        sources = [each.model_copy(update={"path": str(Path(each.path).absolute())}) for each in config.data.sources]
        changed["data"] = config.data.model_copy(update={"sources": sources})
    tasks = config.training.evaluate_tasks
    if tasks is not None and tasks.include_path is not None:
        tasks = tasks.model_copy(update={"include_path": str(Path(tasks.include_path).absolute())})
        training = changed.get("training", config.training)
        changed["training"] = training.model_copy(update={"evaluate_tasks": tasks})
    return config.model_copy(update=changed)


@contextmanager
def explained(
    config: Config, beat: Heartbeat, engine: SDPEngine | None = None, *, dump_dir: Path | None = None
) -> Iterator[None]:
    """Turn failures of the machine into errors of one line.

    A failed allocation becomes an OutOfMemoryError that names remedies, a broken connection a
    PeerLostError, and a full disk a WriteError that names the newest checkpoint.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise out_of_memory(config, str(beat.whereabouts), engine) from None
        if (gone := _GONE.search(str(error))) is None:
            raise
        raise PeerLostError(
            f"{beat.whereabouts}: another rank is gone ({gone[0]}); its log or its launcher says why"
        ) from None
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        problem: Exception = WriteError.of(error.filename or dump_dir, error)
        raise _with_newest_checkpoint(problem, dump_dir) from None
    except WriteError as error:
        raise _with_newest_checkpoint(error, dump_dir) from None


def _with_newest_checkpoint(error: Exception, dump_dir: Path | None) -> WriteError:
    ending = f"; the newest checkpoint: {newest_checkpoint(dump_dir)}" if dump_dir is not None else ""
    return WriteError(f"{error}{ending}")


def set_up_logging(rank: int, dump_dir: Path) -> None:
    """Set up the log files. Rank 0 also logs to the terminal.

    The files of the other ranks have only warnings and errors.
    """
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    log.propagate = False
    log.handlers.clear()
    if rank == 0:
        terminal = logging.StreamHandler()
        terminal.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(terminal)
    refuse_link(dump_dir / "logs")
    try:
        (dump_dir / "logs").mkdir(parents=True, exist_ok=True)
        handler = LogFile(dump_dir / "logs" / f"rank-{rank}.log")
    except OSError as error:
        raise WriteError.of(dump_dir / "logs", error) from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
