"""Layers that several models use: attention, stochastic depth (Huang et al., arXiv 1603.09382), the
head of a language model with its loss, and the loss of a classifier.

In float32, the logits of 8,192 tokens over a vocabulary of 32,000 take 1 GiB, and cross-entropy
keeps the same amount again for backward. Here the logits exist for one chunk of tokens at a time.
The gradients of a chunk are computed right after its loss, from the same probabilities. So nothing
is computed twice (Hsu et al., Liger Kernel, arXiv 2410.10989, section 3.2).

``torch.nn.functional.linear_cross_entropy`` works in the same way. It does not exist in torch 2.11,
does not support tensor parallelism, and rounds the loss to bfloat16. This table compares time and
memory of forward and backward with 2,048 tokens, D = 512 and V = 32,000 (medians of three rounds of
``python -m lab.measurements.loss_benchmark``; torch 2.13, one thread of an AMD EPYC):

| | float32 | bfloat16 |
|---|---:|---:|
| this file | 2.71 s, 139 MiB | 1.76 s, 179 MiB |
| torch | 5.50 s, 149 MiB | 6.74 s, 288 MiB |
| all logits at once | 2.90 s, 693 MiB | 1.78 s, 670 MiB |

Letters of shapes: B sequences, S tokens, N = B × S, D hidden size, H attention heads, K key/value
heads, E head size, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn

from ..engine.distributed.collectives import TensorRanks, autocast_precision, gather_vocabulary, log_softmax, own_ids


def document_mask(documents: Tensor) -> Tensor:
    """Return a causal mask that also separates documents: bool (B, 1, S, S), True to attend.

    ``documents`` (B, S) has the number of each token's document. Positions need not restart at a
    document, because the rotary embedding depends only on the distance of two tokens.
    """
    tokens = documents.shape[1]
    earlier = torch.ones(tokens, tokens, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & earlier)[:, None]


class DocumentStarts(NamedTuple):
    """Where the documents of a batch start, for torch's attention of variable length.

    Attributes:
        starts: The index of each document's first token among the B × S tokens of the batch, and
            then B × S. (documents + 1,) int32.
        longest: An upper bound of the tokens in a document.
    """

    starts: Tensor
    longest: int


Mask = Tensor | DocumentStarts


def document_starts(documents: Tensor) -> DocumentStarts:
    """Find where documents start. ``documents`` (B, S) has the number of each token's document.

    The host waits for the device once, because the size of the result is the number of documents.
    """
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = first.flatten().nonzero().flatten().to(torch.int32)
    return DocumentStarts(F.pad(starts, (0, 1), value=documents.numel()), documents.shape[1])


def has_kernel_for_documents(hidden: Tensor, head_size: int) -> bool:
    """Whether torch's attention of variable length can run on ``hidden`` with heads of this size.

    This is flash attention. It needs CUDA, half precision, and heads of 8, 16, … 256 elements. Its
    memory is linear in S, while a dense mask takes a byte per pair of tokens. A plan for a GPU uses
    fake CPU tensors, and registers the kernel for them, so that the result is True.
    """
    precision = autocast_precision(hidden) or hidden.dtype
    if head_size % 8 or head_size > 256 or precision not in (torch.float16, torch.bfloat16):
        return False
    if not hidden.is_cuda:
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        return hidden.is_cpu and has_kernel("aten::_flash_attention_forward", "CPU")
    head = hidden.new_empty(1, 1, 8, head_size, dtype=precision)
    return torch.backends.cuda.can_use_flash_attention(
        torch.backends.cuda.SDPAParams(head, head, head, None, 0.0, True, False)
    )


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Compute torch's ``scaled_dot_product_attention``. If there are no heads, the result is empty.

    At neuron level, a group may hold no head of a layer. Then torch 2.11 on CUDA ends the process
    by a division by zero, or returns an undefined tensor, so torch is not called.

    Args:
        query: (..., H, S, E).
        key: (..., K, S, E).
        value: (..., K, S, E).
        mask: If it is bool, scores where it is False do not count. Otherwise it is added to the
            scores. If None, all scores count.
        **options: Further arguments of torch's function.
    """
    if query.numel() == 0:
        # Every input gets a gradient, as it would from torch: parameters without one are not
        # averaged and not updated.
        result = query + key.sum() + value.sum()
        return result if mask is None or not mask.is_floating_point() else result + mask.sum()
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, mask: Mask | None = None
) -> Tensor:
    """Compute causal attention of ``query`` (B, H, S, E) over ``key`` and ``value`` (B, K, S, E).

    K divides H. ``dropout`` is the probability with which an attention weight is dropped. If a
    sequence has several documents, ``mask`` replaces the causal mask. It is a tensor (B, 1, S, S)
    (:func:`document_mask`), or a :class:`DocumentStarts`, with which ``dropout`` is ignored.
    """
    if query.numel() == 0:
        return attention(query, key, value)
    grouped, documents = query.shape[1] != key.shape[1], isinstance(mask, DocumentStarts)
    if grouped and (documents or (query.is_cuda and (query.dtype == torch.float32 or mask is not None))):
        # In float32 or with a mask, CUDA has only the memory-efficient kernel, which does not
        # support groups. With groups, torch would fall back to a kernel that materialises S x S
        # scores. torch 2.11 has no groups in its attention of variable length.
        share = query.shape[1] // key.shape[1]
        key, value = (repeat(heads, "b k s e -> b (k share) s e", share=share) for heads in (key, value))
        grouped = False
    if isinstance(mask, DocumentStarts):
        batch = len(query)
        # Under autocast, the rotation has made float32 of queries and keys.
        query, key, value = (rearrange(heads.to(value.dtype), "b h s e -> (b s) h e") for heads in (query, key, value))
        attended: Any = varlen_attn(
            query, key, value, mask.starts, mask.starts, mask.longest, mask.longest, window_size=(-1, 0)
        )  # the window is all that comes before a token
        return rearrange(attended, "(b s) h e -> b h s e", b=batch)
    return attention(query, key, value, mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=grouped)


