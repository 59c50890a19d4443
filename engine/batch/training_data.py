"""Chooses how the ``training_data`` of a script is read and shared out among data ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from ..errors import ConfigError
from .loader import ResumableLoader
from .stream import StreamLoader

_SAMPLERS = (RandomSampler, SequentialSampler, DistributedSampler)


def make_loader(
    data: Any,
    micro_batch_size: int,
    data_rank: int,
    data_ranks: int,
    *,
    seed: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> ResumableLoader | StreamLoader:
    """Return the loader of one data rank.

    Args:
        data: A map-style data set, an iterable, an iterator, or a DataLoader.
        micro_batch_size: Samples per micro-batch of this rank.
        data_rank: This rank's number among those that read different data.
        data_ranks: How many of them there are.
        seed: The seed of the order in which a map-style data set is read.
        collate_fn: Makes a batch from a list of samples.
        num_workers: Processes that read ahead.
        pin_memory: Put batches into page-locked memory.

    Raises:
        ConfigError: A DataLoader or an option cannot be honoured.
        DataError: The data set is empty, or is neither map-style nor iterable.
    """
    if isinstance(data, DataLoader):
        if collate_fn is not None:
            raise ConfigError("sdp.initialize: training_data is a DataLoader with a collate_fn; leave collate_fn out")
        _check_batch_size(data, micro_batch_size)
        if isinstance(data.dataset, IterableDataset):
            _check_batches(data)
            return StreamLoader(data, micro_batch_size, data_rank, data_ranks, of_batches=True)
        _check_sampler(data)
        shuffle = getattr(data.sampler, "shuffle", not isinstance(data.sampler, SequentialSampler))
        names = ("worker_init_fn", "multiprocessing_context", "prefetch_factor", "timeout")
        options = {name: getattr(data, name) for name in names if data.num_workers}
        return ResumableLoader(
            data.dataset, micro_batch_size, data_rank, data_ranks, seed, shuffle, data.collate_fn, data.num_workers,
            pin_memory, options
        )  # fmt: skip
    if is_stream(data):
        if num_workers:
            raise ConfigError(
                f"data.num_workers: is {num_workers}, but an iterable data set is read by the rank itself; leave it at "
                "0, or give training_data=DataLoader(data, batch_size=…, num_workers=…, drop_last=True)"
            )
        return StreamLoader(data, micro_batch_size, data_rank, data_ranks, collate_fn)
    return ResumableLoader(
        data, micro_batch_size, data_rank, data_ranks, seed, collate_fn=collate_fn, num_workers=num_workers,
        pin_memory=pin_memory
    )  # fmt: skip


def is_stream(data: Any) -> bool:
    """Whether ``data`` can be iterated, but has no samples by number."""
    if isinstance(data, IterableDataset):
        return True
    by_number = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return isinstance(data, Iterable) and not by_number and not hasattr(data, "sources")


def _check_batch_size(loader: DataLoader[Any], micro_batch_size: int) -> None:
    if loader.batch_size != micro_batch_size:
        raise ConfigError(
            f"sdp.initialize: training_data is a DataLoader with batch_size {loader.batch_size}, and a rank's "
            f"micro-batch is {micro_batch_size}; make them equal, or give the data set itself"
        )


def _check_batches(loader: DataLoader[Any]) -> None:
    if not loader.drop_last:
        raise ConfigError(
            "sdp.initialize: training_data is a DataLoader of an iterable data set, whose last batch may be short; set "
            "its drop_last to True"
        )


def _check_sampler(loader: DataLoader[Any]) -> None:
    if not isinstance(loader.sampler, _SAMPLERS):
        raise ConfigError(
            f"sdp.initialize: training_data is a DataLoader with a {type(loader.sampler).__name__}, which cannot be "
            "shared out among ranks; give the data set itself, ordered as you want it"
        )
