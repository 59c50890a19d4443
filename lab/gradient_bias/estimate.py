"""Estimates the bias of one gradient against another from paired batches, separated from sampling
noise.

There are N independent batches. Let δ_b be the difference of the two gradients on batch b. Its
expectation B is the bias. The apparent bias is the norm of the mean of all δ_b. It is never zero,
because E‖mean δ‖² = ‖B‖² + tr Cov(δ) / N.

Products of *different* batches are free of noise: E⟨δ_b, δ_c⟩ = ‖B‖² for b ≠ c. Their mean is
therefore an unbiased estimate of ‖B‖². It is a U-statistic of degree two (Hoeffding, 1948). The
difference between the square of the apparent bias and this estimate is the square of the noise
floor.

Everything follows from the Gram matrix of the δ_b. The standard error is that of the jackknife. Its
variance is on average too large rather than too small (Efron and Stein, 1981).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from sdp.engine.errors import NonFiniteError
from sdp.engine.placement.layout import Layout
from sdp.engine.placement.units import SHARED, Slice
from torch import Tensor

FEWEST = 4  # batches; the jackknife leaves one out and then needs pairs of the others
ROUNDING = 1e-6  # relative; the order of float32 sums may change equal gradients by this much
SURE = 3.0  # a bias counts as shown if it is more than this many standard errors above zero
_ELEMENTS = 1 << 20  # elements of a parameter, for each batch, that are in memory in float64


@dataclass(frozen=True)
class Bias:
    """How far the mean of gradients over N batches is from the dense mean in expectation.

    All figures but ``z`` and ``cosine`` are relative to the norm of the dense mean gradient. They
    are None if this norm is zero.

    Attributes:
        apparent: The apparent bias ‖mean g − mean d‖ of the gradients g against the dense ones d.
        floor: The apparent bias that sampling noise alone is expected to cause.
        bias: The square root of the unbiased estimate of the squared bias, 0 if that is negative.
        error: The standard error of ``bias``, None if ``bias`` is 0.
        z: The estimate of the squared bias, divided by its standard error.
        cosine: The cosine between the two mean gradients.
        dense_noise: The expected distance by which noise moves the dense mean.
    """

    apparent: float | None
    floor: float | None
    bias: float | None
    error: float | None
    z: float
    cosine: float | None
    dense_noise: float | None

    @property
    def shown(self) -> bool:
        """Whether the bias is larger than noise and rounding can explain."""
        return self.z > SURE and not self.rounding

    @property
    def rounding(self) -> bool:
        """Whether the two gradients are equal on every batch, except for rounding."""
        return self.apparent is not None and self.floor is not None and max(self.apparent, self.floor) <= ROUNDING


@dataclass(frozen=True)
class Products:
    """Inner products of one unit's gradients over N batches, in float64. They give the bias.

    The products of several units can be added.

    Attributes:
        gram: The Gram matrix (N, N) of the differences δ from the dense gradients.
        dense: ‖Σd‖², where d are the dense gradients.
        cross: ⟨Σd, Σδ⟩.
        squares: Σ‖d‖².
    """

    gram: Tensor
    dense: float
    cross: float
    squares: float

    def __add__(self, other: Products) -> Products:
        return Products(
            self.gram + other.gram, self.dense + other.dense, self.cross + other.cross, self.squares + other.squares
        )


class Differences:
    """Collects the gradients of N batches by parameter, on the CPU.

    It takes the memory of one copy of the model for the dense gradients, and of N copies for each
    name of ``others`` in :meth:`add`.
    """

    def __init__(self, layout: Layout):
        self._parts = _parts_by_unit(layout)
        self._differences: dict[str, list[dict[str, Tensor]]] = {}
        self._dense: dict[str, Tensor] = {}
        self._squares = dict.fromkeys(self._parts, 0.0)

    def add(self, dense: Mapping[str, Tensor], others: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Add the gradients of one batch: the ``dense`` one, and by name those to compare with it.

        Raises :class:`NonFiniteError` if a gradient is NaN or infinite.
        """
        for name, gradients in {"dense": dense, **others}.items():
            wrong = next((key for key, gradient in gradients.items() if not torch.isfinite(gradient).all()), None)
            if wrong is not None:
                raise NonFiniteError(
                    f"{wrong}: its gradient ({name}) is NaN or infinite on a batch; these weights have diverged, take "
                    "others"
                )
        for name, gradients in others.items():
            self._differences.setdefault(name, []).append(
                {key: gradient - dense[key] for key, gradient in gradients.items()}
            )
        for key, gradient in dense.items():
            self._dense[key] = self._dense[key] + gradient if key in self._dense else gradient
        for unit, parts in self._parts.items():
            self._squares[unit] += sum(float(_gram([_of(part, dense)])) for part in parts)

    def products(self, name: str) -> dict[str, Products]:
        """Return the products of each unit, and then of the shared part, for gradients ``name``."""
        return {unit: self._products(unit, parts, self._differences[name]) for unit, parts in self._parts.items()}

    def _products(self, unit: str, parts: Sequence[Slice], differences: Sequence[Mapping[str, Tensor]]) -> Products:
        batches = len(differences)
        gram, sums = torch.zeros(batches, batches, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
        for part in parts:
            own = [_of(part, difference) for difference in differences]
            gram += _gram(own)
            sums += _gram([_of(part, self._dense), torch.stack(own).sum(0)])
        return Products(gram, float(sums[0, 0]), float(sums[0, 1]), self._squares[unit])


def _parts_by_unit(layout: Layout) -> dict[str, list[Slice]]:
    """List the slices of every unit, and of the shared part, which belongs to no unit."""
    trained = [name for name, infos in layout.wholes.items() if infos[0].trainable]
    parts = {unit.name: [part for part in unit.slices if part.parameter in trained] for unit in layout.units}
    taken = {part.parameter for unit in layout.units for part in unit.slices}
    return parts | {SHARED: [Slice(name) for name in trained if name not in taken]}


def _of(part: Slice, gradients: Mapping[str, Tensor]) -> Tensor:
    gradient = gradients[part.parameter]
    if part.dim is None:
        return gradient.flatten()
    return torch.cat(
        [gradient.narrow(part.dim, first, last - first) for first, last in part.ranges], part.dim
    ).flatten()


def _gram(vectors: Sequence[Tensor]) -> Tensor:
    gram = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for pieces in zip(*(vector.split(_ELEMENTS) for vector in vectors), strict=True):
        rows = torch.stack([piece.double() for piece in pieces])
        gram += rows @ rows.T
    return gram


def estimate(products: Products) -> Bias:
    """Estimate the bias from the products of N ≥ 4 batches."""
    gram, batches = products.gram, len(products.gram)
    apparent = max(float(gram.sum()), 0.0) / batches**2
    square = _mean_of_pairs(gram)
    noise = max(float(gram.trace()) / batches - square, 0.0) / batches
    deviation = _jackknife(gram)
    dense = products.dense / batches**2
    dense_noise = max(products.squares / batches - dense, 0.0) / (batches - 1)
    length = math.sqrt(dense)

    def relative(of_square: float) -> float | None:
        return math.sqrt(of_square) / length if length else None

    bias, error = relative(max(square, 0.0)), None
    if bias:
        error = deviation / (2 * math.sqrt(square)) / length  # first-order error of a square root
    other = math.sqrt(max(dense + 2 * products.cross / batches**2 + apparent, 0.0))
    cosine = (dense + products.cross / batches**2) / (length * other) if length and other else None
    z = square / deviation if deviation else 0.0
    return Bias(relative(apparent), relative(noise), bias, error, z, cosine, relative(dense_noise))


def _mean_of_pairs(gram: Tensor) -> float:
    batches = len(gram)
    return float(gram.sum() - gram.trace()) / (batches * (batches - 1))


def _jackknife(gram: Tensor) -> float:
    """Compute the jackknife's standard error of :func:`_mean_of_pairs`."""
    batches = len(gram)
    pairs = gram.sum() - gram.trace()
    without = (pairs - 2 * (gram.sum(1) - gram.diagonal())) / ((batches - 1) * (batches - 2))
    return math.sqrt((batches - 1) / batches * float((without - without.mean()).square().sum()))


def apparent_by_batches(products: Products) -> list[tuple[int, float]]:
    """Return the apparent bias of means over 1, 2, 4 … batches, and over all batches.

    Each value is the root mean square over disjoint runs of that many consecutive batches. It is
    relative to the norm of the dense mean over all batches, so only the numerator depends on the
    number of batches.
    """
    gram, batches = products.gram, len(products.gram)
    sizes = sorted({batches, *(1 << power for power in range(batches.bit_length()) if 1 << power <= batches)})
    length = math.sqrt(products.dense) / batches
    points = []
    for size in sizes if length else ():
        runs = [gram[first : first + size, first : first + size].sum() for first in range(0, batches - size + 1, size)]
        points.append((size, math.sqrt(max(float(torch.stack(runs).mean()), 0.0)) / size / length))
    return points
