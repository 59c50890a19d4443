"""What scripts do that were written for plain torch: it gives torch's result, or one clear line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.errors import ConfigError, HolderMismatchError, ModelError
from sdp.tests.support import models
from sdp.tests.support.cases import said, zero_of
from sdp.tests.support.ranks import RankPool
from torch import nn
from torch.nn.utils import clip_grad_norm_

LIMIT = 0.05


def engine_of(engine: str, stage: int, groups: int, capacity: float = 1.0, accumulation: int = 1, **more: Any) -> Any:
    model = more.pop("model") if "model" in more else models.mlp()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": zero_of(stage),
        "sdp": {"groups": groups, "capacity": capacity, "engine": engine, "check_interval": 0},
    }
    return sdp.initialize(model=model, config=config, **more)


def batch(step: int, micro: int = 0, rank: int | None = None) -> Any:
    return models.micro_batch("mlp", step, micro, dist.get_rank() if rank is None else rank)


def plain(
    change: Callable[[nn.Module], object] = lambda model: None,
    *,
    accumulation: int = 1,
    steps: int = 2,
    model: nn.Module | None = None,
    between: Callable[[nn.Module], object] = lambda model: None,
) -> dict[str, torch.Tensor]:
    """Train with torch alone on the rows of two ranks. ``change`` comes before each step, and
    ``between`` after each.
    """
    model = model or models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(2):
            for micro in range(accumulation):
                (model(**batch(step, micro, rank)) / (2 * accumulation)).backward()
        change(model)
        optimizer.step()
        if step + 1 < steps:
            between(model)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal(engine: Any, expected: dict[str, torch.Tensor]) -> None:
    state = engine.full_state_dict()
    for name, value in (state or {}).items():
        torch.testing.assert_close(
            value, expected[name], rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


# -- gradients that the script changes -------------------------------------------------------------


def _clipped(engine_name: str, stage: int, groups: int) -> None:
    engine = engine_of(engine_name, stage, groups)[0]
    for step in range(2):
        engine.backward(engine(batch(step)))
        clip_grad_norm_(engine.parameters(), LIMIT)
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(LIMIT, rel=1e-4), "the norm is that of the changed ones"
    engine.check_holders()
    expected = plain(lambda model: clip_grad_norm_(model.parameters(), LIMIT))
    assert_equal(engine, expected)
    assert all(not torch.allclose(value, expected[name], atol=1e-4) for name, value in plain().items())


@pytest.mark.parametrize(("stage", "groups"), [(0, 1), (0, 2), (1, 1), (2, 1), (3, 1)])
def test_a_script_clips_where_every_group_has_all_weights(ranks: RankPool, stage: int, groups: int) -> None:
    ranks.run(_clipped, "fsdp2", stage, groups, world=2)


def _clipped_above_zero(stage: int) -> tuple[str, int]:
    engine = engine_of("deepspeed", stage, 1)[0]
    engine.backward(engine(batch(0)))
    with pytest.raises(ModelError) as raised:
        clip_grad_norm_(engine.parameters(), LIMIT)
    engine.step()
    return one_line(raised.value), len(list(engine.parameters()))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_script_that_clips_above_zero_is_refused(ranks: RankPool, stage: int) -> None:
    """ZeRO keeps the gradients elsewhere, so torch's function would find none and do nothing."""
    for message, count in ranks.run(_clipped_above_zero, stage, world=2):
        assert message.startswith("parameters(): between engine.backward and engine.step, parameters have no gradients")
        assert "set gradient_clipping in the configuration" in message
        assert count == len(list(models.mlp().parameters()))


def _changed_unequally(only_rank_0: bool) -> str:
    engine = engine_of("fsdp2", 0, 2, 0.5)[0]
    engine.backward(engine(batch(0)))
    if not only_rank_0:
        clip_grad_norm_(engine.parameters(), LIMIT)
    elif dist.get_rank() == 0:
        for parameter in engine.parameters():
            parameter.grad = parameter.grad * 0.5
    with pytest.raises(HolderMismatchError) as raised:
        engine.step()
    return one_line(raised.value)


