"""The tensors of a checkpoint as they lie on this rank: state under canonical names, random numbers under the rank's coordinates."""

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
from .dcp import Part


class SavedState:
    """What a rank gives to a checkpoint and takes from one."""

    def __init__(self, backend: Backend, optimizer: Optimizer, rank: int):
        self._backend, self._optimizer, self._rank = backend, optimizer, rank
        self._state = OptimizerState(optimizer)

    def mesh_shape(self) -> list[Any]:
        """Sizes of the mesh: sdp, fsdp, tp; of groups of unequal size their numbers of data ranks too."""
        mesh = self._backend.layout.mesh
        return [mesh.sdp, mesh.fsdp, mesh.tp, *([list(mesh.sizes)] if mesh.sizes else [])]

    def tensors(self, *, to_load: bool = False) -> dict[str, Any]:
        """Weights, persistent buffers and optimizer state, each as its part of the full model's.

        Frozen copies are no part of it. Buffers (running statistics) become the full model's on all ranks, and the first holder gives
        them; ``to_load`` all ranks take those.
        """
        backend = self._backend
        backend.shard_parameters()
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
        """A shard as a part of the full model's parameter. FSDP2 knows of no cut but its own."""
        info = self._backend.layout.parameters[name]
        if info.tp_dim is None and info.cut is None:
            return name, tensor
        return info.canonical, Part([local_tensor(tensor)], [info.offset(self._backend.shard)], info.full_shape)

    def loaded(self) -> None:
        """To be called once :meth:`tensors` were filled: what the first slice of a parameter has for all (a step count) the others get."""
        self._state.write_back()
        stepped = self._backend.stepped
        for slices in self._backend.layout.wholes.values():
            here = [stepped[info.name] for info in slices if info.name in stepped]
            for parameter in here[1:]:
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor) and value.shape != parameter.shape:
                        value.copy_(self._optimizer.state[here[0]][key])

    def random_state(self) -> dict[str, torch.Tensor]:
        """This rank's generators, under its coordinates: equal names from several ranks would become one."""
        at = self._backend.layout.mesh.coordinates(self._rank)
        position = f"{at.sdp}.{at.fsdp}.{at.tp}"
        states = {f"random/cpu/{position}": torch.get_rng_state()}
        if self._backend.device.type == "cuda":
            states[f"random/cuda/{position}"] = torch.cuda.get_rng_state(self._backend.device)
        return states


def set_random_state(states: Mapping[str, torch.Tensor]) -> None:
    """Put this rank's generators back, as :meth:`SavedState.random_state` gave them."""
    for key, value in states.items():
        (torch.cuda.set_rng_state if "/cuda/" in key else torch.set_rng_state)(value)


def weights_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The model's tensors by key, ``model/NAME``; shards stay shards."""
    return {f"model/{name}": tensor.detach() for name, tensor in tensors.items()}


def tensors_of(
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    states: OptimizerState,
    placed: Callable[[str, torch.Tensor], tuple[str, Any]],
) -> dict[str, Any]:
    """Everything that is a tensor, by key: ``model/NAME`` and ``optimizer/NAME/KEY``; shards stay shards.

    ``placed(name, tensor)``: the canonical name of the parameter ``name`` here, and a tensor of its shape as DCP is to see it. Several
    slices of one parameter become one part of it; of a number (a step count) they have equal ones: the first's. Raises
    :class:`CheckpointError` for slices with any other state.
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
                        f"the optimizer's {key.rpartition('/')[2]!r} of {name} has not the shape of its parameter, so that no other layout "
                        'could go on with it; use AdamW or SGD, or sdp.granularity "block"'
                    )
                tensors.setdefault(key, value)
            elif isinstance(part, Part) and key in tensors:
                tensors[key] = tensors[key].joined(part)
            else:
                tensors[key] = part
    return tensors
