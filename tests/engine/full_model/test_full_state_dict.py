"""The whole model on rank 0, and parameters and optimizers that the user gives."""

from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sdp.tests.support import models
from sdp.tests.support.cases import Case, engine_of, full_gradients, one_step
from sdp.tests.support.ranks import RankPool
from torch import nn


def _states(case: Case) -> list[Any]:
    return [engine_of(case).full_state_dict(), torch.get_rng_state().sum().item()]


@pytest.mark.parametrize(
    "case",
    [
        Case(4, 1, placement="profile", model="llama-tied"),
        Case(1, 2, 3, placement="full", model="even-llama", tp=2),
        Case(2, 1, placement="cyclic", model="even-llama-tied", tp=2),
    ],
    ids=str,
)
def test_own_weights_are_kept(ranks: RankPool, case: Case) -> None:
    """Under their names, the second name of a tied weight too, and on rank 0 alone."""
    results = [result[0] for result in ranks.run(_states, case, world=case.world)]
    expected = models.cpu_state(models.build(case.model))
    assert set(results[0]) == set(expected)
    for name, value in expected.items():
        assert results[0][name].device.type == "cpu"
        assert torch.equal(results[0][name], value), name
    assert all(result is None for result in results[1:])
    if "tied" in case.model:
        assert torch.equal(results[0]["lm_head.weight"], results[0]["model.embed_tokens.weight"])
    models.build(case.model).load_state_dict(results[0])


def _differing(stage: int) -> tuple[Any, bool]:
    case = Case(2, 2, stage)
    model = models.mlp(seed=dist.get_rank())
    up = model.get_parameter("layers.0.up.weight")
    up.data = up.data.t().contiguous().t()  # not contiguous
    model.register_buffer("flag", torch.tensor([dist.get_rank() == 0]))
    model.register_buffer("scratch", torch.tensor(float(dist.get_rank())), persistent=False)
    engine = sdp.initialize(model=model, config=case.config())[0]
    engine.check_holders()
    return engine.full_state_dict(), engine.module.get_buffer("scratch").item() == 0.0


@pytest.mark.parametrize("stage", [0, 3])
def test_rank_0_wins_where_ranks_differ(ranks: RankPool, stage: int) -> None:
    results = ranks.run(_differing, stage, world=4)
    expected = models.cpu_state(models.mlp(seed=0)) | {"flag": torch.tensor([True])}
    assert set(results[0][0]) == set(expected)
    assert all(torch.equal(results[0][0][name], value) for name, value in expected.items())
    assert all(own for _, own in results)


def _with(kind: str, stage: int) -> dict[str, Any]:
    """Three steps with parameters, an optimizer or a schedule of the user's own."""
    case = Case(2, 2, stage, optimizer="sgd", steps=3)
    config = case.config()
    model = models.mlp()
    del config["scheduler"]
    given: dict[str, Any] = {}
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": plain, "lr": 0.05}]
    if kind == "groups":
        given = {"model_parameters": groups}
    elif kind == "some":
        given = {
            "model_parameters": (p for name, p in model.named_parameters() if "head" in name or "layers.0" in name)
        }
    elif kind == "instance":
        optimizer = torch.optim.SGD(groups, lr=0.1)
        given = {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}
    elif kind == "callable":
        given = {
            "model_parameters": groups,
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        }
    engine, optimizer, loader, scheduler = sdp.initialize(model=model, config=config, **given)
    assert loader is None
    assert engine.optimizer is optimizer
    assert engine.lr_scheduler is scheduler
    norms, seen = [], set()
    for step in range(3):
        one_step(engine, case, step, data_rank=dist.get_rank())
        seen |= set(full_gradients(engine))
        engine.step()
        assert all(p.grad is None for p in engine.parameters_here.values())
        norms.append(engine.get_global_grad_norm())
    assert engine.measured_state_bytes() == engine.predicted_state_bytes()
    return {"state": engine.full_state_dict(), "norms": norms, "rates": engine.get_lr(), "seen": seen}


