"""Evaluates the full model on held-out data while a run trains."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ...engine.batch.loader import evaluation_batches
from ...engine.engine import SDPEngine
from ...engine.full_model.recalibration import tracks_statistics
from ...launcher.heartbeat import Heartbeat
from ..runs.dataset import Corpus


class Evaluator:
    """Reads this rank's share of the held-out data, the same at each evaluation."""

    def __init__(self, engine: SDPEngine, corpus: Corpus, beat: Heartbeat):
        self._engine, self._corpus, self._beat = engine, corpus, beat
        self._held_out = self._batches(corpus.held_out, engine.config.training.evaluate_batches)
        self._sources = {
            name: self._batches(part, engine.config.training.evaluate_batches) for name, part in corpus.sources.items()
        }
        self._calibration = self._calibration_batches()

    def evaluate(self) -> dict[str, Any]:
        """Compute the losses of the full model and of every group's own subnetwork. Collective.

        The result has the keys of evaluations.jsonl.
        """
        engine = self._engine
        self._beat.at(engine.global_steps, "evaluation", engine.config.training.start_timeout)
        started = time.perf_counter()
        batches = list(self._held_out)
        own = engine.evaluate_subnetworks(batches)
        with self.recalibrated():
            loss = engine.evaluate(batches)
            measures = {
                name: engine.evaluate([{**batch, "measure": name} for batch in batches])
                for name in self._corpus.measures
            }
            by_source = {name: engine.evaluate(list(part)) for name, part in self._sources.items()}
        measures = measures or {"perplexity": math.exp(min(loss, 700.0))}
        if by_source:
            measures = {**measures, "source_losses": by_source}
        return {"loss": loss, **measures, "subnetwork_losses": own, "seconds": time.perf_counter() - started}

    def recalibrated(self) -> AbstractContextManager[None]:
        """Give batch norms the full model's statistics while inside. Collective."""
        return self._engine.recalibrated(self._calibration) if self._calibration else nullcontext()

    def _calibration_batches(self) -> list[Any]:
        """Load the training batches on which the statistics of batch norms are measured.

        Their images are neither cropped nor mirrored.
        """
        limit = self._engine.config.training.recalibrate_batches
        if not limit or not tracks_statistics(self._engine.layout.buffers):
            return []
        return list(self._batches(self._corpus.calibration or self._corpus.train, limit))

    def _batches(self, samples: Any, limit: int | None) -> Any:
        engine, here = self._engine, self._engine.data_ranks_here
        mesh = engine.layout.mesh
        return evaluation_batches(
            samples,
            engine.train_micro_batch_size_per_gpu() * here,
            data_rank=mesh.data_rank(engine.global_rank),
            data_ranks=mesh.data_ranks // here,
            limit=limit,
            collate_fn=self._corpus.collate_held_out,
            num_workers=engine.config.data.num_workers,
        )
