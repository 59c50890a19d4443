"""The bias of one gradient against another from paired batches, told from sampling noise.

Let δ_b be the difference of the two gradients on batch b of N independent ones, and B its expectation, the bias. The apparent bias, the
norm of the mean of the δ_b, is never zero: E‖mean δ‖² = ‖B‖² + tr Cov(δ) / N. But products of *different* batches are free of noise,
E⟨δ_b, δ_c⟩ = ‖B‖² for b ≠ c, so that their mean is an unbiased estimate of ‖B‖² (a U-statistic of degree two; Hoeffding, 1948), and
what the apparent square has beyond it is the noise floor's. Everything follows from the Gram matrix of the δ_b. The standard error is the
jackknife's, whose variance is too large rather than too small in expectation (Efron and Stein, 1981).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...engine.errors import NonFiniteError
from ...engine.placement.layout import Layout
from ...engine.placement.units import SHARED, Slice

FEWEST = 4  # batches: the jackknife takes one out of pairs of the others
ROUNDING = 1e-6  # relative: what the order of float32's sums may make of equal gradients
SURE = 3.0  # standard errors above zero from which a bias counts as shown
_ELEMENTS = 1 << 20  # of a parameter that are in memory in float64, times the number of batches


@dataclass(frozen=True)
class Bias:
    """The bias of the mean gradient over N batches, relative to the norm of the dense mean gradient.

    ``z`` and ``cosine`` are not relative. Relative figures are None if that norm is zero.

    ``apparent``: ‖mean g − mean d‖. ``floor``: what sampling noise alone is expected to make of it. ``bias``: the square root of the
    unbiased estimate of the square, 0 where that is negative; ``z``: this estimate in its standard errors. ``error``: the standard error
    of ``bias``, None where it is 0. ``cosine``: between the two means. ``dense_noise``: how far noise takes the dense mean.
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
        """Whether it is more than noise, and than rounding."""
        return self.z > SURE and not self.rounding

    @property
    def rounding(self) -> bool:
        """Whether the gradients are the same on every batch but for rounding."""
        return self.apparent is not None and self.floor is not None and max(self.apparent, self.floor) <= ROUNDING


@dataclass(frozen=True)
class Products:
    """Inner products of one unit's gradients: the ``gram`` matrix (N, N) of the differences; of the sums over all batches of the dense
    ones and of the differences, ``dense`` = ‖Σd‖² and ``cross`` = ⟨Σd, Σδ⟩; ``squares`` = Σ‖d‖². All float64; they add up over units.
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
    """Gradients of N batches by parameter, kept on the CPU: N copies of the model for each name of ``others`` in :meth:`add`, and one."""

    def __init__(self, layout: Layout):
        self._parts = _parts_by_unit(layout)
        self._differences: dict[str, list[dict[str, Tensor]]] = {}
        self._dense: dict[str, Tensor] = {}
        self._squares = dict.fromkeys(self._parts, 0.0)

    def add(self, dense: Mapping[str, Tensor], others: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Add one batch: its ``dense`` gradient, and under each name of ``others`` the one that is compared with it.

        Raises :class:`NonFiniteError` if a gradient is NaN or infinite.
        """
        for name, gradients in {"dense": dense, **others}.items():
            wrong = next((key for key, gradient in gradients.items() if not torch.isfinite(gradient).all()), None)
            if wrong is not None:
                raise NonFiniteError(
                    f"{wrong}: its gradient ({name}) is NaN or infinite on a batch; these weights have diverged, take others"
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
        """By unit, the shared part last, of the gradients that were added as ``name``."""
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
    """What every unit is made of, and the shared part: what is in none."""
    parts = {
        unit.name: [part for part in unit.slices if layout.parameters[part.parameter].trainable]
        for unit in layout.units
    }
    taken = {part.parameter for unit in layout.units for part in unit.slices}
    shared = [Slice(name) for name, info in layout.parameters.items() if info.trainable and name not in taken]
    return parts | {SHARED: shared}


def _of(part: Slice, gradients: Mapping[str, Tensor]) -> Tensor:
    """The elements of ``part``, flat."""
    gradient = gradients[part.parameter]
    if part.dim is None:
        return gradient.flatten()
    return torch.cat(
        [gradient.narrow(part.dim, first, last - first) for first, last in part.ranges], part.dim
    ).flatten()


def _gram(vectors: Sequence[Tensor]) -> Tensor:
    """Inner products of the flat ``vectors`` with each other, in float64."""
    gram = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for pieces in zip(*(vector.split(_ELEMENTS) for vector in vectors), strict=True):
        rows = torch.stack([piece.double() for piece in pieces])
        gram += rows @ rows.T
    return gram


def estimate(products: Products) -> Bias:
    """What N ≥ 4 batches say of the bias."""
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
        error = deviation / (2 * math.sqrt(square)) / length  # of a square root, to first order
    other = math.sqrt(max(dense + 2 * products.cross / batches**2 + apparent, 0.0))
    cosine = (dense + products.cross / batches**2) / (length * other) if length and other else None
    z = square / deviation if deviation else 0.0
    return Bias(relative(apparent), relative(noise), bias, error, z, cosine, relative(dense_noise))


def _mean_of_pairs(gram: Tensor) -> float:
    """The mean of the products of different batches: the unbiased estimate of ‖B‖²."""
    batches = len(gram)
    return float(gram.sum() - gram.trace()) / (batches * (batches - 1))


def _jackknife(gram: Tensor) -> float:
    """Standard error of :func:`_mean_of_pairs`."""
    batches = len(gram)
    pairs = gram.sum() - gram.trace()
    without = (pairs - 2 * (gram.sum(1) - gram.diagonal())) / ((batches - 1) * (batches - 2))
    return math.sqrt((batches - 1) / batches * float((without - without.mean()).square().sum()))


def apparent_by_batches(products: Products) -> list[tuple[int, float]]:
    """The apparent relative bias of means over 1, 2, 4 … batches, and over all: the root of its mean square over disjoint runs of as many.

    Relative to the dense mean over all batches, so that the number of batches moves the numerator alone.
    """
    gram, batches = products.gram, len(products.gram)
    sizes = sorted({batches, *(1 << power for power in range(batches.bit_length()) if 1 << power <= batches)})
    length = math.sqrt(products.dense) / batches
    points = []
    for size in sizes if length else ():
        runs = [gram[first : first + size, first : first + size].sum() for first in range(0, batches - size + 1, size)]
        points.append((size, math.sqrt(max(float(torch.stack(runs).mean()), 0.0)) / size / length))
    return points
