"""The tensors that a rank saves in a checkpoint, and the keys under which they are saved.

Keys contain canonical names: NAME is the name of a parameter in the full model. Keys of random
number states contain the rank's coordinates in the mesh. Between two averages of local steps
(``sdp.sync``), ``model/NAME`` is the weight after the last average, called the anchor. So any
layout can read the full model. Then there are also these keys:

- ``outer/NAME/KEY``: the state of the outer optimizer, equal at all holders.
- ``under_way/NAME``: an averaged change of a weight, not applied yet, equal at all holders.
- ``local/GROUP/model/PIECE``: a group's weights.
- ``local/GROUP/optimizer/PIECE/KEY``: a group's optimizer state.
- ``local/GROUP/before/PIECE``: a group's weights when the average under way began.
- ``local/GROUP/error/PIECE``: a group's rounding errors of compression.
- ``local/POSITION/buffer/NAME``: the running statistics of the rank with these coordinates.

PIECE is the name of a parameter, or ``NAME@DIM:START`` for a slice that begins at START.

A moment in codes of 8 bits (``optimizer.params.state_dtype``) is saved without decoding: the codes
under KEY, and the scales under ``KEY:s``. A scale belongs to a block of elements of one row. A
slice of columns begins its own blocks, so every checkpoint has the slice as a PIECE.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ..errors import CheckpointError
from ..full_model.gather import agree_on_buffers, persistent_buffers
from ..local_steps import LocalSteps
from ..optim.optimizer_state import OptimizerState
from ..optim.small_state import SCALES, Codes
from ..stores.store import GroupStore, Piece, Stepped
from ..sync.between import BetweenGroups
from .storage.dcp import Chunks

Tensors = dict[str, Any]


class _Coded(NamedTuple):
    """A moment of the ``piece`` of a parameter, stored in 8-bit codes with ``scales``.

    ``whole`` is the shape of the saved tensor that has this piece.
    """

    key: str
    name: str
    piece: Piece
    scales: torch.Tensor
    whole: torch.Size


class SavedState:
    """A rank's share of a checkpoint: the tensors that a save writes and a load fills in place."""

    def __init__(self, groups: BetweenGroups):
        self._groups, self._store, self._context = groups, groups.store, groups.context
        self._counts: list[OptimizerState] = []
        self._coded: dict[str, list[_Coded]] = {}  # by the key of the codes
        self._twins: list[tuple[torch.Tensor, torch.Tensor]] = []  # pairs of equal scalars: the first is loaded

    def mesh_shape(self) -> list[int]:
        """Return the sizes of the mesh: SDP groups, FSDP ranks and tensor-parallel ranks."""
        mesh = self._context.mesh
        return [mesh.sdp, mesh.fsdp, mesh.tp]

    def tensors(self, *, to_load: bool = False) -> Tensors:
        """Return this rank's weights, persistent buffers and optimizer state, by key.

        Frozen copies are left out. Unless ``to_load``, this is collective: running statistics are
        averaged, and only the first holder of a buffer returns it. If ``to_load``, every rank
        returns its buffers, so that a load can fill them.
        """
        self._groups.reshard()
        local = self._groups.local
        if local is not None and not to_load:
            # Between two averages of local steps, the full model is the anchors.
            return self.weights(local) | self._buffers(local.anchor_buffers) | self.of_local_steps(local)
        if not to_load:
            agree_on_buffers(self._store)
        buffers = persistent_buffers(self._store)
        return self.weights() | (weights_of(buffers) if to_load else self._buffers(buffers)) | self.moments()

    def _buffers(self, buffers: Mapping[str, torch.Tensor]) -> Tensors:
        layout, rank = self._store.layout, self._context.rank
        first = {name: layout.mesh.rank(layout.buffers[name].holders[0]) for name in buffers}
        return weights_of({name: buffer for name, buffer in buffers.items() if first[name] == rank})

    def weights(self, local: LocalSteps | None = None) -> Tensors:
        """Return this rank's weights by the key ``model/NAME``.

        If ``local`` is given, they are the weights after the last average (the anchors).
        """
        found, anchors = Tensors(), local.anchors if local is not None else {}
        for key, one in self._store.stepped.items():
            self._add_pieces(found, "model/{}", key, anchors.get(key, one.tensor).detach())
        return found

    def moments(self) -> Tensors:
        """Return this rank's part of the optimizer's state, by the key ``optimizer/NAME/KEY``.

        Raises:
            CheckpointError: A tensor of the state has another shape than its slice of the
                parameter, so that no other layout could load it.
        """
        self._counts, self._twins, self._coded = [], [], {}
        return self._state_of(self._store.optimizer, {key: one.tensor for key, one in self._store.stepped.items()})

    def _state_of(self, optimizer: Optimizer, tensors: Mapping[str, torch.Tensor], start: str = "optimizer") -> Tensors:
        """Return the state of ``tensors`` in ``optimizer``, by keys that begin with ``start``."""
        states, found, is_local = OptimizerState(optimizer), Tensors(), start.startswith("local/")
        self._counts.append(states)
        for key, tensor in tensors.items():
            values = list(self._values(states, optimizer, key, tensor))
            scales = {name.removesuffix(SCALES): value for _, name, value in values if name.endswith(SCALES)}
            for canonical, name, value in values:
                if name in scales:
                    self._add_codes(found, start, key, name, value, scales[name], is_local=is_local)
                elif name.endswith(SCALES):
                    continue
                elif value.shape == tensor.shape:
                    self._add_pieces(found, f"{start}/{{}}/{name}", key, value, canonical, slices=is_local)
                else:
                    self._add(found, f"{start}/{canonical}/{name}", value)
        return found

    def _add_codes(
        self, found: Tensors, start: str, key: str, name: str, codes: torch.Tensor, scales: torch.Tensor, *,
        is_local: bool,
    ) -> None:  # fmt: skip
        for piece in self._store.pieces(key, codes):
            slice_name, part = _with_whole_rows(piece, is_local=is_local)
            saved = f"{start}/{slice_name}/{name}"
            self._add(found, saved, part)  # a group may hold several slices of rows
            shape = torch.Size((part.shape[0], scales.shape[1]))
            self._add(found, saved + SCALES, Chunks([scales], [(part.offsets[0][0], 0)], shape))
            coded = _Coded(f"{start}/{piece.info.canonical}/{name}", name, piece, scales, part.shape)
            self._coded.setdefault(saved, []).append(coded)

    def has_other_blocks(self, saved: Mapping[str, torch.Size]) -> bool:
        """Return whether a load must convert moments, because this run stores them differently.

        This is so if only the checkpoint or only this run has codes of 8 bits, or if their blocks
        with one scale differ. ``saved`` has the shapes of the checkpoint's tensors, by key.
        """
        if not self._coded:
            return any(key.startswith("optimizer/") and key.endswith(SCALES) for key in saved)
        return any(key + SCALES not in saved or saved[key] != of[0].whole for key, of in self._coded.items())

    @contextmanager
    def decoded(self, tensors: Mapping[str, Any]) -> Iterator[Tensors]:
        """A context for a load, with float32 tensors in place of 8-bit moments.

        At the end of the context, the loaded values are encoded into the moments.
        """
        found = {key: value for key, value in tensors.items() if key.removesuffix(SCALES) not in self._coded}
        every = [coded for of_key in self._coded.values() for coded in of_key]
        values = [torch.zeros_like(coded.piece.tensor, dtype=torch.float32) for coded in every]
        for coded, value in zip(every, values, strict=True):
            self._add(found, coded.key, Chunks([value], [coded.piece.offset], coded.piece.info.full_shape))
        yield found
        for coded in every:
            value = values.pop(0)  # freed one by one
            codes, scales = Codes(coded.name, value.device).encode(value)
            coded.piece.tensor.copy_(codes)
            coded.scales.copy_(scales)

    def _values(
        self, states: OptimizerState, optimizer: Optimizer, key: str, tensor: torch.Tensor
    ) -> Iterator[tuple[str, str, torch.Tensor]]:
        one, infos = self._store.stepped[key], self._store.layout.parameters
        is_inner = optimizer is self._store.optimizer
        group = optimizer.param_groups[one.group] if is_inner and one.group is not None else None
        for canonical in dict.fromkeys(infos[name].canonical for name in one.names):
            for name, value in states.of(tensor, canonical, group).items():
                is_whole = not value.dim() or value.shape == tensor.shape or name.endswith(SCALES)
                if not is_whole and _is_flat_piece(self._store, one):
                    raise CheckpointError(
                        f"the optimizer's {name!r} of {key} does not have the shape of its parameter, so no other "
                        "layout could load it"
                        '; use AdamW or SGD, or sdp.granularity "block"'
                    )
                yield canonical, name, value

    # -- local steps -------------------------------------------------------------------------------

    def outer(self, local: LocalSteps) -> Tensors:
        """Return the state of the outer optimizer of local steps, by the key ``outer/NAME/KEY``."""
        return self._state_of(local.outer.optimizer, local.outer.anchors, "outer")

    def of_local_steps(self, local: LocalSteps) -> Tensors:
        """Return the tensors that only a checkpoint of local steps has, by key.

        They are the outer optimizer's state, and this group's weights and optimizer state.
        """
        self._counts, self._twins, self._coded = [], [], {}
        found = self.outer(local)
        means, before = local.outer.pending_changes
        for key, mean in means.items():
            self._add_pieces(found, "under_way/{}", key, mean)
        at = self._context.at
        start, position = f"local/{at.sdp}", f"{at.sdp}.{at.fsdp}.{at.tp}"
        found |= {f"local/{position}/buffer/{name}": buffer for name, buffer in local.own_buffers.items()}
        for kind, tensors in (("model", local.weights), ("error", local.outer.errors), ("before", before)):
            for key, tensor in tensors.items():
                self._add_pieces(found, f"{start}/{kind}/{{}}", key, tensor, slices=True)
        stepped = {key: self._store.stepped[key].tensor for key in local.weights}
        return found | self._state_of(self._store.optimizer, stepped, f"{start}/optimizer")

    # -- parts -------------------------------------------------------------------------------------

    def _add_pieces(
        self, found: Tensors, pattern: str, key: str, tensor: torch.Tensor, only: str | None = None, *,
        slices: bool = False,
    ) -> None:  # fmt: skip
        """Add a tensor as parts of the full model's parameters, or of ``slices`` of these."""
        for piece in self._store.pieces(key, tensor):
            if only is None or piece.info.canonical == only:
                name, part = _within_slice(piece) if slices else _within_whole(piece)
                self._add(found, pattern.format(name), part)

    def _add(self, found: Tensors, key: str, value: Any) -> None:
        """Add a tensor. Parts of one tensor are joined. Of equal scalars, the first one stays."""
        if isinstance(value, Chunks) and key in found:
            found[key] = found[key].joined(value)
        elif key in found:
            self._twins.append((found[key], value))
        else:
            found[key] = value

    def finish_load(self) -> None:
        """Copy loaded scalars, such as step counts, to where the optimizer keeps them.

        This is necessary because a load fills only tensors, and only one of them for all slices of
        a parameter. An optimizer may have a plain number, or a tensor for each slice.
        """
        for first, other in self._twins:
            if other is not first:
                other.copy_(first)
        for states in self._counts:
            states.write_back()
        self._store.weights_changed()

    def random_state(self) -> dict[str, torch.Tensor]:
        """Return the states of this rank's random generators, by keys with the rank's position."""
        at = self._context.at
        position = f"{at.sdp}.{at.fsdp}.{at.tp}"
        states = {f"random/cpu/{position}": torch.get_rng_state()}
        if self._context.device.type == "cuda":
            states[f"random/cuda/{position}"] = torch.cuda.get_rng_state(self._context.device)
        return states


