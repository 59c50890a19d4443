"""The ways to train a model that ``sdp bench CONFIG`` compares.

Each method is what a user of its library would run: DDP and FSDP2 are torch's, ZeRO is DeepSpeed's.
All methods have the same model and weights, optimizer, clipping, fused loss, compiled blocks and
batch. DDP reduces through torch's own ``allreduce_hook``. The hook does what DDP does without one,
and ``wire.py`` can leave it out.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from ...engine.batch.size import BatchSize
from ...engine.config.method import SyncSection
from ...engine.config.schema import Config
from ...engine.config.section import parse_section
from ...engine.distributed.mesh import mesh_of
from ...engine.errors import ConfigError, SDPError
from ...engine.placement.layout import Layout
from ..plan.alternatives import dense_config
from ..runs.model_inputs import model_and_batch

DDP = "ddp"
DENSE = (DDP, "fsdp2", "hsdp", "zero2", "zero3", "diloco")
REPLICAS = 2  # of the shards of HSDP
# Local steps between two averages, as in DiLoCo (Douillard et al., arXiv 2311.08105).
OUTER_EVERY = 50
# Local steps: -local32-f4-o2-bf16 averages every 32 steps, in 4 fragments, 2 steps late, in
# bfloat16.
_LOCAL = r"-local(?P<every>\d+)(?:-f(?P<fragments>\d+))?(?:-o(?P<overlap>\d+))?(?:-(?P<compression>bf16|int8))?"
_SDP = re.compile(rf"sdp-(block|neuron)-(forward|backward)-(0?\.\d+|1|1\.0+|\d(?:\.\d+)?e-\d+)(?:{_LOCAL})?")
_DILOCO = re.compile(rf"diloco(?:{_LOCAL})?")
# Methods that make the same steps as DDP, except for rounding.
SAME_STEPS = {DDP, "fsdp2", "hsdp", "zero2", "zero3"}


def default_methods(config: Config) -> list[str]:
    """Return the names of the methods that are compared if none are given.

    These are all dense methods, and SDP by blocks and by neurons under both maskings, at the
    configured capacity. If the configuration lists holders by unit or capacities by group, SDP runs
    only as configured.
    """
    section = config.sdp
    if any(isinstance(value, list | dict) for value in (section.capacity, section.profile, section.placement)):
        return [*DENSE, "sdp"]
    # All digits of the capacity, so that a name says exactly what runs.
    return [
        *DENSE,
        *(
            f"sdp-{by}-{masking}-{section.capacity!r}"
            for by in ("block", "neuron")
            for masking in ("forward", "backward")
        ),
    ]


def is_sdp(name: str) -> bool:
    """Whether the method is SDP."""
    return name.startswith("sdp")


def is_diloco(name: str) -> bool:
    """Whether the method is DiLoCo: local steps of the dense model."""
    return _DILOCO.fullmatch(name) is not None


def variant(name: str, config: Config, world: int) -> Config:
    """Return the configuration of the method ``name``.

    Args:
        name: The method.
        config: The configuration that all methods share.
        world: The number of ranks.

    Raises:
        ConfigError: The name is unknown.
    """
    if name == "sdp":
        _refuse_schedule(config)
        return config
    if is_sdp(name):
        found = _SDP.fullmatch(name)
        if found is None:
            raise ConfigError(
                f"--methods {name}: write sdp (as CONFIG says), or sdp-block-forward-0.5 (block or neuron, forward or "
                "backward, capacity), perhaps with -local32-f4-o2-bf16 (steps, fragments, overlap, compression)"
            )
        if isinstance(config.sdp.placement, dict):
            raise ConfigError(
                f"--methods {name}: sdp.placement lists the holders of every unit, whatever the capacity is; write sdp"
            )
        section: dict[str, Any] = {"granularity": found[1], "masking": found[2], "capacity": float(found[3])}
        if found["every"]:
            section["sync"] = _sync_of(name, found)
        return config.model_copy(update={"sdp": config.sdp.model_copy(update=section)})
    if (found := _DILOCO.fullmatch(name)) is not None:
        sync = _sync_of(name, found) if found["every"] else config.sdp.sync or SyncSection(every=OUTER_EVERY)
        dense = dense_config(config, world, 0)
        return dense.model_copy(update={"sdp": dense.sdp.model_copy(update={"sync": sync})})
    if name not in DENSE:
        raise ConfigError(
            f"--methods {name}: unknown; known: {', '.join(DENSE)}, sdp, sdp-block-forward-0.5, "
            "sdp-block-forward-0.5-local32, diloco-local32 …"
        )
    stage = {"fsdp2": 3, "hsdp": 3, "zero2": 2, "zero3": 3}.get(name, 0)
    return dense_config(config, REPLICAS if name == "hsdp" else 1, stage)


def _refuse_schedule(config: Config) -> None:
    """Raise ConfigError for a schedule of maskings. A bench times one of them."""
    section = config.sdp
    if len(section.maskings) < 2:
        return
    phases = [f"sdp-{section.granularity}-{masking}-{section.capacity}" for masking in ("forward", "backward")]
    one = not isinstance(section.capacity, list) and not isinstance(section.placement, dict)
    named = f"write {','.join(phases)}" if one else "add --set sdp.masking=forward, and then --set sdp.masking=backward"
    raise ConfigError(f"--methods sdp: sdp.masking is a schedule, and every phase has its own speed; {named}")


def _sync_of(name: str, found: re.Match[str]) -> SyncSection:
    """Return the settings of local steps that a method's name has."""
    settings = {
        "every": int(found["every"]),
        "fragments": int(found["fragments"] or 1),
        "overlap": int(found["overlap"] or 0),
        "compression": found["compression"] or "none",
    }
    return parse_section(SyncSection, settings, f"--methods {name}")


def why_not(name: str, config: Config, world: int) -> str | None:
    """Say why the method cannot run here, or return None.

    Raises :class:`ConfigError` for an unknown name.
    """
    changed = variant(name, config, world)
    if name in ("zero2", "zero3") and importlib.util.find_spec("deepspeed") is None:
        return 'needs the package deepspeed; pip install "sdp-engine[deepspeed]"'
    if name == "hsdp" and (world % REPLICAS or world == REPLICAS):
        return f"needs an even number of ranks, 4 or more; there are {world}"
    try:
        mesh = mesh_of(changed, world)
        BatchSize.resolve(changed, mesh)
        Layout.of(model_and_batch(changed)[0](), changed, mesh)
    except SDPError as error:
        return str(error)
    return None
