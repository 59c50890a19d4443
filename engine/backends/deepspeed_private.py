"""Everything that touches DeepSpeed's private names: the versions it was tested with, a check that the names are there, and their use.

Nothing else in the package imports ``deepspeed``. What its optimizers have on a rank: ZeRO's flat partitions, float32 copies of whole
parameters, the scale of the loss.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..checkpoint.files import check_tag
from ..environment.detect import set_default
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
        set_default("DS_ACCELERATOR", "cpu")
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
    if stage and engine.optimizer.optimizer is not engine.basic_optimizer:  # its Adagrad, which it then has in one group for all
        raise ConfigError(
            f"optimizer: under ZeRO DeepSpeed makes another {type(engine.basic_optimizer).__name__} than the one that it was given, whose "
            "state a checkpoint would lack; use another optimizer, or zero_optimization.stage 0"
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


class LossScale:
    """What one rank's optimizer of DeepSpeed's has losses multiplied by in float16, else 1. Ranks that skip alike have the same."""

    _SAVED = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self._record: Any = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)  # ZeRO's; stage 0's
        self._minimum = getattr(self._record, "min_scale", None) or getattr(self._record, "min_loss_scale", None)
        if hasattr(self._record, "raise_error_at_min_scale"):
            self._record.raise_error_at_min_scale = False  # training.max_skips says when a run ends

    @property
    def value(self) -> float:
        return 1.0 if self._record is None else float(self._record.cur_scale)

    @property
    def can_be_lowered(self) -> bool:
        """Whether an overflow may say no more than that the scale is too high."""
        return self._minimum is not None and self.value > self._minimum

    @contextmanager
    def raised_afterwards(self) -> Iterator[None]:
        """While inside, a step of DeepSpeed's divides by the scale that its losses were multiplied by. It would raise a scale that is
        due before it divides, and halve that step.
        """
        optimizer, outcomes = self._optimizer, []
        if self._minimum is None:
            yield
            return
        optimizer._update_scale = outcomes.append
        try:
            yield
        finally:
            del optimizer._update_scale
        for overflow in outcomes:
            optimizer._update_scale(overflow)

    def state(self) -> dict[str, float] | None:
        """Scale and counts, as JSON; None where the scale does not change."""
        if self._minimum is None:
            return None
        return {key: getattr(self._record, key) for key in self._SAVED if hasattr(self._record, key)}

    def load(self, state: Mapping[str, float] | None) -> None:
        """Go on from :meth:`state`, that of another stage too."""
        for key in self.state() or ():
            if state is not None and key in state:
                setattr(self._record, key, state[key])


@contextmanager
def unstepped(optimizer: Optimizer) -> Iterator[None]:
    """While inside, a step of ``optimizer`` does nothing. DeepSpeed takes one at stage 0 in half precision as it builds, which would decay
    the weights and count as the first.
    """
    kept = vars(optimizer).get("step")  # torch's schedules put one there
    optimizer.step = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        if kept is None:
            del optimizer.step
        else:
            optimizer.step = kept


class MasterCopies:
    """Float32 copies of one rank's whole trained parameters, by which DeepSpeed steps at stage 0 in half precision."""

    def __init__(self, engine: Any, parameters: Mapping[str, nn.Parameter]):
        """``parameters``: the model's, by canonical name."""
        self._optimizer, self._parameters = engine.optimizer, parameters
        names = {id(parameter): name for name, parameter in parameters.items()}
        groups = zip(self._optimizer.fp16_groups, self._optimizer.fp32_groups, strict=True)
        self.masters: dict[str, torch.Tensor] = {
            names[id(parameter)]: master for group, masters in groups for parameter, master in zip(group, masters, strict=True)
        }

    def spread_masters(self) -> None:
        """The copies were changed from outside: bring the model's parameters up to date."""
        for name, master in self.masters.items():
            self._parameters[name].detach().copy_(master.detach())

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """While inside, a step of DeepSpeed's takes the gradient for an overflow: it cleans up and leaves the weights."""
        checker = self._optimizer.overflow_checker
        checker.check = lambda *_, **__: True
        try:
            yield
        finally:
            del checker.check


