"""Attention of no heads, as a group computes it that holds none of a layer's, and of documents.

The kernel for documents exists on CUDA alone. On a CPU, the tests put attention of one document
after the other in its place, and so check what is given to the kernel and what is made of its
result; torch's own function is called with tensors that have only shapes.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sdp.models import layers
from sdp.models.layers import attention, causal_attention, document_mask, document_starts, has_kernel_for_documents
from sdp.models.llama import Llama, LlamaConfig
from torch._subclasses.fake_tensor import FakeTensorMode
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


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2], [4, 4, 4, 4, 4, 4, 5, 5]])
STARTS = [0, 3, 4, 8, 14, 16]


def one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, same: torch.Tensor,
    longest: int, _: int, *, window_size: tuple[int, int],
) -> torch.Tensor:  # fmt: skip
    """What torch documents of its attention of variable length: (N, H, E), causal with (-1, 0)."""
    assert window_size == (-1, 0) and torch.equal(starts, same) and starts.dtype == torch.int32
    assert max(starts.diff()) <= longest and query.shape == key.shape == value.shape
    parts = zip(*(heads.transpose(0, 1).split(starts.diff().tolist(), 1) for heads in (query, key, value)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*part, is_causal=True) for part in parts], 1).transpose(0, 1)


def test_starts_of_documents() -> None:
    assert document_starts(DOCUMENTS).starts.tolist() == STARTS
    assert document_starts(DOCUMENTS[:, :1]).starts.tolist() == [0, 1, 2]


@pytest.mark.parametrize("kept", [1, 2, 4])
def test_documents_by_their_starts_equal_the_dense_mask(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "varlen_attn", one_by_one)
    results = []
    for mask in (document_mask(DOCUMENTS), document_starts(DOCUMENTS)):
        torch.manual_seed(0)
        heads = [torch.randn(2, number, 8, 6, dtype=torch.float64, requires_grad=True) for number in (4, kept, kept)]
        attended = causal_attention(*heads, mask=mask)
        attended.square().sum().backward()
        results.append([attended, *(part.grad for part in heads)])
    for dense, starts in zip(*results, strict=True):
        torch.testing.assert_close(starts, dense, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_model_gives_the_kernel_half_precision(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast, the rotation has made float32 of queries and keys."""
    monkeypatch.setattr("sdp.models.llama.has_kernel_for_documents", lambda *_: True)
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "qk_norm": True}
    model = Llama(LlamaConfig(vocab_size=9, hidden_size=16, intermediate_size=8, initializer_range=0.5, **shape))
    model = model if autocast else model.bfloat16()
    kinds: list[set[torch.dtype]] = []

    def kernel(*tensors: Any, **options: Any) -> torch.Tensor:
        kinds.append({heads.dtype for heads in tensors[:3]})
        return one_by_one(*tensors, **options)

    monkeypatch.setattr(layers, "varlen_attn", kernel)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert model(DOCUMENTS, documents=DOCUMENTS).dtype == torch.bfloat16
    assert kinds == [{torch.bfloat16}]


def test_torchs_function_takes_what_it_is_given() -> None:
    starts = document_starts(DOCUMENTS)
    with FakeTensorMode(allow_non_fake_inputs=True):
        heads = [torch.empty(2, number, 8, 16, dtype=torch.bfloat16, requires_grad=True) for number in (4, 2, 2)]
        attended = causal_attention(*heads, mask=starts)
        assert (attended.shape, attended.dtype) == ((2, 4, 8, 16), torch.bfloat16)
        attended.sum().backward()
        assert all(part.grad is not None and part.grad.shape == part.shape for part in heads)


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
