"""``sdp evaluate DIR``: computes the held-out loss of a checkpoint's full model.

For a classifier, it also computes the accuracy. One process is enough, because optimizer state is
not read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from ..data.clusters import load_router
from ..engine.batch.call import count_targets
from ..engine.batch.loader import evaluation_batches
from ..engine.batch.size import BatchSize
from ..engine.environment.process import cache_folder
from ..engine.errors import ConfigError, escape
from ..engine.model_interface import get_config
from ..models.layers import IGNORE_INDEX
from ..models.registry import build_model
from .export import export
from .runs import saved_run
from .runs.dataset import Corpus, dealt, open_prepared, router_folder, verify
from .runs.run_files import read_run
from .runs.saved_run import CheckpointChoice, SavedRun
from .runs.whole_model import IN_ONE_PROCESS, check_exportable, whole_model
from .shared.table import Row, Table, plain_row
from .tasks import LoadedTasks, Scores
from .train.loop.evaluator import Routed

_LARGEST_FILE = 5 * 10**9  # bytes of an exported file


@dataclass(frozen=True)
class Evaluation:
    """The result of ``sdp evaluate``.

    With several paths (``sdp.paths``), each sample belongs to the cluster of one path. A router
    reads a prefix of the sample and chooses the cluster, or the cluster is the sample's source.
    With one path, the fields from ``path_losses`` on are None.

    Attributes:
        checkpoint: the directory of the checkpoint.
        step: the optimizer step of the checkpoint.
        data: the directory of the data.
        batches: the number of micro-batches, over all data ranks.
        sequences: the number of samples.
        targets: the number of tokens or images that the loss is a mean over.
        loss: the mean loss in nats.
        perplexity: the perplexity of a language model, None for a classifier.
        accuracy: the accuracy of a classifier, None for a language model.
        in_training: the loss that the run itself measured at this step, or None.
        tasks: the scores of lm-evaluation-harness, by task.
        path_losses: the loss of each path on its own cluster. None if the cluster is empty.
        cluster_losses: for each path, its loss on each cluster.
        single_path_losses: the loss of each path on all samples.
        loss_after_prefix: the loss of the tokens after the prefix.
        single_path_losses_after_prefix: for each path, the loss of all tokens after the prefix.
        ensemble_loss_after_prefix: the loss of these tokens, predicted by all paths together, with
            the weights that the router gives them.
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
    cluster_losses: list[list[float | None]] | None = None
    single_path_losses: list[float | None] | None = None
    loss_after_prefix: float | None = None
    single_path_losses_after_prefix: list[float | None] | None = None
    ensemble_loss_after_prefix: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    saved_run.add_arguments(parser)
    parser.add_argument(
        "--batches", metavar="N", type=int, help="number of held-out batches per data rank (default: as in the run)"
    )
    parser.add_argument(
        "--tasks",
        metavar="NAME,…",
        help="also run these tasks of lm-evaluation-harness (pip install 'sdp-engine[eval]')",
    )
    parser.add_argument("--limit", metavar="N", type=int, help="use the first N documents of each task (default: all)")
    parser.add_argument(
        "--num-fewshot", metavar="N", type=int, help="number of examples in a prompt (default: that of the task)"
    )
    parser.add_argument("--include-path", metavar="DIR", help="directory with your own task files, which may run code")
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")


def run(args: argparse.Namespace) -> int:
    """Evaluate a checkpoint and print the result.

    Raises an SDPError if the checkpoint or the data cannot be read.
    """
    if args.batches is not None and args.batches < 1:
        raise ConfigError(f"--batches {args.batches}: give 1 or more")
    tasks, choice = _load_tasks(args), CheckpointChoice.from_args(args)
    result = saved_run.use(choice, lambda saved: evaluate(saved, args.batches, tasks), IN_ONE_PROCESS)
    print(as_json(result) if args.json else escape(_table(result)))
    return 0


