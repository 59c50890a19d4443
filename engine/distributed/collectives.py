"""Collectives of tensor parallelism, and counts of the bytes that a rank sends.

Bytes are counted as in ring algorithms over n ranks (like the "bus bandwidth" of nccl-tests):

- all-reduce: a rank sends 2(n − 1)/n of the buffer.
- reduce-scatter, all-gather: a rank sends (n − 1)/n of the whole buffer.
- broadcast: every rank except the last one of the ring sends the buffer once.

Outside of residual branches, hidden states are cut along the sequence (Korthikanti et al., arXiv
2205.05198). They are gathered before a module whose output features are cut, and reduce-scattered
after a module whose input features are cut. In backward, the two collectives change places. Logits
are not gathered for the loss (Shoeybi et al., arXiv 1909.08053).

Letters in shapes: B sequences, S tokens, V vocabulary, D hidden features, T tensor-parallel ranks,
N rows of logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ..errors import ModelError


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or ``tensor`` itself if it is a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stored_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this rank stores: under DeepSpeed's ZeRO 3 a partition, else ``parameter``."""
    return getattr(parameter, "ds_tensor", parameter)


def cut_like(local: torch.Tensor, tensor: DTensor) -> DTensor:
    """Return a DTensor that is cut like ``tensor``, and has ``local`` as this rank's shard.

    Unlike ``DTensor.from_local``, this leaves an offloaded shard in the host's memory.
    """
    return DTensor(local, tensor._spec, requires_grad=False)


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """A context that turns an active ``torch.inference_mode()`` into ``torch.no_grad()``.

    FSDP2 and ZeRO gather parameters into tensors that they use again. If such tensors were made in
    inference mode, training could not use them.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
Scope = Literal["between groups", "inside groups", "tensor parallel", "control"]


def sent_bytes(kind: Kind, nbytes: int, ranks: int) -> float:
    """Return the bytes that one of ``ranks`` ranks sends in a collective.

    ``nbytes`` is the size of the whole (unsharded) buffer.
    """
    if ranks == 1:
        return 0.0
    if kind == "broadcast":
        return float(nbytes)
    return (2 if kind == "all_reduce" else 1) * nbytes * (ranks - 1) / ranks


Among = tuple[Scope, Kind, tuple[int, ...]]
"""The purpose and the kind of collectives, and the ranks that take part, in ascending order."""


class Collective(NamedTuple):
    """The sum of all collectives of one kind, with one purpose (``scope``), among the same ranks.

    ``nbytes`` has the bytes of all whole (unsharded) buffers of these collectives.
    """

    scope: Scope
    kind: Kind
    ranks: tuple[int, ...]
    nbytes: int

    @property
    def sent(self) -> float:
        """The bytes that one rank sends. In a broadcast, the rank sends the whole buffer once."""
        return sent_bytes(self.kind, self.nbytes, len(self.ranks))


class Traffic:
    """Counts the bytes that this rank sends in collectives.

    Attributes:
        buffers: a counter from (purpose, kind, ranks) to the bytes of whole (unsharded) buffers in
            such collectives since the last reset.
    """

    def __init__(self) -> None:
        self.buffers: Counter[Among] = Counter()

    def record(self, scope: Scope, kind: Kind, nbytes: int, ranks: Sequence[int]) -> None:
        """Count one collective.

        Args:
            scope: the purpose of the collective.
            nbytes: the bytes of the whole (unsharded) buffer.
            ranks: the ranks that take part, in ascending order.
        """
        if len(ranks) > 1:
            self.buffers[scope, kind, tuple(ranks)] += nbytes

    def reset(self) -> None:
        self.buffers.clear()

    def by_kind(self) -> dict[str, int]:
        """Return the bytes sent since the last reset, by keys like "between groups/all_reduce"."""
        totals: Counter[str] = Counter()
        for (scope, kind, ranks), nbytes in self.buffers.items():
            totals[f"{scope}/{kind}"] += sent_bytes(kind, nbytes, len(ranks))  # type: ignore[assignment]
        return {name: round(total) for name, total in sorted(totals.items())}


SEQUENCE = 1  # the dimension of tokens in (B, S, …)

# torch 2.13 has new names for two collectives, and warns users of the old ones.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class TensorRanks:
    """The ranks among which tensor parallelism cuts matrices, with their collectives.

    Without ``group``, and for tensors on the meta device, nothing is sent, and only the shapes of
    results are right. So one process can compute the shapes in a model. ``index`` is this rank's
    index, from 0 to ``size`` − 1.
    """

    group: dist.ProcessGroup | None
    size: int
    index: int
    traffic: Traffic

    def __deepcopy__(self, memo: Any) -> TensorRanks:
        """Return ranks that send nothing, for a copy of a model."""
        return replace(self, group=None)

    def _sends(self, kind: Kind, whole: Tensor) -> bool:
        """Return whether the collective takes place. If it does, count it."""
        if self.group is None or whole.is_meta:
            return False
        self.traffic.record("tensor parallel", kind, whole.nbytes, dist.get_process_group_ranks(self.group))
        return True

    def all_gather(self, part: Tensor, dim: int) -> Tensor:
        """Return the tensors ``part`` of all ranks, joined along ``dim``."""
        dim %= part.dim()
        parts = part.new_empty((self.size, *part.shape))
        if self._sends("all_gather", parts):
            all_gather_single(parts.view(-1), part.contiguous().view(-1), group=self.group)
        else:
            parts.zero_()
        return parts.movedim(0, dim).flatten(dim, dim + 1)

    def reduce_scatter(self, whole: Tensor, dim: int) -> Tensor:
        """Sum ``whole`` over all ranks, and return this rank's part of the sum along ``dim``."""
        parts = whole.unflatten(dim, (self.size, -1)).movedim(dim, 0).contiguous()
        part = parts.new_empty(parts.shape[1:])
        if self._sends("reduce_scatter", parts):
            reduce_scatter_single(part.view(-1), parts.view(-1), group=self.group)
        else:
            part.zero_()
        return part

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce ``values`` in place over all ranks, and return them."""
        if self._sends("all_reduce", values):
            dist.all_reduce(values, op, group=self.group)
        return values


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_gather(part, SEQUENCE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Each rank used the whole sequence for its own features, so the gradients add up.
        return ctx.ranks.reduce_scatter(gradients[0], SEQUENCE), None


class _ScatterSequence(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.reduce_scatter(whole, SEQUENCE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.all_gather(gradients[0], SEQUENCE), None


class _GatherVocabulary(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ranks: TensorRanks) -> Tensor:
        ctx.ranks = ranks
        return ranks.all_gather(logits, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Every rank computes the same loss from the whole logits. So each rank already has the
        # complete gradient of its own part.
        return gradients[0].chunk(ctx.ranks.size, dim=-1)[ctx.ranks.index], None


def autocast_precision(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype to which torch's autocast would cast ``tensor`` in a linear layer, or None.

    The result is None if autocast is off, and for float64, which autocast does not cast.
    """
    kind = tensor.device.type
    if tensor.is_meta or tensor.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def gather_sequence(part: Tensor, ranks: TensorRanks) -> Tensor:
    """Gather the hidden states of T ranks along the sequence: (B, S/T, …) → (B, S, …).

    Under autocast, a rank first casts hidden states as the next linear layer would, to send less.
    """
    precision = autocast_precision(part)
    if precision is not None:
        part = part.to(precision)
    return _GatherSequence.apply(part, ranks)  # type: ignore[return-value]


