"""What tensor-parallel ranks send each other: differentiable collectives on plain tensors, counted where they are sent.

Between the modules that are cut, hidden states are cut along the sequence (Korthikanti et al., arXiv 2205.05198): a gather before a
module whose output features are cut, a reduce-scatter after one whose input features are cut, each the other's backward. Logits are
never gathered for the loss (Shoeybi et al., arXiv 1909.08053, section 3). Letters of shapes: B sequences, S tokens, V vocabulary,
T tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from .errors import ModelError
from .traffic import Kind, Traffic

SEQUENCE = 1  # the dimension of tokens in (B, S, …)


@dataclass(frozen=True)
class TensorRanks:
    """The ranks among which a model's matrices are cut, as one of them sees it: its ``index`` of ``size``.

    Without ``group``, and on the meta device, shapes are right and nothing is sent: so a skeleton is probed on one rank alone.
    """

    group: dist.ProcessGroup | None
    size: int
    index: int
    traffic: Traffic

    def __deepcopy__(self, memo: Any) -> TensorRanks:
        """Of a copied skeleton, which sends nothing."""
        return replace(self, group=None)

    def _sends(self, kind: Kind, whole: Tensor) -> bool:
        """Whether the collective takes place, which is then counted."""
        if self.group is None or whole.is_meta:
            return False
        self.traffic.record("tensor parallel", kind, whole.nbytes, self.size)
        return True

    def all_gather(self, part: Tensor, dim: int) -> Tensor:
        """The parts of all ranks, joined along ``dim``."""
        dim %= part.dim()
        parts = part.new_empty((self.size, *part.shape))
        if self._sends("all_gather", parts):
            dist.all_gather_into_tensor(parts.view(-1), part.contiguous().view(-1), group=self.group)
        else:
            parts.zero_()
        return parts.movedim(0, dim).flatten(dim, dim + 1)

    def reduce_scatter(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part along ``dim`` of the sum over all ranks."""
        parts = whole.unflatten(dim, (self.size, -1)).movedim(dim, 0).contiguous()
        part = parts.new_empty(parts.shape[1:])
        if self._sends("reduce_scatter", parts):
            dist.reduce_scatter_tensor(part.view(-1), parts.view(-1), group=self.group)
        else:
            part.zero_()
        return part

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """In place, and returned."""
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
        # Every rank used the whole for features of its own: their gradients add up.
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
        # Every rank computes the same loss from the whole logits, so each has all of its own part's gradient.
        return gradients[0].chunk(ctx.ranks.size, dim=-1)[ctx.ranks.index], None


class _VocabularyCrossEntropy(Function):
    """Mean cross-entropy of logits (N, V/T) against targets (N); keeps the probabilities, as the fused loss keeps their logarithms."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int, ranks: TensorRanks) -> Tensor:
        size = logits.shape[-1]
        counted = targets != ignore_index
        _require_in_vocabulary(targets.masked_fill(~counted, 0), size * ranks.size, "a label")
        exact = logits.float()
        largest = ranks.all_reduce(exact.amax(-1), dist.ReduceOp.MAX)
        shifted = exact - largest[:, None]
        columns = targets - ranks.index * size
        here = counted & (columns >= 0) & (columns < size)
        columns = columns.masked_fill(~here, 0)[:, None]
        of_target = shifted.gather(-1, columns).squeeze(-1).masked_fill(~here, 0)
        exponentials = shifted.exp_()
        total, of_target = ranks.all_reduce(torch.stack([exponentials.sum(-1), of_target]))
        count = counted.sum()
        ctx.save_for_backward(exponentials.div_(total[:, None]), columns, here, counted, count)
        ctx.dtype = logits.dtype
        return (total.log() - of_target).masked_fill(~counted, 0).sum() / count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, columns, here, counted, count = ctx.saved_tensors
        scale = counted * (gradients[0] / count)
        gradient = probabilities * scale[:, None]
        gradient.scatter_add_(-1, columns, -(here * scale)[:, None])
        return gradient.to(ctx.dtype), None, None, None


def gather_sequence(part: Tensor, ranks: TensorRanks) -> Tensor:
    """(B, S/T, …) → (B, S, …)."""
    return _GatherSequence.apply(part, ranks)  # type: ignore[return-value]


def scatter_sequence(whole: Tensor, ranks: TensorRanks) -> Tensor:
    """The sum over the ranks, cut along the sequence: (B, S, …) → (B, S/T, …). Raises :class:`ModelError` where T does not divide S."""
    if whole.shape[SEQUENCE] % ranks.size:
        raise ModelError(
            f"a sequence of {whole.shape[SEQUENCE]} tokens cannot be cut among tensor_parallel.autotp_size = {ranks.size} ranks; "
            f"make its length a multiple of {ranks.size}"
        )
    return _ScatterSequence.apply(whole, ranks)  # type: ignore[return-value]


def gather_vocabulary(logits: Tensor, ranks: TensorRanks | None) -> Tensor:
    """Whole logits (…, V) from parts (…, V/T); as they are without ``ranks``. The loss made of them must be the same on all ranks."""
    return logits if ranks is None else _GatherVocabulary.apply(logits, ranks)  # type: ignore[return-value]


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int, ranks: TensorRanks | None) -> Tensor:
    """Mean cross-entropy in float32 of logits (N, V), or of this rank's part (N, V/T), against targets (N) that are not ignored."""
    if ranks is None:
        return F.cross_entropy(logits.float(), targets, ignore_index=ignore_index)
    return _VocabularyCrossEntropy.apply(logits, targets, ignore_index, ranks)  # type: ignore[return-value]


def vocabulary_embedding(ids: Tensor, rows: Tensor, ranks: TensorRanks) -> Tensor:
    """Embeddings of ids (B, S) from this rank's ``rows`` (V/T, D) of the table, cut along the sequence: (B, S/T, D)."""
    _require_in_vocabulary(ids, len(rows) * ranks.size, "a token")
    own = ids - ranks.index * len(rows)
    elsewhere = (own < 0) | (own >= len(rows))
    found = F.embedding(own.masked_fill(elsewhere, 0), rows)
    return scatter_sequence(found.masked_fill(elsewhere[..., None], 0), ranks)


def _require_in_vocabulary(ids: Tensor, vocabulary: int, what: str) -> None:
    """An id that no rank has would silently count as zero."""
    if not ids.is_meta:
        torch._assert_async(((ids >= 0) & (ids < vocabulary)).all(), f"{what} is outside the vocabulary of {vocabulary}")  # no wait on CUDA