def _load_tasks(args: argparse.Namespace) -> LoadedTasks | None:
    if args.tasks is None:
        if any(value is not None for value in (args.limit, args.num_fewshot, args.include_path)):
            raise ConfigError("--limit, --num-fewshot and --include-path are for tasks; name some with --tasks")
        return None
    if args.num_fewshot is not None and args.num_fewshot < 0:
        raise ConfigError(f"--num-fewshot {args.num_fewshot}: give 0 or more")
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"--limit {args.limit}: give 1 or more")
    if not (names := [name for name in args.tasks.split(",") if name]):
        raise ConfigError("--tasks: no task is named; give one or more, such as hellaswag,arc_easy")
    return LoadedTasks.load(names, args.limit, args.num_fewshot, args.include_path)


def as_json(result: Evaluation) -> str:
    """Return ``result`` as one line of JSON. A loss that is NaN or infinite becomes null."""
    values = asdict(result)
    unknown = {key: None for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps(values | unknown, allow_nan=False)


def evaluate(saved: SavedRun, limit: int | None = None, tasks: LoadedTasks | None = None) -> Evaluation:
    """Evaluate the full model of ``saved`` on held-out data of its run, and then on ``tasks``.

    ``limit`` is the largest number of batches of each data rank. If None, it is the same as in the
    run. Raises ConfigError if the model cannot be evaluated.
    """
    if tasks is not None and saved.config.data.name is not None:
        raise ConfigError(f"--tasks: tasks are for language models, and {saved.dump_dir} trained on images")
    count = saved.config.sdp.paths.count if saved.config.sdp.paths is not None else 1
    if tasks is not None and count > 1:
        raise ConfigError(
            f"--tasks: tasks need one model, but {saved.dump_dir} has several paths; evaluate an exported path (sdp "
            "export)"
        )
    if tasks is not None and not saved.is_model:
        check_exportable(saved, "--tasks")
    corpus = dealt(saved.config, open_prepared(saved.config, saved.data))
    verify(saved.config, saved.data)
    built = build_model(saved.config.model, **corpus.facts)
    config = get_config(built)
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if saved.is_model and most is not None and saved.config.data.sequence_length > most:
        raise ConfigError(
            f"data.sequence_length: {saved.config.data.sequence_length}, but the model {saved.dump_dir} reads at most "
            f"{most} tokens; lower it with --set data.sequence_length={most}"
        )
    batches = list(_batches(saved, corpus, limit or saved.config.training.evaluate_batches))
    measures, of_paths = dict[str, float](), dict[str, Any]()
    counts = [int(count_targets(built, batch)) for batch in batches]
    if corpus.paths is not None:
        loss, of_paths = _evaluate_paths(saved, built, corpus, batches)
    else:
        with whole_model(saved, built) as model:
            loss = model.mean_loss(batches, counts)
            measures = {
                name: model.mean_loss([{**batch, "measure": name} for batch in batches], counts)
                for name in corpus.measures
            }
    written = () if saved.is_model else read_run(saved.dump_dir).evaluations
    losses = [line.get("loss") for line in written if line["step"] == saved.step]
    return Evaluation(
        checkpoint=str(saved.checkpoint),
        step=saved.step,
        data=str(saved.data),
        batches=len(batches),
        sequences=sum(len(batch["labels"]) for batch in batches),
        targets=sum(counts),
        loss=loss,
        perplexity=None if measures else math.exp(min(loss, 700.0)),
        accuracy=measures.get("accuracy"),
        in_training=losses[-1] if losses else None,
        tasks=None if tasks is None else _run_tasks(tasks, saved),
        **of_paths,
    )


def _evaluate_paths(
    saved: SavedRun, built: nn.Module, corpus: Corpus, batches: list[dict[str, Any]]
) -> tuple[float, dict[str, Any]]:
    """Return the routed loss, and the losses of all paths by their names in :class:`Evaluation`."""
    assert corpus.paths is not None
    count, prefix = len(corpus.paths.members), corpus.router_prefix
    folder = router_folder(saved.config, saved.data)
    router = load_router(folder) if folder is not None else None
    clusters = [batch.pop("path") for batch in batches]
    # The logarithms of the router's weights of the paths for each row, (rows, paths).
    scores = [] if router is None else [router.scores(batch["input_ids"].numpy()) for batch in batches]
    weights = [torch.from_numpy(of_batch).log_softmax(1).float() for of_batch in scores]
    ensemble = [torch.full(batch["labels"][:, 1:].shape, -math.inf) for batch in batches]
    # Of all tokens, and of the tokens after the prefix.
    sums, counts = torch.zeros(2, count, count, dtype=torch.float64), torch.zeros(2, count)
    for path in range(count):
        with whole_model(saved, built, path) as model:
            shown = tqdm(batches, f"path {path}", disable=not sys.stderr.isatty())
            for number, (batch, cluster) in enumerate(zip(shown, clusters, strict=True)):
                losses = model.target_losses(batch)
                for row, tokens in enumerate((losses, losses[:, (prefix or 1) - 1 :])):
                    sums[row, path].index_add_(0, cluster, tokens.double().sum(1))
                if weights:
                    ensemble[number] = ensemble[number].logaddexp(weights[number][:, path, None] - losses)
    for batch, cluster in zip(batches, clusters, strict=True):
        for row, tokens in enumerate((batch["labels"][:, 1:], batch["labels"][:, prefix or 1 :])):
            counts[row].index_add_(0, cluster, (tokens != IGNORE_INDEX).sum(1).float())
    found: dict[str, Any] = {
        "path_losses": _means(sums[0].diagonal(), counts[0]),
        "cluster_losses": [_means(row, counts[0]) for row in sums[0]],
        "single_path_losses": _means(sums[0].sum(1), counts[0].sum()),
    }
    if prefix is not None and counts[1].any():
        later = sum(
            mixed[:, prefix - 1 :][batch["labels"][:, prefix:] != IGNORE_INDEX].double().sum()
            for mixed, batch in zip(ensemble, batches, strict=True)
        )
        found |= {
            "loss_after_prefix": float(sums[1].trace() / counts[1].sum()),
            "single_path_losses_after_prefix": _means(sums[1].sum(1), counts[1].sum()),
            "ensemble_loss_after_prefix": float(-later / counts[1].sum()),
        }
    return float(sums[0].trace() / counts[0].sum()), found


def _means(sums: torch.Tensor, counts: torch.Tensor) -> list[float | None]:
    return [mean if math.isfinite(mean) else None for mean in (sums / counts).tolist()]


def _run_tasks(tasks: LoadedTasks, saved: SavedRun) -> Scores:
    micro = BatchSize.resolve(saved.config, saved.mesh).micro
    if saved.is_model:
        return tasks.run(saved.dump_dir, micro)
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="export-", dir=cache_folder()) as made:
        export(saved, Path(made) / "model", torch.float32, _LARGEST_FILE)
        return tasks.run(Path(made) / "model", micro)


