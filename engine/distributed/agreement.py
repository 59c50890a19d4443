"""What all ranks must agree on is compared before any rank waits for another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import CheckpointError, ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The processes that save or load together; ``group`` None is all of them. ``alone``: this one process by itself."""

    alone: bool
    group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return 0 if self.alone else dist.get_rank()

    @property
    def count(self) -> int:
        return 1 if self.alone else dist.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_rank_0(self, action: Callable[[], T]) -> T:
        """What ``action`` returns on rank 0, on every rank; or its CheckpointError."""
        answer: Any = None
        if self.rank == 0:
            try:
                answer = action(), None
            except CheckpointError as error:
                answer = None, error
        result, problem = self.gather(answer)[0]
        if problem is not None:
            raise problem
        return result

    def agree(self, problem: str | None) -> None:
        """Raise the first rank's problem on every rank, so that none waits for another in a collective."""
        first = next((found for found in self.gather(problem) if found is not None), None)
        if first is not None:
            raise CheckpointError(first)


_ALIKE = "start all with the same configuration, model and data"


def check_alike(facts: Mapping[str, Any], device: torch.device) -> None:
    """Raise :class:`ConfigError` on every rank, naming the first of the ``facts`` (of JSON) that is not the same on all. Collective.

    Ranks that differ would wait for each other for ever, or train shared weights in different ways.
    """
    texts = [_text(fact) for fact in facts.values()]
    for key, text, differs in zip(facts, texts, _differ(texts, device), strict=True):
        if differs:
            everyones = [""] * dist.get_world_size()
            dist.all_gather_object(everyones, text)
            other = next(rank for rank, found in enumerate(everyones) if found != everyones[0])
            where, first, second = _first_difference(key, json.loads(everyones[0]), json.loads(everyones[other]))
            raise ConfigError(f"{where}: rank 0 has {first}, rank {other} has {second}; {_ALIKE}")


def _text(fact: Any) -> str:
    """As JSON, where 0.0 is 0."""

    def number(text: str) -> float:
        return int(float(text)) if float(text).is_integer() else float(text)

    return json.dumps(json.loads(json.dumps(fact, default=str), parse_float=number), sort_keys=True)


def _first_difference(path: str, first: Any, second: Any) -> tuple[str, str, str]:
    """Where two values of JSON differ, and what each has there."""
    if isinstance(first, dict) and isinstance(second, dict):
        # As text, in which true is not 1, and what is no number is itself.
        texts = [
            {key: json.dumps(value, sort_keys=True) for key, value in values.items()} for values in (first, second)
        ]
        key = next(key for key in sorted({*first, *second}) if texts[0].get(key) != texts[1].get(key))
        if key in first and key in second:
            return _first_difference(f"{path}.{key}", first[key], second[key])
        there, here = (json.dumps(values[key]) if key in values else "nothing" for values in (first, second))
        return f"{path}.{key}", there, here
    return path, json.dumps(first), json.dumps(second)


def agreed_rates(rates: Mapping[str, float], names: Sequence[str], device: torch.device) -> dict[str, float]:
    """Learning rates of parameters of the full model from those of each rank's, ``rates``; ``names``: of all. Collective.

    Raises :class:`ConfigError` on every rank, naming a parameter of which ranks have different ones.
    """
    none = float("-inf")
    rows = [[rates.get(name, none) for name in names], [-rates[name] if name in rates else none for name in names]]
    extremes = torch.tensor(rows, dtype=torch.float64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    found = {name: (high, -low) for name, high, low in zip(names, *extremes.tolist(), strict=True) if high != none}
    for name, (high, low) in found.items():
        if high != low:
            raise ConfigError(
                f"the learning rate of {name}: ranks have different values, from {low:g} to {high:g}; {_ALIKE}"
            )
    return {name: high for name, (high, _) in found.items()}


def _differ(facts: Sequence[str], device: torch.device) -> list[bool]:
    """Of each whether it is another on some rank."""
    digests = [int(hashlib.sha256(fact.encode()).hexdigest()[:15], 16) for fact in facts]
    extremes = torch.tensor([digests, [-digest for digest in digests]], device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    return (extremes[0] != -extremes[1]).tolist()