def drop_rows(added: Tensor, survival: float) -> Tensor:
    """Drop what a residual branch adds, for random samples of a batch (stochastic depth).

    Args:
        added: The output of the branch, (B, …).
        survival: The probability with which a sample keeps the branch. At 1, nothing is drawn.

    Returns:
        A tensor like ``added``, with zeros for dropped samples. Other values are divided by
        ``survival``, so the expected value is ``added``, and evaluation needs no scaling. (The
        paper scales in evaluation instead.)

    The branch is computed for dropped samples, too: if a rank skipped a whole layer, other ranks
    would wait for it in a gather.
    """
    if survival >= 1:
        return added
    survives = torch.rand(len(added), *[1] * (added.dim() - 1), device=added.device) < survival
    return added * (survives / survival).to(added.dtype)


IGNORE_INDEX = -100
"""Label of a token that does not count in the loss (Hugging Face's convention)."""

CHUNK_LOGITS = 2**24  # 64 MiB in float32


class LanguageModelHead(nn.Linear):
    """The last layer of a language model: hidden states to logits, or with labels to the loss.

    The parameter is that of an ``nn.Linear`` without bias. Under tensor parallelism
    (``tensor_ranks``), this rank has some rows of the weight, and computes their part of the
    logits.

    ``chunk_tokens`` is the number of tokens whose logits exist at the same time. By default these
    are 64 MiB of float32 logits, but at least D tokens: every chunk adds to a gradient of (V, D)
    elements, which costs more than the logits of fewer tokens.

    ``z_loss`` is the coefficient of :func:`linear_cross_entropy`. It is used only in training.
    """

    def __init__(self, hidden_size: int, vocab_size: int, chunk_tokens: int | None = None, z_loss: float = 0.0) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)
        self.z_loss = z_loss
        self.chunk_tokens = chunk_tokens or max(CHUNK_LOGITS // vocab_size, hidden_size)
        self.tensor_ranks: TensorRanks | None = None

    def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
        """Compute the logits (B, S, V) of hidden states ``input`` (B, S, D).

        If ``labels`` (B, S) are given, compute the mean next-token loss instead, a float32 scalar.
        A label is the id of the token at the same position. This method shifts the labels.
        """
        if labels is None:
            return gather_vocabulary(super().forward(input), self.tensor_ranks)
        # Shift the labels, because a shifted copy of the hidden states would be larger.
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        return linear_cross_entropy(
            input.flatten(0, 1),
            self.weight,
            targets.flatten(),
            self.chunk_tokens,
            self.tensor_ranks,
            self.z_loss if self.training else 0.0,
        )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_tokens: int,
    ranks: TensorRanks | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Compute ``F.cross_entropy(F.linear(hidden, weight).float(), targets)`` in chunks of tokens.

    Gradients are computed in forward, so a second backward raises RuntimeError. Under autocast,
    ``hidden`` and ``weight`` are cast to its precision.

    Args:
        hidden: Hidden states (N, D).
        weight: The head's weight (V, D). With ``ranks``, only this rank's rows.
        targets: Token ids (N). Targets of -100 do not count.
        chunk_tokens: Tokens whose logits exist at the same time.
        ranks: The tensor-parallel ranks that share the weight. The gradient of ``hidden`` is then
            only this rank's term, and must be summed over the ranks.
        z_loss: Factor of the mean of ``logsumexp(logits) ** 2``, added to the loss.

    Returns:
        The mean loss, a float32 scalar. It is NaN if no target counts; the gradients are then zero.
    """
    precision = autocast_precision(hidden)
    if precision is not None:
        # Autocast casts the operands of a linear layer, but not those of a product with out=.
        with torch.autocast(hidden.device.type, enabled=False):
            return linear_cross_entropy(
                hidden.to(precision), weight.to(precision), targets, chunk_tokens, ranks, z_loss
            )
    local_targets = _own_targets(targets, len(weight), ranks)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, targets, local_targets, chunk_tokens, ranks, z_loss)  # type: ignore[return-value]
    chunks = _chunks(hidden, targets, local_targets, chunk_tokens)
    return _mean(
        [_chunk_loss(F.linear(rows, weight), wanted, mine, ranks, z_loss)[0] for rows, wanted, mine in chunks],
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
        local_targets: Tensor,
        chunk_tokens: int,
        ranks: TensorRanks | None,
        z_loss: float,
    ) -> Tensor:
        count = _count(targets)
        into_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # The sum over many chunks is float32 even if the weights are not.
        into_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        losses, start = [], 0
        for rows, wanted, mine in _chunks(hidden, targets, local_targets, chunk_tokens):
            loss, into_logits = _chunk_loss(F.linear(rows, weight), wanted, mine, ranks, z_loss, count)
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
    ) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "backward ran a second time through one loss, which is not possible; call the model again"
            )
        (into_hidden, into_weight), ctx.gradients = ctx.gradients, None
        if into_hidden is not None:
            into_hidden.mul_(gradients[0])
        if into_weight is not None:
            into_weight = into_weight.mul_(gradients[0]).to(ctx.dtype)
        return into_hidden, into_weight, None, None, None, None, None


def _count(targets: Tensor) -> Tensor:
    return (targets != IGNORE_INDEX).sum()


def _own_targets(targets: Tensor, rows: int, ranks: TensorRanks | None) -> Tensor:
    """Return the targets' rows in this rank's part of the weight, and ignore other targets."""
    if ranks is None:
        return targets
    counted = targets != IGNORE_INDEX
    shifted, is_local = own_ids(targets.masked_fill(~counted, 0), rows, ranks)
    return shifted.masked_fill(~(is_local & counted), IGNORE_INDEX)


def _mean(losses: list[Tensor], count: Tensor, ranks: TensorRanks | None) -> Tensor:
    total = torch.stack(losses).sum()
    return (total if ranks is None else ranks.all_reduce(total)) / count


def _chunks(hidden: Tensor, targets: Tensor, local_targets: Tensor, tokens: int) -> zip[tuple[Tensor, Tensor, Tensor]]:
    return zip(hidden.split(tokens), targets.split(tokens), local_targets.split(tokens), strict=True)


def _chunk_loss(
    logits: Tensor,
    targets: Tensor,
    local_targets: Tensor,
    ranks: TensorRanks | None,
    z_loss: float,
    count: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the float32 loss of ``logits`` (n, V), summed over this rank's ``local_targets``.

    With ``count``, the second value is the gradient of (loss of all targets / ``count``) with
    respect to ``logits``, in their dtype.
    """
    log_probabilities = (
        F.log_softmax(logits, dim=-1, dtype=torch.float32) if ranks is None else log_softmax(logits, ranks)
    )
    loss = F.nll_loss(log_probabilities, local_targets, ignore_index=IGNORE_INDEX, reduction="sum")
    is_local = local_targets != IGNORE_INDEX
    of_sums: Tensor | float = 0.0  # the derivative of the z-loss with respect to each row's logsumexp
    if z_loss:
        sums = logits.amax(-1).float() - log_probabilities.amax(-1)
        loss = loss + z_loss * sums.square().masked_fill(~is_local, 0).sum()
        of_sums = 2 * z_loss * sums[:, None]
    if count is None:
        return loss, logits
    # If no target counts, the loss is NaN but its gradient is zero, as in torch's cross-entropy.
    scale = torch.where(targets != IGNORE_INDEX, 1 / count, 0.0)[:, None]
    gradient = log_probabilities.exp_().mul_(scale * (1 + of_sums))
    gradient.scatter_add_(1, local_targets.masked_fill(~is_local, 0)[:, None], -scale * is_local[:, None])
    return loss, gradient.to(logits.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if right.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total += left @ right


Measure = Literal["loss", "accuracy"]


def measure_logits(logits: Tensor, labels: Tensor, measure: Measure) -> Tensor:
    """Compute the mean cross-entropy or the accuracy of ``logits`` (B, N) for ``labels`` (B).

    The result is a float32 scalar, a mean over samples. The accuracy is the fraction of samples
    whose largest logit is that of the label.
    """
    if measure == "accuracy":
        return (logits.argmax(1) == labels).float().mean()
    return F.cross_entropy(logits.float(), labels)
