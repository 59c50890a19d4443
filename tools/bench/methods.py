"""The ways to train a model that ``sdp bench CONFIG`` compares.

Each method is what a user of its library would run: DDP and FSDP2 are torch's, ZeRO is DeepSpeed's.
All methods have the same model and weights, optimizer, clipping, fused loss, compiled blocks and
batch. DDP reduces through torch's own ``allreduce_hook``. The hook does what DDP does without one,
and ``wire.py`` can leave it out.
"""

from __future__ import annotations

import importlib.util
import re

from ...engine.batch.size import BatchSize
from ...engine.config.schema import Config
from ...engine.distributed.mesh import mesh_of
from ...engine.errors import ConfigError, SDPError
from ...engine.placement.layout import Layout
from ..plan.alternatives import dense_config
from ..runs.model_inputs import model_and_batch

DDP, SMALLER = "ddp", "smaller-ddp"
DENSE = (DDP, "ddp-recompute", "ddp-bf16-gradients", "fsdp2", "hsdp", "zero2", "zero3", "diloco", SMALLER)
REPLICAS = 2  # of the shards of HSDP
# Local steps between two averages, as in DiLoCo (Douillard et al., arXiv 2311.08105).
OUTER_EVERY = 50
_SDP = re.compile(r"sdp-(block|neuron)-(forward|backward)-(0?\.\d+|1|1\.0+|\d(?:\.\d+)?e-\d+)")
# Methods that make the same steps as DDP, except for rounding.
SAME_STEPS = {DDP, "ddp-recompute", "fsdp2", "hsdp", "zero2", "zero3"}


def default_methods(config: Config) -> list[str]:
    """Return the names of the methods that are compared if none are given.

    These are all dense methods, and SDP by blocks and by neurons under both maskings, at the
    configured capacity. If the configuration lists holders by unit or capacities by group, SDP runs
    only as configured.
    """
    section = config.sdp
    if isinstance(section.capacity, list) or isinstance(section.profile, list) or isinstance(section.placement, dict):
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


def variant(name: str, config: Config, layers: int | None = None) -> Config:
    """Return the configuration of the method ``name``.

    ``layers`` is the depth of the smaller model. Raises :class:`ConfigError` for an unknown name.
    """
    if name == "sdp":
        return config
    if is_sdp(name):
        found = _SDP.fullmatch(name)
        if found is None:
            raise ConfigError(
                f"--methods {name}: write sdp (as CONFIG says), or sdp-block-forward-0.5 (block or neuron, forward or "
                "backward, capacity)"
            )
        if isinstance(config.sdp.placement, dict):
            raise ConfigError(
                f"--methods {name}: sdp.placement lists the holders of every unit, whatever the capacity is; write sdp"
            )
        changed = {"granularity": found[1], "masking": found[2], "capacity": float(found[3])}
        return config.model_copy(update={"sdp": config.sdp.model_copy(update=changed)})
    if name not in DENSE:
        raise ConfigError(f"--methods {name}: unknown; known: {', '.join(DENSE)}, sdp, sdp-block-forward-0.5 …")
    stage = {"fsdp2": 3, "hsdp": 3, "zero2": 2, "zero3": 3}.get(name, 0)
    changed = dense_config(config, REPLICAS if name == "hsdp" else 1, stage)
    if name == "ddp-recompute":
        activations = config.activation_checkpointing.model_copy(update={"mode": "full"})
        changed = changed.model_copy(update={"activation_checkpointing": activations})
    if name == SMALLER and layers is not None:
        changed = changed.model_copy(update={"model": config.model | {"num_hidden_layers": layers}})
    return changed


def why_not(name: str, config: Config, world: int) -> str | None:
    """Say why the method cannot run here, or return None. Raises :class:`ConfigError` for an unknown name."""
    own = variant(name, config)
    if name in ("zero2", "zero3") and importlib.util.find_spec("deepspeed") is None:
        return 'needs the package deepspeed; pip install "sdp-engine[deepspeed]"'
    if name == "hsdp" and (world % REPLICAS or world == REPLICAS):
        return f"needs an even number of ranks, 4 or more; there are {world}"
    if name == SMALLER and "num_hidden_layers" not in config.model:
        return "needs a model with num_hidden_layers, to take fewer layers"
    try:
        mesh = mesh_of(own, world)
        BatchSize.resolve(own, mesh)
        Layout.of(model_and_batch(own)[0](), own, mesh)
    except SDPError as error:
        return str(error)
    return None
