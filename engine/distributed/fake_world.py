"""A process group without other processes, with which one process can plan or trace a run."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """A context in which this process acts as one rank of a world whose other ranks do not exist.

    Collectives return at once, without the data of other ranks.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # this import registers the backend

    hook = sys.excepthook  # torch adds the rank to tracebacks
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch calls names that torch itself deprecates
            yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
