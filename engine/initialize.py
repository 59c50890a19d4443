"""``sdp.initialize``: the same arguments and the same four-tuple as ``deepspeed.initialize``."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from .batch.size import BatchSize
from .config.deepspeed_keys import HINT_SECTIONS, IGNORED_BY_DEEPSPEED
from .config.load import load_config
from .config.schema import Config, SDPSection
from .construct import build_store, values_to_give
from .distributed.agreement import check_equal
from .distributed.heartbeat import CallWatch, watch_calls
from .distributed.join import join
from .distributed.mesh import Mesh, mesh_of
from .engine import SDPEngine
from .environment.detect import detect, set_default
from .environment.process import watch
from .errors import ConfigError, ModelError
from .full_model.whole_copy import UncutModel
from .model_interface import get_random_options
from .optim.muon import arrange as arrange_muon
from .optim.optimizers import check_optimizer, make_optimizer, with_torch_kernels
from .optim.param_groups import freeze_others, groups_here, named_groups, without_decay
from .optim.schedules import check_steps, scheduler_of
from .optim.script_optimizers import needs_whole_matrices
from .placement.layout import Layout
from .placement.policies import warnings_of
from .stores.store import GroupStore
from .subnetwork.given_model import check_given_model, compiled_in_place
from .subnetwork.initialisation import seed_of
from .subnetwork.materialise import make_float32
from .sync.between import check_placement


def clock(device: torch.device, *, waits: bool) -> Callable[[], float]:
    """Return a function like ``time.perf_counter``, which returns the time in seconds.

    On CUDA, if ``waits`` is true, the function first waits until the device has done the work in
    the current stream. Only then do differences of times measure this work.
    """
    if device.type != "cuda" or not waits:
        return time.perf_counter

    def seconds() -> float:
        torch.cuda.current_stream(device).synchronize()
        return time.perf_counter()

    return seconds


if TYPE_CHECKING:
    from .batch.loader import EpochLoader

log = logging.getLogger("sdp")


def announce(engine: SDPEngine, optimizer_note: str) -> None:
    """Log what a run will do (layout, placement, batch, optimizer), and settings without effect."""
    config, layout = engine.config, engine.layout
    log.info("layout: %s processes, ZeRO stage %d", layout.mesh, config.zero_optimization.stage)
    if config.replaces_deepspeed:
        log.info('sdp.engine: "fsdp2" runs in place of "deepspeed", which has nothing to shard at stage 0')
    _warn_of_settings_without_effect(config, layout)
    _announce_placement(config, layout)
    _announce_sharing(engine)
    _warn_of_a_full_placement(config.sdp, layout)
    log.info(
        "batch: %d samples per step = micro-batch %d × accumulation %d × %d data ranks",
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
        layout.mesh.data_ranks,
    )
    if config.training.init_from is not None:
        log.info("weights: training starts from the files in %s", config.training.init_from)
    log.info("%s", optimizer_note)
    if config.autos:
        log.info('"auto" means the default of each key here: %s', ", ".join(config.autos))
    announce_hints(config)


def announce_hints(config: Config) -> None:
    """Log which keys of DeepSpeed's configuration SDP accepts without effect, and why."""
    plain = [path for path in config.hints if path not in HINT_SECTIONS and path not in IGNORED_BY_DEEPSPEED]
    if plain:
        log.info("accepted without effect (performance hints for DeepSpeed): %s", ", ".join(plain))
    for path in config.hints:
        if path in HINT_SECTIONS:
            log.info("%s has no effect: %s", path, HINT_SECTIONS[path])
        elif path in IGNORED_BY_DEEPSPEED:
            log.warning("%s has no effect: %s", path, IGNORED_BY_DEEPSPEED[path])


