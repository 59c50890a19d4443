"""Exchanges small values between ranks, to find disagreements before ranks would hang or diverge.

Every rank must call these functions, in the same order. Without a process group, this process is
the only rank. Values are sent as JSON and not as pickles, because unpickling can run code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from .. import errors
from ..errors import CheckpointError, ConfigError, SDPError

T = TypeVar("T")

_REMEDY = "start all ranks with the same configuration, model and data"


@dataclass(frozen=True)
class Ranks:
    """A set of ranks that exchange small values, for example while they save a checkpoint.

    All methods are collective.

    Attributes:
        alone: whether this process works by itself. Then nothing is sent.
        group: the process group of the ranks. None means all ranks.
    """

    alone: bool
    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return 0 if self.alone else dist.get_rank(self.group)

    @property
    def count(self) -> int:
        return 1 if self.alone else dist.get_world_size(self.group)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order. Values must be JSON."""
        return [json.loads(json.dumps(value))] if self.alone else gather_json(value, self.group)

    def agree(self, problem: str | None) -> None:
        """Raise :class:`CheckpointError` on every rank if any rank has a ``problem``.

        ``problem`` is this rank's message, or None. The error has the first message in rank order.
        """
        first = self.first(problem)
        if first is not None:
            raise CheckpointError(first)

    def first(self, value: Any) -> Any:
        """Return the ``value`` of the lowest rank whose value is not None. None if all are None."""
        return next((found for found in self.gather(value) if found is not None), None)

    def all_or_none(self, action: Callable[[], T]) -> T:
        """Call ``action`` on every rank. If any rank gets an SDPError, raise it on all ranks.

        Otherwise, ranks would wait in the next collective for the rank that has failed.

        Returns:
            This rank's result.

        Raises:
            SDPError: ``action`` raised this error on some rank, the first in rank order.
        """
        result, error = None, None
        try:
            result = action()
        except SDPError as caught:
            if self.alone:
                raise
            error = caught
        first = self.first([type(error).__name__, str(error)] if error is not None else None)
        if first is not None:
            raise _error_named(*first)
        return cast("T", result)


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, in rank order. Tuples arrive as lists.

    Args:
        value: a small value that JSON can hold. NaN and infinite numbers are allowed.
        group: the process group. None means all ranks.

    Raises:
        TypeError: ``value`` cannot be written as JSON.
    """
    return [json.loads(text) for text in gather_bytes(json.dumps(value).encode(), group)]


def gather_bytes(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return the bytes of all ranks, in rank order. Ranks may give different numbers of bytes."""
    if not dist.is_initialized():
        return [data]
    device = _device_of(group)
    ranks = dist.get_world_size(group)
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    lengths = length.new_empty((ranks, 1))
    dist.all_gather(list(lengths.unbind()), length, group=group)
    sizes = [int(size) for size in lengths]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    padded = padded.to(device)
    rows = padded.new_empty((ranks, len(padded)))
    dist.all_gather(list(rows.unbind()), padded, group=group)
    return [row[:size].numpy().tobytes() for row, size in zip(rows.cpu(), sizes, strict=True)]


def start_max(values: Sequence[int]) -> Callable[[], list[int]]:
    """Start to compute the element-wise maximum of ``values`` over all ranks. Collective.

    Args:
        values: 64-bit integers, equally many on every rank.

    Returns:
        A function that waits for the maxima and returns them.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return lambda: list(values)
    row = torch.tensor(values, dtype=torch.int64, device=_device_of(None))
    work = dist.all_reduce(row, op=dist.ReduceOp.MAX, async_op=True)
    assert work is not None

    def maxima() -> list[int]:
        work.wait()
        return row.tolist()

    return maxima


def check_equal(facts: Mapping[str, Any], device: torch.device) -> None:
    """Check that all ranks have equal ``facts``, for example equal settings. Collective.

    Ranks with different settings would wait for each other forever, or train different models.

    Raises:
        ConfigError: A fact differs between two ranks. All ranks raise the error, with the fact.
    """
    texts = [normalise(fact) for fact in facts.values()]
    for key, text, differs in zip(facts, texts, find_differences(texts, device), strict=True):
        if differs:
            everyones = [json.loads(found) for found in gather_json(text)]
            other = next(rank for rank, fact in enumerate(everyones) if not _same(fact, everyones[0]))
            where, first, second = first_difference(key, everyones[0], everyones[other])
            raise ConfigError(f"{where}: rank 0 has {first}, rank {other} has {second}; {_REMEDY}")


def find_differences(texts: Sequence[str], device: torch.device) -> list[bool]:
    """Return for each of the ``texts`` whether it differs between any two ranks. Collective."""
    digests = [int(hashlib.sha256(text.encode()).hexdigest()[:15], 16) for text in texts]
    highest, lowest = _highest([digests, [-digest for digest in digests]], torch.int64, device)
    return [high != -low for high, low in zip(highest, lowest, strict=True)]


def agree_on_rates(rates: Mapping[str, float], names: Sequence[str], device: torch.device) -> dict[str, float]:
    """Return the learning rates of all parameters of the full model, by name. Collective.

    Args:
        rates: the learning rates of this rank's parameters, by name.
        names: the names of all parameters, in the same order on every rank.

    Raises:
        ConfigError: Two ranks have different rates for a parameter. All ranks raise this error.
    """
    none = float("-inf")
    rows = [[rates.get(name, none) for name in names], [-rates[name] if name in rates else none for name in names]]
    extremes = _highest(rows, torch.float64, device)
    found = {name: (high, -low) for name, high, low in zip(names, *extremes, strict=True) if high != none}
    for name, (high, low) in found.items():
        if high != low:
            raise ConfigError(
                f"the learning rate of {name}: ranks have different values, from {low:g} to {high:g}; {_REMEDY}"
            )
    return {name: high for name, (high, _) in found.items()}


def normalise(fact: Any) -> str:
    """Return ``fact`` as JSON text in which equal numbers are equal: 0.0 becomes 0."""

    def number(text: str) -> float:
        return int(float(text)) if float(text).is_integer() else float(text)

    return json.dumps(json.loads(json.dumps(fact, default=str), parse_float=number), sort_keys=True)


def first_difference(path: str, first: Any, second: Any) -> tuple[str, str, str]:
    """Find the first difference between two JSON values that are not equal.

    Returns the path of the difference, which begins with ``path``, and both values at this path.
    """
    if isinstance(first, dict) and isinstance(second, dict):
        key = next(
            key
            for key in sorted({*first, *second})
            if (key in first) != (key in second) or not _same(first[key], second[key])
        )
        if key in first and key in second:
            return first_difference(f"{path}.{key}", first[key], second[key])
        there, mine = (json.dumps(values[key]) if key in values else "nothing" for values in (first, second))
        return f"{path}.{key}", there, mine
    return path, json.dumps(first), json.dumps(second)


def _same(first: Any, second: Any) -> bool:
    """Return whether two JSON values are equal as text: true is not 1, and NaN equals NaN."""
    return json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


def _error_named(name: str, text: str) -> SDPError:
    kind = getattr(errors, name, None)
    return kind(text) if isinstance(kind, type) and issubclass(kind, SDPError) else SDPError(text)


def _highest(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> list[list[Any]]:
    values = torch.tensor(rows, dtype=dtype, device=device)
    if dist.is_initialized():
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values.tolist()


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of the tensors that the group's collectives take.

    This is the CPU if a backend for it exists, else this rank's GPU.
    """
    on_cpu = "cpu" in dist.get_backend_config(group)
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
