"""Find the best packing of few units, and a proved bound, by integer programming.

The solver is HiGHS, through SciPy. The number of nodes in the search tree limits the search, and
time does not. Each rank solves alone, so a time limit would make their placements differ.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from .packing import Packing

_NODES = 500


def optimum(packing: Packing, least_links: int) -> tuple[np.ndarray, int] | None:
    """Find the packing with the most holders in total, and among these the fastest slowest group.

    Args:
        packing: the room of the groups, and the sizes and work of the units.
        least_links: the least number of holders in total.

    Returns:
        ``(held, bound)``, or None if nothing fits or the search found nothing within the node
            limit.
        ``bound`` is a lower bound on the work of the slowest group, in any packing with as many
            holders in total.
    """
    groups, units = len(packing.room), len(packing.size)
    variables = (
        groups * units + 1
    )  # held[group, unit], row by row; then the share of all work that the slowest group has
    memory_scale, work_scale = max(1, int(packing.size.max())), max(1, int(packing.work.sum()))
    memory = sparse.kron(sparse.eye(groups), packing.size[None, :] / memory_scale)
    work = sparse.kron(sparse.eye(groups), packing.work[None, :] / work_scale)

    def rows(matrix: Any, slowest: float = 0.0) -> Any:
        return sparse.hstack(
            [sparse.csr_array(matrix), sparse.csr_array(np.full((matrix.shape[0], 1), slowest))], format="csr"
        )

    room: Any = packing.room / memory_scale  # SciPy's type hints allow only numbers here
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
    # HiGHS has a tolerance of 1e-6, but the packing must fit exactly.
    exact = (packing.left(held) >= 0).all() and held.any(axis=0).all() and (held.sum(axis=0) <= packing.wanted).all()
    return (held, bound) if exact else None


def _solve(objective: np.ndarray, constraints: list[LinearConstraint], variables: int) -> Any:
    upper: Any = np.ones(variables)
    integrality = np.ones(variables)
    integrality[-1] = 0
    options = {"node_limit": _NODES, "mip_rel_gap": 1e-4}
    return milp(objective, constraints=constraints, bounds=Bounds(0, upper), integrality=integrality, options=options)
