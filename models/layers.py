"""Layers of several models: attention, also of no heads and over several documents in a sequence,
and stochastic depth (Huang et al., arXiv 1603.09382).

Letters of shapes: B sequences, S tokens, H attention heads, K key/value heads, E head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor


def document_mask(documents: Tensor) -> Tensor:
    """Return which tokens (B, 1, S, S) a token sees: the earlier ones of its own document, and
    itself.

    ``documents`` (B, S) numbers the documents of each sequence. Positions need not restart at a
    document, because the rotary embedding depends only on the distance of two tokens.
    """
    tokens = documents.shape[1]
    earlier = torch.ones(tokens, tokens, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & earlier)[:, None]


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Compute torch's ``scaled_dot_product_attention``, or nothing if there are no heads.

    A group that holds none of a layer's heads computes attention of no heads. On CUDA, torch 2.11
    then ends the process by a division by zero, or returns an undefined tensor. torch 2.13 returns
    an empty result (seen on a CPU), as this function does.

    Args:
        query: (..., H, S, E).
        key: (..., K, S, E).
        value: (..., K, S, E).
        mask: What is added to the scores, or which of them count. None for all.
        **options: Further arguments of torch's function.
    """
    if query.numel() == 0:
        # Every input gets a gradient, as it would from torch: parameters without one are not
        # averaged and not updated.
        result = query + key.sum() + value.sum()
        return result if mask is None or not mask.is_floating_point() else result + mask.sum()
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, mask: Tensor | None = None
) -> Tensor:
    """Compute causal attention of ``query`` (B, H, S, E) over ``key`` and ``value`` (B, K, S, E).

    K divides H. ``dropout`` is the probability with which an attention weight is dropped. ``mask``
    (B, 1, S, S) replaces the causal mask.
    """
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda and (query.dtype == torch.float32 or mask is not None):
        # In float32 or with a mask, CUDA has only the memory-efficient kernel, which does not
        # support groups. With groups, torch would fall back to a kernel that materialises S x S
        # scores.
        share = query.shape[1] // key.shape[1]
        key, value = (repeat(heads, "b k s e -> b (k share) s e", share=share) for heads in (key, value))
        grouped = False
    return attention(query, key, value, mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=grouped)


def drop_rows(added: Tensor, survival: float) -> Tensor:
    """Return what a residual branch adds, ``added`` (B, …), with zeros in random rows.

    Rows that survive are multiplied by 1 / survival. The expected value is then ``added``, so
    evaluation needs no scaling. The paper scales in evaluation instead.

    Every row is computed. If a rank skipped a layer, other ranks would wait for it in a gather.

    Args:
        added: the output of the branch. The result has its shape and dtype.
        survival: the probability with which a row keeps the branch. Nothing is drawn if it is 1.
    """
    if survival >= 1:
        return added
    survives = torch.rand(len(added), *[1] * (added.dim() - 1), device=added.device) < survival
    return added * (survives / survival).to(added.dtype)