def _by_hand(kind: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same, with plain torch over an explicit mean of holders."""
    model = models.mlp()
    start = models.cpu_state(model)
    trained = {
        name: p for name, p in model.named_parameters() if kind != "some" or "head" in name or "layers.0" in name
    }
    norms = []
    for step in range(3):
        sums = {name: torch.zeros_like(p) for name, p in trained.items()}
        for rank in range(4):
            batch = models.micro_batch("mlp", step, 0, rank)
            hidden = model.stem(batch["x"])
            for index, layer in enumerate(model.layers):
                hidden = layer(hidden) if index in ((0, 1, 2), (1, 2, 3))[rank // 2] else hidden
            model.zero_grad()
            F.mse_loss(model.head(hidden), batch["y"]).backward()
            for name, p in trained.items():
                sums[name] += 0 if p.grad is None else p.grad
        for name, total in sums.items():
            total /= 2 if name.startswith(("layers.0", "layers.3")) else 4
        norms.append(sum(total.square().sum() for total in sums.values()).sqrt().item())  # type: ignore[union-attr]
        factor = 0.5**step if kind in ("instance", "callable") else 1.0
        with torch.no_grad():
            for name, p in trained.items():
                rate, decay = (0.1, 0.3) if p.dim() > 1 else (0.05, 0.0)
                rate, decay = (0.1, 0.0) if kind == "some" else (rate, decay)
                p -= factor * rate * (sums[name] + decay * p)
    assert start.keys() == model.state_dict().keys()
    return models.cpu_state(model), norms


@pytest.mark.parametrize(("kind", "stage"), [
    *((kind, stage) for kind in ("groups", "some", "instance") for stage in (0, 3)), ("callable", 0),
    pytest.param("callable", 3, marks=pytest.mark.slow)
])  # fmt: skip
def test_parameters_optimizers_and_schedules_of_the_user(ranks: RankPool, kind: str, stage: int) -> None:
    weights, norms = _by_hand(kind)
    results = ranks.run(_with, kind, stage, world=4)
    for result in results:
        assert result["norms"] == pytest.approx(norms, rel=1e-5), "the norm counts what is trained, once"
        if result["state"] is not None:
            for name, weight in weights.items():
                torch.testing.assert_close(result["state"][name], weight, rtol=0, atol=1e-5 * weight.abs().max().item())
        assert len(result["rates"]) == (1 if kind == "some" else 2)
    if kind == "some":
        assert results[0]["seen"] == {n for n in weights if "head" in n or "layers.0" in n}, (
            "nothing else gets a gradient"
        )


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("given", [None, "list", "groups"])
def test_an_optimizer_function_gets_what_the_user_gave(given: str | None) -> None:
    """As deepspeed.initialize: a list of parameters, unless groups were given."""
    model, seen = models.mlp(), list[Any]()
    groups = [{"params": list(model.parameters()), "momentum": 0.2}]
    parameters = {None: None, "list": list(model.head.parameters()), "groups": groups}[given]

    def make(parameters: Any) -> torch.optim.Optimizer:
        seen.extend(parameters)
        return torch.optim.SGD(parameters, lr=0.1)

    optimizer = sdp.initialize(model=model, config=Case(1, 1).config(), model_parameters=parameters, optimizer=make)[1]
    if given == "groups":
        assert [type(group) for group in seen] == [dict]
        assert optimizer.param_groups[0]["momentum"] == 0.2
    else:
        assert all(isinstance(parameter, nn.Parameter) for parameter in seen)
        assert len(seen) == (2 if given == "list" else len(list(model.parameters())))


@pytest.mark.usefixtures("one_rank")
def test_wrong_parameters_and_optimizers() -> None:
    config = Case(1, 1).config()
    stranger = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(sdp.ConfigError, match=r"shape \(3, 2\) is given to the optimizer but is not in the model"):
        sdp.initialize(model=models.mlp(), config=config, model_parameters=[stranger])
    model = models.mlp()
    used = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(**models.micro_batch("mlp", 0, 0, 0)).backward()
    used.step()
    with pytest.raises(sdp.ConfigError, match="already has state"):
        sdp.initialize(model=model, config=config, optimizer=used)
