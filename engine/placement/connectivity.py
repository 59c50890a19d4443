"""How well a placement connects the groups: the spectral gap of the graph of groups and units."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import sparse

_DENSE = 2048  # size up to which all singular values are cheaper than iterating for the two largest


def spectral_gap(members: sparse.csr_array, copies: Sequence[int]) -> float:
    """Return the spectral gap 1 − σ₂² of a group–unit graph. It is 0 if a group holds no unit.

    Equal columns are merged into one that is √copies times as long. This changes no singular value
    except zeros.

    Args:
        members: 0/1, shape (groups, holder sets).
        copies: ``copies[s]`` is the number of units that have the holder set s.
    """
    times = np.asarray(copies, dtype=float)
    degrees = members @ times
    if not degrees.all():
        return 0.0
    side = min(len(degrees), len(times))
    if side == 1:
        return 1.0
    scale = np.sqrt(times / members.sum(axis=0))
    normalised = sparse.csr_array(members.multiply(scale[None, :] / np.sqrt(degrees)[:, None]))
    normalised = normalised if side == len(degrees) else sparse.csr_array(normalised.T)
    if side > _DENSE:
        from scipy.sparse import linalg  # imported only here, because most runs have few groups

        values = linalg.eigsh(normalised @ normalised.T, k=2, v0=np.linspace(1, 2, side), return_eigenvectors=False)
        second = np.min(np.asarray(values))
    else:
        rows = normalised if normalised.nnz < 0.02 * len(degrees) * len(times) else normalised.toarray()
        gram = rows @ rows.T
        second = np.linalg.eigvalsh(gram.toarray() if sparse.issparse(gram) else gram)[-2]
    return float(min(1.0, max(0.0, 1 - second)))
