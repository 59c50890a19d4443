"""DeepSpeed's private names: the versions that they were tested with, and a check that they are there.

Nothing else in the package imports ``deepspeed``; ``deepspeed_optimizers.py`` uses what its optimizers have.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import environment
from ..errors import CheckpointError, ConfigError

log = logging.getLogger("sdp")

TESTED = ("0.19.8",)
_BETWEEN_GROUPS = "sdp_between_groups"  # in the tables of DeepSpeed's communication logger

# Module → names in it that are used, or replaced, here.
_NAMES = {
    "deepspeed.ops": ("__compatible_ops__",),
    "deepspeed.accelerator": ("get_accelerator",),
    "deepspeed.comm.comm": ("cdb", "all_reduce", "broadcast"),
    "deepspeed.utils.groups": ("_WORLD_GROUP", "_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mpu"),
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
# Attributes of the optimizer that DeepSpeed makes, by ZeRO stage. At stage 0 it is torch's, but for what computes in half precision.
_COPIES = "fp16_groups fp32_groups overflow_checker loss_scale_config _update_scale"
_FLAT = """
    averaged_gradients all_grad_tensors micro_step_id reset_cpu_buffers single_partition_of_fp32_groups bit16_groups partition_size
    cpu_offload update_lp_params check_grad_overflow check_overflow _wait_for_offload_copies loss_scaler _update_scale
"""
_PARTITIONED = """
    averaged_gradients fp32_partitioned_groups_flat fp16_groups sub_group_to_group_id offload_optimizer persistent_parameters
    _overflow_check_and_loss_scale_update _loss_scale_update_and_overflow_cleanup loss_scaler _update_scale
    _reassign_or_swap_out_partitioned_parameters partition_grads _get_param_partition_rank
"""
_OF_OPTIMIZER = {0: "", 1: _FLAT, 2: _FLAT, 3: _PARTITIONED}
_OF_ENGINE = "enable_backward_allreduce basic_optimizer micro_steps global_steps global_samples skipped_steps _global_grad_norm"


def load() -> Any:
    """The package ``deepspeed``, set up for this machine and checked. Raises :class:`ConfigError` where it cannot be used."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError('sdp.engine: "deepspeed" needs the package deepspeed; pip install "sdp-engine[deepspeed]"')
    if not torch.cuda.is_available():
        environment.set_default("DS_ACCELERATOR", "cpu")
    deepspeed = importlib.import_module("deepspeed")
    for module, names in _NAMES.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            raise _unsupported(deepspeed, module) from None
        _require(deepspeed, found, names, module)
    if deepspeed.__version__ not in TESTED:
        log.warning("DeepSpeed %s has all names that are needed, but was not tested (tested: %s)", deepspeed.__version__, ", ".join(TESTED))
    # Or C++ is compiled at start, for minutes, for a collective in shared memory that gloo replaces.
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def set_verbosity(file: Mapping[str, Any]) -> None:
    """DeepSpeed's own lines are printed where the file asks for some."""
    asked = any((file.get(section) or {}).get("enabled") for section in ("comms_logger", "flops_profiler"))
    asked = asked or bool(file.get("wall_clock_breakdown")) or "steps_per_print" in file
    logging.getLogger("DeepSpeed").setLevel(logging.INFO if asked else logging.WARNING)


def check_engine(deepspeed: Any, engine: Any, stage: int, precision: str) -> None:
    """Raise :class:`ConfigError` where an object that DeepSpeed made lacks a name that is needed."""
    _require(deepspeed, engine, _OF_ENGINE.split(), type(engine).__name__)
    if hasattr(engine.optimizer, "fp32_groups_flat"):
        raise ConfigError(
            f"{precision} at zero_optimization.stage 0: DeepSpeed lays the weights of its FusedAdam side by side, so that they are not "
            "found again; set optimizer.params.torch_adam to true, or use stage 1"
        )
    names = _COPIES if stage == 0 and precision != "float32" else _OF_OPTIMIZER[stage]
    _require(deepspeed, engine.optimizer, names.split(), type(engine.optimizer).__name__)