class ZeroState:
    """The flat tensors of one rank under ZeRO 1–3, by the index of DeepSpeed's parameter group."""

    def __init__(self, engine: Any, stage: int):
        self._engine, self._optimizer, self._stage = engine, engine.optimizer, stage

    @property
    def offloaded(self) -> bool:
        return bool(self._optimizer.offload_optimizer if self._stage == 3 else self._optimizer.cpu_offload)

    @property
    def masters(self) -> list[torch.Tensor]:
        """Float32 weights: this rank's partition of every group, padding included."""
        optimizer = self._optimizer
        return optimizer.fp32_partitioned_groups_flat if self._stage == 3 else optimizer.single_partition_of_fp32_groups

    @property
    def members(self) -> list[list[nn.Parameter]]:
        """The model's parameters of every group, in the order in which they are partitioned."""
        return self._optimizer.fp16_groups if self._stage == 3 else self._optimizer.bit16_groups

    def take_gradient(self, index: int) -> torch.Tensor:
        """The reduced gradient of this rank's partition of a group, flat float32. It is the optimizer's from now on: it steps by what
        becomes of it.
        """
        master = self.masters[index]
        if self._stage < 3:
            self._optimizer._wait_for_offload_copies()
        if self.offloaded:
            return master.grad  # type: ignore[return-value]
        flat = torch.zeros(master.numel(), dtype=torch.float32, device=master.device)
        at = 0
        for piece in self._optimizer.averaged_gradients[index]:
            flat[at : at + piece.numel()].copy_(piece.reshape(-1))
            at += piece.numel()
        self.put_gradient(index, flat)
        return flat

    def put_gradient(self, index: int, flat: torch.Tensor) -> None:
        """Make ``flat`` the gradient of this rank's partition of a group."""
        self._optimizer.averaged_gradients[index] = [flat]

    def on_reduced(self, call: Callable[[torch.Tensor, torch.Tensor | None], None]) -> None:
        """ZeRO 3: from now on ``call`` gets each parameter whose gradient was reduced, with what this rank keeps of it.

        None where that is padding alone. On CUDA it is called on DeepSpeed's stream of reductions.
        """
        optimizer = self._optimizer
        partition_grads = optimizer.partition_grads

        def and_tell(parameters: Sequence[torch.Tensor], partitions: Sequence[torch.Tensor]) -> Any:
            told, kept = list(parameters), partition_grads(parameters, partitions)
            left = iter(kept)
            for parameter in told:
                rank = optimizer._get_param_partition_rank(parameter)
                is_padding = parameter.partition_numel() * rank >= parameter.ds_numel  # type: ignore[attr-defined]
                call(parameter, None if is_padding else next(left))
            return kept

        optimizer.partition_grads = and_tell

    def gradients(self) -> list[torch.Tensor]:
        """Reduced gradients of this rank's partitions, each in as many pieces as DeepSpeed has it in."""
        if self._stage < 3:
            self._optimizer._wait_for_offload_copies()
        if self.offloaded:
            return [master.grad for master in self.masters if master.grad is not None]
        return [piece for index in range(len(self.masters)) for piece in self._optimizer.averaged_gradients.get(index) or ()]

    def drop_gradients(self) -> None:
        """Forget the gradients of all micro-batches; DeepSpeed's ``zero_grad`` leaves what ZeRO 1 and 2 have reduced already."""
        optimizer = self._optimizer
        optimizer.zero_grad()
        if self._stage == 3:
            return
        for reduced in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            for index in reduced:
                reduced[index] = None
        if self.offloaded:
            optimizer.reset_cpu_buffers()
        optimizer.micro_step_id = -1  # what is accumulated in host memory is overwritten by the next micro-batch

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """While inside, a step of DeepSpeed's takes the gradient for an overflow: it cleans up and leaves the weights."""
        optimizer = self._optimizer

        def overflow(*_: Any, **__: Any) -> None:
            optimizer.overflow = True

        replaced = "_overflow_check_and_loss_scale_update" if self._stage == 3 else "check_overflow"
        checks = getattr(optimizer, "check_grad_overflow", None)
        setattr(optimizer, replaced, overflow)
        optimizer.check_grad_overflow = True
        try:
            yield
        finally:
            delattr(optimizer, replaced)
            optimizer.check_grad_overflow = checks

    def spread_masters(self) -> None:
        """The float32 weights were changed from outside: bring the model's up to date. Collective inside the group."""
        optimizer = self._optimizer
        if self._stage < 3:
            optimizer.update_lp_params()
            return
        for index in range(len(self.masters)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        self.gather_persistent()

    def gather_persistent(self) -> None:
        """ZeRO 3 keeps small parameters whole beside their partitions: make them from these anew. Collective inside the group."""
        persistent = self._optimizer.persistent_parameters
        for parameter in persistent:
            parameter.partition()
        if persistent:
            persistent[0].all_gather(persistent)

    def basic_groups(self) -> list[tuple[dict[str, Any], torch.Tensor]]:
        """Every parameter group of torch's optimizer with its partition."""
        groups = self._engine.basic_optimizer.param_groups
        indices = self._optimizer.sub_group_to_group_id if self._stage == 3 else range(len(groups))
        return [(groups[indices[index]], master) for index, master in enumerate(self.masters)]


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
    pointer = directory / "latest"
    if not pointer.is_file():  # reading a FIFO would hang
        return None
    try:
        tag = pointer.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{directory / 'latest'}: is no text, but must name the checkpoint to read ({error.reason})") from None
    try:
        return check_tag(tag)
    except CheckpointError as error:
        raise CheckpointError(f"{pointer}: {error}") from None


def weights_of_zero_checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    """Float32 weights and buffers of a dense model by name, by DeepSpeed's own ``zero_to_fp32``, which prints to nowhere.

    Raises :class:`CheckpointError` for a checkpoint that is damaged, or holds anything but tensors and DeepSpeed's own records.
    """
    for file in (directory / (_latest(directory) or "")).glob("*"):
        if not (file.is_file() or file.is_dir()):  # opening a FIFO would hang
            raise CheckpointError(f"{file}: is not a regular file; remove it, or take another checkpoint")
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


def local_part(parameter: nn.Parameter) -> torch.Tensor:
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


def set_gradient_norm(engine: Any, norm: float) -> None:
    """What the engine's ``get_global_grad_norm()`` says from now on."""
    engine._global_grad_norm = norm
