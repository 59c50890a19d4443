"""Names of the package deepspeed in a script whose only change is ``sdp.initialize``."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.tests.support.models import Mlp, mlp
from sdp.tests.support.ranks import RankPool
from torch import nn

pytest.importorskip("deepspeed", reason="deepspeed is not installed; the extra 'deepspeed' has it")

CONFIG: dict[str, Any] = {
    "train_batch_size": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "sdp": {"groups": 2, "capacity": 0.5},
}


def _import() -> Any:
    import deepspeed

    # DeepSpeed would compile a collective in shared memory, which takes minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    from sdp.engine.stores.deepspeed.private import forget_process_groups

    forget_process_groups()  # of an earlier test
    return deepspeed


def _train(engine: Any, steps: int = 1) -> dict[str, torch.Tensor] | None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        engine.backward(engine(torch.randn(2, 5, generator=generator), torch.randn(2, 3, generator=generator)))
        engine.step()
    return engine.full_state_dict()


def _assert_equal(ours: dict[str, torch.Tensor] | None, theirs: dict[str, torch.Tensor] | None) -> None:
    assert (ours is None) is (theirs is None)
    for name, value in (ours or {}).items():
        torch.testing.assert_close(value, (theirs or {})[name], rtol=1e-5, atol=1e-6)


def _communicate(before: bool, engine_name: str) -> None:
    deepspeed = _import()
    if before:
        deepspeed.init_distributed()
    config = CONFIG | {"zero_optimization": {"stage": 1}, "sdp": CONFIG["sdp"] | {"engine": engine_name}}
    engine = sdp.initialize(model=mlp(), config=config)[0]
    assert (deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()) == (engine.global_rank, engine.world_size)
    value = torch.tensor([deepspeed.comm.get_rank() + 1.0])
    deepspeed.comm.all_reduce(value, op=deepspeed.comm.ReduceOp.SUM)
    assert value.item() == 3
    deepspeed.comm.barrier()
    _train(engine)


@pytest.mark.parametrize("engine_name", ["fsdp2", "deepspeed"])
@pytest.mark.parametrize("before", [True, False], ids=["init_distributed before", "after"])
def test_its_collectives_work_in_the_script(ranks: RankPool, before: bool, engine_name: str) -> None:
    ranks.run(_communicate, before, engine_name, world=2)


class Teacher(Mlp):
    """A second model of the script."""


def _train_beside_deepspeed(engine_name: str, stage: int, first: str, expected: dict[str, torch.Tensor]) -> None:
    deepspeed = _import()

    def start_ours() -> Any:
        config = CONFIG | {"zero_optimization": {"stage": stage}, "sdp": CONFIG["sdp"] | {"engine": engine_name}}
        return sdp.initialize(model=mlp(), config=config)[0]

    def start_theirs() -> Any:
        torch.manual_seed(1)
        model = Teacher()
        settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
        settings |= {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}  # it clips at 1 by default
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]

    if first == "ours":
        ours, theirs = start_ours(), start_theirs()
    else:
        theirs, ours = start_theirs(), start_ours()
    for step in range(3):
        for engine in (ours, theirs):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            engine.backward(engine(torch.randn(2, 5, generator=generator), torch.randn(2, 3, generator=generator)))
            engine.step()
    with deepspeed.zero.GatheredParameters(list(theirs.module.parameters())):
        for name, value in theirs.module.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    alone = start_ours()  # without DeepSpeed's engine next to it
    _assert_equal(_train(alone, steps=3), ours.full_state_dict())


def _train_plainly(world: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = Teacher()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(world):
            generator = torch.Generator().manual_seed(10 * step + rank)
            loss = model(torch.randn(2, 5, generator=generator), torch.randn(2, 3, generator=generator))
            (loss / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(("engine_name", "stage", "first"), [
    ("fsdp2", 2, "ours"), ("fsdp2", 2, "theirs"), ("deepspeed", 1, "ours"), ("deepspeed", 2, "theirs"),
    ("deepspeed", 3, "ours"), ("deepspeed", 3, "theirs"),
    *(pytest.param("deepspeed", *more, marks=pytest.mark.slow) for more in ((1, "theirs"), (2, "ours")))
])  # fmt: skip
def test_another_model_under_deepspeed_itself_trains_as_with_torch(
    ranks: RankPool, engine_name: str, stage: int, first: str
) -> None:
    """DeepSpeed's own engine averages over all ranks, not over those of an SDP group."""
    ranks.run(_train_beside_deepspeed, engine_name, stage, first, _train_plainly(4), world=4)


