"""Which parameters a rank builds, holds and returns under DeepSpeed."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
import torch.distributed as dist
from sdp.tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def _built_from_huggingface() -> tuple[int, int, int, list[str]]:
    """Bytes of the whole model, at most alive before DeepSpeed cuts this rank's part, and of what
    it holds; names of units that it has.
    """
    import sdp
    from sdp.engine.accounting.memory_probe import LiveStorages
    from sdp.engine.stores.deepspeed.private import load
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 16, "num_attention_heads": 2,
    }  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape))
    whole = sum(p.numel() * 4 for p in model.parameters())
    file = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 4096},
        "sdp": {"groups": 4, "capacity": 0.25, "engine": "deepspeed"},
    }
    package, handed_over = load(), []
    with LiveStorages(torch.device("cpu")) as live, pytest.MonkeyPatch.context() as patch:
        own = package.initialize
        patch.setattr(package, "initialize", lambda **given: (handed_over.append(live.peak), own(**given))[1])
        engine = sdp.initialize(model=model, config=file)[0]
    tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for _ in range(8):
        loss = engine({"input_ids": tokens, "labels": tokens}).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    held = sum(engine.layout.parameters[name].numel * 4 for name in engine.parameters_here)
    units = [
        u.name
        for u in engine.layout.units
        if any(n.startswith(f"{u.name}.") for n, _ in engine.module.named_parameters())
    ]
    group, layout = engine.store.context.at.sdp, engine.layout
    expected = [u.name for u in layout.units if layout.placement.holds(group, u.index)]
    assert units == expected
    return whole, handed_over[0], held, units


def test_a_huggingface_model_is_built_of_what_a_rank_holds_alone(ranks: RankPool) -> None:
    pytest.importorskip("transformers")
    everyone = ranks.run(_built_from_huggingface, world=4)
    for whole, peak, held, units in everyone:
        assert len(units) == 4
        assert held < 0.35 * whole
        assert held <= peak < 1.5 * held < 0.55 * whole  # and the numbers that are being drawn
    assert len({name for *_, units in everyone for name in units}) == 16
