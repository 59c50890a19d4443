"""What scripts do to a model that FSDP2 shards."""

from types import SimpleNamespace
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.engine import SDPEngine
from sdp.engine.stores.fsdp2.sharding import ModuleUses
from sdp.tests.support.models import Mlp, build, micro_batch, on_device
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
                    model(**on_device(rows, engine.device))
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


class Dropping(Mlp):
    """Leaves out a block in training, as layer drop does."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, dropped: int) -> torch.Tensor:  # type: ignore[override]
        hidden = self.stem(x)
        for index, layer in enumerate(self.layers):
            if index != dropped:
                hidden = layer(hidden)
        return nn.functional.mse_loss(self.head(hidden).float(), y.float())


def _dropped(step: int, micro: int, rank: int) -> int:
    """Early passes of a rank never use one of the blocks."""
    return (step + micro + rank) % 4


def _drop(bf16: bool, groups: int) -> float:
    """Take two steps in which ranks leave out different blocks. The distance to plain torch."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Dropping()
        torch.manual_seed(0)
        plain = Dropping()
    engine = _engine(
        {"sdp": {"groups": groups, "capacity": 1.0}, "gradient_accumulation_steps": 2, "bf16": {"enabled": bf16}}, model
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        for micro in range(2):
            for rank in range(2):
                rows = micro_batch("mlp", step, micro, rank) | {"dropped": _dropped(step, micro, rank)}
                (plain(**rows) / 4).backward()
            rows = micro_batch("mlp", step, micro, dist.get_rank())
            engine.backward(engine(**rows, dropped=_dropped(step, micro, dist.get_rank())))
            engine.step()
        optimizer.step()
        optimizer.zero_grad()
    state, start = engine.full_state_dict(), build("mlp").state_dict()
    pairs = [(value, (state or {})[name], start[name]) for name, value in plain.state_dict().items() if state]
    return max(((found - value).norm() / (value - before).norm()).item() for value, found, before in pairs or [
        (torch.ones(1), torch.ones(1), torch.zeros(1))
    ])  # fmt: skip


@pytest.mark.parametrize(("bf16", "groups"), [(False, 1), (True, 1), (True, 2)])
def test_ranks_may_leave_out_blocks_at_stage_0(ranks: RankPool, bf16: bool, groups: int) -> None:
    """In bf16, FSDP2 casts whole parameters, and no pass may have used a block yet."""
    for distance in ranks.run(_drop, bf16, groups, world=2):
        assert distance < (0.1 if bf16 else 1e-5)


def _drop_sharded(stage: int) -> list[str]:
    """Drop the same block on both ranks, different ones, and different ones in a second pass, in
    which stages 1 and 2 gather nothing.
    """
    messages, rows = [], micro_batch("mlp", 0, 0, dist.get_rank())
    for block, is_second in ((1, False), (dist.get_rank(), False), (dist.get_rank(), True)):
        engine = _engine({"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 2}, Dropping())
        if is_second:
            engine.backward(engine(**rows, dropped=-1))
            engine.step()
        with pytest.raises(sdp.ModelError) as caught:
            engine(**rows, dropped=block)
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharded_blocks_that_a_pass_leaves_out_are_refused(ranks: RankPool, stage: int) -> None:
    """FSDP2 would gather the parameters of different blocks together, or add up their gradients."""
    for rank, messages in enumerate(ranks.run(_drop_sharded, stage, world=2)):
        for block, message in zip((1, rank, rank), messages, strict=True):
            assert message.startswith(f"a forward pass left out 'layers.{block}', ")
            assert message.endswith("or use zero_optimization.stage 0") and "\n" not in message


def _two_engines(stage: int) -> float:
    """Two steps with losses that go through another engine: the distance to plain torch."""
    settings = {"zero_optimization": {"stage": stage}}
    ours, judge = _engine(settings), _engine(settings)
    plain, other, start = build("mlp"), build("mlp"), build("mlp").state_dict()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        for rank in range(2):
            rows = micro_batch("mlp", step, 0, rank)
            (other(x=rows["x"] * plain(**rows), y=rows["y"]) / 2).backward()
        rows = on_device(micro_batch("mlp", step, 0, dist.get_rank()), ours.device)
        ours.backward(judge(x=rows["x"] * ours(**rows), y=rows["y"]))
        ours.step()
        judge.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    state = ours.full_state_dict()
    pairs = [(value, state[name], start[name]) for name, value in plain.state_dict().items()] if state else []
    return max([((found - value).norm() / (value - before).norm()).item() for value, found, before in pairs], default=0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loss_may_pass_through_two_engines(ranks: RankPool, stage: int) -> None:
    assert max(ranks.run(_two_engines, stage, world=2)) < 1e-5


def test_another_fsdp2_is_refused() -> None:
    """The names of torch's FSDP2 that sdp needs."""
    with pytest.raises(sdp.ConfigError, match=r"^torch [\w.+]+: FSDP2 has no post_backward"):
        ModuleUses(nn.Module(), "", [SimpleNamespace()], sharded=True)
