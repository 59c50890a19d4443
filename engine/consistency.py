"""Holders never drift: checksums of weights and optimizer state, compared across the holders of every unit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from .errors import ConfigError, DivergenceError, PlacementError
from .layout import Layout
from .placement import Placement
from .sync import local_tensor
from .units import SHARED

CHUNK = 1 << 20
_ALIKE = "start all with the same configuration, model and data"


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """A 63-bit checksum of the tensors' bits; any single changed value changes it."""
    total = 0
    for tensor in tensors:
        flat = local_tensor(tensor.detach()).contiguous().view(-1)
        words = flat.view(torch.int32 if flat.element_size() % 4 == 0 else torch.uint8)
        for start in range(0, words.numel(), CHUNK):
            chunk = words[start : start + CHUNK].long()
            positions = torch.arange(start + 1, start + 1 + chunk.numel(), device=chunk.device)
            total = (total * 1_000_003 + int((chunk * (2 * positions + 1)).sum())) & ((1 << 63) - 1)
    return total


def check_holders(layout: Layout, parameters: Mapping[str, torch.Tensor], optimizer: Optimizer, rank: int, *, sharded: bool) -> None:
    """Compare every unit's weights and optimizer state bitwise across its holders. Collective.

    Raises :class:`DivergenceError` on every rank, naming the unit and the groups that disagree.
    """
    names = [SHARED, *(unit.name for unit in layout.units)]
    device = next(iter(parameters.values())).device
    mine = torch.zeros((2, len(names)), dtype=torch.int64, device=device)
    for index, unit in enumerate(names):
        held = [info for info in layout.parameters.values() if info.unit == unit and info.name in parameters]
        whole = [info for info in held if info.tp_dim is None]  # equal on all tensor-parallel ranks
        for row, infos in enumerate((held, whole)):
            here = [parameters[info.name] for info in infos]
            mine[row, index] = checksum(t for p in here for t in (p, *_state_of(optimizer, p)))
    everyones = mine.new_empty((layout.mesh.world_size, *mine.shape))
    dist.all_gather(list(everyones.unbind()), mine)
    for index, unit in enumerate(names):
        holders = layout.everyone if unit == SHARED else layout.placement.holders[index - 1]
        _compare(layout, unit, holders, everyones[:, 0, index].tolist(), sharded=sharded)
        _compare_copies(layout, unit, everyones[:, 1, index].tolist())


def check_placement(placement: Placement, device: torch.device) -> None:
    """Raise :class:`PlacementError` on every rank unless all have computed the same placement. Collective.

    Process groups are made of the holder sets: where ranks differ in them, they would wait for each other for ever.
    """
    if any(_differ([repr((placement.units, placement.holders))], device)):
        raise PlacementError(
            "sdp.placement: ranks have computed different placements; start all with the same configuration, model and versions of "
            "sdp, NumPy and SciPy, or name the holders of every unit in sdp.placement"
        )


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
        texts = [{key: json.dumps(value, sort_keys=True) for key, value in values.items()} for values in (first, second)]
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
            raise ConfigError(f"the learning rate of {name}: ranks have different values, from {low:g} to {high:g}; {_ALIKE}")
    return {name: high for name, (high, _) in found.items()}


def check_loss_scale(scale: str, device: torch.device) -> None:
    """Raise :class:`DivergenceError` on every rank unless all have the same loss scale and counts of overflows. Collective."""
    if any(_differ([scale], device)):
        raise DivergenceError(
            "fp16: ranks have different loss scales, or counts of steps without an overflow; ranks that skip alike cannot: check the "
            "hardware, and resume from the last checkpoint"
        )


def _differ(facts: Sequence[str], device: torch.device) -> list[bool]:
    """Of each whether it is another on some rank."""
    digests = [int(hashlib.sha256(fact.encode()).hexdigest()[:15], 16) for fact in facts]
    extremes = torch.tensor([digests, [-digest for digest in digests]], device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    return (extremes[0] != -extremes[1]).tolist()


def _state_of(optimizer: Optimizer, parameter: torch.Tensor) -> list[torch.Tensor]:
    state = optimizer.state.get(parameter, {})
    return [value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor) and value.dim()]


def _compare(layout: Layout, unit: str, holders: tuple[int, ...], sums: list[int], *, sharded: bool) -> None:
    mesh = layout.mesh
    for tp in range(mesh.tp):
        for group in holders:
            for fsdp in range(mesh.size(group)):
                # Without shards the replicas inside a group must agree too.
                first = mesh.rank(holders[0], fsdp if sharded else 0, tp)
                other = mesh.rank(group, fsdp, tp)
                if sums[other] != sums[first]:
                    raise _disagreement(unit, other, group, first, holders[0])


def compare_sums(unit: str, holders: tuple[int, ...], sums: list[int], ranks: list[int]) -> None:
    """Raise :class:`DivergenceError` unless the groups ``holders`` have equal ``sums``; ``ranks``: who is named, by group."""
    for group in holders[1:]:
        if sums[group] != sums[holders[0]]:
            raise _disagreement(unit, ranks[group], group, ranks[holders[0]], holders[0])


def _compare_copies(layout: Layout, unit: str, sums: list[int]) -> None:
    """What tensor parallelism does not cut is equal on all ranks of one (sdp, fsdp)."""
    for first in range(0, layout.mesh.world_size, layout.mesh.tp):
        for other in range(first + 1, first + layout.mesh.tp):
            if sums[other] != sums[first]:
                group = layout.mesh.coordinates(other).sdp
                raise _disagreement(unit, other, group, first, group)


def _disagreement(unit: str, other: int, group: int, first: int, first_group: int) -> DivergenceError:
    what = "the shared part" if unit == SHARED else f"unit {unit!r}"
    return DivergenceError(
        f"{what}: weights or optimizer state of rank {other} (group {group}) differ from those of rank {first} (group {first_group}); "
        "holders must stay bitwise equal: check the hardware, and resume from the last checkpoint"
    )
