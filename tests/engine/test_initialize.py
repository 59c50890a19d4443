"""Arguments that ``sdp.initialize`` refuses, and the names of errors of earlier versions."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import sdp
import torch
from sdp.engine import errors
from sdp.tests.support import models
from sdp.tests.support.cases import Case
from sdp.tests.support.ranks import RankPool

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "sdp": {"groups": 1}}


@pytest.mark.parametrize(
    ("argument", "match"),
    [
        ({"distributed_port": 1}, "distributed_port 1 cannot be honoured"),
        ({"dist_init_required": False}, "sdp.init_dis"),
        ({"model": None}, "sdp.initialize: model is missing"),
        ({"config": None}, "config is missing; give a path to a JSON file or a dict"),
        ({"config": [CONFIG]}, "the configuration must be a path or a mapping, not list"),
        ({"args": SimpleNamespace(deepspeed_config="ds.json")}, "config and --deepspeed_config are both given"),
        ({"mpu": object()}, "mpu is not supported"),
    ],
)
def test_refuses_what_it_cannot_honour(argument: dict[str, Any], match: str) -> None:
    with pytest.raises(sdp.ConfigError, match=match):
        sdp.initialize(**{"model": torch.nn.Linear(2, 2), "config": CONFIG, **argument})


def test_earlier_names_of_errors_stay() -> None:
    assert errors.DivergedError is errors.NonFiniteError is sdp.NonFiniteError
    assert errors.DivergenceError is errors.HolderMismatchError is sdp.HolderMismatchError is sdp.DivergenceError


class _Complex(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))


def _misuses() -> dict[str, str]:
    config, frozen = Case(1, 1, placement="full").config(), models.mlp().requires_grad_(False)
    calls: dict[str, Any] = {
        "no module": lambda: sdp.initialize(model={"weight": 1}, config=config),  # type: ignore[arg-type]
        "set": lambda: sdp.initialize(model=models.mlp(), config=config | {"sdp": {"units": {"a"}}}),
        "complex": lambda: sdp.initialize(model=_Complex(), config=config),
        "frozen": lambda: sdp.initialize(model=frozen, config=config),
        "none trained": lambda: sdp.initialize(model=models.mlp(), model_parameters=[], config=config),
    }
    twice = models.mlp()
    sdp.initialize(model=twice, config=config)
    calls["twice"] = lambda: sdp.initialize(model=twice, config=config)
    found = {}
    for name, call in calls.items():
        try:
            call()
        except sdp.SDPError as error:
            found[name] = str(error)
    return found


def test_a_misuse_is_one_line(ranks: RankPool) -> None:
    (found,) = ranks.run(_misuses, world=1)
    assert "model must be a torch.nn.Module, not dict" in found["no module"]
    assert "must consist of JSON values" in found["set"]
    assert "parameter 'weight' is complex (torch.complex64)" in found["complex"]
    assert "all parameters are frozen" in found["frozen"]
    assert "all parameters are frozen" in found["none trained"]
    assert "called twice on the same model" in found["twice"]
    assert not any("\n" in message for message in found.values())


class Scatters(torch.nn.Linear):
    """Its forward pass has an operation that torch has no deterministic algorithm for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        return super().forward(x).sum()


@pytest.mark.usefixtures("one_rank")
def test_deterministic_mode_refuses_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # the user's own value stays
    try:
        for deterministic in (False, True):
            config = {**CONFIG, "training": {"deterministic": deterministic}}
            engine, *_ = sdp.initialize(model=Scatters(2, 2), config=config)
            if deterministic:
                with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
                    engine(torch.ones(1, 2))
            else:
                engine(torch.ones(1, 2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
