"""What every rank of a run does before it trains: its configuration, logs, heartbeat, data and
engine.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ...engine.accounting.memory import PeakMemory
from ...engine.config.load import load_config
from ...engine.config.schema import Config
from ...engine.distributed.heartbeat import Heartbeat
from ...engine.distributed.join import join
from ...engine.engine import SDPEngine
from ...engine.environment.detect import whereabouts_file
from ...engine.initialize import initialize
from ...engine.service.steps import Membership
from ...models.registry import build_model
from ..runs.dataset import Corpus, open_corpus
from ..runs.run_config import with_absolute_paths, with_initial_model
from ..shared.files import WriteError, refuse_link
from .options import TrainOptions
from .process.log_file import LogFile, PrintableFormatter, TerminalHandler

log = logging.getLogger("sdp")


def read_config(options: TrainOptions) -> Config:
    """Read the configuration in the form that is written to config.json."""
    return with_absolute_paths(with_initial_model(load_config(options.config, options.overrides)))


@contextlib.contextmanager
def started(
    config: Config, options: TrainOptions, rank: int, world_size: int, on_stall: Callable[[str], None]
) -> Iterator[Heartbeat]:
    """Open the logs, tell the launcher where this rank is, and join the other ranks. Collective.

    A rank of several is watched until its process has ended, because an exit that hangs would keep
    the others waiting. A run in one process is watched inside the ``with`` block only: the process
    may go on with other work.

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
    beat = Heartbeat(rank, whereabouts_file(), logs / f"rank-{rank}.log", on_stall)
    training = config.training
    beat.at(0, "starting", training.start_timeout)
    try:
        join(max(training.start_timeout, training.step_timeout))
        yield beat
    finally:
        if world_size == 1:
            beat.stop()


def set_up_logging(rank: int, dump_dir: Path) -> None:
    """Set up the log files. Rank 0 also logs to the terminal.

    The files of the other ranks have only warnings and errors.
    """
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    log.propagate = False
    log.handlers.clear()
    if rank == 0:
        log.addHandler(TerminalHandler(sys.stderr))
    refuse_link(dump_dir / "logs")
    try:
        (dump_dir / "logs").mkdir(parents=True, exist_ok=True)
        handler = LogFile(dump_dir / "logs" / f"rank-{rank}.log")
    except OSError as error:
        raise WriteError.of(dump_dir / "logs", error) from None
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)


def build(config: Config, dump_dir: Path, beat: Heartbeat, service: Membership | None) -> tuple[Corpus, SDPEngine, int]:
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
        config=with_loss_weighting(config, corpus).without_monitors(),
        service=service,
    )
    if engine.calls is not None:  # the heartbeat watches
        engine.calls.stop()
        engine.calls = None
    return corpus, engine, baseline


def with_loss_weighting(config: Config, corpus: Corpus) -> Config:
    """Let losses weigh as many labels as they count if these differ, unless the file decides."""
    if config.training.loss_weighting is not None or not corpus.masks_labels:
        return config
    training = config.training.model_copy(update={"loss_weighting": "tokens"})
    return config.model_copy(update={"training": training})
