"""From the full model to DeepSpeed's engine over this rank's part of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...accounting.clock import clock
from ...batch.size import BatchSize
from ...config.schema import Config
from ...distributed.traffic import Traffic
from ...environment.detect import alone_if_unlaunched
from ...errors import ConfigError, ModelError
from ...optim.optimizers import make_optimizer
from ...optim.schedules import build_scheduler
from ...placement.layout import Layout
from ...placement.tensor_info import Shard
from ...subnetwork.activations import checkpoint_activations
from ...subnetwork.initialisation import ModuleInit
from ...subnetwork.materialise import cut, give_values, take_values_of_rank_0
from .backend import DeepSpeedBackend
from .groups import GroupsOfRanks
from .optimizer import unstepped
from .partitions import Bundle, partition_numel
from .private import check_engine, forget_process_groups, let_groups_differ, load, require_float16, set_verbosity

log = logging.getLogger("sdp")


def initialize_deepspeed(
    model: nn.Module,
    config: Config,
    layout: Layout,
    batch: BatchSize,
    device: torch.device,
    plan: Sequence[ModuleInit] | None,
    groups: Sequence[Mapping[str, Any]],
    optimizer: Any,
    lr_scheduler: Any,
    *,
    grouped: bool,
) -> tuple[DeepSpeedBackend, Optimizer, Any, str]:
    """Cut ``model`` for this rank's group and hand it to DeepSpeed.

    Returns the backend, the optimizer, the schedule, and a line about the optimizer.

    ``groups``: the user's parameter groups by canonical names. With one group all is DeepSpeed's as the file and the arguments say.
    """
    package = load()
    if config.fp16.enabled:
        require_float16()
    forget_process_groups()
    set_verbosity(config.deepspeed)
    installed, stage = layout.mesh.sdp > 1, config.zero_optimization.stage
    compute_dtype = getattr(torch, config.precision)
    if plan is None:
        take_values_of_rank_0(model, device)
    at = layout.mesh.coordinates(dist.get_rank())
    stand_ins = cut(model, config, layout, at.sdp, compute_dtype)
    checkpoint_activations(
        model, [name for name in layout.blocks if name not in stand_ins], config.activation_checkpointing.mode
    )
    give_values(model, layout, plan, device, Shard(), {info.name for info in layout.frozen(at.sdp)})

    bundles = bundles_of(layout, groups)
    parameters = dict(model.named_parameters())
    held = [bundle for bundle in bundles if at.sdp in bundle.holders]
    settings = config.deepspeed | {
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
        "zero_allow_untested_optimizer": True,  # as with several groups: any optimizer steps on partitions
    }
    note = "optimizer: DeepSpeed's, as the configuration or the script says"
    scheduler: Any = lr_scheduler
    given: Any = optimizer
    building: AbstractContextManager[None] = nullcontext()
    if installed or (optimizer is None and config.optimizer is None):
        ours = [
            {**_options(groups[bundle.options]), "params": [parameters[name] for name in bundle.names]} for bundle in held
        ]  # fmt: skip
        arrangement = ", a parameter group for each unit" if installed else ""
        given, note = make_optimizer(config.optimizer, optimizer, ours, device, grouped=True, arrangement=arrangement)
        if layout.mesh.sizes and stage:
            note = _rounding_alike(given, note)
        if installed:
            scheduler = _scheduler(config, lr_scheduler, given, [bundle.options for bundle in held])
            _hand_over(settings, config)
            building = unstepped(given)
    process_groups = GroupsOfRanks(layout, bundles, stage)
    if stage == 3:
        # DeepSpeed's default cuts a large unit into several groups.
        settings["zero_optimization"] = {"sub_group_size": 10**12, **settings.get("zero_optimization", {})}
    _refuse_small_sub_groups(config, bundles, layout)
    if stage == 3 and (
        installed or dist.get_world_size() == 1
    ):  # which asks for a launcher's variables, to compare a rank with itself
        let_groups_differ()
    unbuilt = given is None or not isinstance(given, Optimizer)
    try:
        with alone_if_unlaunched(), building:  # DeepSpeed asks for a launcher's variables
            _, _, _, scheduler = made = package.initialize(
                model=model,
                optimizer=given,
                model_parameters=_as_given(groups, parameters, grouped=grouped) if unbuilt else None,
                lr_scheduler=scheduler,
                mpu=process_groups.mpu,
                config=settings,
            )
    except (AssertionError, ValueError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(
            f'sdp.engine "deepspeed": DeepSpeed refuses its configuration ({reason}); change what it names'
        ) from error
    engine = made[0]
    check_engine(package, engine, stage, config.precision)
    backend = DeepSpeedBackend(
        engine,
        layout,
        bundles,
        process_groups,
        stand_ins,
        device,
        stage=stage,
        compute_dtype=compute_dtype,
        traffic=Traffic(),
    )
    backend.clock = clock(device, waits=config.wall_clock_breakdown)
    _check_partitions(backend, parameters)
    return backend, engine.optimizer, scheduler, note


def bundles_of(layout: Layout, groups: Sequence[Mapping[str, Any]]) -> list[Bundle]:
    """What DeepSpeed partitions together, in one order on all ranks: the user's groups by unit; as they are with one SDP group."""
    collected: dict[tuple[str, int], list[str]] = {}
    for options, group in enumerate(groups):
        for canonical in group["params"]:
            for info in layout.wholes[canonical]:
                if info.trainable:
                    unit = info.unit if layout.mesh.sdp > 1 else ""
                    collected.setdefault((unit, options), []).append(info.name)
    infos = layout.parameters
    bundles = [
        Bundle(
            infos[names[0]].unit,
            options,
            infos[names[0]].holders,
            tuple(names),
            tuple(infos[name].numel for name in names),
        )
        for (_, options), names in collected.items()
    ]
    order = {info.unit: index for index, info in reversed(list(enumerate(infos.values())))}
    return sorted(bundles, key=lambda bundle: order[bundle.unit]) if layout.mesh.sdp > 1 else bundles


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _as_given(
    groups: Sequence[Mapping[str, Any]], parameters: Mapping[str, nn.Parameter], *, grouped: bool
) -> list[Any]:
    """What the user's ``model_parameters`` were."""
    lists = [[parameters[name] for name in group["params"] if parameters[name].requires_grad] for group in groups]
    return (
        [{**_options(group), "params": members} for group, members in zip(groups, lists, strict=True)]
        if grouped
        else lists[0]
    )