def require_float16() -> None:
    """Raise :class:`ConfigError` where DeepSpeed does not compute in float16 on this device."""
    accelerator: Any = importlib.import_module("deepspeed.accelerator").get_accelerator()
    if not accelerator.is_fp16_supported():
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "this CPU"
        raise ConfigError(f"fp16.enabled: true is not supported on {name}, as DeepSpeed finds; use bf16")


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
    """Drop what an engine before has left in this process: its process groups may be gone, or another layout's.

    ZeRO 3 puts a ``linear`` of its own into torch, under which gradients become ready in another order: ranks of a group of which only
    some had such an engine would reduce different parameters together.
    """
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    comm.cdb = None
    groups = importlib.import_module("deepspeed.utils.groups")
    for name in _NAMES["deepspeed.utils.groups"]:
        setattr(groups, name, None)
    patches: Any = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    if torch.nn.functional.linear is patches.zero3_linear_wrap:  # and not what somebody else has put there since
        torch.nn.functional.linear = patches.InsertPostInitMethodToModuleSubClasses.linear_bk


def let_groups_differ() -> None:
    """ZeRO 3 compares its parameters with rank 0's of the *world*, whose modules are others; inside a group they are equal."""
    for module in ("partitioned_param_coordinator", "partition_parameters", "stage3"):
        found: Any = importlib.import_module(f"deepspeed.runtime.zero.{module}")
        found.assert_ints_same_as_other_ranks = lambda ints: None


class GroupAsWorld:
    """DeepSpeed's ``mpu``: data parallelism is one SDP group. Model parallelism is this rank alone wherever something is summed."""

    def __init__(self, data: dist.ProcessGroup, alone: dist.ProcessGroup):
        self._data, self._alone = data, alone

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._data)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._alone

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size


# What the optimizer part of a checkpoint holds beside tensors: DeepSpeed's own, and data alone.
_IN_CHECKPOINTS = {
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
}


# What a conversion may fail with that finds other things in a file than it looks for.
_DAMAGED = (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, AssertionError)


class _SafeTorch:
    """``torch`` whose ``load`` takes weights alone: DeepSpeed's conversion would run any code that a file holds."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        return torch.load(file, **{**options, "weights_only": True})


@contextmanager
def _silence() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def is_zero_checkpoint(directory: Path) -> bool:
    """Whether DeepSpeed wrote a checkpoint of ZeRO 1–3 to ``directory``."""
    tag = _latest(directory)
    return tag is not None and any((directory / tag).glob("*_optim_states.pt"))


def _latest(directory: Path) -> str | None:
    try:
        return (directory / "latest").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{directory / 'latest'}: is no text, but must name the checkpoint to read ({error.reason})") from None


def weights_of_zero_checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    """Float32 weights and buffers of a dense model by name, by DeepSpeed's own ``zero_to_fp32``, which prints to nowhere.

    Raises :class:`CheckpointError` for a checkpoint that is damaged, or holds anything but tensors and DeepSpeed's own records.
    """
    load()
    convert: Any = importlib.import_module("deepspeed.utils.zero_to_fp32")
    allowed = [getattr(importlib.import_module(module), name) for module, names in _IN_CHECKPOINTS.items() for name in names]
    kept = convert.torch
    convert.torch = _SafeTorch()
    try:
        with torch.serialization.safe_globals(allowed), _silence():
            return convert.get_fp32_state_dict_from_zero_checkpoint(str(directory))
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0][:160]
        raise CheckpointError(f"{directory}: holds more than weights, which could run code and is not read ({reason})") from None
    except _DAMAGED as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        raise CheckpointError(f"{directory}: DeepSpeed cannot read its checkpoint there ({reason})") from None
    finally:
        convert.torch = kept


def local_part(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What this rank has in memory of a model's parameter: under ZeRO 3 its partition, else all of it."""
    return parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter.detach()  # type: ignore[attr-defined]


def logged_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """An asynchronous all-reduce that DeepSpeed's communication logger sees."""
    comm = importlib.import_module("deepspeed.comm")
    return comm.all_reduce(tensor, group=group, async_op=True, log_name=_BETWEEN_GROUPS)


def logged_broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Any:
    """An asynchronous broadcast from the member ``source`` of the group that DeepSpeed's communication logger sees."""
    comm = importlib.import_module("deepspeed.comm")
    return comm.broadcast(tensor, dist.get_global_rank(group, source), group=group, async_op=True, log_name=_BETWEEN_GROUPS)
