"""Attention of no heads, as a group computes it that holds none of a layer's."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sdp.models.layers import attention, causal_attention
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class WithoutTorchsAttention(TorchFunctionMode):
    """Fails where torch's attention is called, which ends the process on CUDA with torch 2.11."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not F.scaled_dot_product_attention, "torch's attention was called"
        return function(*args, **(kwargs or {}))


def heads(number: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, number, 5, 4, device=DEVICE, requires_grad=True)


def test_the_mode_sees_torchs_attention() -> None:
    with pytest.raises(AssertionError, match="torch's attention was called"), WithoutTorchsAttention():
        causal_attention(heads(2), heads(2), heads(2))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("number", [0, 2])
def test_no_queries(number: int, documents: bool) -> None:
    """With 2 key heads, only the queries are missing."""
    query, key, value = heads(0), heads(number), heads(number)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool, device=DEVICE) if documents else None
    with WithoutTorchsAttention():
        result = attention(query, key, value, mask, is_causal=mask is None)
    assert result.shape == (2, 0, 5, 4)
    result.sum().backward()
    assert query.grad is not None
    assert all(part.grad is not None and not part.grad.any() for part in (key, value))


def test_no_heads_of_a_window_with_learned_biases() -> None:
    bias = torch.zeros(0, 5, 5, device=DEVICE, requires_grad=True)
    query, key, value = heads(0), heads(0), heads(0)
    with WithoutTorchsAttention():
        attention(query, key, value, bias).sum().backward()
    assert all(part.grad is not None for part in (query, key, value, bias))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="torch 2.11 would end the process")
def test_no_heads_equal_what_torch_returns() -> None:
    """A newer torch returns an empty result itself."""
    query, key, value = heads(0), heads(0), heads(0)
    mine, theirs = causal_attention(query, key, value), F.scaled_dot_product_attention(query, key, value)
    assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)


def test_no_samples() -> None:
    assert causal_attention(*(heads(2, batch=0) for _ in range(3))).shape == (0, 2, 5, 4)
