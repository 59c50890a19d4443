"""Everything that SDP uses of DeepSpeed beyond the documented interface.

The file lists the tested versions of DeepSpeed, and the private names that SDP uses. If the
installed version lacks one of these names, it is refused.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...distributed.collectives import stored_tensor
from ...environment.detect import set_default
from ...errors import ConfigError

log = logging.getLogger("sdp")

TESTED = ("0.19.8",)
_BETWEEN_GROUPS = "sdp_between_groups"  # the name in the tables of DeepSpeed's communication logger

# Private names of DeepSpeed that SDP uses: by module, and for ZeRO's optimizer by stage. SDP also
# uses ``ds_id`` and ``ds_tensor`` of a parameter under ZeRO 3.
NAMES = {
    "deepspeed.ops": ("__compatible_ops__",),
    "deepspeed.comm.comm": ("cdb",),
    "deepspeed.runtime.zero.partitioned_param_coordinator": ("assert_ints_same_as_other_ranks",),
    "deepspeed.runtime.zero.partition_parameters": ("assert_ints_same_as_other_ranks",),
    "deepspeed.runtime.zero.stage3": ("assert_ints_same_as_other_ranks",),
}
_FLAT = (
    "optimizer",
    "averaged_gradients",
    "all_grad_tensors",
    "reset_cpu_buffers",
    "micro_step_id",
    "update_lp_params",
)
_BY_PARAMETER = ("optimizer", "averaged_gradients", "fp32_partitioned_groups_flat", "grad_partitions_flat_buffer")
OF_OPTIMIZER = {1: _FLAT, 2: _FLAT, 3: _BY_PARAMETER}


def load() -> Any:
    """Import ``deepspeed``, set it up for this machine, and return the package.

    Raises ConfigError if the package is not installed, or SDP does not support its version.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError('sdp.engine: "deepspeed" needs the package deepspeed; pip install "sdp-engine[deepspeed]"')
    if not torch.cuda.is_available():
        set_default("DS_ACCELERATOR", "cpu")
    deepspeed = importlib.import_module("deepspeed")
    for module, names in NAMES.items():
        try:
            found = importlib.import_module(module)
        except ImportError:
            raise _unsupported(deepspeed, module) from None
        _require(deepspeed, found, names, module)
    if deepspeed.__version__ not in TESTED:
        log.warning(
            "DeepSpeed %s was not tested (tested: %s), but has all names that sdp needs",
            deepspeed.__version__,
            ", ".join(TESTED),
        )
    _count_devices_once()
    keep_gloo()
    return deepspeed


def keep_gloo() -> None:
    """Make DeepSpeed use gloo on a CPU, because compiling its own collectives takes minutes."""
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False


def use_default_process_group() -> None:
    """Make ``deepspeed.comm`` use torch's process group, as ``deepspeed.initialize`` does."""
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    if comm.cdb is None:
        keep_gloo()
        comm.init_distributed(verbose=False)


def _count_devices_once() -> None:
    """Cache the number of "devices" of a CPU, which DeepSpeed's ZeRO 3 needs in each step.
    Otherwise it would start ``numactl`` each time, and torch would repeat warnings.
    """
    accelerator: Any = importlib.import_module("deepspeed.accelerator").get_accelerator()
    if not torch.cuda.is_available() and "device_count" not in vars(accelerator):
        accelerator.device_count = functools.cache(accelerator.device_count)


def set_verbosity(file: Mapping[str, Any]) -> None:
    """Show DeepSpeed's log lines if the configuration ``file`` has a key that enables output."""
    asked = any((file.get(section) or {}).get("enabled") for section in ("comms_logger", "flops_profiler"))
    asked = asked or bool(file.get("wall_clock_breakdown")) or "steps_per_print" in file
    logging.getLogger("DeepSpeed").setLevel(logging.INFO if asked else logging.WARNING)


def _require(deepspeed: Any, owner: Any, names: Sequence[str], where: str) -> None:
    for name in names:
        if not hasattr(owner, name):
            raise _unsupported(deepspeed, f"{where}.{name}")


