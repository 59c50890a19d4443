"""Evaluates the full model on held-out data while a run trains."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset

from ....engine.batch.loader import evaluation_batches, evaluation_rows
from ....engine.batch.sampler import PathSamples
from ....engine.distributed.heartbeat import Heartbeat
from ....engine.engine import SDPEngine
from ....engine.full_model.evaluation import tracks_statistics
from ...runs.dataset import Corpus

# Activities that the heartbeat reports.
EVALUATION, READING = "evaluation", "reading samples"
CALIBRATION_BATCHES = 8  # training batches per rank that measure batch norm's statistics of the full model


class Routed(Dataset[dict[str, Any]]):
    """A data set that adds the number of the path (``sdp.paths``) to each sample, as ``path``."""

    def __init__(self, samples: Any, paths: PathSamples):
        self._samples, self._paths = samples, np.empty(len(samples), dtype=np.int64)
        for path, members in enumerate(paths.members):
            self._paths[members] = path

    def by_path(self, rows: Sequence[int], micro: int) -> Subset[dict[str, Any]]:
        """Return the samples ``rows``, ordered so that each micro-batch has a single path.

        A micro-batch has ``micro`` samples. Micro-batches of different paths alternate. Samples
        that fill no micro-batch come last.
        """
        members = [[row for row in rows if self._paths[row] == path] for path in range(self._paths.max() + 1)]
        whole = [len(mine) // micro * micro for mine in members]
        turns = [
            mine[start : start + micro]
            for start in range(0, max(whole), micro)
            for mine, end in zip(members, whole, strict=True)
            if start < end
        ]
        rest = [mine[end:] for mine, end in zip(members, whole, strict=True)]
        return Subset(self, list(chain.from_iterable([*turns, *rest])))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, item: int) -> dict[str, Any]:
        return {**self._samples[item], "path": int(self._paths[item])}


def without_prefix(batch: dict[str, Any], prefix: int) -> dict[str, Any]:
    """Return the batch with labels of -100 (no loss) for the first ``prefix`` tokens."""
    labels = batch["labels"].clone()
    labels[:, :prefix] = -100
    return {**batch, "labels": labels}


class Evaluator:
    """Evaluates the full model and the subnetworks of a run, always on the same held-out data."""

    def __init__(self, engine: SDPEngine, corpus: Corpus, beat: Heartbeat):
        self._engine, self._corpus, self._beat = engine, corpus, beat
        limit, paths, mesh = engine.config.training.evaluate_batches, corpus.paths, engine.layout.mesh
        self._held_out = self._batches(corpus.held_out if paths is None else Routed(corpus.held_out, paths), limit)
        self._own: list[Any] | None = None  # with paths, held-out samples of this rank's path
        if paths is not None:
            path, share, shares = paths.rank_of_path(mesh.data_rank(engine.global_rank), mesh.data_ranks)
            members = paths.members[path].tolist()
            self._own = self._batches(Subset(corpus.held_out, members), limit, share=(share, shares))
        self._sources = {name: self._batches(part, limit) for name, part in corpus.sources.items()}
        self._calibration = self._calibration_batches()

    def is_due(self, step: int, *, is_last: bool) -> bool:
        every = self._engine.config.training.evaluate_every
        return is_last or bool(every and step % every == 0)

    def evaluate(self, *, is_last: bool = False) -> dict[str, Any]:
        """Compute the losses of the full model and of every group's subnetwork. Collective.

        The result has the keys of a line of evaluations.jsonl.
        """
        engine = self._engine
        started = time.perf_counter()
        self._beat.at(engine.global_steps, READING, engine.config.training.start_timeout)
        batches, sources = _read(self._held_out), {name: _read(part) for name, part in self._sources.items()}
        paths = None if self._corpus.paths is None else [batch.pop("path") for batch in batches]
        own_batches = batches if self._own is None else _read(self._own)
        self._beat.at(engine.global_steps, EVALUATION, engine.config.training.start_timeout)
        losses = engine.evaluate_subnetworks(own_batches)
        with self.recalibrated():
            loss = engine.evaluate(batches, paths=paths)
            measures = {
                name: engine.evaluate([{**batch, "measure": name} for batch in batches])
                for name in self._corpus.measures
            }
            by_source = {
                name: engine.evaluate(part, paths=None if paths is None else [path] * len(part))
                for path, (name, part) in enumerate(sources.items())
            }
            routed = {} if paths is None else self._routed(batches, paths, is_last=is_last)
        measures = {**(measures or {"perplexity": math.exp(min(loss, 700.0))}), **routed}
        if by_source:
            measures = {**measures, "source_losses": by_source}
        return {"loss": loss, **measures, "subnetwork_losses": losses, "seconds": time.perf_counter() - started}

    def _routed(self, batches: list[Any], paths: list[Any], *, is_last: bool) -> dict[str, Any]:
        """Return the loss after the prefix that the router reads.

        After the last step, also return the losses of all held-out samples under each single path.
        """
        engine, prefix, found = self._engine, self._corpus.router_prefix, dict[str, Any]()
        if prefix is not None and prefix < engine.config.data.sequence_length:
            rest = [without_prefix(batch, prefix) for batch in batches]
            found["loss_after_prefix"] = engine.evaluate(rest, paths=paths)
        if is_last:
            found["single_path_losses"] = [
                engine.evaluate(batches, paths=[path] * len(batches)) for path in range(engine.layout.paths)
            ]
        return found

    def recalibrated(self) -> AbstractContextManager[None]:
        """A context in which batch norms have the statistics of the full model. Collective."""
        return self._engine.recalibrated(self._calibration) if self._calibration else nullcontext()

    def _calibration_batches(self) -> list[Any]:
        """Load the training batches on which the statistics of batch norms are measured.

        Their images are neither cropped nor mirrored.
        """
        if not tracks_statistics(self._engine.layout.buffers):
            return []
        self._beat.at(self._engine.global_steps, READING, self._engine.config.training.start_timeout)
        return _read(self._batches(self._corpus.calibration or self._corpus.train, CALIBRATION_BATCHES, drop_last=True))

    def _batches(
        self, samples: Any, limit: int | None, *, drop_last: bool = False, share: tuple[int, int] | None = None
    ) -> list[Any]:
        """Return loaders of batches, which are read one after the other."""
        engine = self._engine
        mesh = engine.layout.mesh
        if mesh.alone is not None and share is None:  # this group alone evaluates, and reads the shares of all
            found = list[Any]()
            for group in range(mesh.sdp):
                pair = (group * mesh.data_ranks + mesh.data_rank(engine.global_rank), mesh.sdp * mesh.data_ranks)
                found += self._batches(samples, limit, drop_last=drop_last, share=pair)
            return found
        rank, ranks = share or (mesh.data_rank(engine.global_rank), mesh.data_ranks)
        micro, drop_last = engine.train_micro_batch_size_per_gpu(), drop_last or engine.config.data.name is None
        if isinstance(samples, Routed):
            samples = samples.by_path(evaluation_rows(len(samples), ranks * micro, limit, drop_last=drop_last), micro)
        loader = evaluation_batches(
            samples,
            micro,
            data_rank=rank,
            data_ranks=ranks,
            limit=limit,
            collate_fn=self._corpus.collate_held_out,
            num_workers=engine.config.data.num_workers,
            drop_last=drop_last,
        )
        return [loader]


def _read(loaders: list[Any]) -> list[Any]:
    return list(chain.from_iterable(loaders))