def _train_what_deepspeed_has_partitioned(engine_name: str) -> None:
    """As transformers' from_pretrained does with an HfDeepSpeedConfig of stage 3."""
    deepspeed, states = _import(), []
    for partitions in (True, False):
        stage3 = CONFIG | {"zero_optimization": {"stage": 3}}
        with deepspeed.zero.Init(config_dict_or_path=stage3, enabled=partitions):
            model = mlp()
        assert all(hasattr(parameter, "ds_id") is partitions for parameter in model.parameters())
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            if dist.get_rank() == 0:
                nn.init.constant_(model.head.bias, 0.25)
        if not partitions:  # a context of DeepSpeed does nothing with parameters of torch
            nn.init.constant_(model.head.bias, 0.25)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = CONFIG | {"zero_optimization": {"stage": 1}, "sdp": CONFIG["sdp"] | {"engine": engine_name}}
        states.append(_train(sdp.initialize(model=model, optimizer=optimizer, config=config)[0]))
    _assert_equal(*states)


@pytest.mark.parametrize("engine_name", ["fsdp2", "deepspeed"])
def test_a_model_built_in_zero_init_trains_as_any_other(ranks: RankPool, engine_name: str) -> None:
    """``zero.Init`` has partitioned its parameters, and ``GatheredParameters`` has changed them."""
    ranks.run(_train_what_deepspeed_has_partitioned, engine_name, world=2)


class Checkpointed(Mlp):
    """Recomputes each layer with DeepSpeed's function, as a script's own model does."""

    function = "checkpoint"

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden = self.stem(x)
        for layer in self.layers:
            hidden = getattr(_import().checkpointing, self.function)(layer, hidden)
        return nn.functional.mse_loss(self.head(hidden), y)


class CheckpointedAgain(Checkpointed):
    function = "non_reentrant_checkpoint"


def _recompute(kind: type[Mlp], stage: int) -> None:
    deepspeed, states = _import(), []
    deepspeed.init_distributed()
    deepspeed.checkpointing.configure(None, partition_activations=False, num_checkpoints=4)
    for model_kind in (kind, Mlp):
        torch.manual_seed(0)
        model = model_kind()
        config = CONFIG | {"zero_optimization": {"stage": stage}, "sdp": {"groups": 1}}
        states.append(_train(sdp.initialize(model=model, config=config)[0], steps=2))
    _assert_equal(*states)


@pytest.mark.parametrize(("kind", "stage"), [(Checkpointed, 0), (CheckpointedAgain, 3)])
def test_its_activation_checkpointing_gives_the_same_gradients(ranks: RankPool, kind: type[Mlp], stage: int) -> None:
    ranks.run(_recompute, kind, stage, world=2)


def _gather(engine_name: str) -> None:
    deepspeed = _import()
    config = CONFIG | {"zero_optimization": {"stage": 3}, "sdp": CONFIG["sdp"] | {"engine": engine_name}}
    engine = sdp.initialize(model=mlp(), config=config)[0]
    whole = mlp().state_dict()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for name, parameter in engine.module.named_parameters():
            assert parameter.shape == whole[name].shape
    _train(engine)


@pytest.mark.parametrize("engine_name", ["fsdp2", "deepspeed"])
def test_gathering_the_engines_parameters_shows_whole_shapes(ranks: RankPool, engine_name: str) -> None:
    """With fsdp2 the context does nothing, and parameters stay as they are."""
    ranks.run(_gather, engine_name, world=2)


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle"])
def test_a_schedule_of_deepspeed_sets_the_rates(one_rank: None, kind: str) -> None:
    deepspeed = _import()
    arguments: dict[str, dict[str, Any]] = {
        "WarmupLR": {"warmup_max_lr": 0.01, "warmup_num_steps": 4},
        "WarmupDecayLR": {"total_num_steps": 12, "warmup_max_lr": 0.01, "warmup_num_steps": 4},
        "WarmupCosineLR": {"total_num_steps": 12, "warmup_num_steps": 4},
        "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 4},
    }
    make = getattr(deepspeed.runtime.lr_schedules, kind)
    optimizers = [torch.optim.SGD(mlp().parameters(), lr=0.02, momentum=0.9) for _ in range(2)]
    model = mlp()
    optimizers[0] = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    schedule, expected = (make(optimizer, **arguments[kind]) for optimizer in optimizers)
    engine = sdp.initialize(
        model=model, optimizer=optimizers[0], lr_scheduler=schedule, config={"train_batch_size": 2}
    )[0]
    for _ in range(12):
        _train(engine)
        expected.step()
        assert engine.get_lr() == pytest.approx([group["lr"] for group in optimizers[1].param_groups])


