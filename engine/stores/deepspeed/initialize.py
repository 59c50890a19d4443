"""Cuts the full model to this rank's part and builds DeepSpeed's engine over the part."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...accounting.clock import clock
from ...batch.size import BatchSize
from ...config.schema import Config
from ...distributed.mesh import Coordinates
from ...distributed.traffic import Traffic
from ...environment.detect import alone_if_unlaunched
from ...environment.waits import announced, compiler_locks
from ...errors import ConfigError, shorten
from ...optim.optimizers import make_optimizer
from ...optim.schedules import build_scheduler
from ...placement.layout import Layout
from ...placement.tensor_info import Shard
from ...subnetwork.activations import checkpoint_activations
from ...subnetwork.carve import PassThrough
from ...subnetwork.dormant import make_pass_throughs
from ...subnetwork.given_model import refuse_shapes
from ...subnetwork.initialisation import ModuleInit
from ...subnetwork.materialise import cut, give_values, take_values_of_rank_0
from .backend import DeepSpeedBackend
from .checks import check_partitions, refuse_small_sub_groups
from .optimizer import unstepped
from .partitions import Bundle, bundles_of
from .private import check_engine, let_groups_differ, load, require_float16, separate_process_groups, set_verbosity
from .process_groups import ProcessGroups

log = logging.getLogger("sdp")


@dataclass
class _Handover:
    """The settings, optimizer and schedule for DeepSpeed.

    Attributes:
        settings: DeepSpeed's configuration.
        optimizer: The optimizer, a function that makes one, or None.
        scheduler: The schedule, a function that makes one, or None.
        note: A line that says which optimizer is used.
        building: The context in which DeepSpeed builds its engine.
    """

    settings: dict[str, Any]
    optimizer: Any
    scheduler: Any
    note: str = "optimizer: DeepSpeed's, as the configuration or the script says"
    building: AbstractContextManager[None] = field(default_factory=nullcontext)


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
    *,
    grouped: bool,
) -> tuple[DeepSpeedBackend, Optimizer, Any, str]:
    """Cut ``model`` for this rank's group and hand it to DeepSpeed. Collective.

    Args:
        model: The full model. It is cut in place.
        config: The configuration.
        layout: Which rank has which part of the model.
        batch: Samples per micro-batch and step.
        device: This rank's device.
        plan: How parameters get their first values. None: rank 0's values are used.
        param_groups: The user's parameter groups, with canonical names as ``params``.
        optimizer: The user's optimizer, a function that makes one, or None.
        lr_scheduler: The user's schedule, a function that makes one, or None.
        grouped: Whether the user gave parameter groups.

    Returns:
        The backend, DeepSpeed's optimizer, its schedule, and a line about the optimizer.
    """
    refuse_shapes(layout)
    package = _prepare_package(config)
    at = layout.mesh.coordinates(dist.get_rank())
    stand_ins, pass_throughs = _cut_and_fill(model, config, layout, device, plan, at)
    bundles = bundles_of(layout, param_groups)
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.data = parameter.data.contiguous()  # DeepSpeed broadcasts nothing else
    held = [bundle for bundle in bundles if at.sdp in bundle.holders]
    handover = _Handover(_settings(config, batch), optimizer, lr_scheduler)
    if layout.mesh.sdp > 1 or (optimizer is None and config.optimizer is None):
        _take_optimizer_over(handover, config, layout, param_groups, held, parameters, device)
    process_groups = ProcessGroups(
        layout, bundles, config.zero_optimization.stage, local_steps=config.sdp.sync is not None
    )
    _keep_units_whole(handover.settings, config, bundles, layout)
    unbuilt = not isinstance(handover.optimizer, Optimizer)
    model_parameters = _as_given(param_groups, parameters, grouped=grouped) if unbuilt else None
    engine, scheduler = _build(package, model, handover, model_parameters, process_groups)
    check_engine(package, engine, config.zero_optimization.stage, config.precision)
    _accumulate_in_float32(parameters, config)
    backend = DeepSpeedBackend(
        engine,
        layout,
        bundles,
        process_groups,
        stand_ins,
        device,
        stage=config.zero_optimization.stage,
        compute_dtype=getattr(torch, config.precision),
        traffic=Traffic(),
        maskings=config.sdp.maskings,
        pass_throughs=pass_throughs,
        sync=config.sdp.sync,
    )
    backend.clock = clock(device, waits=config.wall_clock_breakdown)
    check_partitions(backend, parameters)
    return backend, engine.optimizer, scheduler, handover.note


def _prepare_package(config: Config) -> Any:
    """Import DeepSpeed and set it up for the configuration."""
    package = load()
    if config.fp16.enabled:
        require_float16()
    set_verbosity(config.deepspeed)
    return package


def _cut_and_fill(
    model: nn.Module,
    config: Config,
    layout: Layout,
    device: torch.device,
    plan: Sequence[ModuleInit] | None,
    at: Coordinates,
) -> tuple[dict[str, PassThrough], dict[str, PassThrough]]:
    """Cut ``model`` in place to the parts that this group holds, and give it values.

    Returns:
        The stand-ins of skipped blocks, by block, and those of the forward phases of a schedule.
    """
    if plan is None:
        take_values_of_rank_0(model, device)
    stand_ins = cut(model, config, layout, at.sdp, getattr(torch, config.precision))
    pass_throughs = make_pass_throughs(model, layout, at.sdp) if len(config.sdp.maskings) > 1 else {}
    run = [name for name in layout.blocks if name not in stand_ins]
    checkpoint_activations(model, run, config.activation_checkpointing.mode)
    give_values(model, layout, plan, device, Shard(), {info.name for info in layout.frozen(at.sdp)})
    return stand_ins, pass_throughs


def _settings(config: Config, batch: BatchSize) -> dict[str, Any]:
    # DeepSpeed refuses "fp32" at stage 0, and at stage 1 it keeps no partitions then; there
    # autograd adds up in float32 (_accumulate_in_float32).
    adds_up_itself = config.precision != "float32" and config.zero_optimization.stage >= 2
    return {key: value for key, value in config.deepspeed.items() if key != "data_types"} | {
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
        "zero_allow_untested_optimizer": True,  # any optimizer can step on partitions, as with several groups
        **({"data_types": {"grad_accum_dtype": "fp32"}} if adds_up_itself else {}),
    }


def _accumulate_in_float32(parameters: Mapping[str, nn.Parameter], config: Config) -> None:
    """Let autograd add up the gradients of micro-batches in float32 at stages 0 and 1."""
    if config.zero_optimization.stage < 2:
        for parameter in parameters.values():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.grad_dtype = torch.float32


def _take_optimizer_over(
    handover: _Handover,
    config: Config,
    layout: Layout,
    param_groups: Sequence[Mapping[str, Any]],
    held: Sequence[Bundle],
    parameters: Mapping[str, nn.Parameter],
    device: torch.device,
) -> None:
    """Build the optimizer here, so that DeepSpeed partitions each unit separately.

    It has one parameter group per bundle.
    """
    several = layout.mesh.sdp > 1
    ours = [
        {**_options(param_groups[bundle.options]), "params": [parameters[name] for name in bundle.names]}
        for bundle in held
    ]
    arrangement = ", a parameter group for each unit" if several else ""
    handover.optimizer, handover.note = make_optimizer(
        config.optimizer, handover.optimizer, ours, device, grouped=True, arrangement=arrangement
    )
    if several:
        options = [bundle.options for bundle in held]
        handover.scheduler = _scheduler(config, handover.scheduler, handover.optimizer, options)
        _hand_over(handover.settings, config)
        handover.building = unstepped(handover.optimizer)


def _keep_units_whole(settings: dict[str, Any], config: Config, bundles: Sequence[Bundle], layout: Layout) -> None:
    """At stage 3, keep DeepSpeed from cutting a large unit into several sub-groups.

    Also switch off DeepSpeed's comparison with rank 0, which may be in another SDP group.
    """
    refuse_small_sub_groups(config, bundles, layout)
    if config.zero_optimization.stage < 3:
        return
    settings["zero_optimization"] = {"sub_group_size": 10**12, **settings.get("zero_optimization", {})}
    # In a world of one rank, the comparison is useless too, and it asks for a launcher's variables.
    if layout.mesh.sdp > 1 or dist.get_world_size() == 1:
        let_groups_differ()


def _build(
    package: Any, model: nn.Module, handover: _Handover, model_parameters: Any, process_groups: ProcessGroups
) -> tuple[Any, Any]:
    """Build DeepSpeed's engine and its schedule."""
    try:
        # DeepSpeed asks for a launcher's variables.
        with alone_if_unlaunched(), separate_process_groups(), handover.building, announced(compiler_locks):
            engine, _, _, scheduler = package.initialize(
                model=model,
                optimizer=handover.optimizer,
                model_parameters=model_parameters,
                lr_scheduler=handover.scheduler,
                mpu=process_groups.mpu,
                config=handover.settings,
            )
    except (AssertionError, ValueError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(
            f'sdp.engine "deepspeed": DeepSpeed refuses its configuration ({reason}); change what it names'
        ) from error
    return engine, scheduler


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _as_given(
    param_groups: Sequence[Mapping[str, Any]], parameters: Mapping[str, nn.Parameter], *, grouped: bool
) -> list[Any]:
    """Return the parameters in the form in which the user gave ``model_parameters``."""
    lists = [[parameters[name] for name in group["params"] if parameters[name].requires_grad] for group in param_groups]
    return (
        [{**_options(group), "params": members} for group, members in zip(param_groups, lists, strict=True)]
        if grouped
        else lists[0]
    )


def _scheduler(config: Config, given: Any, optimizer: Optimizer, options: Sequence[int]) -> Any:
    if given is not None:
        if isinstance(given, type) or not hasattr(given, "step"):
            try:
                return given(optimizer)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"lr_scheduler: {shorten(error)}; DeepSpeed has {len(optimizer.param_groups)} parameter groups, "
                    'one for each unit: give one rule for all of them, or use sdp.engine "fsdp2"'
                ) from error
        if len(getattr(given, "base_lrs", optimizer.param_groups)) != len(optimizer.param_groups):
            raise ConfigError(
                f"lr_scheduler: the {type(given).__name__} given has rates for {len(given.base_lrs)} parameter "
                f"groups, and DeepSpeed has {len(optimizer.param_groups)}, one for each unit; pass a function that "
                "makes it from the optimizer"
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


def _hand_over(settings: dict[str, Any], config: Config) -> None:
    """Remove the settings from DeepSpeed's configuration that SDP applies between groups."""
    settings.pop("optimizer", None)
    settings.pop("scheduler", None)
    settings |= {"gradient_clipping": 0.0, "zero_force_ds_cpu_optimizer": False}
    zero = settings["zero_optimization"] = dict(settings.get("zero_optimization", {}))
    offloads = (zero.get("offload_optimizer") or {}).get("device") == "cpu"
    if config.zero_optimization.stage in (1, 2) and not offloads:
        zero["compute_grad_norm"] = False  # DeepSpeed's norm would be that of the group alone
