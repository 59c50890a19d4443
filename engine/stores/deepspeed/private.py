"""The only file that imports ``deepspeed``.

It has the tested versions and the private names that this package uses, and checks that the
installed version has these names.
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

# Names outside DeepSpeed's documented interface: by module, and of ZeRO's optimizer by stage. A
# parameter of ZeRO 3 also has ``ds_id`` and ``ds_tensor``.
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
    """Import ``deepspeed``, set it up for this machine, and check it.

    Raises ConfigError if it cannot be used.
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
    """Keep DeepSpeed from compiling a collective in C++ for minutes. gloo takes its place."""
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
    """Show log lines of DeepSpeed if the configuration ``file`` asks for them."""
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
    """Drop the process groups of an earlier DeepSpeed engine in this process.

    They may be destroyed, or belong to another layout.
    """
    importlib.import_module("deepspeed.comm.comm").cdb = None  # type: ignore[attr-defined]
    importlib.reload(importlib.import_module("deepspeed.utils.groups"))
    restore_linear()


@contextmanager
def separate_process_groups() -> Iterator[None]:
    """A context in which DeepSpeed builds an engine over the process groups of one SDP group.

    DeepSpeed keeps process groups in global variables. At the end, the earlier ones are restored,
    because a script may train another model with DeepSpeed alone, over all ranks.
    """
    groups = importlib.import_module("deepspeed.utils.groups")
    before = dict(vars(groups))
    forget_process_groups()
    try:
        yield
    finally:
        vars(groups).update(before)


def restore_linear() -> None:
    """Restore torch's ``linear``, if an earlier engine with ZeRO 3 replaced it.

    DeepSpeed's function accepts less, such as no nested tensors, and changes the order in which
    gradients become ready. If only some ranks of a group had such an engine before, the ranks would
    reduce different parameters together.
    """
    # If another library has replaced the function later, that one stays.
    if torch.nn.functional.linear.__module__.startswith("deepspeed."):
        native: Any = torch._C
        torch.nn.functional.linear = native._nn.linear


def make_whole(model: nn.Module) -> int:
    """Restore the values of parameters that DeepSpeed's ``zero.Init`` has partitioned. Parameters
    stay the same objects. transformers partitions a model in ``from_pretrained`` if an
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
            vars(parameter).clear()  # attributes that DeepSpeed has added
            parameter.data = values
        restore_linear()
        # Torch caches its constructors when a device context is first used. Inside zero.Init, those
        # are DeepSpeed's, and ``with torch.device("meta")`` would have no effect ever after.
        importlib.import_module("torch.utils._device")._device_constructors.cache_clear()
    return len(partitioned)


def let_groups_differ() -> None:
    """Switch off ZeRO 3's comparison of parameters with those of rank 0 of the world.

    Rank 0 may be in another group, which has other modules. Inside a group, all ranks have the same
    modules.
    """
    for module, names in NAMES.items():
        if names == ("assert_ints_same_as_other_ranks",):
            importlib.import_module(module).assert_ints_same_as_other_ranks = lambda ints: None  # type: ignore[attr-defined]


# -- messages --------------------------------------------------------------------------------------


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


# -- ZeRO's partitions -----------------------------------------------------------------------------


def whole_float32(parameter: nn.Parameter) -> torch.Tensor:
    """Return a whole trained parameter, joined from ZeRO's partitions. Collective in the group."""
    return importlib.import_module("deepspeed.utils").safe_get_full_fp32_param(parameter).detach()


class Zero:
    """This rank's float32 partitions under ZeRO, and their gradients, by the index of their
    parameter group.

    Args:
        zero: DeepSpeed's optimizer.
        optimizer: torch's optimizer, which DeepSpeed was given.
        stage: of ZeRO.
        offloads: whether the partitions are in the host's memory.

    Raises:
        ConfigError: DeepSpeed has replaced ``optimizer``, or does not have a name that is needed.
    """

    def __init__(self, zero: Any, optimizer: Optimizer, stage: int, *, offloads: bool):
        deepspeed = importlib.import_module("deepspeed")
        _require(deepspeed, zero, OF_OPTIMIZER[stage], type(zero).__name__)
        if zero.optimizer is not optimizer:  # as Adagrad
            raise ConfigError(
                f"optimizer: under ZeRO DeepSpeed replaces the {type(optimizer).__name__} that it was given by another "
                'one, whose state a checkpoint would lack; use another optimizer, or sdp.engine "fsdp2"'
            )
        self._zero, self._stage, self._offloads = zero, stage, offloads
        groups = zero.fp32_partitioned_groups_flat if stage == 3 else (g["params"][0] for g in optimizer.param_groups)
        self.masters: list[torch.Tensor] = list(groups)

    def take_gradients(self) -> None:
        """Set ``grad`` of the partitions to the reduced gradients of a step, flat and in
        float32.
        """
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
        """Let DeepSpeed's next step use the ``grad`` of the partitions."""
        for index, master in enumerate(() if self._offloads else self.masters):
            self._zero.averaged_gradients[index], master.grad = [master.grad], None

    def drop_gradients(self) -> None:
        """Drop all gradients. DeepSpeed's ``zero_grad`` does not drop gradients that are
        reduced.
        """
        zero = self._zero
        zero.zero_grad()
        for master in () if self._offloads else self.masters:
            master.grad = None
        if self._stage == 3:
            # The first micro-batch of the next step overwrites only the sums of parameters that it
            # uses. The others would keep the gradients of this step.
            zero.grad_partitions_flat_buffer.zero_()
            return
        for reduced in (zero.averaged_gradients, zero.all_grad_tensors):
            for index in reduced:
                reduced[index] = None
        if self._offloads:
            zero.reset_cpu_buffers()
        zero.micro_step_id = -1  # the next micro-batch overwrites the sums in host memory

    def update_model(self) -> None:
        """Copy the partitions of ZeRO 1 or 2 to the model, after they were changed from outside.

        Collective in the group.
        """
        self._zero.update_lp_params()


def offsets_in_partition(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Return the offset of each parameter of a bundle in ZeRO's flat tensor, from the first one. At
    stages 1 and 2 this tensor has whole parameters, at stage 3 this rank's partitions. -1: the
    parameter is not in this tensor.
    """
    tensors = [stored_tensor(parameter) for parameter in parameters]
    storage = tensors[0].untyped_storage().data_ptr()
    return [
        int(tensor.storage_offset() - tensors[0].storage_offset())
        if tensor.untyped_storage().data_ptr() == storage
        else -1
        for tensor in tensors
    ]
