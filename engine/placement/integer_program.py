"""The best packing of few units, and what is proved of it, by integer programming (HiGHS through SciPy).

Bounded by nodes of the search tree, never by time: each rank solves alone, and a clock would make their placements differ.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from .packing import Packing

_NODES = 500


def optimum(packing: Packing, least_links: int) -> tuple[np.ndarray, int] | None:
    """``(held, bound)``: the most holders in all that fit, at least ``least_links``, and with these the least work of the slowest group.

    ``bound``: work that the slowest group has in any packing of as many holders in all. None if nothing fits, or nothing was found
    within the node limit.
    """
    groups, units = len(packing.room), len(packing.size)
    variables = (
        groups * units + 1
    )  # held[group, unit], row by row; then the work of the slowest, a fraction of all work
    memory_scale, work_scale = max(1, int(packing.size.max())), max(1, int(packing.work.sum()))
    memory = sparse.kron(sparse.eye(groups), packing.size[None, :] / memory_scale)
    work = sparse.kron(sparse.eye(groups), packing.work[None, :] / work_scale)

    def rows(matrix: Any, slowest: float = 0.0) -> Any:
        return sparse.hstack(
            [sparse.csr_array(matrix), sparse.csr_array(np.full((matrix.shape[0], 1), slowest))], format="csr"
        )

    room: Any = packing.room / memory_scale  # SciPy's hints know numbers alone
    wanted: Any = packing.wanted
    constraints = [
        LinearConstraint(rows(memory), -np.inf, room),
        LinearConstraint(rows(sparse.kron(np.ones((1, groups)), sparse.eye(units))), 1, wanted),
        LinearConstraint(rows(work, -1.0), -np.inf, 0),
    ]
    links = rows(np.ones((1, groups * units)))
    most = int(packing.wanted.sum())
    if least_links < most:
        result = _solve(-links.toarray()[0], [*constraints, LinearConstraint(links, least_links, most)], variables)
        if result.x is None:
            return None
        least_links = round(-result.fun)
    slowest = np.zeros(variables)
    slowest[-1] = 1
    result = _solve(slowest, [*constraints, LinearConstraint(links, least_links, most)], variables)
    if result.x is None:
        return None
    held = result.x[:-1].reshape(groups, units) > 0.5
    step = max(1, int(np.gcd.reduce(packing.work)))
    bound = int(np.ceil((result.mip_dual_bound - 1e-6) * work_scale / step)) * step
    # HiGHS works to 1e-6; the packing must hold exactly.
    exact = (packing.left(held) >= 0).all() and held.any(axis=0).all() and (held.sum(axis=0) <= packing.wanted).all()
    return (held, bound) if exact else None


def _solve(objective: np.ndarray, constraints: list[LinearConstraint], variables: int) -> Any:
    upper: Any = np.ones(variables)
    integrality = np.ones(variables)
    integrality[-1] = 0
    options = {"node_limit": _NODES, "mip_rel_gap": 1e-4}
    return milp(objective, constraints=constraints, bounds=Bounds(0, upper), integrality=integrality, options=options)