def _warn_of_settings_without_effect(config: Config, layout: Layout) -> None:
    sdp = config.sdp
    if isinstance(sdp.placement, dict) and sdp.model_fields_set & {"capacity", "profile"}:
        log.warning("sdp.capacity and sdp.profile have no effect with an explicit sdp.placement; remove them")
    if sdp.seed and sdp.placement != "random":
        log.warning('sdp.seed %d has no effect without sdp.placement "random"; training.seed seeds the run', sdp.seed)
    if sdp.granularity == "block" and sdp.neuron_groups != SDPSection.model_fields["neuron_groups"].default:
        log.warning('sdp.neuron_groups %d has no effect with sdp.granularity "block"', sdp.neuron_groups)
    counts = {len(holders) for holders in layout.placement.holders}
    if sdp.lr_scale not in ("none", 0) and len(counts) == 1:
        log.warning("sdp.lr_scale %s has no effect: every unit has %d holders", sdp.lr_scale, *counts)
    if layout.mesh.sdp == 1 and "groups" not in sdp.model_fields_set:
        log.warning("sdp.groups is not given: one group, which trains the whole model on all of its ranks")


def _announce_placement(config: Config, layout: Layout) -> None:
    if config.sdp.paths is not None:
        count = sum(bool(unit.prefix) for unit in layout.units) // layout.paths
        log.info("paths: %d; each path owns %d of the %d blocks; group g trains path g mod %d",
                 layout.paths, count, len(layout.blocks), layout.paths)  # fmt: skip
    if layout.units:
        log.info("placement: %s", layout.placement.describe())
        for warning in warnings_of(config.sdp, layout.placement) + layout.warnings() if layout.mesh.sdp > 1 else []:
            log.warning("placement: %s", warning)


def _announce_sharing(engine: SDPEngine) -> None:
    """Print which messages groups exchange in addition to gradients, or instead of gradients."""
    config, layout = engine.config, engine.layout
    if config.masking_schedule.ends:
        log.info("masking: %s", config.masking_schedule)
    if layout.refreshes:
        ways = {(refresh.source, refresh.members) for refresh in layout.refreshes}
        most = max(sum(group in members for _, members in ways) for group in layout.everyone)
        when = "each step" if config.sdp.copies.refresh_every == 1 else f"every {config.sdp.copies.refresh_every} steps"
        log.info("masking: a group runs frozen copies of units that it does not hold; holders refresh the copies after "
            "%s (at most %d more communicators per rank)", when, most)  # fmt: skip
    if (scale := engine.rate_scale) is not None:
        log.info(
            "rates: sdp.lr_scale %s multiplies the learning rates of units by %s", config.sdp.lr_scale, scale.describe()
        )
    if config.sdp.sync is not None:
        log.info("sync: %s", engine.local_training.describe())
        if layout.mesh.sdp == 1:
            log.warning("sdp.sync: there is one group, so nothing is exchanged; the outer optimizer still steps")


def _warn_of_a_full_placement(sdp: SDPSection, layout: Layout) -> None:
    if any(len(holders) < layout.mesh.sdp for holders in layout.placement.holders):
        return
    if layout.branch_scale != "none":
        log.warning('sdp.branch_scale "%s" has no effect: every group holds every unit', layout.branch_scale)
    elif layout.masking == "backward" or len(sdp.maskings) > 1:
        what = 'sdp.masking "backward"' if isinstance(sdp.masking, str) else "the schedule in sdp.masking"
        log.warning("%s has no effect: every group holds every unit", what)


