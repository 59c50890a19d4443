"""Says at the start which decisions were made for the user, and which settings have no effect."""

from __future__ import annotations

import logging

from .config.deepspeed_keys import HINT_SECTIONS, IGNORED_BY_DEEPSPEED
from .config.schema import Config, SDPSection
from .engine import SDPEngine
from .placement.layout import Layout
from .placement.policies import warnings_of

log = logging.getLogger("sdp")


def announce(engine: SDPEngine, optimizer_note: str) -> None:
    """Print each decision that was made for the user, and its reason.

    ``optimizer_note``: the line about the optimizer.
    """
    config, layout = engine.config, engine.layout
    _announce_layout(engine)
    _warn_of_settings_without_effect(config, layout)
    _announce_placement(config, layout)
    _announce_sharing(engine)
    _warn_of_a_full_placement(config.sdp, layout)
    _announce_batch(engine)
    if config.training.init_from is not None:
        log.info("weights: training starts from those in %s", config.training.init_from)
    log.info("%s", optimizer_note)
    if config.autos:
        log.info('"auto" means the default of each key here: %s', ", ".join(config.autos))
    announce_hints(config)


def announce_hints(config: Config) -> None:
    """Print DeepSpeed's keys in the file that have no effect, some with the reason."""
    plain = [path for path in config.hints if path not in HINT_SECTIONS and path not in IGNORED_BY_DEEPSPEED]
    if plain:
        log.info("accepted without effect (performance hints for DeepSpeed): %s", ", ".join(plain))
    for path in config.hints:
        if path in HINT_SECTIONS:
            log.info("%s has no effect: %s", path, HINT_SECTIONS[path])
        elif path in IGNORED_BY_DEEPSPEED:
            log.warning("%s has no effect: %s", path, IGNORED_BY_DEEPSPEED[path])


def _announce_layout(engine: SDPEngine) -> None:
    log.info("layout: %s processes, ZeRO stage %d", engine.layout.mesh, engine.config.zero_optimization.stage)
    if engine.config.replaces_deepspeed:
        log.info('sdp.engine: "fsdp2" runs in place of "deepspeed", which has nothing to shard at stage 0')


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
    if layout.units:
        log.info("placement: %s", layout.placement.describe())
        for warning in warnings_of(config.sdp, layout.placement) + layout.warnings() if layout.mesh.sdp > 1 else []:
            log.warning("placement: %s", warning)


def _announce_sharing(engine: SDPEngine) -> None:
    """The messages that groups exchange in addition to gradients, or instead of them."""
    config, layout = engine.config, engine.layout
    if config.masking_schedule.ends:
        log.info("masking: %s", config.masking_schedule)
    if layout.refreshes:
        ways = {(refresh.source, refresh.members) for refresh in layout.refreshes}
        most = max(sum(group in members for _, members in ways) for group in layout.everyone)
        log.info("masking: units that a group does not hold run from frozen copies, which holders refresh after each "
                 "step (at most %d more communicators per rank)", most)  # fmt: skip
    if (scale := engine.rate_scale) is not None:
        log.info(
            "rates: sdp.lr_scale %s multiplies the learning rates of units by %s",
            config.sdp.lr_scale,
            scale.describe(),
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


def _announce_batch(engine: SDPEngine) -> None:
    log.info(
        "batch: %d samples a step = micro-batch %d × accumulation %d × %d data ranks",
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
        engine.layout.mesh.data_ranks,
    )
