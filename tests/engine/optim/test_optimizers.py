"""Optimizers by name: the same steps as torch's, what is said about them, and what is refused."""

import importlib.util
import re
import sys
import types
from typing import Any

import pytest
import torch
from sdp.engine.errors import ConfigError
from sdp.engine.optim.optimizers import AdamKernel, ApexFusedAdam, apex_kernel, build_optimizer
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

CPU = torch.device("cpu")
ADAM: dict[str, Any] = {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}
TORCH_ADAM: dict[str, Any] = ADAM | {"betas": (0.8, 0.95)}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 5, generator=generator)).square().sum().backward()
        optimizer.step()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).cpu() for p in model.parameters()]


CASES = {
    "AdamW": ("AdamW", ADAM, torch.optim.AdamW, TORCH_ADAM),
    "lower case": ("adamw", ADAM, torch.optim.AdamW, TORCH_ADAM),
    "Adam is AdamW by default": ("Adam", ADAM, torch.optim.AdamW, TORCH_ADAM),
    "plain Adam": ("Adam", ADAM | {"adam_w_mode": False}, torch.optim.Adam, TORCH_ADAM),
    "AdamW forces decay": ("AdamW", ADAM | {"adam_w_mode": False}, torch.optim.AdamW, TORCH_ADAM),
    "torch_adam": ("AdamW", ADAM | {"torch_adam": True}, torch.optim.AdamW, TORCH_ADAM),
    "DeepSpeed's defaults": ("AdamW", {}, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0}),
    "FusedAdam": ("FusedAdam", ADAM, torch.optim.AdamW, TORCH_ADAM),
    "FusedAdam, not decoupled": ("FusedAdam", ADAM | {"adam_w_mode": False}, torch.optim.Adam, TORCH_ADAM),
    "SGD": ("SGD", {"lr": 0.01}, torch.optim.SGD, {"lr": 0.01}),
    "SGD, all settings": ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, torch.optim.SGD,
        {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}  # fmt: skip


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "DTensor"])
@pytest.mark.parametrize("case", CASES)
def test_steps_equal_torch(case, sharded, one_rank):
    name, params, reference, settings = CASES[case]
    model, expected = network(), network()
    if sharded:
        fully_shard(model)
    optimizer, line = build_optimizer(name, params, model.parameters(), CPU)
    assert reference.__name__ in line
    ours = train(model, optimizer)
    theirs = train(expected, reference(expected.parameters(), **settings, foreach=False))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-5, atol=1e-7)  # FSDP2 moves to a GPU


def test_parameter_groups_keep_their_own_settings():
    model = network()
    groups = [{"params": list(model[0].parameters()), "weight_decay": 0.0}, {"params": list(model[2].parameters())}]
    optimizer, _ = build_optimizer("AdamW", ADAM, groups, CPU)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]


def test_says_which_implementation_was_taken():
    lines = {name: build_optimizer(name, {}, network().parameters(), CPU)[1] for name in ("AdamW", "FusedAdam", "SGD")}
    assert lines["AdamW"] == "AdamW: torch.optim.AdamW, fused"
    assert lines["FusedAdam"].endswith("fused, because NVIDIA Apex's kernel needs CUDA and this run is on cpu")
    assert "foreach" in lines["SGD"]