# Models that were passed to sdp.initialize.
_initialized: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | Path | Mapping[str, Any] | Config | None = None,
    config_params: str | Mapping[str, Any] | None = None,
    service: Any = None,
) -> tuple[SDPEngine, Optimizer, EpochLoader | None, Any]:
    """Make the engine that trains ``model``, with the same arguments as ``deepspeed.initialize``.

    The model is cut in place to the part of this rank's SDP group. Every rank must call this.

    Args:
        args: Parsed arguments that may have ``deepspeed_config``; see :func:`add_config_arguments`.
        model: Any module whose units can be found (see ``sdp.units`` of the configuration). All
            ranks get rank 0's weights. A model on the meta device is initialised from
            ``training.seed``.
        optimizer: An optimizer of the model's parameters, or a function that makes an optimizer
            from this rank's parameters (or from parameter groups, if ``model_parameters`` are
            groups). By default the configuration decides.
        model_parameters: The parameters or parameter groups to train; by default all.
        training_data: A map-style data set, an iterable one, an iterator, or a DataLoader. It is
            divided among data ranks. The loader ends with every epoch; see docs/data.md.
        lr_scheduler: A scheduler, or a function that makes a scheduler from the optimizer. By
            default the configuration decides.
        distributed_port: If given, it must be the launcher's port.
        mpu: Must be None.
        dist_init_required: False requires that torch.distributed is initialised already.
        collate_fn: Makes a batch from a list of samples.
        config: The path of a JSON file, a mapping, or a Config.
        config_params: Another name for ``config``.
        service: The group's connection to an anchor service. Only ``sdp train`` passes it.

    Returns:
        The engine, the optimizer, the data loader or None, and the scheduler or None.

    Raises:
        SDPError: SDP cannot do what an argument or a setting asks for.
    """
    model = _checked(model)
    if mpu is not None:
        raise ConfigError(
            "sdp.initialize: mpu is not supported, because sdp.groups and the number of processes decide the layout; "
            "leave it out"
        )
    _check_scheduler(lr_scheduler, optimizer)
    settings = _settings(args, config if config is not None else config_params)
    check_optimizer(settings, optimizer)
    if settings.sdp.engine != "deepspeed":
        optimizer = with_torch_kernels(optimizer)
    _check_launch(distributed_port, dist_init_required)
    if settings.training.deterministic:
        set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
    device = join()
    watch()
    check_equal(_settings_of_all(settings), device)
    _share_ranks_with_deepspeed()
    _make_whole(model)
    _check_service(settings, service)
    mesh = mesh_of(settings, dist.get_world_size(), service.slot if service is not None else None)
    batch = BatchSize.resolve(settings, mesh)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    param_groups, grouped = named_groups(model_parameters, optimizer, names)
    if optimizer is None and settings.optimizer is not None:
        param_groups = without_decay(param_groups, model, settings.optimizer.params.get("no_decay", ()))
    freeze_others(model, param_groups)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            "sdp.initialize: all parameters are frozen, so there is nothing to train; set requires_grad on some of them"
        )
    converted = make_float32(model)
    if converted and dist.get_rank() == 0:
        computes = f"the model computes in {settings.precision}"
        log.warning("%s; %s, which bf16.enabled chooses", converted, computes)
    _refuse_to_scale(model, settings)
    _refuse_hooks(model, settings, mesh)
    layout = Layout.of(model, settings, mesh).in_phase(settings.masking_schedule.at(1))
    if get_random_options(model):
        torch.manual_seed(seed_of(settings.training.seed, "draws", dist.get_rank()))
    check_placement(layout.placement, device)
    check_equal({"the model's parameters": _parameters(layout)}, device)
    plan = values_to_give(model, settings, layout)
    uncut = UncutModel(model, layout, plan)
    _initialized.add(model)
    store: GroupStore
    if settings.sdp.engine == "deepspeed":
        from .stores.deepspeed.initialize import initialize_deepspeed  # deepspeed is optional

        store, built, scheduler, note = initialize_deepspeed(
            model, settings, layout, batch, device, plan, param_groups, optimizer, lr_scheduler
        )
    else:
        store = build_store(model, settings, layout, device, plan)
        groups = groups_here(param_groups, layout, store.parameters)
        stepped_on = torch.device("cpu") if settings.zero_optimization.offloads else device
        built, note = make_optimizer(settings.optimizer, optimizer, groups, stepped_on, grouped=grouped)
        arrange_muon(built, layout, store.parameters, store.context.tensor_ranks, store.context.traffic)
        scheduler = scheduler_of(settings, lr_scheduler, built)
        store.optimizer = built
    store.context.clock = clock(device, waits=settings.wall_clock_breakdown)
    store.context.service = service
    if optimizer is not None and needs_whole_matrices(store.optimizer):
        _refuse_parts(settings, type(store.optimizer).__name__)
        store.context.needs_whole_matrices = True
    check_steps(scheduler)
    engine = SDPEngine(store, settings, batch, built, scheduler, uncut)
    return _finish(engine, note, training_data, collate_fn, device)


