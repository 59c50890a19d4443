"""A process group without other processes, for one rank that is traced or planned."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Make this process rank ``rank`` of ``size`` ranks, although the others do not exist.

    Collectives return at once.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # this import registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch calls names that torch itself deprecates
            yield
    finally:
        dist.destroy_process_group()
