"""The head of a language model and its loss, without ever holding the logits of all tokens.

In float32 the logits of 8,192 tokens over a vocabulary of 32,000 are 1 GiB, and plain cross-entropy keeps as much again for backward.
Here logits exist for a chunk of tokens at a time, and the chunk's gradients are made at once, while its probabilities are at hand
(Hsu et al., Liger Kernel, arXiv 2410.10989, section 3.2): so nothing is computed twice. Letters of shapes: B sequences, S tokens,
N = B × S, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..engine.distributed.tensor_collectives import (
    TensorRanks,
    autocast_precision,
    gather_vocabulary,
    log_softmax,
    own_ids,
)

IGNORE_INDEX = -100
"""Label of a token that does not count in the loss (Hugging Face's convention)."""

CHUNK_LOGITS = 2**24  # 64 MiB in float32


class LanguageModelHead(nn.Linear):
    """Hidden states → logits over the vocabulary; given labels too, their loss. Parameters are those of ``nn.Linear`` without bias.

    Under tensor parallelism (``tensor_ranks``) this rank has some rows of the weight, and makes the loss with its part of the logits.

    ``chunk_tokens``: tokens whose logits exist at the same time. Default: those of 64 MiB of float32 logits, but at least as many as the
    hidden size, because every chunk adds to a gradient of (V, D) elements: with fewer tokens that would cost more than their logits.
    """

    def __init__(self, hidden_size: int, vocab_size: int, chunk_tokens: int | None = None) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)
        self.chunk_tokens = chunk_tokens or max(CHUNK_LOGITS // vocab_size, hidden_size)
        self.tensor_ranks: TensorRanks | None = None

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (B, S, V) of hidden states ``input`` (B, S, D); with ``labels`` (B, S) the mean next-token loss, a float32 scalar."""
        if labels is None:
            return gather_vocabulary(super().forward(input), self.tensor_ranks)
        # The labels are shifted, not the hidden states: a shifted copy of those would be larger.
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        return linear_cross_entropy(
            input.flatten(0, 1), self.weight, targets.flatten(), self.chunk_tokens, self.tensor_ranks
        )


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int, ranks: TensorRanks | None = None
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight).float(), targets)`` for ``hidden`` (N, D), ``weight`` (V, D) and ``targets`` (N).

    Targets of -100 do not count. Gradients are made in forward, so backward works once. Raises RuntimeError if it is asked for twice.
    Under autocast both are cast to its precision. With ``ranks``, ``weight`` is this one's part of the rows, and so is what ``hidden``
    gets as its gradient.
    """
    precision = autocast_precision(hidden)
    if (
        precision is not None
    ):  # autocast casts a linear layer's operands, but not those of a product that is written into a given tensor
        with torch.autocast(hidden.device.type, enabled=False):
            return linear_cross_entropy(hidden.to(precision), weight.to(precision), targets, chunk_tokens, ranks)
    own = _own_targets(targets, len(weight), ranks)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, targets, own, chunk_tokens, ranks)  # type: ignore[return-value]
    chunks = _chunks(hidden, targets, own, chunk_tokens)
    return _mean(
        [_chunk_loss(F.linear(rows, weight), wanted, mine, ranks)[0] for rows, wanted, mine in chunks],
        _count(targets),
        ranks,
    )


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        own: Tensor,
        chunk_tokens: int,
        ranks: TensorRanks | None,
    ) -> Tensor:
        count = _count(targets)
        into_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Sums of many chunks are kept in float32, whatever the weights are computed in.
        into_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        losses, start = [], 0
        for rows, wanted, mine in _chunks(hidden, targets, own, chunk_tokens):
            loss, into_logits = _chunk_loss(F.linear(rows, weight), wanted, mine, ranks, count)
            losses.append(loss)
            if into_hidden is not None:
                torch.mm(into_logits, weight, out=into_hidden[start : start + len(rows)])
            if into_weight is not None:
                _add_product(into_weight, into_logits.t(), rows)
            start += len(rows)
            del into_logits  # before the next chunk's exist
        ctx.dtype = weight.dtype
        ctx.gradients = (into_hidden, into_weight)
        return _mean(losses, count, ranks)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides the names
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        if ctx.gradients is None:
            raise RuntimeError("backward through the loss a second time; call the model again")
        (into_hidden, into_weight), ctx.gradients = ctx.gradients, None
        if into_hidden is not None:
            into_hidden.mul_(gradients[0])
        if into_weight is not None:
            into_weight = into_weight.mul_(gradients[0]).to(ctx.dtype)
        return into_hidden, into_weight, None, None, None, None


def _count(targets: Tensor) -> Tensor:
    return (targets != IGNORE_INDEX).sum()


def _own_targets(targets: Tensor, rows: int, ranks: TensorRanks | None) -> Tensor:
    """The targets' rows in this rank's part of the weight; those of other parts are ignored."""
    if ranks is None:
        return targets
    counted = targets != IGNORE_INDEX
    own, here = own_ids(targets.masked_fill(~counted, 0), rows, ranks)
    return own.masked_fill(~(here & counted), IGNORE_INDEX)


def _mean(losses: list[Tensor], count: Tensor, ranks: TensorRanks | None) -> Tensor:
    total = torch.stack(losses).sum()
    return (total if ranks is None else ranks.all_reduce(total)) / count


def _chunks(hidden: Tensor, targets: Tensor, own: Tensor, tokens: int) -> zip[tuple[Tensor, Tensor, Tensor]]:
    return zip(hidden.split(tokens), targets.split(tokens), own.split(tokens), strict=True)


def _chunk_loss(
    logits: Tensor, targets: Tensor, own: Tensor, ranks: TensorRanks | None, count: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The loss of ``logits`` (n, V) in float32, summed over this rank's ``own`` targets; with ``count`` also what all the targets' loss /
    ``count`` has as gradient of ``logits``, in their dtype.
    """
    log_probabilities = (
        F.log_softmax(logits, dim=-1, dtype=torch.float32) if ranks is None else log_softmax(logits, ranks)
    )
    loss = F.nll_loss(log_probabilities, own, ignore_index=IGNORE_INDEX, reduction="sum")
    if count is None:
        return loss, logits
    here = own != IGNORE_INDEX
    # Where nothing counts the loss is no number, but its gradient is zero, as that of torch's cross-entropy.
    scale = torch.where(targets != IGNORE_INDEX, 1 / count, 0.0)[:, None]
    gradient = log_probabilities.exp_().mul_(scale)
    gradient.scatter_add_(1, own.masked_fill(~here, 0)[:, None], -scale * here[:, None])
    return loss, gradient.to(logits.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, where ``total`` is float32."""
    if right.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += left @ right
