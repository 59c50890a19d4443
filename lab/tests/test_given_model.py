"""``python -m lab.given_model``: methods of equal state, and what each of them changes."""

from __future__ import annotations

import copy

import pytest
import torch
from sdp.engine.distributed.collectives import local_tensor
from sdp.engine.distributed.fake_world import fake_world
from sdp.engine.initialize import initialize
from sdp.lab.given_model import study
from sdp.lab.given_model.study import (
    METHODS,
    Method,
    OfGroups,
    OfLocalSteps,
    Size,
    continued,
    state_bytes,
    with_adapters,
)
from torch import nn

SIZE = Size(16)
WINDOWS = torch.randint(256, (8, 128), generator=torch.Generator().manual_seed(0))


def changed(before: nn.Module, after: nn.Module) -> set[str]:
    """The blocks that training has changed."""
    old = dict(before.named_parameters())
    names = [name for name, new in after.named_parameters() if name in old and not torch.equal(old[name], new)]
    return {name.partition(".layers.")[2].partition(".")[0] for name in names} - {""}


def test_states_are_equal() -> None:
    pytest.importorskip("peft")
    for method in METHODS:
        if method.kind == "lora":
            sdp = state_bytes(Method("sdp", method.capacity), SIZE)
            assert state_bytes(method, SIZE) == pytest.approx(sdp, rel=0.12)


def test_the_state_of_sdp_is_what_the_engine_counts() -> None:
    config = {"bf16": {"enabled": True}, **SIZE.config(0.25).model_dump(mode="json", exclude_unset=True)}
    with fake_world(0, 8):
        engine, *_ = initialize(model=SIZE.empty(), config=config)
        with torch.no_grad():
            for frozen in engine.frozen_here.values():  # the holders, whose weights they have, do not exist here
                local_tensor(frozen).fill_(0.01)
        engine.backward(engine(WINDOWS, labels=WINDOWS))
        engine.step()
        counted = engine.measured_state_bytes().total
    assert counted == pytest.approx(state_bytes(Method("sdp", 0.25), SIZE), rel=0.02)


def test_each_method_trains_its_blocks() -> None:
    given = SIZE.new_model()
    wanted = {"full": set("01234567"), "last": {"6", "7"}, "spread": {"3", "7"}, "badam": {"0", "1"}}
    for kind, blocks in wanted.items():
        run = continued(Method(kind, 1.0 if kind == "full" else 0.25), SIZE, copy.deepcopy(given))
        run.step(WINDOWS, 0.01)
        assert changed(given, run.model) == blocks
    run = continued(Method("badam", 0.25), SIZE, copy.deepcopy(given))
    for _ in range(51):
        run.step(WINDOWS, 0.01)
    assert changed(given, run.model) == {"0", "1", "2", "3"}


def test_adapters_change_nothing_at_first() -> None:
    pytest.importorskip("peft")
    given = SIZE.new_model()
    adapted = with_adapters(copy.deepcopy(given), Method("lora", 0.25), 2)
    torch.testing.assert_close(adapted(WINDOWS), given(WINDOWS))


def test_a_round_of_one_local_step_is_a_step_with_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    """With SGD, whose step is linear in the gradient. Groups clip their own, so none is clipped."""
    monkeypatch.setattr(study, "LARGEST_NORM", float("inf"))
    given = SIZE.new_model()
    layout = SIZE.layout(given, 0.25)
    runs = [OfGroups(copy.deepcopy(given), layout), OfLocalSteps(copy.deepcopy(given), layout, 1)]
    for run in runs:
        run.optimizers = [
            torch.optim.SGD([p for group in optimizer.param_groups for p in group["params"]], lr=0.0)
            for optimizer in run.optimizers
        ]
        run.step(WINDOWS, 0.1)
    assert changed(given, runs[0].model) == set("01234567")
    for mine, other in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_names_are_different() -> None:
    assert len({method.name for method in METHODS}) == len(METHODS)