def _rounding_alike(optimizer: Optimizer, note: str) -> str:
    """Take ``optimizer`` off torch's fused kernels, and say so.

    On a CPU they round the last elements of a tensor in another way than the rest, and groups of unequal size cut a unit at unequal
    places: holders would drift.
    """
    fused = [group for group in optimizer.param_groups if group.get("fused")]
    for group in fused:
        group.update(fused=False, foreach=True)
    return f"{note}; foreach instead of fused, whose rounding depends on where a shard is cut" if fused else note


def _scheduler(config: Config, given: Any, optimizer: Optimizer, options: Sequence[int]) -> Any:
    if given is not None:
        if not hasattr(given, "step"):
            return given(optimizer)
        if len(getattr(given, "base_lrs", optimizer.param_groups)) != len(optimizer.param_groups):
            raise ConfigError(
                f"lr_scheduler: the {type(given).__name__} given has rates for {len(given.base_lrs)} parameter groups, and "
                f"DeepSpeed has {len(optimizer.param_groups)}, one for each unit; pass a function that makes it from the optimizer"
            )
        return given
    if config.scheduler is None:
        return None
    # A list of rates has one for each group of the user's.
    params = {
        key: [value[index] for index in options] if isinstance(value, list) and len(value) > max(options) else value
        for key, value in config.scheduler.params.items()
    }
    return build_scheduler(config.scheduler.type, params, optimizer)


def _hand_over(settings: dict[str, Any], config: Config) -> None:
    """Take out of DeepSpeed's file what is done between groups."""
    settings.pop("optimizer", None)
    settings.pop("scheduler", None)
    settings |= {"gradient_clipping": 0.0, "zero_force_ds_cpu_optimizer": False}
    zero = settings["zero_optimization"] = dict(settings.get("zero_optimization", {}))
    offloads = (zero.get("offload_optimizer") or {}).get("device") == "cpu"
    if config.zero_optimization.stage in (1, 2) and not offloads:
        zero["compute_grad_norm"] = False  # it would be the group's own


def _refuse_small_sub_groups(config: Config, bundles: Sequence[Bundle], layout: Layout) -> None:
    limit = config.deepspeed.get("zero_optimization", {}).get("sub_group_size")
    if config.zero_optimization.stage < 3 or limit is None:
        return
    for bundle in bundles:
        numel = max(partition_numel(bundle, 3, len(layout.mesh.ranks_of(group))) for group in bundle.holders)
        if numel > limit:
            raise ConfigError(
                f"zero_optimization.sub_group_size: {limit} is less than the {numel} elements that a rank steps at once"
                + (f" of {bundle.unit!r}" if layout.mesh.sdp > 1 else "")
                + ": DeepSpeed would cut them into parts, which no other group, and no checkpoint, knows; raise it, or remove it"
            )


def _check_partitions(backend: DeepSpeedBackend, parameters: Mapping[str, nn.Parameter]) -> None:
    """DeepSpeed has cut what we think it has: the same parameters in the same order, partitions of the same sizes."""
    if backend.zero is None:
        _check_copies(backend)
        return
    members = [[id(p) for p in group] for group in backend.zero.members]
    expected = [[id(parameters[name]) for name in bundle.names] for bundle in backend.bundles]
    sizes = [partition_numel(bundle, backend.stage, backend.ranks_inside) for bundle in backend.bundles]
    if members != expected or [master.numel() for master in backend.zero.masters] != sizes:
        raise ModelError(
            "DeepSpeed has partitioned the parameters in another way than is known of it, so that shards of holders would not align; "
            'remove settings of zero_optimization that change partitions, or use sdp.engine "fsdp2"'
        )


def _check_copies(backend: DeepSpeedBackend) -> None:
    """At stage 0 in half precision DeepSpeed has a float32 copy of every parameter that is trained, and of no other."""
    if backend.copies is not None and set(backend.copies.masters) != {
        name for bundle in backend.bundles for name in bundle.names
    }:
        raise ModelError(
            "DeepSpeed has float32 copies of other parameters than are trained; use zero_optimization.stage 1"
        )
