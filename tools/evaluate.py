"""``sdp evaluate DIR``: held-out loss (of a classifier its accuracy too) of a checkpoint's full model, in one process and without
optimizer state.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch

from ..engine.backend import Backend
from ..engine.batch.call import target_count
from ..engine.batch.loader import evaluation_batches
from ..engine.batch.size import BatchSize
from ..engine.checkpoint.load import load
from ..engine.checkpoint.state import weights_of
from ..engine.construct import build_backend, values_to_give
from ..engine.distributed.mesh import Mesh
from ..engine.errors import ConfigError
from ..engine.placement.layout import Layout
from ..models.registry import build_model
from .runs import saved_run
from .runs.dataset import Corpus, open_prepared
from .runs.run_files import read_run
from .runs.saved_run import SavedRun

# The reference engine holds the whole model in one process, whatever the layout that trained it, and however fast.
_IN_ONE_PROCESS = (
    "sdp.engine=reference",
    "fp16.enabled=false",
    "tensor_parallel.autotp_size=1",
    "training.init_from=null",
    "training.compile=false",
    "activation_checkpointing.mode=none",
)


@dataclass(frozen=True)
class Evaluation:
    """``loss``: mean over ``targets`` tokens or images, in nats; ``in_training``: what the run itself measured at this step, if it did.

    ``sequences``: samples. A language model has a ``perplexity``, a classifier an ``accuracy``.
    """

    checkpoint: str
    step: int
    data: str
    batches: int
    sequences: int
    targets: int
    loss: float
    perplexity: float | None
    accuracy: float | None
    in_training: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    saved_run.add_arguments(parser)
    parser.add_argument(
        "--batches", metavar="N", type=int, help="held-out batches per data rank (default: those of the run)"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print; nothing is written. Raises an SDPError for a checkpoint or data that cannot be read."""
    if args.batches is not None and args.batches < 1:
        raise ConfigError(f"--batches {args.batches}: at least one batch is needed")
    result = evaluate(saved_run.find(args, _IN_ONE_PROCESS), args.batches)
    print(json.dumps(asdict(result)) if args.json else _table(result))
    return 0


def evaluate(saved: SavedRun, limit: int | None = None) -> Evaluation:
    """The full model of ``saved`` on the batches that the run's own evaluations read, at most ``limit`` per data rank."""
    corpus = open_prepared(saved.config, saved.data)
    batches = list(_batches(saved, corpus, limit or saved.config.training.evaluate_batches))
    backend = _load(saved, corpus)
    loss = backend.evaluate(batches)
    measures = {name: backend.evaluate([{**batch, "measure": name} for batch in batches]) for name in corpus.measures}
    own = [line["loss"] for line in read_run(saved.dump_dir).evaluations if line["step"] == saved.step]
    return Evaluation(
        checkpoint=str(saved.checkpoint),
        step=saved.step,
        data=str(saved.data),
        batches=len(batches),
        sequences=sum(len(batch["labels"]) for batch in batches),
        targets=sum(target_count(backend.module, batch) for batch in batches),
        loss=loss,
        perplexity=None if measures else math.exp(min(loss, 700.0)),
        accuracy=measures.get("accuracy"),
        in_training=own[-1] if own else None,
    )


def _batches(saved: SavedRun, corpus: Corpus, limit: int) -> Iterator[Any]:
    """Micro-batches of all data ranks of the run, which decide what is read, one after the other."""
    sdp, fsdp, tp, *sizes = saved.state["mesh"]
    mesh = Mesh(sdp, fsdp, tp, *map(tuple, sizes))
    micro = BatchSize.resolve(saved.config, mesh).micro
    loaders = (
        evaluation_batches(corpus.held_out, micro, rank, mesh.data_ranks, limit, corpus.collate_held_out)
        for rank in range(mesh.data_ranks)
    )
    return chain.from_iterable(loaders)


def _load(saved: SavedRun, corpus: Corpus) -> Backend:
    """The checkpoint's weights in evaluation mode."""
    model = build_model(saved.config.model, **corpus.facts)
    layout = Layout.of(model, saved.config, Mesh(saved.config.sdp.groups))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = build_backend(model, saved.config, layout, device, values_to_give(model, saved.config, layout))
    buffers = {name: buffer for name, buffer in backend.module.named_buffers() if name in layout.buffers}
    load(saved.checkpoint, weights_of({**backend.parameters, **buffers}), saved.state["files"], alone=True)
    backend.module.eval()
    return backend


def _table(result: Evaluation) -> str:
    samples = (
        f"{result.sequences:,} sequences, {result.targets:,} targets"
        if result.accuracy is None
        else f"{result.sequences:,} images"
    )
    rows = {"checkpoint": result.checkpoint, "held out": f"{samples} of {result.data}", "loss": f"{result.loss:.6f}"}
    if result.perplexity is not None:
        rows["perplexity"] = f"{result.perplexity:.4f}"
    if result.accuracy is not None:
        rows["accuracy"] = f"{result.accuracy:.2%}"
    if result.in_training is not None:
        rows["in training"] = f"{result.in_training:.6f} at this step"
    return "\n".join(f"{name:<12} {text}" for name, text in rows.items())
