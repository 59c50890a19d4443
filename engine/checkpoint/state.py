"""This rank's share of a checkpoint's tensors.

State has canonical names. Random number states have names with the rank's coordinates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ..backend import Backend
from ..distributed.tensors import local_tensor
from ..errors import CheckpointError
from ..optim.optimizer_state import OptimizerState
from ..placement.tensor_info import TensorInfo
from .local_state import LocalState
from .storage.dcp import Part


class SavedState:
    """The tensors that a rank saves to a checkpoint and loads from one."""

    def __init__(self, backend: Backend, optimizer: Optimizer, rank: int):
        self._backend, self._optimizer, self._rank = backend, optimizer, rank
        self._state = OptimizerState(optimizer)

    def mesh_shape(self) -> list[int]:
        """Return the sizes of the mesh: sdp, fsdp, tp."""
        mesh = self._backend.layout.mesh
        return [mesh.sdp, mesh.fsdp, mesh.tp]

    def tensors(self, *, to_load: bool = False) -> dict[str, Any]:
        """Return weights, persistent buffers and optimizer state, by key.

        Each is a part of the full model's tensor. Frozen copies are left out. Before a save,
        buffers (running statistics) become those of the full model on all ranks, and only the first
        holder saves them. With ``to_load``, every rank returns its buffers, so that they can be
        filled.
        """
        backend = self._backend
        backend.shard_parameters()
        if backend.local is not None and not to_load:
            # Between two averages of local steps, the full model is the anchors.
            state = LocalState(backend)
            buffers = backend.local.common_part().buffers
            given = {name: of for name, of in buffers.items() if self._gives(backend.layout.buffers[name])}
            return state.model() | weights_of(given) | state.tensors()
        if not to_load:
            backend.agree_on_buffers()
        known = backend.layout.buffers
        named = ((name, buffer) for name, buffer in backend.module.named_buffers() if name in known)
        buffers = {name: buffer for name, buffer in named if to_load or self._gives(known[name])}
        self._state = OptimizerState(self._optimizer)
        return tensors_of(self._backend.stepped, buffers, self._state, self._placed)

    def _gives(self, buffer: TensorInfo) -> bool:
        layout = self._backend.layout
        alone = self._backend.data_ranks_here == layout.mesh.data_ranks
        return alone or self._rank == layout.mesh.rank(buffer.holders[0])

    def _placed(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        """Return the canonical name of ``name``, and a shard as a part of the full parameter.

        FSDP2 knows only its own sharding, not tensor parallelism or slices.
        """
        info = self._backend.layout.parameters[name]
        if info.tp_dim is None and info.cut is None:
            return name, tensor
        return info.canonical, Part([local_tensor(tensor)], [info.offset(self._backend.shard)], info.full_shape)

    def finish_load(self) -> None:
        """Apply the values that were loaded into the result of :meth:`tensors`.

        Slices of one parameter share some state, such as a step count. Only the first slice was
        filled with it, so it is copied to the other slices.
        """
        self._state.write_back()
        stepped = self._backend.stepped
        for slices in self._backend.layout.wholes.values():
            here = [stepped[info.name] for info in slices if info.name in stepped]
            for parameter in here[1:]:
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor) and value.shape != parameter.shape:
                        value.copy_(self._optimizer.state[here[0]][key])

    def finish_load_of_weights(self) -> None:
        """Finish a load of weights alone.

        A no-op where the optimizer steps on the model's parameters.
        """

    def random_state(self) -> dict[str, torch.Tensor]:
        """Return the states of this rank's generators, under names with the rank's coordinates.

        A checkpoint would keep only one state if several ranks used the same name.
        """
        at = self._backend.layout.mesh.coordinates(self._rank)
        position = f"{at.sdp}.{at.fsdp}.{at.tp}"
        states = {f"random/cpu/{position}": torch.get_rng_state()}
        if self._backend.device.type == "cuda":
            states[f"random/cuda/{position}"] = torch.cuda.get_rng_state(self._backend.device)
        return states


def set_random_state(states: Mapping[str, torch.Tensor]) -> None:
    """Set this rank's generators to the states from :meth:`SavedState.random_state`."""
    for key, value in states.items():
        (torch.cuda.set_rng_state if "/cuda/" in key else torch.set_rng_state)(value)


def weights_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the model's tensors by key, ``model/NAME``. Shards stay shards."""
    return {f"model/{name}": tensor.detach() for name, tensor in tensors.items()}


def tensors_of(
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    states: OptimizerState,
    placed: Callable[[str, torch.Tensor], tuple[str, Any]],
) -> dict[str, Any]:
    """Return all tensors by key: ``model/NAME`` and ``optimizer/NAME/KEY``. Shards stay shards.

    Several slices of one parameter become one part. Their scalars, such as step counts, are equal,
    so the first slice's is taken.

    Args:
        parameters: This rank's parameters, or slices of them, by name.
        buffers: The buffers to save or to load, by name.
        states: The optimizer's state.
        placed: ``placed(name, tensor)`` returns the canonical name of the parameter ``name``, and
            the form of ``tensor`` that DCP sees. ``tensor`` has the parameter's shape.

    Raises:
        CheckpointError: A slice has state that is neither a scalar nor of the slice's shape.
    """
    tensors = weights_of(buffers)
    for name, parameter in parameters.items():
        here = {"model/{}": parameter.detach()}
        here |= {
            f"optimizer/{{}}/{key}": value
            for key, value in states.of(parameter, placed(name, here["model/{}"])[0]).items()
        }
        for pattern, value in here.items():
            canonical, part = placed(name, value)
            key = pattern.format(canonical)
            if value.shape != parameter.shape:
                if value.dim() and canonical != name:
                    raise CheckpointError(
                        f"the optimizer's {key.rpartition('/')[2]!r} of {name} does not have the shape of its "
                        "parameter, so no other "
                        'layout could continue with it; use AdamW or SGD, or sdp.granularity "block"'
                    )
                tensors.setdefault(key, value)
            elif isinstance(part, Part) and key in tensors:
                tensors[key] = tensors[key].joined(part)
            else:
                tensors[key] = part
    return tensors
