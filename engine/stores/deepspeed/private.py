"""The only file that imports ``deepspeed``.

It lists the tested versions and the private names that this package uses, and checks that the
installed version has these names.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...environment.detect import set_default
from ...errors import ConfigError

log = logging.getLogger("sdp")

TESTED = ("0.19.8",)
_BETWEEN_GROUPS = "sdp_between_groups"  # the name in the tables of DeepSpeed's communication logger

# By module: the names that this package uses or replaces.
_NAMES = {
    "deepspeed.ops": ("__compatible_ops__",),
    "deepspeed.accelerator": ("get_accelerator",),
    "deepspeed.comm.comm": ("cdb", "all_reduce", "broadcast"),
    "deepspeed.utils.groups": (
        "_WORLD_GROUP",
        "_TENSOR_MODEL_PARALLEL_GROUP",
        "_MODEL_PARALLEL_GROUP",
        "_DATA_PARALLEL_GROUP",
        "mpu",
    ),
    "deepspeed.runtime.zero.partitioned_param_coordinator": ("assert_ints_same_as_other_ranks",),
    "deepspeed.runtime.zero.partition_parameters": (
        "assert_ints_same_as_other_ranks",
        "Init",
        "InsertPostInitMethodToModuleSubClasses",
        "zero3_linear_wrap",
    ),
    "deepspeed.runtime.zero.stage3": ("assert_ints_same_as_other_ranks",),
    "deepspeed.utils.zero_to_fp32": ("get_fp32_state_dict_from_zero_checkpoint",),
}
# Attributes of DeepSpeed's optimizer, by ZeRO stage. At stage 0 the optimizer is torch's own,
# except in half precision.
_COPIES = "fp16_groups fp32_groups overflow_checker loss_scale_config _update_scale"
_FLAT = """
    averaged_gradients all_grad_tensors micro_step_id reset_cpu_buffers single_partition_of_fp32_groups
    bit16_groups partition_size cpu_offload update_lp_params check_grad_overflow check_overflow
    _wait_for_offload_copies loss_scaler _update_scale
"""
_PARTITIONED = """
    averaged_gradients fp32_partitioned_groups_flat fp16_groups sub_group_to_group_id offload_optimizer
    persistent_parameters
    _overflow_check_and_loss_scale_update _loss_scale_update_and_overflow_cleanup loss_scaler _update_scale
    _reassign_or_swap_out_partitioned_parameters _partition_all_parameters partition_grads _get_param_partition_rank
    grad_partitions_flat_buffer _get_param_coordinator
"""
_OF_OPTIMIZER = {0: "", 1: _FLAT, 2: _FLAT, 3: _PARTITIONED}
OF_ENGINE = (
    "enable_backward_allreduce basic_optimizer micro_steps global_steps global_samples skipped_steps _global_grad_norm"
)


def load() -> Any:
    """Import ``deepspeed``, set it up for this machine, and check it.

    Raises ConfigError if it cannot be used.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError('sdp.engine: "deepspeed" needs the package deepspeed; pip install "sdp-engine[deepspeed]"')
    if not torch.cuda.is_available():
        set_default("DS_ACCELERATOR", "cpu")
    deepspeed = importlib.import_module("deepspeed")
    for module, names in _NAMES.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            raise _unsupported(deepspeed, module) from None
        _require(deepspeed, found, names, module)
    if deepspeed.__version__ not in TESTED:
        log.warning(
            "DeepSpeed %s was not tested (tested: %s), but it has all names that sdp needs",
            deepspeed.__version__,
            ", ".join(TESTED),
        )
    _count_devices_once()
    keep_gloo()
    return deepspeed


def keep_gloo() -> None:
    """Keep DeepSpeed from compiling C++ at its start, for minutes: a collective in shared memory,
    which gloo replaces.
    """
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False


def use_default_process_group() -> None:
    """Make ``deepspeed.comm`` use torch's process group, as ``deepspeed.initialize`` does."""
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    if comm.cdb is None:
        keep_gloo()
        comm.init_distributed(verbose=False)


def _count_devices_once() -> None:
    """Keep the number of "devices" of a CPU, for which DeepSpeed's ZeRO 3 asks in each step.

    It would start ``numactl`` each time, which also makes torch repeat its warnings.
    """
    accelerator: Any = importlib.import_module("deepspeed.accelerator").get_accelerator()
    if accelerator._name == "cpu" and "device_count" not in vars(accelerator):
        accelerator.device_count = functools.cache(accelerator.device_count)


def set_verbosity(file: Mapping[str, Any]) -> None:
    """Show DeepSpeed's own log lines if the configuration ``file`` asks for any."""
    asked = any((file.get(section) or {}).get("enabled") for section in ("comms_logger", "flops_profiler"))
    asked = asked or bool(file.get("wall_clock_breakdown")) or "steps_per_print" in file
    logging.getLogger("DeepSpeed").setLevel(logging.INFO if asked else logging.WARNING)


