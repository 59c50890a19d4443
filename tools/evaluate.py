"""``sdp evaluate DIR``: the held-out loss of a checkpoint's full model, and the accuracy of a
classifier.

It runs in one process and does not read optimizer state.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, NamedTuple

from ..engine.batch.call import target_count
from ..engine.batch.loader import evaluation_batches
from ..engine.batch.size import BatchSize
from ..engine.config.schema import TasksSection
from ..engine.config.section import parse_section
from ..engine.distributed.mesh import Mesh
from ..engine.errors import ConfigError, escape
from ..engine.full_model.evaluation import split_by_path
from ..models.registry import build_model
from .runs import saved_run
from .runs.dataset import Corpus, dealt, open_prepared, verify
from .runs.run_files import read_run
from .runs.saved_run import CheckpointChoice, SavedRun
from .runs.whole_model import IN_ONE_PROCESS, WholeModel, whole_model
from .tasks.harness import LoadedTasks, Scores
from .tasks.scoring import FullModel, Scorer, max_length
from .train.loop.evaluator import Routed, without_prefix


@dataclass(frozen=True)
class EvaluateOptions:
    """The arguments of ``sdp evaluate``.

    Attributes:
        choice: which checkpoint.
        batches: held-out batches per data rank, None for as many as the run itself read.
        json: print one line of JSON.
        tasks: tasks of lm-evaluation-harness, None for none.
        num_fewshot: examples in a prompt, None for those of the task.
    """

    choice: CheckpointChoice
    batches: int | None = None
    json: bool = False
    tasks: TasksSection | None = None
    num_fewshot: int | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> EvaluateOptions:
        """The options in what :func:`add_arguments` has put into ``args``. Raises ConfigError."""
        if args.batches is not None and args.batches < 1:
            raise ConfigError(f"--batches {args.batches}: at least one batch is needed")
        tasks = None
        if args.tasks is not None:
            wanted = {
                "tasks": [name for name in args.tasks.split(",") if name],
                "limit": args.limit,
                "include_path": args.include_path,
            }
            tasks = parse_section(TasksSection, wanted, "--tasks")
        elif any(value is not None for value in (args.limit, args.num_fewshot, args.include_path)):
            raise ConfigError("--limit, --num-fewshot and --include-path are for tasks; name some with --tasks")
        if args.num_fewshot is not None and args.num_fewshot < 0:
            raise ConfigError(f"--num-fewshot {args.num_fewshot}: a number of examples is 0 or more")
        return cls(CheckpointChoice.from_args(args), args.batches, args.json, tasks, args.num_fewshot)


@dataclass(frozen=True)
class Evaluation:
    """The result of ``sdp evaluate``.

    Attributes:
        checkpoint: the directory of the checkpoint.
        step: the optimizer step of the checkpoint.
        data: the directory of the data.
        batches: micro-batches read, over all data ranks.
        sequences: samples read.
        targets: tokens or images that the loss is a mean over.
        loss: the mean loss in nats.
        perplexity: of a language model.
        accuracy: of a classifier.
        in_training: the loss that the run itself measured at this step, if it did.
        tasks: the scores of lm-evaluation-harness, by task.
        path_losses: with several paths, the loss of each on the samples that are dealt to it, None
            without samples.
        loss_after_prefix: the loss of the tokens that the router does not read.
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
    tasks: Scores | None = None
    path_losses: list[float | None] | None = None
    loss_after_prefix: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    saved_run.add_arguments(parser)
    parser.add_argument(
        "--batches", metavar="N", type=int, help="held-out batches per data rank (default: those of the run)"
    )
    parser.add_argument(
        "--tasks",
        metavar="NAME,…",
        help="also run these tasks of lm-evaluation-harness (pip install 'sdp-engine[eval]')",
    )
    parser.add_argument("--limit", metavar="N", type=int, help="the first N documents of each task (default: all)")
    parser.add_argument(
        "--num-fewshot", metavar="N", type=int, help="examples in a prompt (default: those of the task)"
    )
    parser.add_argument(
        "--include-path", metavar="DIR", help="a directory with task files of your own, which may run code"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(args: argparse.Namespace) -> int:
    """Evaluate a checkpoint and print the result.

    Raises an SDPError if the checkpoint or the data cannot be read.
    """
    options = EvaluateOptions.from_args(args)
    tasks = LoadedTasks.load(options.tasks, "--tasks", options.num_fewshot) if options.tasks else None
    result = saved_run.use(options.choice, lambda saved: evaluate(saved, options.batches, tasks), IN_ONE_PROCESS)
    print(as_json(result) if options.json else escape(_table(result)))
    return 0


def as_json(result: Evaluation) -> str:
    """Return ``result`` as one line of JSON.

    A loss that is NaN or infinite becomes null, which JSON has no numbers for.
    """
    values = asdict(result)
    unknown = {key: None for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps(values | unknown, allow_nan=False)


def evaluate(saved: SavedRun, limit: int | None = None, tasks: LoadedTasks | None = None) -> Evaluation:
    """Evaluate the full model of ``saved`` on the batches that the run itself reads, at most
    ``limit`` per data rank. Then evaluate ``tasks``.

    Raises ConfigError if there are tasks and the run trained on images.
    """
    if tasks is not None and saved.config.data.name is not None:
        raise ConfigError(f"--tasks: tasks are for language models, and {saved.dump_dir} trained on images")
    count = saved.config.sdp.paths.count if saved.config.sdp.paths is not None else 1
    if tasks is not None and count > 1:
        raise ConfigError(
            f"--tasks: tasks run one model, and {saved.dump_dir} has several paths; evaluate an exported path "
            "(sdp export)"
        )
    corpus = dealt(saved.config, open_prepared(saved.config, saved.data))
    verify(saved.config, saved.data)
    built = build_model(saved.config.model, **corpus.facts)
    most = max_length(built, saved.config.data.sequence_length)
    if saved.is_model and saved.config.data.sequence_length > most:
        raise ConfigError(
            f"data.sequence_length: {saved.config.data.sequence_length}, but {saved.dump_dir} reads at most {most} "
            f"tokens; lower it with --set data.sequence_length={most}"
        )
    batches = list(_batches(saved, corpus, limit or saved.config.training.evaluate_batches))
    ids = [0] * len(batches) if corpus.paths is None else [batch.pop("path") for batch in batches]
    parts, of_parts = split_by_path(batches, ids, count, weighted=False)
    of_paths, later, measures, scores = list[_Loss](), list[_Loss](), dict[str, float](), None
    for path in range(count):
        mine = [part for part, of_part in zip(parts, of_parts, strict=True) if of_part == path]
        with whole_model(saved, built, path) as model:
            counts = [target_count(model.module, batch) for batch in mine]
            of_paths.append(_Loss(model.mean_loss(mine, counts), sum(counts)))
            if corpus.router_prefix is not None and corpus.router_prefix < saved.config.data.sequence_length:
                rest = [without_prefix(batch, corpus.router_prefix) for batch in mine]
                counts_of_rest = [target_count(model.module, batch) for batch in rest]
                later.append(_Loss(model.mean_loss(rest, counts_of_rest), sum(counts_of_rest)))
            measures = {
                name: model.mean_loss([{**batch, "measure": name} for batch in mine], counts)
                for name in corpus.measures
            }
            scores = _run_tasks(tasks, saved, model) if tasks is not None else None
    loss = _mean_of(of_paths)
    written = () if saved.is_model else read_run(saved.dump_dir).evaluations
    losses = [line.get("loss") for line in written if line["step"] == saved.step]
    return Evaluation(
        checkpoint=str(saved.checkpoint),
        step=saved.step,
        data=str(saved.data),
        batches=len(batches),
        sequences=sum(len(batch["labels"]) for batch in batches),
        targets=sum(one.targets for one in of_paths),
        loss=loss,
        perplexity=None if measures else math.exp(min(loss, 700.0)),
        accuracy=measures.get("accuracy"),
        in_training=losses[-1] if losses else None,
        tasks=scores,
        path_losses=[one.mean if one.targets else None for one in of_paths] if count > 1 else None,
        loss_after_prefix=_mean_of(later) if later else None,
    )


class _Loss(NamedTuple):
    """The mean loss of a path over so many targets."""

    mean: float
    targets: int


def _mean_of(losses: Sequence[_Loss]) -> float:
    targets = sum(one.targets for one in losses)
    return sum(one.mean * one.targets for one in losses if one.targets) / targets if targets else math.nan


def _run_tasks(tasks: LoadedTasks, saved: SavedRun, model: WholeModel) -> Scores:
    longest = max_length(model.module, saved.config.data.sequence_length)
    micro = BatchSize.resolve(saved.config, _mesh_of(saved)).micro
    scorer = Scorer(FullModel(model.module, model.mean_loss, longest, micro, model.device))
    return scorer.lead(lambda: tasks.run(scorer, saved.data))


def _mesh_of(saved: SavedRun) -> Mesh:
    """The mesh of the run that wrote the checkpoint."""
    return Mesh(*saved.state["mesh"][:3])


def _batches(saved: SavedRun, corpus: Corpus, limit: int) -> Iterator[Any]:
    """The micro-batches that the data ranks of the run would read, one rank after the other."""
    mesh = _mesh_of(saved)
    micro = BatchSize.resolve(saved.config, mesh).micro
    loaders = (
        evaluation_batches(
            corpus.held_out if corpus.paths is None else Routed(corpus.held_out, corpus.paths),
            micro,
            rank,
            mesh.data_ranks,
            limit,
            corpus.collate_held_out,
            drop_last=saved.config.data.name is None,
        )
        for rank in range(mesh.data_ranks)
    )
    return chain.from_iterable(loaders)


def _table(result: Evaluation) -> str:
    samples = (
        f"{result.sequences:,} sequences, {result.targets:,} targets"
        if result.accuracy is None
        else f"{result.sequences:,} images"
    )
    rows = {"checkpoint": result.checkpoint, "held out": f"{samples} of {result.data}", "loss": f"{result.loss:.6f}"}
    if result.path_losses is not None:
        rows["by path"] = ", ".join("no samples" if loss is None else f"{loss:.6f}" for loss in result.path_losses)
    if result.loss_after_prefix is not None:
        rows["after prefix"] = f"{result.loss_after_prefix:.6f}"
    if result.perplexity is not None:
        rows["perplexity"] = f"{result.perplexity:.4f}"
    if result.accuracy is not None:
        rows["accuracy"] = f"{result.accuracy:.2%}"
    if result.in_training is not None:
        rows["in training"] = f"{result.in_training:.6f} at this step"
    for task, measures in (result.tasks or {}).items():
        scores = (f"{name} {value:.4g}" for name, value in measures.items() if value is not None)
        rows[task] = ", ".join(scores)
    return "\n".join(f"{name:<12} {text}" for name, text in rows.items())
