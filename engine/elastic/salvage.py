"""Writes a last checkpoint when a run ends because no living group holds some units.

It is complete. The units of the living groups are those of the present step, and the lost ones are
those of the newest checkpoint. It is the model with which the run would have gone on if a holder
had come back.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..backends.sharded import ShardedBackend
from ..checkpoint.load import find_together, load
from ..checkpoint.run_state import run_state
from ..checkpoint.save import write
from ..checkpoint.state import SavedState
from ..checkpoint.storage.dcp import Part, SafeReader
from ..checkpoint.storage.finite import check_finite
from ..distributed.agreement import Ranks
from ..engine import SDPEngine
from ..errors import CheckpointError
from ..optim.param_groups import named_rates
from ..placement.layout import Layout
from ..placement.tensor_info import Shard, TensorInfo

# The tensors of a unit in a checkpoint: of all holders, or of a group between two averages.
_OWNED = re.compile(r"(model|optimizer|outer|local/\d+/optimizer)/(.+)")


def salvage(
    engine: SDPEngine,
    backend: ShardedBackend,
    layout: Layout,
    directory: Path,
    lost: Sequence[str],
    groups: Sequence[int],
) -> str | None:
    """Write a checkpoint of what lives and, of the units ``lost``, what the newest one has.

    Collective among the living ranks.

    Args:
        engine: this rank's engine.
        backend: its backend, as the last generation left it.
        layout: the layout with all groups.
        directory: the run's checkpoints.
        lost: the units that no living group holds.
        groups: the living groups.

    Returns:
        What was written, for the user. None if there is no checkpoint, or it is of this step.

    Raises:
        CheckpointError: it cannot be written.
        NonFiniteError: a weight is NaN or infinite.
        StepAbortedError: a group was lost meanwhile.
    """
    ranks = Ranks(alone=False)
    found = find_together(directory, None, ranks)
    if found is None or found[1]["global_steps"] >= engine.global_steps:
        return None
    path, before = found
    own = backend.state_to_save()
    assert isinstance(own, SavedState)
    tensors = own.tensors_as_they_are()
    problem = None
    if ranks.rank == 0:
        try:
            carried = _carried(path, layout, {*lost})
            load(path, carried, before["files"], alone=True)
            for key, tensor in carried.items():  # this rank may have other slices of the same parameter
                tensors[key] = tensors[key].joined(tensor) if key in tensors else tensor
        except CheckpointError as error:
            problem = str(error)
    ranks.agree(problem)
    rates = _rates(engine, backend, before["learning_rates"], ranks)
    state = run_state(engine, backend, own, rates, before["client_state"])
    # No run has this mesh with all units, so a load takes the full model and the means of moments.
    state |= {"mesh": [len(groups), *state["mesh"][1:3]], "placement": layout.placement.to_json()}
    tag = f"step-{engine.global_steps}"
    check_finite(directory, tensors, layout.wholes, ranks)
    write(directory, tag, tensors, state, ranks)
    units = f"{min(lost)!r} ({len(lost)} units)"
    return f"wrote {directory / tag}; in it, {units} is {engine.global_steps - before['global_steps']} steps older"


def _rates(engine: SDPEngine, backend: ShardedBackend, before: Mapping[str, float], ranks: Ranks) -> dict[str, float]:
    """Return the learning rates of all parameters. Collective.

    A parameter of a lost unit has that of the parameters that had the same rate before.
    """
    own = named_rates(engine.optimizer, backend.names_of_param_groups())
    living = {name: rate for each in ranks.gather(own) for name, rate in each.items()}
    now = {before[name]: rate for name, rate in living.items() if name in before}
    return {name: now.get(rate, rate) for name, rate in before.items()} | living


def _carried(path: Path, layout: Layout, lost: set[str]) -> dict[str, Any]:
    """Return empty tensors for what the checkpoint at ``path`` has of the units ``lost``, by key.

    If only some slices of a parameter are lost, only they are returned. The step count of such a
    parameter is left out, because a rank with another slice saves it.
    """
    whole = {name for name, slices in layout.wholes.items() if all(info.unit in lost for info in slices)}
    whole |= {name for name, info in layout.buffers.items() if info.unit in lost}
    slices: dict[str, list[TensorInfo]] = {}
    pieces = set[str]()
    for info in layout.parameters.values():
        if info.unit in lost and info.canonical not in whole and info.cut is not None:
            slices.setdefault(info.canonical, []).append(info)
            pieces.add(f"{info.canonical}@{info.cut.dim}:{info.cut.start}")
    carried: dict[str, Any] = {}
    for key, entry in SafeReader(path).read_metadata().state_dict_metadata.items():
        match = _OWNED.fullmatch(key)
        if match is None or not isinstance(entry, TensorStorageMetadata):
            continue
        name, dtype = match[2] if match[1] == "model" else match[2].rpartition("/")[0], entry.properties.dtype
        if name in whole or name.rpartition("@")[0] in whole or name in pieces:
            carried[key] = torch.empty(entry.size, dtype=dtype)
        elif name in slices and entry.size == slices[name][0].full_shape:
            parts = (
                Part([torch.empty(info.shape, dtype=dtype)], [info.offset(Shard())], entry.size)
                for info in slices[name]
            )
            carried[key] = functools.reduce(Part.joined, parts)
    return carried