def check_engine(deepspeed: Any, engine: Any, stage: int, precision: str) -> None:
    """Raise ConfigError if DeepSpeed's engine or optimizer lacks a name or cannot be supported."""
    _require(deepspeed, engine, OF_ENGINE.split(), type(engine).__name__)
    if hasattr(engine.optimizer, "fp32_groups_flat"):
        raise ConfigError(
            f"{precision} at zero_optimization.stage 0: DeepSpeed flattens the weights of its FusedAdam into one "
            "tensor, so they cannot be found again; set optimizer.params.torch_adam to true, or use stage 1"
        )
    # DeepSpeed replaces its Adagrad by one that has all parameters in one group.
    if stage and engine.optimizer.optimizer is not engine.basic_optimizer:
        raise ConfigError(
            f"optimizer: under ZeRO DeepSpeed replaces the {type(engine.basic_optimizer).__name__} that it was given "
            "by another one, whose state a checkpoint would lack; use another optimizer, or zero_optimization.stage 0"
        )
    names = _COPIES if stage == 0 and precision != "float32" else _OF_OPTIMIZER[stage]
    _require(deepspeed, engine.optimizer, names.split(), type(engine.optimizer).__name__)


def require_float16() -> None:
    """Raise ConfigError if DeepSpeed does not compute in float16 on this device."""
    accelerator: Any = importlib.import_module("deepspeed.accelerator").get_accelerator()
    if not accelerator.is_fp16_supported():
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "this CPU"
        raise ConfigError(f"fp16.enabled: true is not supported on {name}, according to DeepSpeed; use bf16")


def _require(deepspeed: Any, owner: Any, names: Sequence[str], where: str) -> None:
    for name in names:
        if not hasattr(owner, name):
            raise _unsupported(deepspeed, f"{where}.{name}")


def _unsupported(deepspeed: Any, name: str) -> ConfigError:
    return ConfigError(
        f"DeepSpeed {deepspeed.__version__} is not supported (tested: {', '.join(TESTED)}): it has no {name}; "
        f"install deepspeed=={TESTED[-1]}"
    )


def forget_process_groups() -> None:
    """Drop what an earlier DeepSpeed engine left in this process.

    Its process groups may be destroyed or belong to another layout.
    """
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    comm.cdb = None
    groups = importlib.import_module("deepspeed.utils.groups")
    for name in _NAMES["deepspeed.utils.groups"]:
        setattr(groups, name, None)
    restore_linear()


@contextmanager
def separate_process_groups() -> Iterator[None]:
    """A context in which DeepSpeed builds an engine over the process groups of one SDP group.

    DeepSpeed keeps process groups in global variables. Those from before are put back at the end:
    a script may give another model to DeepSpeed itself, which averages over all ranks.
    """
    groups = importlib.import_module("deepspeed.utils.groups")
    before = {name: getattr(groups, name) for name in _NAMES["deepspeed.utils.groups"]}
    forget_process_groups()
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(groups, name, value)


def restore_linear() -> None:
    """Give torch its own ``linear`` again, if an earlier engine with ZeRO 3 replaced it.

    DeepSpeed's function accepts less, such as no nested tensors, and changes the order in which
    gradients become ready. If only some ranks of a group had such an engine before, the ranks would
    reduce different parameters together.
    """
    patches: Any = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    # Another library may have replaced it later. That patch stays.
    if patches is not None and torch.nn.functional.linear is patches.zero3_linear_wrap:
        torch.nn.functional.linear = patches.InsertPostInitMethodToModuleSubClasses.linear_bk


def make_whole(model: nn.Module) -> int:
    """Give parameters that DeepSpeed's ``zero.Init`` has partitioned their values again.

    They stay the same objects. transformers partitions a model in ``from_pretrained`` if an
    ``HfDeepSpeedConfig``, or ``TrainingArguments``, has stage 3. Collective.

    Returns:
        The number of these parameters.
    """
    partitioned = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if partitioned:
        zero: Any = importlib.import_module("deepspeed").zero
        for parameter in partitioned:
            with zero.GatheredParameters([parameter]):
                values = parameter.data.clone()
            vars(parameter).clear()  # what DeepSpeed has attached to it
            parameter.data = values
        restore_linear()
        # Torch caches its constructors when a device context is first used. Inside zero.Init, those
        # are DeepSpeed's, and ``with torch.device("meta")`` would have no effect ever after.
        torch.utils._device._device_constructors.cache_clear()
    return len(partitioned)


def let_groups_differ() -> None:
    """Switch off ZeRO 3's comparison of parameters with those of rank 0 of the world.

    Rank 0 may be in another group, which has other modules. Inside a group, all ranks have the
    same.
    """
    for module in ("partitioned_param_coordinator", "partition_parameters", "stage3"):
        found: Any = importlib.import_module(f"deepspeed.runtime.zero.{module}")
        found.assert_ints_same_as_other_ranks = lambda ints: None


def logged_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Start an all-reduce that DeepSpeed's communication logger counts; return its handle."""
    comm = importlib.import_module("deepspeed.comm")
    return comm.all_reduce(tensor, group=group, async_op=True, log_name=_BETWEEN_GROUPS)


def logged_broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Any:
    """Start a broadcast that DeepSpeed's communication logger counts; return its handle.

    ``source`` is the sender's rank in ``group``.
    """
    comm = importlib.import_module("deepspeed.comm")
    return comm.broadcast(
        tensor, dist.get_global_rank(group, source), group=group, async_op=True, log_name=_BETWEEN_GROUPS
    )


def set_gradient_norm(engine: Any, norm: float) -> None:
    """Set the value that the engine's ``get_global_grad_norm()`` returns."""
    engine._global_grad_norm = norm
