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

from ..errors import ModelError
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


def autocast_precision(tensor: Tensor) -> torch.dtype | None:
    """To which torch's autocast casts the tensor in a linear layer; None where it is off, and in float64, which it leaves alone."""
    kind = tensor.device.type
    if tensor.is_meta or tensor.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def gather_sequence(part: Tensor, ranks: TensorRanks) -> Tensor:
    """(B, S/T, …) → (B, S, …); under autocast in its precision, to which the linear layers that follow would cast it."""
    precision = autocast_precision(part)
    if precision is not None:
        part = part.to(precision)
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


def vocabulary_embedding(ids: Tensor, rows: Tensor, ranks: TensorRanks) -> Tensor:
    """Embeddings of ids (B, S) from this rank's ``rows`` (V/T, D) of the table, cut along the sequence: (B, S/T, D)."""
    own, here = own_ids(ids, len(rows), ranks)
    found = F.embedding(own, rows)
    return scatter_sequence(found.masked_fill(~here[..., None], 0), ranks)


def own_ids(ids: Tensor, part: int, ranks: TensorRanks) -> tuple[Tensor, Tensor]:
    """Of global ``ids``, those within this rank's ``part`` ids of the vocabulary, and 0 for others; and which are within it."""
    vocabulary = part * ranks.size
    if not ids.is_meta:  # what no rank has would silently count as zero; on CUDA this waits for nothing
        torch._assert_async(
            ((ids >= 0) & (ids < vocabulary)).all(), f"a token id is outside the vocabulary of {vocabulary}"
        )
    own = ids - ranks.index * part
    here = (own >= 0) & (own < part)
    return own.masked_fill(~here, 0), here


def log_softmax(logits: Tensor, ranks: TensorRanks) -> Tensor:
    """Float32 logarithms of the probabilities over the whole vocabulary, for this rank's part of the logits (N, V/T). No gradient."""
    exact = logits.float()
    shifted = exact - ranks.all_reduce(exact.amax(-1), dist.ReduceOp.MAX)[:, None]
    return shifted.sub_(ranks.all_reduce(shifted.exp().sum(-1)).log_()[:, None])