def _batches(saved: SavedRun, corpus: Corpus, limit: int) -> Iterator[Any]:
    """The micro-batches that the data ranks of the run would read, one rank after the other."""
    mesh = saved.mesh
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
    if result.perplexity is not None:
        rows["perplexity"] = f"{result.perplexity:.4f}"
    if result.accuracy is not None:
        rows["accuracy"] = f"{result.accuracy:.2%}"
    if result.in_training is not None:
        rows["in training"] = f"{result.in_training:.6f} at this step"
    for task, measures in (result.tasks or {}).items():
        scores = (f"{name} {value:.4g}" for name, value in measures.items() if value is not None)
        rows[task] = ", ".join(scores)
    lines = [f"{name:<12} {text}" for name, text in rows.items()]
    return "\n".join([*lines, *_path_table(result)])


def _path_table(result: Evaluation) -> list[str]:
    if result.cluster_losses is None or result.single_path_losses is None:
        return []
    count, rest = len(result.cluster_losses), result.single_path_losses_after_prefix
    table = Table(
        [*(f"cluster {cluster}" for cluster in range(count)), "all", *(["after prefix"] if rest is not None else [])],
        [
            Row("loss of"),
            *(
                plain_row(f"path {path}", [*losses, alone, *([] if rest is None else [rest[path]])], ".4f")
                for path, (losses, alone) in enumerate(
                    zip(result.cluster_losses, result.single_path_losses, strict=True)
                )
            ),
            plain_row("each by its path", [*(result.path_losses or []), result.loss, result.loss_after_prefix], ".4f"),
            plain_row(
                "all, by the router's weights", [*[None] * (count + 1), result.ensemble_loss_after_prefix], ".4f"
            ),
        ],
    )
    return ["", *table.text().splitlines()]
