"""Measures gradient noise every few steps of a run, and keeps running means
(``training.noise_scale_interval``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .noise import NoiseMeter, UnitNoise

KEPT = 0.95  # of the running means at each measured step, which makes them means over about 20 of these


class NoiseScale:
    """The gradient noise of every unit, and of the model, in the steps that are measured.

    The noise scale is tr Σ / ‖G‖², in samples. A step with so many samples has as much noise as
    signal. Both parts are averaged over measured steps before they are divided, because the
    estimate of ‖G‖² in a single step may be negative.

    Args:
        meter: adds up squared norms. Without one, nothing is measured.
        interval: the number of steps from one measurement to the next.
        samples: the samples of one rank in a micro-batch.
        micro_batches: the micro-batches of a step.
        steps: returns the steps that are finished.
    """

    def __init__(
        self, meter: NoiseMeter | None, interval: int, samples: int, micro_batches: int, steps: Callable[[], int]
    ):
        self._meter, self._samples = meter, samples * micro_batches
        self._last: tuple[int, dict[str, tuple[UnitNoise, UnitNoise | None]]] = (-1, {})
        self._steps = steps
        # By unit: decayed sums of trace and squared norm, and of weights.
        self._means: dict[str, tuple[float, float, float]] = {}
        if meter is not None:
            meter.is_due = lambda: (steps() + 1) % interval == 0
            meter.micro_batches = micro_batches

    def drop(self) -> None:
        """Forget what the present step has measured so far, because its gradients are dropped."""
        if self._meter is not None:
            self._meter.drop()

    def collect(self, sum_over_ranks: Callable[[torch.Tensor], None], loss_scale: float | None) -> None:
        """Measure the present step, if it is due, from its averaged gradients. Collective.

        Args:
            sum_over_ranks: adds up numbers over all ranks, in place.
            loss_scale: the factor of the step's losses, or None.
        """
        meter = self._meter
        if meter is None or not meter.is_due():
            return
        sums = meter.take() / (loss_scale or 1.0) ** 2
        sum_over_ranks(sums)
        found = meter.estimate(sums.cpu(), self._samples)
        self._last = self._steps() + 1, found
        for unit, (plain, _) in found.items():
            trace, squared_norm, weight = self._means.get(unit, (0.0, 0.0, 0.0))
            self._means[unit] = (
                KEPT * trace + (1 - KEPT) * plain.trace,
                KEPT * squared_norm + (1 - KEPT) * plain.squared_norm,
                KEPT * weight + (1 - KEPT),
            )

    def scale_of(self, unit: str) -> float | None:
        """Return the noise scale of a unit in samples. None if it is not known, or too large to
        measure.
        """
        trace, squared_norm, _ = self._means.get(unit, (0.0, 0.0, 0.0))
        return trace / squared_norm if squared_norm > 0 else None

    @property
    def scale(self) -> float | None:
        """The noise scale of all measured units together, in samples."""
        means = [(trace / weight, norm / weight) for trace, norm, weight in self._means.values()]
        traces, norms = (math.fsum(values) for values in zip(*means, strict=True)) if means else (0.0, 0.0)
        return traces / norms if norms > 0 else None

    def metrics(self) -> dict[str, Any]:
        """Return the noise of the last step, for metrics.jsonl. Empty if it was not measured.

        ``trace`` and ``squared_norm`` are those of the one step. The noise scales are those of the
        running means.
        """
        step, found = self._last
        if step != self._steps() or self._meter is None:
            return {}
        holders = self._meter.holders
        units: dict[str, dict[str, Any]] = {}
        for unit, (plain, scaled) in found.items():
            units[unit] = {"holders": len(holders[unit]), **plain._asdict(), "noise_scale": self.scale_of(unit)}
            if scaled is not None:
                units[unit] |= {f"preconditioned_{key}": value for key, value in scaled._asdict().items()}
        return {"noise_scale": self.scale, "noise": units}

    def state_dict(self) -> dict[str, list[float]]:
        """Return the running means as JSON, for a checkpoint."""
        return {unit: list(means) for unit, means in self._means.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the running means of ``state``. Units of another model are left out."""
        known = self._meter.units if self._meter is not None else []
        self._last = (-1, {})
        self._means = {
            unit: (float(means[0]), float(means[1]), float(means[2])) for unit, means in state.items() if unit in known
        }
