"""The modules that scripts import from DeepSpeed, under ``sdp``."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.deepspeed_api.namespace import MODULES, NAMES_OUT_OF_SCOPE, OUT_OF_SCOPE
from sdp.tests.support.models import mlp
from sdp.tests.support.ranks import RankPool
from torch import nn

CONFIG: dict[str, Any] = {"train_batch_size": 2, "sdp": {"engine": "reference", "groups": 2, "capacity": 0.5}}


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import sys, sdp; assert 'torch' not in sys.modules; sdp.DeepSpeedEngine; assert 'torch' in sys.modules; "
        "sdp.__version__"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_module_can_be_imported_and_is_the_same_by_all_its_names() -> None:
    import importlib.util

    for name, file in MODULES.items():
        if name.endswith(".lightning") and importlib.util.find_spec("lightning") is None:
            continue  # tests/engine/integrations/test_lightning.py covers it where lightning is installed
        module = importlib.import_module(f"sdp.{name}")
        own = importlib.import_module(f"sdp.engine.{file}")
        assert module is own
        assert own.__spec__ is not None and own.__spec__.name == f"sdp.engine.{file}"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("sdp.nothing")
    with pytest.raises(AttributeError):
        sdp.nothing  # noqa: B018


def test_what_is_out_of_scope_can_be_imported_and_says_so_when_it_is_used() -> None:
    import importlib

    for name in OUT_OF_SCOPE:
        module = importlib.import_module(f"sdp.{name}")
        with pytest.raises(sdp.ConfigError, match=f"^sdp.{name}.Thing: ") as caught:
            module.Thing(1)
        assert "\n" not in str(caught.value)
        assert not isinstance(1, module.Thing)
    for name in NAMES_OUT_OF_SCOPE:
        with pytest.raises(sdp.ConfigError, match=f"^sdp.{name}: "):
            getattr(sdp, name)(1)
    from sdp.moe.layer import MoE
    from sdp.pipe import PipelineModule, TiedLayerSpec

    for refused in (MoE, PipelineModule, TiedLayerSpec, sdp.moe.layer.MoE):
        with pytest.raises(sdp.ConfigError):
            refused(2)


def test_names_of_the_package() -> None:
    assert sdp.DeepSpeedEngine is sdp.SDPEngine
    assert sdp.Branch.__module__ == "sdp.engine.model_interface"
    assert sdp.__version__.count(".") == 2
    assert sdp.logger is sdp.utils.logger is logging.getLogger("sdp")


def test_zero_init_keeps_what_is_computed_and_loaded_inside_it() -> None:
    with sdp.zero.Init(config_dict_or_path=CONFIG, dtype=torch.float16):
        model = mlp()
        nn.init.constant_(next(model.parameters()), 0.25)
    first = next(model.parameters())
    assert first.dtype == torch.float32
    with sdp.zero.GatheredParameters(model.parameters(), modifier_rank=0):
        assert torch.all(first == 0.25)
    engine = sdp.initialize(model=model, config=CONFIG)[0]
    state = engine.full_state_dict()
    assert state is not None
    assert torch.all(next(iter(state.values())) == 0.25)


def _gather() -> None:
    model = mlp(seed=dist.get_rank())
    with sdp.zero.GatheredParameters(model, modifier_rank=1):
        pass
    for ours, theirs in zip(model.parameters(), mlp(seed=1).parameters(), strict=True):
        assert torch.equal(ours, theirs)
    from sdp import comm

    value = torch.tensor([comm.get_rank() + 1.0])
    comm.all_reduce(value, op=comm.ReduceOp.SUM, log_name="a name", prof=False)
    gathered = [torch.zeros(1) for _ in range(comm.get_world_size())]
    comm.all_gather(gathered, value, debug="x")
    comm.barrier(log_name="end")
    assert [tensor.item() for tensor in gathered] == [3.0, 3.0]
    objects: list[Any] = [None, None]
    comm.all_gather_object(objects, comm.get_rank(), log_name="objects")
    assert objects == [0, 1]
    assert comm.get_all_ranks_from_group(comm.get_world_group()) == [0, 1]
    config = {"train_batch_size": 2, "sdp": {"groups": 1}, "zero_optimization": {"stage": 3}}
    engine = sdp.initialize(model=model, config=config)[0]
    with pytest.raises(sdp.ConfigError, match="full_state_dict"):
        sdp.zero.GatheredParameters(engine.module)


def _gather_after_initialize() -> str:
    config = {"train_batch_size": 2, "sdp": {"groups": 2, "capacity": 0.5}}
    engine = sdp.initialize(model=mlp(), config=config)[0]
    with sdp.zero.GatheredParameters(engine.module):  # only reads
        pass
    with pytest.raises(sdp.ConfigError) as caught:
        sdp.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0)
    alone = sdp.initialize(model=mlp(), config={**config, "sdp": {"groups": 1}})[0]
    with sdp.zero.GatheredParameters(alone.module, modifier_rank=0), torch.no_grad():
        next(alone.module.parameters()).fill_(dist.get_rank() + 1.0)
    assert torch.all(next(alone.module.parameters()) == 1)
    return str(caught.value)


def test_parameters_that_groups_lack_are_not_broadcast(ranks: RankPool) -> None:
    for message in ranks.run(_gather_after_initialize, world=2):
        assert "groups hold different parameters" in message
        assert "\n" not in message


def test_parameters_of_one_rank_go_to_all_and_comm_communicates(ranks: RankPool) -> None:
    ranks.run(_gather, world=2)


def test_comm_has_the_collectives_of_deepspeed() -> None:
    theirs = pytest.importorskip("deepspeed.comm")
    collectives = {name for name in dir(dist) if not name.startswith("_") and hasattr(theirs, name)}
    functions = {name for name in collectives if callable(getattr(theirs, name)) and name.islower()}
    assert all(hasattr(sdp.comm, name) for name in functions)
    assert not hasattr(sdp.comm, "no_such_name")


@pytest.mark.parametrize(
    ("make", "of_torch"),
    [
        (
            lambda p: sdp.ops.adam.FusedAdam(p, lr=0.1, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
        ),
        (
            lambda p: sdp.ops.adam.FusedAdam(p, lr=0.1, weight_decay=0.1, adam_w_mode=False),
            lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
        ),
        (
            lambda p: sdp.ops.adam.DeepSpeedCPUAdam(p, lr=0.1, adamw_mode=False),
            lambda p: torch.optim.Adam(p, lr=0.1),
        ),
    ],
    ids=["AdamW", "Adam", "DeepSpeedCPUAdam"],
)
def test_an_optimizer_by_deepspeeds_name(make: Any, of_torch: Any) -> None:
    states = []
    for maker in (make, of_torch):
        model = mlp()
        engine = sdp.initialize(model=model, optimizer=maker(model.parameters()), config=CONFIG)[0]
        engine.backward(engine(torch.ones(2, 5), torch.ones(2, 3)))
        engine.step()
        states.append(engine.full_state_dict())
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])


def test_activation_checkpointing() -> None:
    layer, value = nn.Sequential(nn.Linear(3, 3), nn.Dropout()), torch.ones(2, 3, requires_grad=True)
    assert not sdp.checkpointing.is_configured()
    sdp.checkpointing.configure(None, partition_activations=True)
    assert sdp.checkpointing.is_configured()
    gradients = []
    for call in (layer, lambda x: sdp.checkpointing.checkpoint(layer, x)):
        torch.manual_seed(0)
        gradients.append(torch.autograd.grad(call(value).sum(), value)[0])
    assert torch.equal(*gradients)
    sdp.checkpointing.reset()


def test_the_accelerator_and_helpers() -> None:
    accelerator = sdp.accelerator.get_accelerator()
    assert accelerator is sdp.get_accelerator()
    name = "cuda" if torch.cuda.is_available() else "cpu"
    assert accelerator.device_name() == name
    assert torch.zeros(1, device=accelerator.current_device_name()).device.type == name
    accelerator.synchronize()
    accelerator.empty_cache()
    loader = sdp.utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    with sdp.OnDevice(torch.float32, "meta"):
        assert nn.Linear(1, 1).weight.is_meta
    assert not nn.Linear(1, 1).weight.is_meta
