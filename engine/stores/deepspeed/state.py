"""Checkpoints, checksums and sizes of ZeRO's flat partitions, by the full model's canonical
names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ...accounting.memory import StateBytes, predict_outer_bytes, state_tensors
from ...checkpoint.state import SavedState
from ...checkpoint.storage.dcp import Part
from ...optim.optimizer_state import OptimizerState
from ...optim.script_optimizers import stepped_by_engine
from ...placement.tensor_info import TensorInfo
from ...placement.units import SHARED
from ...sync.consistency import CHUNK, compare_sums
from .base import DeepSpeedBase, untrained_part
from .local_steps import find_boxes
from .optimizer import local_part
from .partitions import boxes, partition_numel


def part_of(info: TensorInfo, start: int, flat: torch.Tensor) -> Part:
    """Describe ``flat`` as a part of the full model's parameter, by views and without a copy.

    ``flat`` holds the elements from ``start`` of the parameter or slice ``info``.
    """
    locals_, offsets, at = [], [], 0
    for box, sizes, numel in boxes(start, flat.numel(), info.shape):
        shift = [info.cut.start if info.cut is not None and dim == info.cut.dim else 0 for dim in range(len(box))]
        locals_.append(flat[at : at + numel].view(sizes))
        offsets.append([a + b for a, b in zip(box, shift, strict=True)])
        at += numel
    return Part(locals_, offsets, info.full_shape)


class DeepSpeedState(SavedState):
    """The tensors that a rank saves and loads under ZeRO 1 to 3.

    At stage 0, parameters are whole.
    """

    _backend: DeepSpeedBase

    def tensors(self, *, to_load: bool = False) -> dict[str, Any]:
        backend = self._backend
        if backend.zero is None or (backend.local is not None and not to_load):
            return super().tensors(to_load=to_load)
        backend.shard_parameters()
        if not to_load:
            backend.agree_on_buffers()
        known = backend.layout.buffers
        tensors: dict[str, Any] = {
            f"model/{name}": buffer.detach()
            for name, buffer in backend.module.named_buffers()
            if name in known and (to_load or self._gives(known[name]))
        }
        self._state = OptimizerState(backend.deepspeed.basic_optimizer)
        for index, (group, master) in enumerate(backend.zero.basic_groups()):
            for at, piece in backend.pieces():
                if at != index:
                    continue
                info = backend.layout.parameters[piece.name]
                values = {"model/{}": master.detach()}
                values |= {
                    f"optimizer/{{}}/{key}": value
                    for key, value in self._state.of(master, info.canonical, group).items()
                }
                for pattern, value in values.items():
                    key = pattern.format(info.canonical)
                    if value.shape != master.shape:
                        tensors.setdefault(key, value)  # a step count
                        continue
                    part = part_of(info, piece.start, value[piece.at : piece.at + piece.length])
                    tensors[key] = tensors[key].joined(part) if key in tensors else part
        return tensors | self._untrained(to_load=to_load)

    def _untrained(self, *, to_load: bool) -> dict[str, Any]:
        """The parameters that this rank holds but the optimizer does not have."""
        backend = self._backend
        trained = {name for bundle in backend.bundles for name in bundle.names}
        tensors: dict[str, Any] = {}
        for name in backend.parameters:
            info = backend.layout.parameters[name]
            if name not in trained:
                for start, values in untrained_part(backend, name):
                    tensors[f"model/{info.canonical}"] = part_of(info, start, values)
        return tensors

    def finish_load(self) -> None:
        if self._backend.zero is None:
            super().finish_load()
            self._spread()
            return
        self._state.write_back()
        self._spread_counts()
        self._spread()

    def finish_load_of_weights(self) -> None:
        self._spread()

    def _spread(self) -> None:
        """Copy the loaded float32 weights to the model. Collective inside the group."""
        self._backend.write_weights()

    def _spread_counts(self) -> None:
        """Copy the state that all slices of a parameter share (a step count) from the first slice.

        Each slice is in a bundle of its own.
        """
        backend, first = self._backend, {}
        assert backend.zero is not None
        for index, piece in backend.pieces():
            master, canonical = backend.zero.masters[index], backend.layout.parameters[piece.name].canonical
            for key, value in backend.deepspeed.basic_optimizer.state.get(master, {}).items():
                if isinstance(value, torch.Tensor) and value.shape != master.shape:
                    value.copy_(first.setdefault((canonical, key), value))


def materialise_state(backend: DeepSpeedBase) -> None:
    """Give every partition the optimizer state that its first step would make, without changing any
    weight.
    """
    assert backend.zero is not None
    optimizer = backend.deepspeed.basic_optimizer
    param_groups = optimizer.param_groups
    for group, master in backend.zero.basic_groups():
        kept, rate, gradient = group["params"], group["lr"], master.grad
        group["params"], group["lr"], master.grad = [master], 0.0, torch.zeros_like(master)
        optimizer.param_groups = [group]
        with stepped_by_engine(optimizer):
            optimizer.step()
        group["params"], group["lr"], master.grad = kept, rate, gradient
    optimizer.param_groups = param_groups


def check_holders(backend: DeepSpeedBase) -> None:
    """Compare float32 weights and optimizer state across holders. Collective.

    In local steps, anchors and the state of the outer optimizer are compared. Groups may partition
    differently. A checksum is the sum over elements of their bits times their positions, so the
    sums over any partitions are equal. Raises HolderMismatchError.
    """
    assert backend.zero is not None
    names = [SHARED, *(unit.name for unit in backend.layout.units)]
    sums = torch.zeros(len(names), dtype=torch.int64)
    position = {name: index for index, name in enumerate(backend.layout.parameters)}
    for name, start, values in _common_values(backend):
        for kind, value in enumerate(values):
            first = (position[name] * 8 + kind) * 1_000_003 + start
            total = sums[names.index(backend.layout.parameters[name].unit)]
            for at in range(0, value.numel(), CHUNK):  # 64-bit copies of a whole partition could be too much
                words = value[at : at + CHUNK].contiguous().view(torch.int32).long()
                weights = 2 * torch.arange(first + at, first + at + words.numel(), device=words.device) + 1
                total += (words * weights).sum().cpu()
    everyones = torch.empty((backend.layout.mesh.world_size, len(names)), dtype=torch.int64, device=backend.device)
    dist.all_gather(list(everyones.unbind()), sums.to(backend.device))
    mesh = backend.layout.mesh
    by_group = [everyones[mesh.ranks_of(group)].sum(0).tolist() for group in range(mesh.sdp)]
    for index, unit in enumerate(names):
        holders = backend.layout.everyone if unit == SHARED else backend.layout.placement.holders[index - 1]
        compare_sums(
            unit, holders, [sums[index] for sums in by_group], [mesh.ranks_of(group)[0] for group in range(mesh.sdp)]
        )


def _common_values(backend: DeepSpeedBase) -> Iterator[tuple[str, int, list[torch.Tensor]]]:
    """Yield name, start and flat values of what all holders of a parameter have: weights and
    optimizer state.

    In local steps, these are anchors and the state of the outer optimizer.
    """
    local: Any = backend.local
    if local is not None:
        outer = local.outer
        for key, box in local.boxes.items():
            anchor = outer.anchors[key]
            yield box.name, box.start, [value.view(-1) for value in _with_state(anchor, outer.optimizer)]
        return
    assert backend.zero is not None
    masters = backend.zero.masters
    for index, piece in backend.pieces():
        values = _with_state(masters[index], backend.deepspeed.basic_optimizer)
        yield piece.name, piece.start, [value[piece.at : piece.at + piece.length] for value in values]


def _with_state(weights: torch.Tensor, optimizer: Optimizer) -> list[torch.Tensor]:
    state = optimizer.state.get(weights, {})
    of_state = [value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor) and value.dim()]
    return [weights.detach(), *of_state]


def measured_bytes(backend: DeepSpeedBase, gradient_bytes: int) -> StateBytes:
    """Bytes of the tensors that exist on this rank; gradients as at the last step.

    Parameters include float32 master weights if these are separate tensors.
    """
    held = sum(local_part(p).nbytes for p in backend.parameters.values())
    copies = sum(local_part(p).nbytes for p in backend.copies_in_memory.values())
    masters = sum(master.nbytes for master in backend.masters)
    states = backend.deepspeed.basic_optimizer.state.values()
    moments = sum(v.nbytes for state in states for v in state.values() if isinstance(v, torch.Tensor) and v.dim())
    outer = backend.local.nbytes() if backend.local is not None else 0
    on_host = outer if backend.local is not None and backend.local.sync.offload == "cpu" else 0
    return StateBytes(held + masters, gradient_bytes, moments, copies, outer, on_host)


def predicted_bytes(backend: DeepSpeedBase) -> StateBytes:
    """The bytes of :func:`measured_bytes`, predicted from the placement and DeepSpeed's padding."""
    ranks, compute = backend.ranks_inside, backend.compute_dtype.itemsize
    infos = backend.layout.parameters

    def numel(name: str) -> int:
        return -(-infos[name].numel // ranks) if backend.stage == 3 else infos[name].numel

    held = compute * sum(numel(name) for name in backend.parameters)
    copies = compute * sum(numel(name) for name in backend.copies_in_memory)
    stepped = sum(partition_numel(bundle, backend.stage, ranks) for bundle in backend.bundles)
    masters = 4 * stepped if backend.stage or compute == 2 else 0
    # Gradients are float32, but with one group ZeRO 1 reduces them in the dtype of the model.
    of_zero_1 = backend.stage == 1 and not backend.installed and not (backend.zero and backend.zero.offloaded)
    averaged = compute if of_zero_1 else 4
    moments = 4 * stepped * state_tensors(backend.deepspeed.basic_optimizer)
    sync, outer = backend.local_settings, 0
    if sync is not None:
        outer = predict_outer_bytes(sync, [(infos[box.name], box.numel) for box in find_boxes(backend).values()])
    on_host = outer if sync is not None and sync.offload == "cpu" else 0
    return StateBytes(held + masters, averaged * stepped, moments, copies, outer, on_host)