def _finish(
    engine: SDPEngine, note: str, training_data: Any, collate_fn: Any, device: torch.device
) -> tuple[SDPEngine, Optimizer, EpochLoader | None, Any]:
    """Make the data loader, check that ranks agree, and return the four-tuple."""
    samples = None
    if training_data is not None:
        from .batch.loader import EpochLoader, ResumableLoader, make_loader  # a script may read its own data

        mesh = engine.layout.mesh
        engine.loader = make_loader(
            training_data,
            engine.train_micro_batch_size_per_gpu(),
            mesh.data_rank(engine.global_rank),
            mesh.data_ranks,
            seed=engine.config.training.seed,
            collate_fn=collate_fn,
            num_workers=engine.config.data.num_workers,
            pin_memory=device.type == "cuda",
        )
        engine.training_dataloader = EpochLoader(engine.loader)
        if (service := engine.store.context.service) is not None and isinstance(engine.loader, ResumableLoader):
            engine.loader.sampler.ranges = service.ranges
        samples = engine.loader.sampler.num_samples if isinstance(engine.loader, ResumableLoader) else "a stream"
    if engine.world_size > 1 and dist.get_backend() != "fake":  # ranks that do not exist are not watched
        engine.calls = CallWatch()
        watch_calls(engine)
        weakref.finalize(engine, engine.calls.stop).atexit = False  # the watch reports the exit of a script
    check_equal({"the samples of training_data": samples}, device)
    engine.rates_of_parameters()
    if engine.global_rank == 0:
        announce(engine, note)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _checked(model: Any) -> nn.Module:
    """Return ``model``. Raise ConfigError or ModelError if it cannot be trained."""
    if model is None:
        raise ConfigError("sdp.initialize: model is missing")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"sdp.initialize: model must be a torch.nn.Module, not {type(model).__name__}")
    model = compiled_in_place(model)
    if model in _initialized:
        raise ModelError(
            "sdp.initialize was called twice on the same model, which the first call has changed; use the engine of "
            "the first call, or build the model again"
        )
    check_given_model(model)
    return model


def _share_ranks_with_deepspeed() -> None:
    """Let a script that has imported DeepSpeed use ``deepspeed.comm``."""
    if "deepspeed" in sys.modules:
        from .stores.deepspeed.private import use_default_process_group  # deepspeed is optional

        use_default_process_group()


def _make_whole(model: nn.Module) -> None:
    """Undo what DeepSpeed's own ``zero.Init`` did to ``model``. Collective."""
    if not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return
    from .stores.deepspeed.private import make_whole  # deepspeed is optional

    count = make_whole(model)
    if dist.get_rank() == 0:
        log.warning(
            "weights: DeepSpeed's zero.Init had partitioned %d parameters; now every rank has all parameters until the "
            "model is cut. If they do not fit into memory, build the model on the meta device", count
        )  # fmt: skip


def _refuse_to_scale(model: nn.Module, config: Config) -> None:
    """Raise ConfigError if ``sdp.branch_scale`` would scale the wrong dimension of a weight."""
    if config.sdp.branch_scale == "none" or config.sdp.granularity != "neuron":
        return
    for name, module in model.named_modules():
        if getattr(module, "has_inputs_first", False):
            raise ConfigError(
                f'sdp.branch_scale: "{config.sdp.branch_scale}" is not available with {name}, whose weight '
                'has a row for each input; use "none", or sdp.granularity "block"'
            )


def _refuse_hooks(model: nn.Module, config: Config, mesh: Mesh) -> None:
    """Raise ModelError for a parameter whose hooks would be lost with shards or slices."""
    zero = config.zero_optimization
    shards = mesh.shards(zero.stage) > 1 or config.precision != "float32" or zero.offloads
    reasons = {
        "zero_optimization.stage 1 to 3, half precision or offload": config.sdp.engine == "fsdp2" and shards,
        "tensor_parallel.autotp_size above 1": mesh.tp > 1,
        'sdp.granularity "neuron"': config.sdp.granularity == "neuron",
        "a model on the meta device": any(parameter.is_meta for parameter in model.parameters()),
    }
    for name, parameter in model.named_parameters():
        hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        for reason, applies in reasons.items() if hooks else ():
            if applies:
                raise ModelError(
                    f"parameter {name!r} has a hook, which {reason} would silently drop; change the gradient inside "
                    "the model (torch.Tensor.register_hook on an activation), or set the learning rate of the "
                    "parameter in a parameter group"
                )


