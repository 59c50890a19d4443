"""How the ranks of a group vote, so that all of them learn the same of the result."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..distributed.agreement import gather_json
from .coordination.assembly import Decision
from .coordination.errors import StepAbortedError
from .coordination.member import CoordinatorClient
from .inside import all_inside


def vote_together(
    client: CoordinatorClient,
    facts: Any,
    *,
    step: int,
    phase: int = 0,
    fresh: bool = False,
    at: int | None = None,
    over: str | None = None,
) -> Decision:
    """Vote for the present step, and return the decision. Collective in the group.

    A coordinator that dies may have told only some ranks. So those tell the others of their group.
    Otherwise one part of the group would go on, and the other part would wait for it elsewhere.

    Args:
        client: this rank's connection.
        facts: a small JSON value that all ranks get if the step is committed.
        step: see :meth:`CoordinatorClient.settle`.
        phase: what comes next for this rank if the coordinator is gone.
        fresh: whether this rank has no state.
        at: see :meth:`CoordinatorClient.ask`.
        over: why this generation is over, or None if this rank knows of no reason. If it is given,
            this rank does not vote.

    Raises:
        StepAbortedError: the step is not committed.
    """
    decision = None
    if over is None:
        try:
            decision = client.ask(facts, at=at)
        except StepAbortedError as error:
            over = str(error)
    if dist.get_world_size() > 1 and not all_inside(decision is not None):
        decision, over = _known_inside(decision, over)
    if decision is not None:
        return decision
    if over is not None:
        raise StepAbortedError(over)
    return client.settle(facts, step=step, phase=phase, fresh=fresh)


def _known_inside(decision: Decision | None, over: str | None) -> tuple[Decision | None, str | None]:
    """Return the decision and the reason that any rank of this group knows, each None if no rank
    does. Collective in the group.
    """
    told = [list(decision.facts), decision.newcomers] if decision is not None else None
    known = gather_json([told, over], dist.group.WORLD)
    told = next((each for each, _ in known if each is not None), None)
    over = next((each for _, each in known if each is not None), None)
    return (Decision(tuple(told[0]), newcomers=told[1]) if told is not None else None), over