def test_falls_back_where_torch_has_no_fused_kernel():
    parameters = [nn.Parameter(torch.zeros(3, device="meta"))]
    optimizer, line = build_optimizer("AdamW", {}, parameters, torch.device("meta"))
    assert line.startswith("AdamW: torch.optim.AdamW, foreach, because fused fails here (")
    assert optimizer.defaults["foreach"] and not optimizer.defaults["fused"]


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("AdamWW", {}, 'optimizer.type: unknown optimizer "AdamWW", did you mean AdamW?'),
        ("Rprop", {}, 'optimizer.type: unknown optimizer "Rprop"; known: AdamW, Adam, FusedAdam, SGD, Muon'),
        ("OneBitAdam", {"freeze_step": 9},
            'optimizer.type: "OneBitAdam" cannot be honoured: its step sends compressed gradients'),
        ("MuAdam", {},
            'optimizer.type: "MuAdam" cannot be honoured: it is not available here; make it yourself and pass it'),
        ("AdamW", {"bettas": [0.9, 0.95]}, "optimizer.params.bettas: unknown key, did you mean betas?"),
        ("AdamW", {"lr": "0.1"}, 'optimizer.params.lr: input should be a valid number (found "0.1")'),
        ("AdamW", {"lr": -0.1}, "optimizer.params.lr: input should be greater than or equal to 0 (found -0.1)"),
        ("AdamW", {"lr": float("nan")}, "optimizer.params.lr: input should be a finite number"),
        ("AdamW", {"betas": [0.9]}, "optimizer.params.betas: value should have at least 2 items"),
        ("AdamW", {"betas": [0.9, 1.5]}, "optimizer.params.betas.1: input should be less than 1 (found 1.5)"),
        ("AdamW", {"bias_correction": "yes"}, 'optimizer.params.bias_correction: input should be True (found "yes")'),
        ("FusedAdam", {"amsgrad": True}, "optimizer.params.amsgrad: input should be False (found true)"),
        ("AdamW", {"max_grad_norm": 1.0},
            "optimizer.params.max_grad_norm: not an optimizer's setting; use gradient_cl"),
        ("SGD", {"nesterov": True}, "optimizer.params.nesterov: needs momentum above 0 and dampening 0"),
        ("SGD", {"betas": [0.9, 0.95]}, "optimizer.params.betas: unknown key; known: lr, momentum"),
    ],
)  # fmt: skip
def test_bad_sections_are_refused_in_one_line(name, params, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        build_optimizer(name, params, network().parameters(), CPU)
    assert "\n" not in str(error.value)


def adam_on_lists(tensors, group, step, decoupled):
    beta1, beta2 = group["betas"]
    for gradient, parameter, first, second in zip(*tensors, strict=True):
        assert type(parameter) is torch.Tensor or type(parameter) is nn.Parameter
        if decoupled:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        else:
            gradient = gradient + group["weight_decay"] * parameter
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        parameter.addcdiv_(first / (1 - beta1**step), denominator, value=-group["lr"])


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "DTensor"])
def test_apex_adam_hands_local_shards_to_its_kernel(sharded, decoupled, one_rank):
    model, expected = network(), network()
    if sharded:
        fully_shard(model)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(expected.parameters(), **TORCH_ADAM)
    ours = train(model, ApexFusedAdam(model.parameters(), adam_on_lists, **TORCH_ADAM, decoupled=decoupled))
    for mine, other in zip(ours, train(expected, reference), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


def test_apex_adam_continues_from_the_state_of_torch_adamw():
    model, expected = network(), network()
    before, reference = (torch.optim.AdamW(m.parameters(), **TORCH_ADAM) for m in (model, expected))
    train(model, before)
    train(expected, reference)
    optimizer = ApexFusedAdam(model.parameters(), adam_on_lists, **TORCH_ADAM)
    optimizer.load_state_dict(before.state_dict())
    for mine, other in zip(train(model, optimizer), train(expected, reference), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


def test_apex_adam_leaves_out_empty_shards_and_missing_gradients():
    empty, idle, held = (nn.Parameter(torch.ones(size)) for size in (0, 2, 3))
    empty.grad, held.grad = torch.zeros(0), torch.ones(3)
    seen = []
    optimizer = ApexFusedAdam([held, idle, empty], lambda tensors, *rest: seen.append(tensors))
    optimizer.step()
    ((gradients, *_),) = seen
    assert len(gradients) == 1 and gradients[0].shape == (3,)


def with_modules(monkeypatch, *names: str) -> None:
    """Pretend that exactly these of Apex's modules are installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in names else None)


def test_apex_is_recognised_and_its_namesake_is_not(monkeypatch):
    cuda = torch.device("cuda")
    with_modules(monkeypatch)
    assert apex_kernel(cuda) == (None, "NVIDIA Apex is not installed")
    with_modules(monkeypatch, "apex")
    kernel, reason = apex_kernel(cuda)
    assert kernel is None and "PyPI's unrelated project of that name" in reason
    with_modules(monkeypatch, "apex", "amp_C")
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", types.ModuleType("apex.optimizers"))
    kernel, reason = apex_kernel(cuda)
    assert kernel is None and "cannot be used (module 'apex.optimizers' has no attribute 'FusedAdam')" in reason


def test_apex_kernel_is_called_as_nvidia_defines_it(monkeypatch):
    """Argument order of apex/optimizers/fused_adam.py."""
    calls = []
    kernels, applier = types.ModuleType("amp_C"), types.ModuleType("apex.multi_tensor_apply")
    vars(kernels)["multi_tensor_adam"] = "adam"
    vars(applier)["multi_tensor_applier"] = lambda *arguments: calls.append(arguments)
    monkeypatch.setitem(sys.modules, "apex", types.ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "amp_C", kernels)
    monkeypatch.setitem(sys.modules, "apex.multi_tensor_apply", applier)
    group = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    AdamKernel(CPU)([[], [], [], []], group, step=3, decoupled=True)
    ((op, overflow, tensors, *scalars),) = calls
    assert (op, overflow.dtype, tensors) == ("adam", torch.int32, [[], [], [], []])
    assert scalars == [0.1, 0.8, 0.9, 1e-6, 3, 1, 1, 0.2]
