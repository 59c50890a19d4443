"""Attention of no heads, as a group computes it that holds none of a layer's, and of documents.

The kernel for documents exists on CUDA alone. On a CPU, the tests put attention of one document
after the other in its place. torch's own function calls it, forward and backward.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sdp.models.layers import attention, causal_attention, document_mask, document_starts, has_kernel_for_documents
from sdp.models.llama import Llama, LlamaConfig
from sdp.tests.support.foreign.flash_attention import flash_attention_on_cpu
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2], [4, 4, 4, 4, 4, 4, 5, 5]])
STARTS = [0, 3, 4, 8, 14, 16]


@pytest.fixture
def flash_attention() -> Iterator[None]:
    with flash_attention_on_cpu():
        yield


def test_starts_of_documents() -> None:
    assert document_starts(DOCUMENTS).starts.tolist() == STARTS
    assert document_starts(DOCUMENTS[:, :1]).starts.tolist() == [0, 1, 2]


@pytest.mark.usefixtures("flash_attention")
@pytest.mark.parametrize("kept", [1, 2, 4])
def test_documents_by_their_starts_equal_the_dense_mask(kept: int) -> None:
    results = []
    for mask in (document_mask(DOCUMENTS), document_starts(DOCUMENTS)):
        torch.manual_seed(0)
        heads = [torch.randn(2, number, 8, 8, dtype=torch.float64, requires_grad=True) for number in (4, kept, kept)]
        attended = causal_attention(*heads, mask=mask)
        attended.square().sum().backward()
        results.append([attended, *(part.grad for part in heads)])
    for dense, starts in zip(*results, strict=True):
        torch.testing.assert_close(starts, dense, rtol=1e-9, atol=1e-12)


class OperatorsOfFlashAttention(TorchDispatchMode):
    """Collects the types of the heads that torch's operators are given."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[tuple[str, set[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "varlen" in str(func):
            self.kinds.append((func.__name__, {heads.dtype for heads in args[:3]}))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("flash_attention")
@pytest.mark.parametrize("autocast", [False, True])
def test_the_model_gives_the_kernel_half_precision(autocast: bool) -> None:
    """Under autocast, the rotation has made float32 of queries and keys."""
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "qk_norm": True}
    model = Llama(LlamaConfig(vocab_size=9, hidden_size=16, intermediate_size=8, initializer_range=0.5, **shape))
    model = model if autocast else model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), OperatorsOfFlashAttention() as seen:
        logits = model(DOCUMENTS, documents=DOCUMENTS)
        logits.float().square().mean().backward()
    half = {torch.bfloat16}
    assert seen.kinds == [("_varlen_attn.default", half), ("_varlen_attn_backward.default", half)]
    assert logits.dtype == torch.bfloat16 and all(part.grad is not None for part in model.parameters())


def test_no_heads_of_documents() -> None:
    query, key, value = heads(0), heads(2), heads(2)
    causal_attention(query, key, value, mask=document_starts(DOCUMENTS[:, :5].to(DEVICE))).sum().backward()
    assert all(part.grad is not None for part in (query, key, value))


def test_a_cpu_has_no_kernel_for_documents() -> None:
    assert not has_kernel_for_documents(torch.empty(2, 8, 64, dtype=torch.bfloat16), 64)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="the kernel is CUDA's")
def test_on_cuda_documents_equal_the_dense_mask_and_take_memory_linear_in_the_sequence() -> None:
    grown = []
    for tokens in (2048, 8192):
        documents = (torch.arange(tokens, device=DEVICE) // 700)[None]
        results = []
        for masked in (document_starts, document_mask):
            torch.manual_seed(0)
            parts = [torch.randn(1, n, tokens, 64, device=DEVICE, dtype=torch.bfloat16) for n in (8, 2, 2)]
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            parts = [part.requires_grad_() for part in parts]
            attended = causal_attention(*parts, mask=masked(documents))
            attended.float().square().sum().backward()
            grown.append(torch.cuda.max_memory_allocated() - before)
            results.append([attended, *(part.grad for part in parts)])
        for starts, dense in zip(*results, strict=True):
            assert (starts.float() - dense.float()).norm() <= 1e-2 * dense.float().norm()
    assert grown[2] <= 4.5 * grown[0]