def _optimizer_of_deepspeed(name: str, parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    """DeepSpeed's optimizer without its kernel, which compiles for minutes and is not called."""
    kind = getattr(importlib.import_module("deepspeed.ops.adam"), name)
    made = kind.__new__(kind)
    defaults = {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0,
        "amsgrad": False,
    }  # fmt: skip
    made.adam_w_mode = settings.pop("adam_w_mode", True)
    made.opt_id, made.ds_opt_adam = 0, SimpleNamespace(destroy_adam=lambda _: None)
    torch.optim.Optimizer.__init__(made, parameters, defaults | settings)
    return made


def _train_with_an_optimizer_of_deepspeed(name: str, decoupled: bool) -> None:
    states = []
    for of_deepspeed in (True, False):
        model = mlp()
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2]},
        ]
        if of_deepspeed:
            optimizer = _optimizer_of_deepspeed(name, groups, lr=0.01, betas=(0.8, 0.95), adam_w_mode=decoupled)
        else:
            optimizer = torch.optim.Adam(
                groups, lr=0.01, betas=(0.8, 0.95), weight_decay=0.0, decoupled_weight_decay=decoupled
            )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        config = CONFIG | {"zero_optimization": {"stage": 2}, "sdp": {"groups": 1}}
        engine = sdp.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]
        states.append(_train(engine, steps=3))
        assert engine.get_lr() == [0.01 * 0.5**3] * 2
    _assert_equal(*states)


@pytest.mark.parametrize(("name", "decoupled"), [("FusedAdam", True), ("DeepSpeedCPUAdam", False)])
def test_an_optimizer_of_deepspeed_steps_as_torchs(ranks: RankPool, name: str, decoupled: bool) -> None:
    """With its own kernel, which does not know shards, the process would end."""
    ranks.run(_train_with_an_optimizer_of_deepspeed, name, decoupled, world=2)


def test_what_torchs_adam_does_not_have_is_refused(one_rank: None) -> None:
    model = mlp()
    optimizer = _optimizer_of_deepspeed("FusedAdam", model.parameters(), bias_correction=False)
    with pytest.raises(sdp.ConfigError, match=r"^optimizer: FusedAdam with bias_correction false"):
        sdp.initialize(model=model, optimizer=optimizer, config=CONFIG)
    kind = importlib.import_module("deepspeed.ops.lion").FusedLion
    lion = kind.__new__(kind)
    torch.optim.Optimizer.__init__(lion, model.parameters(), {"lr": 0.1})
    with pytest.raises(sdp.ConfigError, match=r"^optimizer: DeepSpeed's FusedLion does not take sharded"):
        sdp.initialize(model=model, optimizer=lion, config=CONFIG)


def test_helpers_of_deepspeed(one_rank: None) -> None:
    deepspeed = _import()
    model = mlp()
    deepspeed.utils.set_z3_leaf_modules(model, [nn.Linear])
    rows = torch.utils.data.TensorDataset(torch.ones(4, 5), torch.ones(4, 3))
    engine, _, loader, _ = sdp.initialize(model=model, config={"train_batch_size": 2}, training_data=rows)
    batches = iter(deepspeed.utils.RepeatingLoader(loader))
    for _ in range(3):
        inputs, targets = next(batches)
        device = deepspeed.get_accelerator().device_name(engine.local_rank)
        engine.backward(engine(inputs.to(device), targets.to(device)))
        engine.step()
    assert engine.global_steps == 3
    assert not isinstance(engine, deepspeed.DeepSpeedEngine)


def test_experts_of_deepspeeds_layers_are_refused() -> None:
    """They differ between ranks, so their average would be wrong."""
    model = mlp()
    model.head.weight.allreduce = False  # DeepSpeed's mark
    with pytest.raises(sdp.ModelError, match=r"^sdp.initialize: parameter 'head.weight' belongs to DeepSpeed's MoE"):
        sdp.initialize(model=model, config=CONFIG)


def test_names_that_were_under_sdp_are_in_the_package_deepspeed() -> None:
    with pytest.raises(AttributeError, match="no attribute 'zero'; DeepSpeed's own names are in the package deepspeed"):
        sdp.zero  # noqa: B018
