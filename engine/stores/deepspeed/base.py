"""The base class of the DeepSpeed backend: this rank's engine, partitions or copies, and bundles.

:class:`Gathered` shows the full model's float32 parameters, from these partitions or copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...config.sync import SyncSection
from ...distributed.process_groups import Communicators
from ...errors import ModelError
from ...placement.tensor_info import Shard
from ..sharded import ShardedBackend
from .optimizer import LossScale, MasterCopies, ZeroState, local_part
from .partitions import Bundle, Piece, pieces_of
from .process_groups import ProcessGroups


class DeepSpeedBase(ShardedBackend):
    """The state that DeepSpeed holds for this rank. :class:`DeepSpeedBackend` fills the
    attributes.
    """

    deepspeed: Any  # DeepSpeed's own engine of this group
    stage: int
    compute_dtype: torch.dtype
    installed: bool  # whether there are several groups, so that averages between them are installed
    bundles: list[Bundle]  # DeepSpeed's parameter groups, in order
    options: list[int]  # for each of them, the index of the user's parameter group
    options_count: int
    zero: ZeroState | None
    copies: MasterCopies | None
    scale: LossScale
    local_settings: SyncSection | None  # of local steps
    averaged: list[torch.Tensor]  # the gradients of the present step, as the next update uses them
    _process_groups: ProcessGroups
    _written: Mapping[str, int]  # by parameter, the version that torch counts, when the weights were written last

    @property
    def copies_in_memory(self) -> dict[str, nn.Parameter]:
        """The frozen copies that are allocated. In forward phases of a schedule, those of ZeRO 3
        are.
        """
        return self._frozen if self.layout.keeps_frozen or self.stage == 3 else {}

    @property
    def library_engine(self) -> Any:
        return self.deepspeed

    @property
    def stepped(self) -> dict[str, torch.Tensor]:
        """The tensors that stage 0 steps on: float32 copies in half precision, else the
        parameters.
        """
        return {**self.parameters, **(self.copies.masters if self.copies is not None else {})}

    @property
    def masters(self) -> list[torch.Tensor]:
        """Float32 weights other than the model's own: this rank's partitions, or copies of
        parameters.
        """
        if self.zero is not None:
            return self.zero.masters
        return list(self.copies.masters.values()) if self.copies is not None else []

    @property
    def ranks_inside(self) -> int:
        """The number of ranks among which DeepSpeed partitions this group's state."""
        return dist.get_world_size(self._process_groups.inside)

    @property
    def rank_inside(self) -> int:
        """This rank's index among them."""
        return dist.get_rank(self._process_groups.inside)

    @property
    def shard(self) -> Shard:
        return Shard()

    @property
    def between(self) -> dict[tuple[int, ...], dist.ProcessGroup]:
        """The communicators between groups by their ranks (ZeRO 1 to 3)."""
        return self._process_groups.between

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """This rank's pieces of every bundle's parameters, each with the bundle's index (ZeRO 1 to
        3).
        """
        for index, bundle in enumerate(self.bundles):
            for piece in pieces_of(bundle, self.stage, self.ranks_inside, self.rank_inside):
                yield index, piece

    def write_weights(self) -> None:
        """Copy the float32 weights to the model's parameters, where both exist.

        Collective inside the group.
        """
        if self.zero is not None:
            self.zero.release_parameters()
        state = self.zero or self.copies
        if state is not None:
            state.spread_masters()
        self.note_weights()

    def note_weights(self) -> None:
        """Note that the model has the weights on which ZeRO steps."""
        self._written = {name: parameter._version for name, parameter in self.parameters.items()}

    def refuse_changed_weights(self) -> None:
        """Raise ModelError if the script has changed the model's weights, which ZeRO would undo."""
        parameters = self.parameters
        changed = next((name for name, then in self._written.items() if parameters[name]._version != then), "")
        if changed and self.zero is not None:
            raise ModelError(
                f"the script changed the weights of {changed} after sdp.initialize, and DeepSpeed's ZeRO steps on "
                "float32 copies of its own, so the next step would undo the change; change them before sdp.initialize, "
                'call engine.load_checkpoint, or use sdp.engine "fsdp2"'
            )

    def all_reduce_inside(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over the ranks of the group in place."""
        if self.ranks_inside > 1:
            self.traffic.record("inside groups", "all_reduce", tensor.nbytes, self.ranks_inside)
            dist.all_reduce(tensor, group=self._process_groups.inside)


def untrained_part(backend: DeepSpeedBase, name: str) -> list[tuple[int, torch.Tensor]]:
    """This rank's flat pieces of a parameter that the optimizer does not have, each with its start.

    ZeRO 3 partitions such parameters too.
    """
    info, local = backend.layout.parameters[name], local_part(backend.parameters[name]).detach().view(-1)
    alone = Bundle(info.unit, 0, info.holders, (name,), (info.numel,))
    ranks, rank = (backend.ranks_inside, backend.rank_inside) if backend.stage == 3 else (1, 0)
    return [(piece.start, local[: piece.length]) for piece in pieces_of(alone, 3, ranks, rank)]


class _WholeParameters(Mapping[str, nn.Parameter]):
    """Whole float32 parameters, by name.

    A lookup gathers inside the group, so all its ranks must do it.
    """

    def __init__(self, backend: DeepSpeedBase):
        self._backend = backend

    def __getitem__(self, name: str) -> Any:
        backend = self._backend
        if name not in backend.parameters:
            raise KeyError(name)
        if backend.zero is not None and backend.parameters[name].requires_grad:
            return self._joined(name, self._partitions(name, backend.zero.masters))
        if backend.stage == 3:
            return self._joined(name, untrained_part(backend, name))
        return backend.stepped[name].detach().float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._backend.parameters)

    def __len__(self) -> int:
        return len(self._backend.parameters)

    def _partitions(self, name: str, flats: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
        """This rank's flat pieces of a partitioned parameter, each with its start."""
        pieces = [(index, piece) for index, piece in self._backend.pieces() if piece.name == name]
        return [(piece.start, flats[index].detach()[piece.at : piece.at + piece.length]) for index, piece in pieces]

    def _joined(self, name: str, parts: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
        """Join the pieces of all ranks by a sum. It is exact, because one rank has each element."""
        backend, info = self._backend, self._backend.layout.parameters[name]
        whole = torch.zeros(info.numel, dtype=torch.float32, device=backend.device)
        for start, part in parts:
            whole[start : start + part.numel()] = part.to(backend.device)
        backend.all_reduce_inside(whole)
        return whole.view(info.shape)


class Gathered:
    """A view of the backend without shards, for evaluation and the full state."""

    shards = 1
    tensor_ranks = None

    def __init__(self, backend: DeepSpeedBase):
        self._backend = backend
        self.parameters = _WholeParameters(backend)
        everyone = dist.group.WORLD
        assert everyone is not None
        holders = {backend.layout.everyone: everyone}
        self.communicators = Communicators(backend.layout.mesh, backend.rank, True, holders=holders)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def gather_root(self) -> None:
        """A no-op: DeepSpeed gathers with hooks of its own."""


class CalledEngine(nn.Module):
    """DeepSpeed's engine with the signature of the module's ``forward``."""

    def __init__(self, engine: Any):
        super().__init__()
        self._hidden = (engine,)
        self.forward = engine.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._hidden[0](*args, **kwargs)
