"""torch's operators of flash attention over documents, on a CPU, which has none.

They check what CUDA's check (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp,
``mha_varlen_fwd``), except for the precision, and compute one document after the other. torch's own
``varlen_attn`` runs on top of them.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def _documents(tensors: list[Tensor], starts: Tensor, also: Tensor, longest: int, right: int) -> Iterator[Any]:
    """Yield the heads of each document (H, S, E) and its scores (H, S, S), which are -inf where a
    token sees nothing.
    """
    assert starts.dtype == also.dtype == torch.int32 and torch.equal(starts, also) and starts.is_contiguous()
    assert all(heads.stride(-1) == 1 and len(heads) == starts[-1] for heads in tensors)
    lengths = starts.diff().tolist()
    assert starts[0] == 0 and 0 < min(lengths) <= max(lengths) <= longest
    for heads in zip(*(heads.transpose(0, 1).split(lengths, 1) for heads in tensors), strict=True):
        scores = heads[0] @ heads[1].mT / heads[0].shape[-1] ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + right)
        yield *heads, scores.masked_fill(later, -torch.inf)


def _joined(documents: Iterable[Tensor], like: Tensor) -> Tensor:
    return torch.empty_like(like).copy_(torch.cat(list(documents), 1).transpose(0, 1))


def _forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, also: Tensor, longest: int, _: int, dropout: float,
    is_causal: bool, return_debug_mask: bool, *, window_size_left: int, window_size_right: int, **others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert query.shape == key.shape == value.shape and query.shape[-1] % 8 == 0
    assert is_causal and (dropout, window_size_left, window_size_right) == (0, -1, 0) and not any(others.values())
    attended, sums = [], []
    for _, _, values, scores in _documents([query, key, value], starts, also, longest, window_size_right):
        attended.append(scores.softmax(-1) @ values)
        sums.append(scores.logsumexp(-1))
    nothing = query.new_empty(0)
    return _joined(attended, query), torch.cat(sums, 1), nothing, nothing, nothing


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, starts: Tensor,
    also: Tensor, longest: int, *_: Any, window_size_right: int, **others: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    results: list[tuple[Tensor, ...]] = []
    tensors = [query, key, value, gradient, out, sums.mT[..., None]]
    for q, k, v, grad, attended, total, scores in _documents(tensors, starts, also, longest, window_size_right):
        weights = (scores - total).exp()
        into_scores = weights * (grad @ v.mT - (grad * attended).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
        results.append((into_scores @ k, into_scores.mT @ q, weights.mT @ grad))
    return tuple(_joined(parts, query) for parts in zip(*results, strict=True))


@contextmanager
def flash_attention_on_cpu() -> Iterator[None]:
    """Give the CPU these operators inside this context."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    try:
        yield
    finally:
        del library