def _unsupported(deepspeed: Any, name: str) -> ConfigError:
    return ConfigError(
        f"DeepSpeed {deepspeed.__version__} is not supported (tested: {', '.join(TESTED)}): it has no {name}; "
        f"install deepspeed=={TESTED[-1]}"
    )


# -- state of the process --------------------------------------------------------------------------


def forget_process_groups() -> None:
    """Make DeepSpeed forget the process groups of an earlier engine in this process.

    These groups may be destroyed already, or belong to another layout.
    """
    importlib.import_module("deepspeed.comm.comm").cdb = None  # type: ignore[attr-defined]
    importlib.reload(importlib.import_module("deepspeed.utils.groups"))
    restore_linear()


@contextmanager
def separate_process_groups() -> Iterator[None]:
    """A context in which DeepSpeed can build an engine for the ranks of one SDP group.

    DeepSpeed keeps process groups in global variables. The context restores the earlier values at
    the end, because the script may also train another model with DeepSpeed over all ranks.
    """
    groups = importlib.import_module("deepspeed.utils.groups")
    before = dict(vars(groups))
    forget_process_groups()
    try:
        yield
    finally:
        vars(groups).update(before)


def restore_linear() -> None:
    """Restore torch's ``linear`` function, if an earlier engine with ZeRO 3 has replaced it.

    With DeepSpeed's function, gradients become ready in another order. If only some ranks of a
    group used it, ranks would reduce gradients of different parameters together.
    """
    # A function of another library, which has replaced DeepSpeed's function later, stays.
    if torch.nn.functional.linear.__module__.startswith("deepspeed."):
        native: Any = torch._C
        torch.nn.functional.linear = native._nn.linear


def make_whole(model: nn.Module) -> int:
    """Give whole values to parameters that DeepSpeed's ``zero.Init`` has partitioned. Collective.

    Parameters stay the same objects. For example, ``from_pretrained`` of transformers partitions
    parameters if an ``HfDeepSpeedConfig``, or ``TrainingArguments``, has ZeRO stage 3.

    Returns:
        The number of parameters that were partitioned.
    """
    partitioned = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if partitioned:
        zero: Any = importlib.import_module("deepspeed").zero
        for parameter in partitioned:
            with zero.GatheredParameters([parameter]):
                values = parameter.data.clone()
            vars(parameter).clear()  # attributes that DeepSpeed has added
            parameter.data = values
        restore_linear()
        # Torch caches its constructors when a device context is first used. Inside zero.Init, those
        # are DeepSpeed's, and ``with torch.device("meta")`` would have no effect ever after.
        importlib.import_module("torch.utils._device")._device_constructors.cache_clear()
    return len(partitioned)


def let_groups_differ() -> None:
    """Switch off ZeRO 3's check that all ranks of the world have the same parameters.

    The check would fail, because SDP groups have different modules.
    """
    for module, names in NAMES.items():
        if names == ("assert_ints_same_as_other_ranks",):
            importlib.import_module(module).assert_ints_same_as_other_ranks = lambda ints: None  # type: ignore[attr-defined]


# -- messages --------------------------------------------------------------------------------------


def logged_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Start an all-reduce that DeepSpeed's communication logger counts; return a work handle."""
    comm = importlib.import_module("deepspeed.comm")
    return comm.all_reduce(tensor, group=group, async_op=True, log_name=_BETWEEN_GROUPS)


def logged_broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> Any:
    """Start a broadcast that DeepSpeed's communication logger counts; return a work handle.

    ``source`` is the sender's rank in ``group``.
    """
    comm = importlib.import_module("deepspeed.comm")
    return comm.broadcast(
        tensor, dist.get_global_rank(group, source), group=group, async_op=True, log_name=_BETWEEN_GROUPS
    )


# -- ZeRO's partitions -----------------------------------------------------------------------------


def whole_float32(parameter: nn.Parameter) -> torch.Tensor:
    """Join a trained parameter from ZeRO's float32 partitions. Collective in the group."""
    return importlib.import_module("deepspeed.utils").safe_get_full_fp32_param(parameter).detach()


