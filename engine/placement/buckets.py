"""The static plan of messages between groups.

It says which gradients are averaged in one message, and which frozen copies are refreshed in one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..distributed.mesh import Holders
from .placement import Delivery

# Buckets per unit. The first is sent while backward is still in the same block. While one bucket is
# summed, the network has another bucket to send.
BUCKETS = 4

# Limits of a bucket's size in float32. Smaller buckets are bound by latency, and larger ones cost
# memory.
LEAST_BYTES, MOST_BYTES = 2**19, 64 * 2**20


@dataclass(frozen=True)
class Bucket:
    """Canonical names of parameters that are reduced together, and the groups that hold them."""

    holders: Holders
    names: tuple[str, ...]


def plan_buckets(
    numels: Mapping[str, int],
    holders_of: Callable[[str], Holders],
    unit_of: Callable[[str], str],
    comes_last: Callable[[str], bool],
) -> list[Bucket]:
    """Plan the buckets of the full model's trainable parameters, in launch order.

    The last parameter comes first, because backward makes gradients in this order. Parameters that
    ``comes_last`` selects come after all others. Otherwise the others would have to wait for them.
    Neighbours of one unit share a bucket up to 1 / ``BUCKETS`` of the unit. This limit is at least
    ``LEAST_BYTES`` and at most ``MOST_BYTES``. A parameter is never split. Every rank computes the
    same list.

    Args:
        numels: parameter name → number of elements, in the model's order.
        holders_of: returns the groups that hold a parameter.
        unit_of: returns the unit of a parameter.
        comes_last: whether a gradient is ready only at the very end. FSDP2 delivers the gradients
            of the root's own parameters then.
    """
    buckets: list[Bucket] = []
    size, last = 0, None
    of_unit: Counter[str] = Counter()
    for name, numel in numels.items():
        of_unit[unit_of(name)] += numel * 4
    backwards = list(numels)[::-1]
    for name in sorted(backwards, key=comes_last):  # stable
        nbytes = numels[name] * 4
        most = min(MOST_BYTES, max(LEAST_BYTES, -(-of_unit[unit_of(name)] // BUCKETS)))
        if last == unit_of(name) and size + nbytes <= most:
            buckets[-1] = Bucket(buckets[-1].holders, (name, *buckets[-1].names))
            size += nbytes
        else:
            buckets.append(Bucket(holders_of(name), (name,)))
            size, last = nbytes, unit_of(name)
    return buckets


@dataclass(frozen=True)
class Refresh(Delivery):
    """A holder sends the parameters ``names`` of a unit in ``block`` to groups without it."""

    block: str
    names: tuple[str, ...]
