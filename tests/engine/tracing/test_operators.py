"""Plans of a GPU's operators, against a real step whose norms keep what CUDA's keep, and whose
attention of documents needs no mask.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import sdp
import torch
import torch.nn.functional as F
from sdp.engine.accounting.memory_probe import peak_tensor_bytes
from sdp.engine.config.load import load_config
from sdp.engine.distributed.fake_world import fake_world
from sdp.engine.distributed.mesh import mesh_of
from sdp.engine.placement.layout import Layout
from sdp.engine.tracing.operators import DEVICES, Device, operators_of
from sdp.engine.tracing.step import StepTrace, trace_step
from sdp.models.registry import build_model
from sdp.tests.support.foreign.flash_attention import flash_attention_on_cpu
from torch._subclasses.fake_tensor import FakeTensorMode

LLAMA = {
    "name": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6,
    "num_attention_heads": 4,
}  # fmt: skip
CONFIG = {
    "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "sdp": {"groups": 2, "capacity": 0.5}, "model": LLAMA,
    "data": {"sequence_length": 64},
}  # fmt: skip


def _batch(samples: int, length: int = 64, documents: int = 0) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(samples, length, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}
    return batch | ({"documents": torch.arange(length).expand(samples, length) // documents} if documents else {})


def _kept_by(device: Device, dtype: torch.dtype) -> tuple[str, list[tuple[tuple[int, ...], torch.dtype]]]:
    """The derivative's name, and the tensors that RMSNorm of (2, 8, 64) keeps for it."""
    kept: list[tuple[tuple[int, ...], torch.dtype]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with operators_of(device), FakeTensorMode(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden, weight = (torch.empty(shape, dtype=dtype, requires_grad=True) for shape in ((2, 8, 64), (64,)))
        normed = F.rms_norm(hidden, (64,), weight, 1e-6)
        assert normed.grad_fn is not None
        name = normed.grad_fn.name()
        normed.sum().backward()
        assert hidden.grad is not None and weight.grad is not None
        assert (hidden.grad.shape, weight.grad.shape) == (hidden.shape, weight.shape)
    return name, kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_of_a_gpu_keeps_its_input_and_a_number_a_row(dtype: torch.dtype) -> None:
    name, kept = _kept_by("cuda", dtype)
    assert name == "FusedRmsNormBackward0"
    assert sorted(kept, key=str) == sorted([((2, 8, 64), dtype), ((64,), dtype), ((2, 8, 1), torch.float32)], key=str)
    name, kept = _kept_by("cpu", dtype)
    assert name != "FusedRmsNormBackward0"
    assert kept.count(((2, 8, 64), torch.float32)) > (dtype == torch.float32)


def test_real_norms_are_as_before_after_a_trace_and_refused_amid_one() -> None:
    hidden = torch.randn(2, 8, 64)
    before = F.rms_norm(hidden, (64,))
    with operators_of("cuda"), pytest.raises(RuntimeError, match="real tensors ran in a trace"):
        F.rms_norm(hidden, (64,))
    assert torch.equal(F.rms_norm(hidden, (64,)), before)


class _FewRows(torch.autograd.Function):
    """RMSNorm that keeps what CUDA's kernel keeps, without large temporaries."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normed, scales = torch.empty_like(hidden), hidden.new_empty(*hidden.shape[:-1], 1, dtype=torch.float32)
        for row, into, scale in zip(*(of.flatten(0, -2).split(8) for of in (hidden, normed, scales)), strict=True):
            scale.copy_(torch.rsqrt(row.float().square().mean(-1, keepdim=True) + eps))
            into.copy_(row.float() * scale * weight)
        ctx.save_for_backward(hidden, weight, scales)
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden, weight, scales = ctx.saved_tensors
        into_hidden, into_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        rows = (tensor.flatten(0, -2).split(8) for tensor in (hidden, gradients[0], into_hidden, scales))
        for row, gradient, into, scale in zip(*rows, strict=True):
            normed, weighted = row.float() * scale, gradient.float() * weight
            into.copy_(scale * (weighted - normed * (normed * weighted).mean(-1, keepdim=True)))
            into_weight += (gradient.float() * normed).sum(0)
        return into_hidden, into_weight.to(weight.dtype), None


def _traced(config: dict[str, Any], device: Device, **batch: int) -> StepTrace:
    settings, build = load_config(config), partial(build_model, config["model"])
    layout = Layout.of(build(), settings, mesh_of(settings, 2))
    return trace_step(build, settings, layout, partial(_batch, **batch), 0, device=device)


@pytest.mark.parametrize(
    ("bf16", "checkpointing", "documents"),
    [(False, "none", 0), (True, "none", 8), pytest.param(True, "selective", 8, marks=pytest.mark.slow)],
)
def test_a_step_with_such_operators_is_as_planned_of_a_gpu(
    bf16: bool, checkpointing: str, documents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIG | {"bf16": {"enabled": bf16}, "activation_checkpointing": {"mode": checkpointing}}
    on_cpu, on_cuda = (_traced(config, device, documents=documents) for device in DEVICES)
    assert (on_cuda.state, on_cuda.flops) == (on_cpu.state, on_cpu.flops)
    monkeypatch.setattr(F, "rms_norm", lambda hidden, _, weight, eps: _FewRows.apply(hidden, weight, eps))
    with fake_world(0, 2), flash_attention_on_cpu() if documents else nullcontext():
        engine, optimizer, *_ = sdp.initialize(model=build_model(LLAMA), config=config)

        def step() -> None:
            engine.backward(engine(_batch(4, documents=documents)))
            engine.step()

        step()
        measured = peak_tensor_bytes(step, engine.module, optimizer, engine.device)
    assert on_cuda.peak == pytest.approx(measured, rel=0.01)
    if checkpointing == "none":  # of selective recomputation the peak of so small a model lies elsewhere
        assert on_cpu.peak > 1.05 * measured


def test_documents_take_memory_linear_in_the_sequence_on_a_gpu_alone() -> None:
    config = CONFIG | {"bf16": {"enabled": True}, "model": LLAMA | {"num_hidden_layers": 2, "num_key_value_heads": 2}}
    for device in DEVICES:
        traces = [_traced(config, device, length=tokens, documents=8) for tokens in (256, 512, 1024)]
        first, second, third = (trace.at_peak["activations"] for trace in traces)
        more = (third - second) - 2 * (second - first)
        # The mask has a byte per pair of tokens of 4 sequences, at least.
        assert more == 0 if device == "cuda" else more >= 4 * (1024**2 - 3 * 512**2 + 2 * 256**2)
