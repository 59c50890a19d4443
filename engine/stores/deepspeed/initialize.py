"""Cuts the full model to this rank's part, and builds DeepSpeed's engine for the part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...batch.size import BatchSize
from ...config.schema import Config
from ...distributed.process_groups import new_group
from ...environment.detect import alone_if_unlaunched
from ...environment.process import announced, compiler_locks
from ...errors import ConfigError, shorten
from ...optim.optimizers import make_optimizer
from ...optim.schedules import build_scheduler
from ...placement.layout import Layout
from ...placement.tensor_info import Shard
from ...subnetwork.copies import copy_cheaply
from ...subnetwork.execution import checkpoint_activations
from ...subnetwork.given_model import refuse_shapes
from ...subnetwork.initialisation import ModuleInit
from ...subnetwork.materialise import give_values, replace_blocks, take_values_of_rank_0
from ...subnetwork.neurons import slice_layers
from ..store import make_communicators, parameters_of
from .partitions import bundles_of
from .private import let_groups_differ, load, separate_process_groups, set_verbosity
from .store import DeepSpeedStore

# Sections that are not passed to DeepSpeed: SDP builds optimizer and schedule, and writes monitors.
_APPLIED_HERE = ("optimizer", "scheduler", "data_types", "tensorboard", "wandb")


def initialize_deepspeed(
    model: nn.Module,
    config: Config,
    layout: Layout,
    batch: BatchSize,
    device: torch.device,
    plan: Sequence[ModuleInit] | None,
    param_groups: Sequence[Mapping[str, Any]],
    optimizer: Any,
    lr_scheduler: Any,
) -> tuple[DeepSpeedStore, Optimizer, Any, str]:
    """Cut ``model`` for this rank's group and hand it to DeepSpeed. Collective.

    Args:
        model: The full model. It is cut in place.
        layout: Which rank has which part of the model.
        batch: The batch sizes of the run.
        plan: How parameters get their initial values. If None, all ranks get rank 0's values.
        param_groups: The user's parameter groups, with canonical names as ``params``.
        optimizer: The user's optimizer, a function that makes an optimizer, or None.
        lr_scheduler: The user's schedule, a function that makes a schedule, or None.

    Returns:
        The store, the optimizer, the schedule, and a line for the log about the optimizer.
    """
    refuse_shapes(layout)
    package = load()
    set_verbosity(config.deepspeed)
    at = layout.mesh.coordinates(dist.get_rank())
    _cut_and_fill(model, config, layout, device, plan, at.sdp)
    bundles, parameters = bundles_of(layout, param_groups), parameters_of(model, layout, at.sdp)
    for parameter in parameters.values():
        parameter.data = parameter.data.contiguous()  # DeepSpeed broadcasts nothing else
    held = [bundle for bundle in bundles if at.sdp in bundle.holders]
    ours = [
        {**_options(param_groups[bundle.options]), "params": [parameters[name] for name in bundle.names]}
        for bundle in held
    ]
    arrangement = ", a parameter group for each unit" if layout.mesh.sdp > 1 else ""
    steps_on = torch.device("cpu") if config.zero_optimization.offloads else device
    built, note = make_optimizer(config.optimizer, optimizer, ours, steps_on, grouped=True, arrangement=arrangement)
    scheduler = _scheduler(config, lr_scheduler, built, [bundle.options for bundle in held])
    communicators = make_communicators(layout, config)
    engine = _build(package, model, built, _settings(config, batch, layout), communicators.fsdp)
    if config.zero_optimization.stage == 1:
        _accumulate_in_float32(model)
    store = DeepSpeedStore(engine, built, layout, bundles, config, device, communicators)
    return store, built, scheduler, note


def _cut_and_fill(
    model: nn.Module,
    config: Config,
    layout: Layout,
    device: torch.device,
    plan: Sequence[ModuleInit] | None,
    group: int,
) -> None:
    """Cut ``model`` in place to the parts that ``group`` holds, and give it values."""
    if plan is None:
        take_values_of_rank_0(model, device)
    compute_dtype = getattr(torch, config.precision)
    slice_layers(model, layout, group, compute_dtype)
    replaced = replace_blocks(model, config, layout, group, compute_dtype)
    run = [name for name in layout.blocks if name not in replaced]
    checkpoint_activations(model, run, config.activation_checkpointing.mode)
    copy_cheaply(model, layout, group, config.sdp.copies, compute_dtype)
    give_values(model, layout, plan, device, Shard(), {info.name for info in layout.frozen(group)})


def _settings(config: Config, batch: BatchSize, layout: Layout) -> dict[str, Any]:
    """Return DeepSpeed's configuration, without what SDP applies between groups."""
    given, stage = config.deepspeed, config.zero_optimization.stage
    zero = {**given.get("zero_optimization", {}), "sub_group_size": 10**12}  # a unit is never cut into sub-groups
    if stage < 3 and not config.zero_optimization.offloads:
        zero["compute_grad_norm"] = False  # DeepSpeed's norm would be that of the group alone
    if stage == 3 and layout.refreshes:
        zero["stage3_param_persistence_threshold"] = 0  # if frozen copies stayed gathered, they would not be refreshed
    if stage == 3:
        let_groups_differ()
    settings = {key: value for key, value in given.items() if key not in _APPLIED_HERE} | {
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,  # any optimizer that steps on single elements can step on partitions
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    if config.fp16.enabled:
        settings["fp16"] = {**settings["fp16"], "loss_scale": 1.0}  # the engine scales, for all groups
    if config.precision != "float32" and stage >= 2:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def _build(
    package: Any, model: nn.Module, optimizer: Optimizer, settings: dict[str, Any], data: dist.ProcessGroup | None
) -> Any:
    """Build DeepSpeed's engine over the ranks ``data``, or for this rank alone if it is None."""
    alone: Any = new_group([dist.get_rank()], use_local_synchronization=True)
    try:
        # DeepSpeed asks for a launcher's variables.
        with alone_if_unlaunched(), separate_process_groups(), announced(compiler_locks):
            return package.initialize(
                model=model, optimizer=optimizer, mpu=_GroupAsWorld(data or alone, alone), config=settings
            )[0]
    except (AssertionError, ValueError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(
            f'sdp.engine "deepspeed": DeepSpeed refuses its configuration ({reason}); change the setting that it names'
        ) from error


class _GroupAsWorld:
    """The ``mpu`` object for DeepSpeed.

    Data parallelism covers one SDP group. Model parallelism covers this rank only, so that sums
    over it change nothing.
    """

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


def _accumulate_in_float32(model: nn.Module) -> None:
    """Let autograd add up the gradients of micro-batches in float32, where DeepSpeed does not."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.grad_dtype = torch.float32


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _scheduler(config: Config, given: Any, optimizer: Optimizer, options: Sequence[int]) -> Any:
    if given is not None:
        if isinstance(given, type) or not hasattr(given, "step"):
            try:
                return given(optimizer)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"lr_scheduler: {shorten(error)}; DeepSpeed has {len(optimizer.param_groups)} parameter groups, "
                    'one for each unit; give one rule for all groups, or use sdp.engine "fsdp2"'
                ) from error
        if len(getattr(given, "base_lrs", optimizer.param_groups)) != len(optimizer.param_groups):
            raise ConfigError(
                f"lr_scheduler: the {type(given).__name__} given has rates for {len(given.base_lrs)} parameter "
                f"groups, and DeepSpeed has {len(optimizer.param_groups)}, one for each unit; pass a function that "
                "makes the schedule from the optimizer"
            )
        return given
    if config.scheduler is None:
        return None
    # A list of rates has one rate for each of the user's parameter groups.
    params = {
        key: [value[index] for index in options] if isinstance(value, list) and len(value) > max(options) else value
        for key, value in config.scheduler.params.items()
    }
    return build_scheduler(config.scheduler.type, params, optimizer)