@pytest.mark.parametrize("only_rank_0", [False, True])
def test_changes_that_let_holders_drift_are_refused_at_once(ranks: RankPool, only_rank_0: bool) -> None:
    for message in ranks.run(_changed_unequally, only_rank_0, world=2):
        assert "the script changed gradients between engine.backward and engine.step" in message
        assert "set gradient_clipping in the configuration" in message


def _changed_equally() -> None:
    engine = engine_of("fsdp2", 0, 2, 0.5)[0]
    norms = []
    for factor in (1.0, 0.5):
        engine.backward(engine(batch(0)))
        engine.traffic.reset()
        for parameter in engine.parameters():
            if factor != 1.0:
                parameter.grad.mul_(factor)
        norm = engine.groups.norm_and_loss(torch.zeros((), dtype=torch.float64))[0]
        norms.append(norm)
        engine.zero_grad()
    assert norms[1] == pytest.approx(norms[0] / 2)


def test_changes_that_are_equal_on_all_ranks_count_in_the_norm(ranks: RankPool) -> None:
    ranks.run(_changed_equally, world=2)


def _drifted() -> str:
    engine = engine_of("fsdp2", 0, 2)[0]
    with torch.no_grad():
        engine.module.head.weight.add_(dist.get_rank())
    with pytest.raises(HolderMismatchError) as raised:
        engine.check_holders()
    return one_line(raised.value)


def test_drifting_holders_are_first_looked_for_in_the_script(ranks: RankPool) -> None:
    for message in ranks.run(_drifted, world=2):
        assert message.index("the script changes weights, gradients") < message.index("the hardware")


# -- calls of torch --------------------------------------------------------------------------------


def _own_calls(engine_name: str, stage: int, groups: int) -> list[str]:
    messages = []
    for body in ("own step", "own loop", "own backward", "both steps"):
        engine, optimizer, _, _ = engine_of(engine_name, stage, groups)
        try:
            loss = engine(batch(0))
            if body in ("own step", "both steps"):
                engine.backward(loss)
            else:
                loss.backward()
            if body in ("own backward", "both steps"):
                engine.step()
            if body != "own backward":
                optimizer.step()
        except (ConfigError, RuntimeError) as error:
            messages.append(one_line(error))
        else:
            messages.append("")
            assert_equal(engine, plain(steps=1))
    return messages


@pytest.mark.parametrize(("stage", "groups"), [(0, 2), (2, 1), (3, 1)])
def test_torch_s_own_backward_and_step_are_refused(ranks: RankPool, stage: int, groups: int) -> None:
    for own_step, own_loop, own_backward, both in ranks.run(_own_calls, "fsdp2", stage, groups, world=2):
        for message in (own_step, own_loop):
            assert (
                "call engine.backward(loss) and engine.step() instead of loss.backward() and optimizer.step()"
                in message
            )
        assert "call engine.backward(loss) instead of loss.backward()" in own_backward
        assert not both


def test_torch_s_own_step_is_refused_under_zero(ranks: RankPool) -> None:
    for own_step, own_loop, own_backward, both in ranks.run(_own_calls, "deepspeed", 2, 1, world=2):
        for message in (own_step, own_loop, both):
            assert "call engine.backward(loss) and engine.step() instead" in message
        assert "call engine.backward(loss) instead of loss.backward()" in own_backward


def _zeroed(engine_name: str, stage: int, groups: int, whose: str) -> None:
    engine, optimizer, _, _ = engine_of(engine_name, stage, groups, accumulation=2)
    for step in range(2):
        for micro in range(2):
            engine.backward(engine(batch(step, micro)))
            engine.step()
            (engine if whose == "engine" else optimizer).zero_grad(set_to_none=True)
    assert_equal(engine, plain(accumulation=2))