def set_random_state(states: Mapping[str, torch.Tensor]) -> None:
    """Set this rank's random generators to states from :meth:`SavedState.random_state`."""
    for key, value in states.items():
        (torch.cuda.set_rng_state if "/cuda/" in key else torch.set_rng_state)(value)


def weights_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return ``tensors`` of the model by their keys in a checkpoint, ``model/NAME``."""
    return {f"model/{name}": tensor.detach() for name, tensor in tensors.items()}


def _is_flat_piece(store: GroupStore, one: Stepped) -> bool:
    """Return whether a tensor is only a part of a parameter, even without FSDP2's sharding."""
    infos = [store.layout.parameters[name] for name in one.names]
    return len(infos) > 1 or infos[0].tp_dim is not None or infos[0].cut is not None


def _within_whole(piece: Piece) -> tuple[str, Chunks]:
    """Return the name of the parameter, and the piece as a part of it."""
    return piece.info.canonical, Chunks([piece.tensor], [piece.offset], piece.info.full_shape)


def _within_slice(piece: Piece) -> tuple[str, Chunks]:
    """Return the name of the slice (or parameter), and the position of the piece in the slice."""
    info = piece.info
    if info.cut is None:
        return _within_whole(piece)
    inside = [at - info.cut.start if dim == info.cut.dim else at for dim, at in enumerate(piece.offset)]
    return f"{info.canonical}@{info.cut.dim}:{info.cut.start}", Chunks([piece.tensor], [inside], info.shape)


def _with_whole_rows(piece: Piece, *, is_local: bool) -> tuple[str, Chunks]:
    """Return the name under which codes are saved, and the position of the piece in this tensor.

    A part of the columns is a slice with blocks of its own. Rows are a slice only if ``is_local``.
    """
    info = piece.info
    if is_local and info.cut is not None and info.cut.dim == 0:
        return _within_slice(piece)
    name, shape, offset = info.canonical, list(info.full_shape), list(piece.offset)
    for dim, size in enumerate(piece.tensor.shape):
        if dim > 0 and size < shape[dim]:
            name, shape[dim], offset[dim] = f"{name}@{dim}:{offset[dim]}", size, 0
    return name, Chunks([piece.tensor], [offset], torch.Size(shape))