def scatter_sequence(whole: Tensor, ranks: TensorRanks) -> Tensor:
    """Sum hidden states over T ranks, and cut the sum along the sequence: (B, S, …) → (B, S/T, …).

    Raises ModelError if S is not divisible by T.
    """
    if whole.shape[SEQUENCE] % ranks.size:
        raise ModelError(
            f"a sequence of {whole.shape[SEQUENCE]} tokens cannot be cut among tensor_parallel.autotp_size = "
            f"{ranks.size} ranks; choose a length that is a multiple of {ranks.size}"
        )
    return _ScatterSequence.apply(whole, ranks)  # type: ignore[return-value]


def gather_vocabulary(logits: Tensor, ranks: TensorRanks | None) -> Tensor:
    """Gather the logits of T ranks along the vocabulary: (…, V/T) → (…, V).

    All ranks must compute the same loss from the result, because backward does not sum gradients
    over ranks. If ``ranks`` is None, the logits are whole already and are returned as they are.
    """
    return logits if ranks is None else _GatherVocabulary.apply(logits, ranks)  # type: ignore[return-value]


def vocabulary_embedding(ids: Tensor, rows: Tensor, ranks: TensorRanks) -> Tensor:
    """Look up embeddings in a table whose V rows are cut among T ranks.

    Args:
        ids: token ids (B, S), the same on all ranks.
        rows: this rank's rows of the table (V/T, D).

    Returns:
        The embeddings of this rank's part of the sequence (B, S/T, D).
    """
    shifted, is_local = own_ids(ids, len(rows), ranks)
    found = F.embedding(shifted, rows)
    return scatter_sequence(found.masked_fill(~is_local[..., None], 0), ranks)


def own_ids(ids: Tensor, part: int, ranks: TensorRanks) -> tuple[Tensor, Tensor]:
    """Map token ids to positions in this rank's part of the vocabulary.

    Args:
        ids: token ids of the whole vocabulary.
        part: the number of token ids that each rank has.

    Returns:
        The positions, which are 0 for ids of other ranks, and a mask of the ids of this rank.
    """
    vocabulary = part * ranks.size
    if not ids.is_meta:  # otherwise such an id would silently count as zero; no wait on CUDA
        torch._assert_async(
            ((ids >= 0) & (ids < vocabulary)).all(), f"a token id is outside the vocabulary of {vocabulary}"
        )
    shifted = ids - ranks.index * part
    is_local = (shifted >= 0) & (shifted < part)
    return shifted.masked_fill(~is_local, 0), is_local


def log_softmax(logits: Tensor, ranks: TensorRanks) -> Tensor:
    """Return log-probabilities for logits whose vocabulary is cut among tensor-parallel ranks.

    The logits and the result have the shape (N, V/T): N rows, V/T tokens of the vocabulary on each
    of T ranks. The result is in float32. The function is not differentiable.
    """
    exact = logits.float()
    shifted = exact - ranks.all_reduce(exact.amax(-1), dist.ReduceOp.MAX)[:, None]
    return shifted.sub_(ranks.all_reduce(shifted.exp().sum(-1)).log_()[:, None])