@pytest.mark.parametrize("whose", ["engine", "optimizer"])
@pytest.mark.parametrize(
    ("engine", "stage", "groups"), [("fsdp2", 0, 2), ("fsdp2", 1, 1), ("fsdp2", 2, 1), ("deepspeed", 2, 1)]
)
def test_zero_grad_after_every_micro_batch_drops_none(
    ranks: RankPool, engine: str, stage: int, groups: int, whose: str
) -> None:
    ranks.run(_zeroed, engine, stage, groups, whose, world=2)


@pytest.mark.usefixtures("one_rank")
def test_zero_grad_drops_a_step_that_is_not_begun_and_says_when_it_does_not(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of("fsdp2", 0, 1, accumulation=2)[0]
    rows = batch(0)
    engine.backward(engine(rows))
    engine.zero_grad()
    assert all(parameter.grad is None for parameter in engine.parameters())
    with caplog.at_level(logging.WARNING, "sdp"):
        for _ in range(2):
            engine.backward(engine(rows))
            engine.step()
            engine.zero_grad()
            assert any(parameter.grad is not None for parameter in engine.parameters())
            engine.backward(engine(rows))
            engine.step()
            assert all(parameter.grad is None for parameter in engine.parameters())
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.message.partition(";")[0] for record in warnings] == [
        "zero_grad() has no effect between the micro-batches of a step"
    ]


# -- parameters that do not move -------------------------------------------------------------------


def half_frozen() -> nn.Module:
    model = models.mlp()
    model.layers[0].requires_grad_(False)
    return model


def _unfrozen(stage: int, groups: int, given: str) -> list[str]:
    model = half_frozen()
    more = {"optimizer": {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}, "config": {}}[given]
    engine, optimizer, _, _ = engine_of("fsdp2", stage, groups, model=model, **more)
    with said(logging.WARNING) as lines:
        for step in range(3):
            if step == 1:
                engine.module.layers[0].requires_grad_(True)
            engine.backward(engine(batch(step)))
            engine.step()
        engine.check_holders()
        optimizer.add_param_group({"params": list(engine.module.layers[0].parameters())})
        engine.backward(engine(batch(3)))
        with pytest.raises(ConfigError, match="add_param_group: parameter groups cannot change"):
            engine.step()
    return lines


@pytest.mark.parametrize("given", ["config", "optimizer"])
@pytest.mark.parametrize(("stage", "groups"), [(0, 2), (3, 1)])
def test_parameters_that_are_unfrozen_later_are_named_once(
    ranks: RankPool, stage: int, groups: int, given: str
) -> None:
    first, second = ranks.run(_unfrozen, stage, groups, given, world=2)
    assert len(first) == 1
    assert "layers.0" in first[0]
    assert "were frozen in sdp.initialize and are not trained, though the script unfroze them" in first[0]
    assert not second


def _unfrozen_under_deepspeed(stage: int) -> dict[str, float]:
    model = half_frozen()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine, *_ = engine_of("deepspeed", stage, 1, model=model)
    engine.backward(engine(batch(0)))
    engine.step()
    engine.module.layers[0].requires_grad_(True)
    with pytest.raises(ModelError, match=r"layers\.0\..* were frozen in sdp.initialize, and the script unfroze them"):
        engine(batch(1))
    after = engine.full_state_dict() or {}
    return {name: float((tensor - before[name]).abs().max()) for name, tensor in after.items()}


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_refuses_parameters_that_are_unfrozen_later(ranks: RankPool, stage: int) -> None:
    moved, _ = ranks.run(_unfrozen_under_deepspeed, stage, world=2)
    assert all((change == 0) == name.startswith("layers.0.") for name, change in moved.items())


