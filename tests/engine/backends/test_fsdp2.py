"""What scripts do to a model that FSDP2 shards: inference mode, results of their own classes, and
torch versions with another FSDP2.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.backends.fsdp2.uses import ModuleUses
from sdp.engine.engine import SDPEngine
from sdp.tests.support.models import Mlp, build, micro_batch
from sdp.tests.support.ranks import RankPool
from torch import nn

SETTINGS: list[dict[str, Any]] = [
    {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}},
    *({"zero_optimization": {"stage": stage}} for stage in (1, 2, 3)),
]


class Wrapped(Mlp):
    """Returns its loss in an object whose class torch does not know."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
        return SimpleNamespace(loss=super().forward(x, y))


def _engine(settings: dict[str, Any], model: nn.Module | None = None) -> SDPEngine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "sdp": {"groups": 1},
        **settings,
    }
    return sdp.initialize(model=build("mlp") if model is None else model, config=config)[0]


def _train(settings: dict[str, Any], *, looks: bool) -> dict[str, torch.Tensor] | None:
    """Take two steps. With ``looks``, a script evaluates in inference mode before each of them."""
    engine = _engine(settings)
    for step in range(2):
        rows = micro_batch("mlp", step, 0, dist.get_rank())
        if looks:
            with torch.inference_mode():
                engine.eval()
                engine(rows)
                engine.evaluate([rows])
                engine.full_state_dict()
                with engine.full_model() as model:
                    model(**rows)
                engine.train()
        loss = engine(rows)
        if looks:
            with torch.inference_mode():
                engine(rows)
        engine.backward(loss)
        engine.step()
    return engine.full_state_dict()


def _compare() -> None:
    for settings in SETTINGS:
        found, expected = _train(settings, looks=True), _train(settings, looks=False)
        assert found is None or all(torch.equal(value, found[name]) for name, value in (expected or {}).items())


def test_a_script_may_evaluate_in_inference_mode_while_it_trains(ranks: RankPool) -> None:
    ranks.run(_compare, world=2)


def _misuse() -> list[str]:
    messages = []
    engine = _engine({"zero_optimization": {"stage": 3}}, Wrapped())
    with pytest.raises(sdp.ModelError) as caught:
        engine(micro_batch("mlp", 0, 0, 0))
    messages.append(str(caught.value))
    with torch.no_grad():
        assert engine(micro_batch("mlp", 0, 0, 0)).loss.item() > 0
    engine = _engine({"zero_optimization": {"stage": 3}})
    with torch.inference_mode(), pytest.raises(sdp.ModelError) as caught:
        engine.module(**micro_batch("mlp", 0, 0, 0))
    return [*messages, str(caught.value)]


def test_what_fsdp2_would_not_notice_is_one_line(ranks: RankPool) -> None:
    hidden, inference = ranks.run(_misuse, world=2)[0]
    assert hidden.startswith("the model returns tensors in a SimpleNamespace")
    assert inference.startswith("engine.module is called inside torch.inference_mode()")
    assert "\n" not in hidden + inference


def test_another_fsdp2_is_refused() -> None:
    """The names and the marks of torch's FSDP2 that sdp needs."""
    with pytest.raises(sdp.ConfigError, match=r"^torch [\w.+]+: FSDP2 has no _register_post_backward_hook"):
        ModuleUses(SimpleNamespace())
    group = SimpleNamespace(
        _register_post_backward_hook=lambda args, kwargs: (args, kwargs), post_backward=None, finalize_backward=None,
        fsdp_params=[], reduce_grads=True, reshard_after_backward=True, _reshard_after_forward=True,
    )  # fmt: skip
    ModuleUses(group)
    note = vars(group)["_register_post_backward_hook"]
    note((torch.ones(1),), {})
    with pytest.raises(sdp.ConfigError, match="FSDP2 marks the inputs of modules in another way"):
        note((torch.ones(1, requires_grad=True),), {})