def _refuse_parts(config: Config, optimizer: str) -> None:
    """Raise ConfigError if an optimizer of whole matrices would get only shards or slices."""
    reasons = {
        'zero_optimization.stage 1 to 3 of sdp.engine "deepspeed"': config.sdp.engine == "deepspeed"
        and config.zero_optimization.stage > 0,
        "tensor_parallel.autotp_size above 1": config.tensor_parallel.autotp_size > 1,
        'sdp.granularity "neuron"': config.sdp.granularity == "neuron",
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(
                f"optimizer: {optimizer} needs whole matrices, but {reason} cuts them; change that setting, or use "
                "an optimizer that steps on single elements, such as AdamW"
            )


def _check_service(config: Config, service: Any) -> None:
    """Raise ConfigError if groups of a run with a service are started without it."""
    if config.sdp.sync is not None and config.sdp.sync.service is not None and service is None:
        raise ConfigError(
            "sdp.sync.service: a script cannot use a service; start the groups with sdp train, or remove the key"
        )


def _check_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Raise ConfigError if the scheduler belongs to an optimizer that is not used."""
    steered = getattr(scheduler, "optimizer", None)
    if steered is not None and steered is not optimizer and steered is not getattr(optimizer, "optimizer", None):
        raise ConfigError(
            f"sdp.initialize: the {type(scheduler).__name__} in lr_scheduler was built on another optimizer, so the "
            "learning rate would never change; pass that optimizer as optimizer=, or a function that makes the "
            "scheduler from the optimizer"
        )


def _check_launch(port: int | None, init_required: bool | None) -> None:
    """Raise ConfigError for arguments about torch.distributed that cannot be honoured."""
    environment = detect()
    if port is not None and not dist.is_initialized() and (environment is None or environment.master_port != port):
        raise ConfigError(
            f"sdp.initialize: distributed_port {port} cannot be honoured, because the launcher chooses the port; "
            "leave it out, or give the port to the launcher (--master-port, or MASTER_PORT)"
        )
    if init_required is False and not dist.is_initialized():
        raise ConfigError(
            "sdp.initialize: dist_init_required is False but torch.distributed is not initialised; call "
            "sdp.init_distributed() first, or leave dist_init_required out"
        )


def _settings(args: Any, config: Any) -> Config:
    from_arguments = getattr(args, "deepspeed_config", None)
    if config is not None and from_arguments is not None:
        raise ConfigError("sdp.initialize: config and --deepspeed_config are both given; leave one out")
    config = from_arguments if config is None else config
    if config is None:
        raise ConfigError("sdp.initialize: config is missing; give a path to a JSON file or a dict")
    return config if isinstance(config, Config) else load_config(config)


def _settings_of_all(config: Config) -> dict[str, Any]:
    """The settings that all ranks must agree on. Each rank may have its own paths and outputs."""
    individual = {"data", "tensorboard", "wandb", "env", "steps_per_print", "wall_clock_breakdown"}
    settings = config.model_dump(mode="json", exclude=individual)
    for key in ("init_from", "keep", "start_timeout", "step_timeout", "save_timeout"):
        del settings["training"][key]
    ours = settings["zero_optimization"]
    theirs = config.deepspeed.get("zero_optimization", {})
    # Averages are sent at another time with offload, so its device must be the same on all ranks.
    # Other settings of offload may differ.
    keys = ("offload_optimizer", "offload_param")
    devices = {key: {"device": (ours[key] or {}).get("device", "none")} for key in keys}
    of_theirs = {key: value for key, value in theirs.items() if key not in keys}
    settings["zero_optimization"] = of_theirs | ours | devices
    return settings


def _parameters(layout: Layout) -> dict[str, Any]:
    return {
        name: {"shape": list(slices[0].full_shape), "dtype": slices[0].dtype, "is trained": slices[0].trainable}
        for name, slices in layout.wholes.items()
    }


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options ``--deepspeed`` and ``--deepspeed_config FILE`` to a script's parser.

    :func:`sdp.initialize` reads the parsed options from ``args``. Returns the parser.
    """
    group = parser.add_argument_group("DeepSpeed", "configuration, as DeepSpeed names it")
    group.add_argument(
        "--deepspeed", action="store_true", help="accepted for DeepSpeed's scripts; sdp is used in any case"
    )
    group.add_argument(
        "--deepspeed_config", metavar="FILE", default=None, help="JSON file with DeepSpeed's keys and a section sdp"
    )
    return parser