@pytest.mark.usefixtures("one_rank")
def test_parameters_that_the_optimizer_lacks_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sdp"):
        engine_of("fsdp2", 0, 1, optimizer=lambda parameters: torch.optim.SGD(parameters[2:], lr=0.1))
    (line,) = [record.message for record in caplog.records if "these parameters" in record.message]
    assert line.startswith("stem.weight, stem.bias: these parameters require a gradient, and the optimizer does not")


# -- hooks and weights -----------------------------------------------------------------------------


def smaller(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.1


def hooked() -> nn.Module:
    model = models.mlp()
    model.stem.weight.register_hook(smaller)
    model.layers[1].up.weight.register_post_accumulate_grad_hook(_shrink)
    return model


def _shrink(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.1)


def _hooks(engine_name: str, stage: int, groups: int) -> None:
    engine = engine_of(engine_name, stage, groups, model=hooked())[0]
    for step in range(2):
        engine.backward(engine(batch(step)))
        engine.step()

    def shrink(model: nn.Module) -> None:
        for parameter in (model.stem.weight, model.layers[1].up.weight):
            _shrink(parameter)

    assert_equal(engine, plain(shrink))


@pytest.mark.parametrize(
    ("engine", "stage", "groups"), [("fsdp2", 0, 1), ("fsdp2", 0, 2), *(("deepspeed", stage, 1) for stage in (1, 2, 3))]
)
def test_hooks_on_parameters_are_kept(ranks: RankPool, engine: str, stage: int, groups: int) -> None:
    ranks.run(_hooks, engine, stage, groups, world=2)


def _lost_hooks(stage: int) -> list[str]:
    messages = []
    with pytest.raises(ModelError) as raised:
        engine_of("fsdp2", stage, 1, model=hooked())
    messages.append(one_line(raised.value))
    engine = engine_of("fsdp2", stage, 1)[0]
    engine.module.head.weight.register_hook(smaller)
    with pytest.raises(ModelError) as raised:
        engine.backward(engine(batch(0)))
    messages.append(one_line(raised.value))
    engine = engine_of("fsdp2", stage, 1)[0]
    with pytest.raises(ModelError) as raised:
        engine.module.load_state_dict(models.mlp().state_dict())
    messages.append(one_line(raised.value))
    return messages


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hooks_and_whole_weights_on_shards_are_refused_by_name(ranks: RankPool, stage: int) -> None:
    for before, after, state in ranks.run(_lost_hooks, stage, world=2):
        assert before.startswith("parameter 'stem.weight' has a hook, which zero_optimization.stage 1 to 3")
        assert after.startswith("parameter 'head.weight' has a hook, which FSDP2 would not run")
        assert state.startswith("engine.module.load_state_dict: stem.weight is a shard here")


@torch.no_grad()
def halve_the_head(model: Any) -> None:
    model.head.weight.mul_(0.5)


def _written(engine_name: str, stage: int, groups: int) -> str:
    engine = engine_of(engine_name, stage, groups)[0]
    for step in range(2):
        if step == 1:
            halve_the_head(engine.module)
        try:
            engine.backward(engine(batch(step)))
        except ModelError as error:
            return one_line(error)
        engine.step()
    assert_equal(engine, plain(between=halve_the_head))
    return ""


@pytest.mark.parametrize(
    ("engine", "stage", "groups"),
    [("fsdp2", 0, 2), ("fsdp2", 1, 1), ("fsdp2", 3, 1), ("deepspeed", 2, 1), ("deepspeed", 3, 1)],
)
def test_weights_that_the_script_changes_are_kept_or_refused(
    ranks: RankPool, engine: str, stage: int, groups: int
) -> None:
    for message in ranks.run(_written, engine, stage, groups, world=2):
        if engine == "deepspeed":
            assert message.startswith("the script changed the weights of head.weight after sdp.initialize")
        else:
            assert not message


# -- models of scripts -----------------------------------------------------------------------------


def transposed() -> nn.Module:
    model = models.mlp()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return model


def compiled(compiler: Callable[..., Any], *, blocks: bool) -> nn.Module:
    model: Any = models.mlp()
    if blocks:
        model.layers = nn.ModuleList(torch.compile(block, backend=compiler) for block in model.layers)
        return model
    return torch.compile(model, backend=compiler)


def _trained_like_torch(engine_name: str, stage: int, groups: int, kind: str) -> None:
    graphs = []

    def compiler(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = transposed() if kind == "transposed" else compiled(compiler, blocks=kind == "compiled blocks")
    engine = engine_of(engine_name, stage, groups, model=model)[0]
    for step in range(2):
        engine.backward(engine(batch(step)))
        engine.step()
    assert_equal(engine, plain())
    assert bool(graphs) == (kind != "transposed")


ENGINES = [("fsdp2", 0, 2), ("fsdp2", 3, 1), ("deepspeed", 1, 2), ("deepspeed", 3, 1)]


@pytest.mark.parametrize(
    ("engine", "stage", "groups", "kind"),
    [
        *((*engine, kind) for engine in ENGINES for kind in ("transposed", "compiled blocks")),
        *((*engine, "compiled model") for engine in ENGINES[:3]),
        pytest.param(*ENGINES[3], "compiled model", marks=pytest.mark.slow),  # ZeRO 3 compiles in many pieces
    ],
)
def test_compiled_and_transposed_models_train_under_their_names(
    ranks: RankPool, engine: str, stage: int, groups: int, kind: str
) -> None:
    ranks.run(_trained_like_torch, engine, stage, groups, kind, world=2)


def _odd(kind: str) -> nn.Module:
    model: Any = models.mlp()
    if kind == "scalar":
        model.layers[1].scale = nn.Parameter(torch.tensor(1.0))
    elif kind == "empty":
        model.layers[1].nothing = nn.Parameter(torch.zeros(0, 4))
    elif kind == "sparse":
        model.table = nn.Embedding(4, 4, sparse=True)
    elif kind == "twice":
        model.layers[3] = model.layers[0]
    else:
        sdp.init_distributed()
        model = {"DDP": nn.parallel.DistributedDataParallel, "DP": nn.DataParallel}[kind](model)
    return model


def _refused(engine: str, stage: int, groups: int, kind: str) -> str:
    try:
        engine_of(engine, stage, groups, model=_odd(kind))
    except ModelError as error:
        return one_line(error)
    return "trained"


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("scalar", "parameter 'layers.1.scale' has no dimension that could be sharded; give it the shape (1,), or "),
        ("empty", "parameter 'layers.1.nothing' of shape (0, 4) has no elements to shard; remove it"),
        ("sparse", "table has sparse gradients, which are not averaged; create it with sparse=False"),
        ("DDP", "the model is wrapped in DistributedDataParallel, which would average gradients a second time"),
        ("DP", "the model is wrapped in DataParallel, which would average gradients a second time"),
    ],
)
def test_models_that_cannot_be_trained_are_one_line(ranks: RankPool, engine: str, kind: str, message: str) -> None:
    for found in ranks.run(_refused, engine, 3, 1, kind, world=2):
        assert message in found


def _shared_twice() -> None:
    """Block 0, which is also block 3, is shared. Plain torch has it twice, too."""
    section = {"groups": 2, "units": ["layers.1", "layers.2"]}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "sdp": section}
    engine = sdp.initialize(model=_odd("twice"), config=config)[0]
    for step in range(2):
        engine.backward(engine(batch(step)))
        engine.step()
    engine.check_holders()
    assert_equal(engine, plain(model=_odd("twice")))


def test_a_block_at_two_places_can_be_shared_by_all_groups(ranks: RankPool) -> None:
    for line in ranks.run(_refused, "fsdp2", 0, 2, "twice", world=2):
        assert line.startswith("sdp.units: layers.0 and layers.3 are one module, and a unit has only one place; ")
        assert line.endswith('set sdp.units to ["layers.1", "layers.2"]')
    ranks.run(_shared_twice, world=2)
