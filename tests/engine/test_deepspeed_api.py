"""The modules that scripts import from DeepSpeed, under ``sdp``."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import sdp
import torch
import torch.distributed as dist
from sdp.engine.deepspeed_api.namespace import MODULES, NAMES_OUT_OF_SCOPE, OUT_OF_SCOPE
from sdp.tests.support.models import mlp
from sdp.tests.support.ranks import RankPool
from torch import nn

# Names that public scripts import from DeepSpeed, by module. Many of them are out of scope.
IMPORTED = {
    "checkpoint": "UNIVERSAL_CHECKPOINT_INFO PADDED_VOCAB_SIZE DeepSpeedCheckpoint",
    "checkpoint.constants": "OPTIMIZER_STATE_DICT PARAM_SHAPES DS_VERSION",
    "checkpoint.utils": "clone_tensors_for_torch_save",
    "comm": "TorchBackend",
    "compile.passes": "zero3_compile",
    "constants": "TORCH_DISTRIBUTED_DEFAULT_PORT",
    "env_report": "main",
    "io": "FastFileWriter",
    "launcher.runner": "DEEPSPEED_ENVIRONMENT_NAME main",
    "ops.op_builder": "AsyncIOBuilder CPUAdamBuilder UtilsBuilder",
    "ops.op_builder.builder": "OpBuilder",
    "runtime.config": "DeepSpeedConfig ADAM_OPTIMIZER ONEBIT_ADAM_OPTIMIZER TORCH_ADAM_PARAM",
    "runtime.constants": "ROUTE_TRAIN ROUTE_EVAL",
    "runtime.dataloader": "RepeatingLoader DeepSpeedDataLoader",
    "runtime.engine": "DeepSpeedEngine",
    "runtime.fp16.loss_scaler": "LossScaler",
    "runtime.lr_schedules": "VALID_LR_SCHEDULES WarmupLR WARMUP_LR",
    "runtime.sequence_parallel.ulysses_sp": "UlyssesSPAttentionHF",
    "runtime.utils": "move_to_device see_memory_usage PartitionedTensor",
    "runtime.zero": "Init GatheredParameters",
    "runtime.zero.config": "ZeroStageEnum DeepSpeedZeroConfig",
    "runtime.zero.offload_config": "OffloadDeviceEnum OffloadStateTypeEnum",
    "runtime.zero.partition_parameters": "ZeroParamStatus is_zero_param",
    "runtime.zero.stage3": "DeepSpeedZeroOptimizer_Stage3",
    "utils": "logger groups set_z3_leaf_modules safe_get_full_fp32_param safe_get_full_optimizer_state",
    "utils.timer": "SynchronizedWallClockTimer ThroughputTimer",
}
CONFIG: dict[str, Any] = {"train_batch_size": 2, "sdp": {"engine": "reference", "groups": 2, "capacity": 0.5}}


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import sys, sdp; assert 'torch' not in sys.modules; sdp.DeepSpeedEngine; assert 'torch' in sys.modules; "
        "sdp.__version__"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_module_can_be_imported_and_is_the_same_by_all_its_names() -> None:
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
    for name in OUT_OF_SCOPE:
        module = importlib.import_module(f"sdp.{name}")
        with pytest.raises(sdp.ConfigError, match=r"^sdp\.[\w.]+\.Thing: ") as caught:
            module.Thing(1)
        assert OUT_OF_SCOPE[name] in str(caught.value)
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


def test_modules_that_no_statement_has_imported_are_found() -> None:
    """In a process of its own, because an import sets the attribute of the parent module."""
    code = """
        import sdp as deepspeed, logging
        assert deepspeed.utils.logging.logger is logging.getLogger("sdp")
        assert deepspeed.version == deepspeed.git_version_info.version == deepspeed.__version__
        assert deepspeed.runtime.config.LAMB_OPTIMIZER == "lamb"
        assert deepspeed.runtime.zero.partition_parameters.ZeroParamStatus.NOT_AVAILABLE.value == 2
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_names_that_public_scripts_import() -> None:
    """They are of the packages of DeepSpeed below ``sdp`` in the list, by module."""
    for module, names in IMPORTED.items():
        for name in names.split():
            getattr(importlib.import_module(f"sdp.{module}"), name)
    assert sdp.runtime.engine.DeepSpeedEngine is sdp.SDPEngine
    with pytest.raises(sdp.ConfigError, match="sdp compiles no kernels"):
        sdp.ops.op_builder.CPUAdamBuilder().load()
    with pytest.raises(sdp.ConfigError, match="sdp launch starts ranks"):
        sdp.launcher.runner.fetch_hostfile("hosts")
    with pytest.raises(AttributeError):
        sdp.utils.no_such_name  # noqa: B018


def test_constants_are_deepspeeds() -> None:
    pytest.importorskip("deepspeed")
    for name in ("constants", "runtime.config", "runtime.constants", "checkpoint.constants", "launcher.constants"):
        ours, theirs = importlib.import_module(f"sdp.{name}"), importlib.import_module(f"deepspeed.{name}")
        common = [key for key in vars(ours) if key.isupper() and key in vars(theirs)]
        assert common
        assert {key: vars(ours)[key] for key in common} == {key: vars(theirs)[key] for key in common}
    theirs = importlib.import_module("deepspeed.runtime.lr_schedules")
    names = [key for key in vars(theirs) if key.isupper()]
    ours = importlib.import_module("sdp.runtime.lr_schedules")
    assert {key: vars(theirs)[key] for key in names if key != "VALID_LR_SCHEDULES"} == {
        key: vars(ours)[key] for key in names if key != "VALID_LR_SCHEDULES"
    }
    theirs = importlib.import_module("deepspeed.runtime.zero.partition_parameters").ZeroParamStatus
    assert theirs.NOT_AVAILABLE == sdp.zero.ZeroParamStatus.NOT_AVAILABLE != theirs.AVAILABLE
    offload = importlib.import_module("deepspeed.runtime.zero.offload_config")
    for kind in ("OffloadDeviceEnum", "OffloadStateTypeEnum"):
        ours = getattr(sdp.runtime.zero.offload_config, kind)
        assert {each.name: each.value for each in ours} == {e.name: str(e.value) for e in getattr(offload, kind)}


