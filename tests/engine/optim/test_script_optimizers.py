"""Optimizers whose step depends on whole matrices: torch's result, or one clear line."""

from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.errors import ConfigError
from sdp.engine.optim.script_optimizers import needs_whole_matrices
from sdp.tests.support import models
from sdp.tests.support.cases import zero_of
from sdp.tests.support.ranks import RankPool
from torch import nn


class Lars(torch.optim.Optimizer):
    """Scales each parameter's step by the ratio of its norm to that of its gradient."""

    def __init__(self, params: Any, lr: float = 0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * (p.norm() / (p.grad.norm() + 1e-8)), alpha=-group["lr"])


class Whitening(torch.optim.Optimizer):
    """Whitens the gradient of each matrix, as SOAP and Shampoo do with running averages."""

    def __init__(self, params: Any, lr: float = 0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad
                if p.dim() == 2:
                    state = self.state[p]
                    if not state:
                        state["left"] = torch.zeros(p.shape[0], p.shape[0], device=p.device)
                    state["left"].mul_(0.9).add_(p.grad @ p.grad.T)
                    values, vectors = torch.linalg.eigh(state["left"] + 1e-3 * torch.eye(p.shape[0], device=p.device))
                    update = vectors @ torch.diag(values.rsqrt()) @ vectors.T @ p.grad
                p.add_(update, alpha=-group["lr"])


def adafactor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=0.05)


WHOLE = {"Adafactor": adafactor, "Lars": Lars, "Whitening": Whitening}
ELEMENTWISE = [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Rprop]


def test_they_are_recognised_by_a_trial() -> None:
    model = nn.Linear(3, 4)
    for make in WHOLE.values():
        assert needs_whole_matrices(make(model.parameters()))
        assert needs_whole_matrices(make([{"params": model.weight, "lr": 0.0}, {"params": [model.bias]}]))
    for kind in ELEMENTWISE:
        assert not needs_whole_matrices(kind(model.parameters(), lr=0.01))
    assert not needs_whole_matrices(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1))


def _config(engine: str, stage: int, groups: int, bf16: bool = False, **section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": bf16},
        "zero_optimization": zero_of(stage),
        "sdp": {"groups": groups, "engine": engine, "capacity": 1.0, **section},
    }


def _train(name: str, as_object: bool, *settings: Any) -> dict[str, torch.Tensor] | None:
    model = models.mlp()
    optimizer = WHOLE[name](model.parameters()) if as_object else WHOLE[name]
    engine = sdp.initialize(model=model, config=_config(*settings), optimizer=optimizer)[0]
    for step in range(3):
        engine.backward(engine(models.micro_batch("mlp", step, 0, dist.get_rank())))
        engine.step()
    engine.check_holders()
    return engine.full_state_dict()


def _plain(name: str) -> dict[str, torch.Tensor]:
    model = models.mlp()
    optimizer = WHOLE[name](model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (model(**models.micro_batch("mlp", step, 0, rank)) / 2).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("settings", [("fsdp2", 0, 1), ("fsdp2", 0, 2)], ids=str)
def test_at_stage_0_the_result_is_torch_s(ranks: RankPool, name: str, settings: Any) -> None:
    state = ranks.run(_train, name, settings[1:] == (0, 2), *settings, world=2)[0]
    for key, expected in _plain(name).items():
        torch.testing.assert_close(state[key], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", WHOLE)
def test_at_stage_0_in_bf16_the_optimizer_gets_whole_matrices(ranks: RankPool, name: str) -> None:
    """FSDP2 has DTensors with one shard there, with which Adafactor of torch fails."""
    state = ranks.run(_train, name, False, "fsdp2", 0, 2, True, world=2)[0]
    plain, before = _plain(name), models.mlp().state_dict()
    ours, theirs = (
        torch.cat([(after[key] - value).flatten() for key, value in before.items()]) for after in (state, plain)
    )
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0) > 0.95


def _message(name: str, *settings: Any) -> str:
    try:
        state = _train(name, False, *settings)
    except ConfigError as error:
        return str(error)
    for key, expected in _plain(name).items() if state is not None else ():
        torch.testing.assert_close(state[key], expected, rtol=0, atol=2e-5)
    return ""


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("stage", [1, 3])
def test_on_shards_the_result_is_torch_s_or_one_line(ranks: RankPool, name: str, stage: int) -> None:
    for message in ranks.run(_message, name, "fsdp2", stage, 1, world=2):
        if name == "Lars":
            assert not message  # DTensors know the norm of the whole
        else:
            assert "needs whole matrices, and cannot step on shards; use zero_optimization.stage 0" in message
            assert "\n" not in message
    for message in ranks.run(_message, name, "deepspeed", stage, 1, world=2):
        assert 'needs whole matrices, but zero_optimization.stage 1 to 3 of sdp.engine "deepspeed" cuts' in message


def test_slices_of_neurons_are_refused(ranks: RankPool) -> None:
    (message,) = ranks.run(_neurons, world=1)
    assert 'Lars needs whole matrices, but sdp.granularity "neuron" cuts' in message


def _neurons() -> str:
    config = {"train_batch_size": 2, "sdp": {"groups": 1, "granularity": "neuron", "neuron_groups": 2}}
    with pytest.raises(ConfigError) as raised:
        sdp.initialize(model=models.build("even-llama"), config=config, optimizer=Lars)
    return str(raised.value)