class Zero:
    """Access to this rank's ZeRO partitions inside DeepSpeed's optimizer.

    SDP takes the reduced gradients out, averages them among holders, and puts them back.

    Args:
        zero: DeepSpeed's optimizer.
        optimizer: torch's optimizer that was passed to DeepSpeed.
        offloads: whether the partitions are in the host's memory.

    Attributes:
        masters: the float32 partition of each parameter group.

    Raises:
        ConfigError: DeepSpeed has replaced ``optimizer``, or lacks a private name that SDP uses.
    """

    def __init__(self, zero: Any, optimizer: Optimizer, stage: int, *, offloads: bool):
        deepspeed = importlib.import_module("deepspeed")
        _require(deepspeed, zero, OF_OPTIMIZER[stage], type(zero).__name__)
        if zero.optimizer is not optimizer:  # as Adagrad
            raise ConfigError(
                f"optimizer: under ZeRO, DeepSpeed replaces {type(optimizer).__name__} by an optimizer of its own, "
                'whose state a checkpoint would lack; use another optimizer, or sdp.engine "fsdp2"'
            )
        self._zero, self._stage, self._offloads = zero, stage, offloads
        groups = zero.fp32_partitioned_groups_flat if stage == 3 else (g["params"][0] for g in optimizer.param_groups)
        self.masters: list[torch.Tensor] = list(groups)

    def take_gradients(self) -> None:
        """Set the ``grad`` of each partition to the step's reduced gradient, flat in float32."""
        if self._offloads:  # wait until the copies have arrived
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return
        for index, master in enumerate(self.masters):
            flat, at = torch.zeros_like(master, requires_grad=False), 0
            earlier = master.grad  # of a backward pass at a boundary, after which no step was taken
            for piece in self._zero.averaged_gradients[index]:
                flat[at : at + piece.numel()].copy_(piece.reshape(-1))
                at += piece.numel()
            if earlier is not None and self._stage < 3:  # ZeRO 3 adds up what was reduced by itself
                flat += earlier
            self._zero.averaged_gradients[index], master.grad = None, flat

    def give_gradients(self) -> None:
        """Make DeepSpeed's next step use the ``grad`` of each partition."""
        for index, master in enumerate(() if self._offloads else self.masters):
            self._zero.averaged_gradients[index], master.grad = [master.grad], None

    def drop_gradients(self) -> None:
        """Drop all gradients, also reduced gradients, which DeepSpeed's ``zero_grad`` keeps."""
        zero = self._zero
        zero.zero_grad()
        for master in () if self._offloads else self.masters:
            master.grad = None
        if self._stage == 3:
            # The first micro-batch of the next step overwrites only the sums of parameters that it
            # uses. Sums of other parameters would keep the gradients of this step.
            zero.grad_partitions_flat_buffer.zero_()
            return
        for reduced in (zero.averaged_gradients, zero.all_grad_tensors):
            for index in reduced:
                reduced[index] = None
        if self._offloads:
            zero.reset_cpu_buffers()
        zero.micro_step_id = -1  # the next micro-batch overwrites the sums in host memory

    def update_model(self) -> None:
        """Copy the partitions of ZeRO 1 or 2 to the model's weights. Collective in the group.

        Call this after code other than DeepSpeed's has changed the partitions.
        """
        self._zero.update_lp_params()


def offsets_in_partition(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Return where each parameter begins in ZeRO's flat tensor, counted from the first parameter.

    At stage 3 the flat tensor has only this rank's partition of each parameter. The result is -1
    for a parameter that is not in the flat tensor of the first parameter.
    """
    tensors = [stored_tensor(parameter) for parameter in parameters]
    storage = tensors[0].untyped_storage().data_ptr()
    return [
        int(tensor.storage_offset() - tensors[0].storage_offset())
        if tensor.untyped_storage().data_ptr() == storage
        else -1
        for tensor in tensors
    ]