def test_a_configuration_by_deepspeeds_class() -> None:
    config = sdp.DeepSpeedConfig({"train_batch_size": 4, "fp16": {"enabled": True}})
    assert isinstance(config, sdp.Config)
    assert (config.train_batch_size, config.precision) == (4, "float16")
    with pytest.raises(sdp.ConfigError, match="unknown key"):
        sdp.runtime.config.DeepSpeedConfig({"train_batch_sise": 4})


def test_leaf_modules_are_marked_as_deepspeeds_engine_reads_it() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()))
    assert sdp.utils.set_z3_leaf_modules(model, [nn.Linear, "ReLU"]) == [model[0], model[1][0]]
    assert sdp.utils.get_z3_leaf_modules(model) == [model[0], model[1][0]]
    with pytest.raises(ValueError, match="no module of the classes Conv2d"):
        sdp.utils.set_z3_leaf_modules(model, [nn.Conv2d])
    read = pytest.importorskip("deepspeed.utils").z3_leaf_module
    assert [read(module) for module in model.modules()] == [False, True, False, True]
    sdp.utils.unset_z3_leaf_modules(model, ["torch.nn.modules.linear.Linear"])
    assert not read(model[0])


def test_tensors_of_a_checkpoint_of_the_script_are_copied() -> None:
    whole = torch.arange(10.0)
    saved = sdp.checkpoint.utils.clone_tensors_for_torch_save({"a": [whole[:2]], "b": (whole[2:3], 7)})
    assert saved["a"][0].tolist() == [0, 1] and saved["a"][0].untyped_storage().nbytes() == 8
    assert saved["b"][1] == 7
    moved = sdp.runtime.utils.move_to_device({"x": [torch.zeros(1)]}, "meta")
    assert moved["x"][0].is_meta


def test_a_generator_of_a_script_does_not_change_the_others() -> None:
    sdp.checkpointing.model_parallel_cuda_manual_seed(3)
    tracker = sdp.checkpointing.get_cuda_rng_tracker()
    with tracker.fork():
        first = torch.rand(3)
    plain = torch.rand(3)
    with tracker.fork():
        second = torch.rand(3)
    torch.manual_seed(3 + 2718)
    assert torch.equal(torch.rand(3), first) and torch.equal(torch.rand(3), second)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3), plain)
    with pytest.raises(ValueError, match="no generator 'other'"), tracker.fork("other"):
        pass
    with pytest.raises(ValueError, match="exists already"):
        tracker.add("model-parallel-rng", 1)


def test_the_version_of_torch() -> None:
    """``sdp.utils`` still works when its module ``torch`` has been imported."""
    theirs = pytest.importorskip("deepspeed.utils.torch")
    from sdp.utils.torch import required_torch_version

    own = torch.__version__.split("+")[0]
    for options in ({"min_version": 2.1}, {"min_version": own}, {"min_version": "99"}, {"max_version": 2.1},
                    {"min_version": 2.1, "max_version": "99"}):  # fmt: skip
        assert required_torch_version(**options) is theirs.required_torch_version(**options)
    assert sdp.utils.torch.required_torch_version is required_torch_version
    with sdp.OnDevice(torch.float32, "meta"):
        assert nn.Linear(1, 1).weight.is_meta


def test_versions_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    sdp.env_report.main()
    assert capsys.readouterr().out.startswith(f"sdp {sdp.__version__}, torch {torch.__version__}, Python ")


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


def _train_what_deepspeed_has_partitioned(engine_name: str) -> None:
    """As transformers' from_pretrained does with an HfDeepSpeedConfig of stage 3."""
    from sdp.engine.backends.deepspeed.private import load

    states = []
    for partitions in (True, False):
        config = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        with load().zero.Init(config_dict_or_path=config | {"zero_optimization": {"stage": 3}}, enabled=partitions):
            model = mlp()
        assert all(hasattr(parameter, "ds_id") is partitions for parameter in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config["sdp"] = {"groups": 2, "capacity": 0.5, "engine": engine_name}
        engine = sdp.initialize(model=model, optimizer=optimizer, config=config)[0]
        engine.backward(engine(torch.ones(2, 5), torch.ones(2, 3)))
        engine.step()
        states.append(engine.full_state_dict())
    first, second = states
    assert first is None or all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("engine_name", ["fsdp2", "deepspeed"])
def test_a_model_that_deepspeed_has_partitioned_trains(ranks: RankPool, engine_name: str) -> None:
    pytest.importorskip("deepspeed")
    ranks.run(_train_what_deepspeed_has_partitioned, engine_name, world=2)


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


def test_the_versions_have_deepspeeds_keys() -> None:
    from sdp.git_version_info import torch_info

    assert torch_info.keys() >= {"version", "bf16_support", "cuda_version", "nccl_version", "hip_version"}
