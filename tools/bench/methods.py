"""The ways to train a model that ``sdp bench CONFIG`` puts side by side: what a user would run, from the libraries themselves.

All get the same model and weights, optimizer, clipping, fused loss, compiled blocks and batch. DDP and FSDP2 are torch's, ZeRO is
DeepSpeed's. DDP reduces through torch's own ``allreduce_hook``, which does what DDP does without a hook, and can be left out (``wire.py``).
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
REPLICAS = 2  # of HSDP's shards
OUTER_EVERY = (
    50  # steps of a replica of its own between two averages, as in DiLoCo (Douillard et al., arXiv 2311.08105)
)
_SDP = re.compile(r"sdp-(block|neuron)-(forward|backward)-(0?\.\d+|1|1\.0+|\d(?:\.\d+)?e-\d+)")
# Methods that make the same steps as DDP, but for rounding.
SAME_STEPS = {DDP, "ddp-recompute", "fsdp2", "hsdp", "zero2", "zero3"}


def default_methods(config: Config) -> list[str]:
    """All dense ones, and SDP by blocks and by neurons under both maskings at the configuration's capacity; where holders are listed unit
    by unit or capacities group by group, SDP as configured.
    """
    section = config.sdp
    if isinstance(section.capacity, list) or isinstance(section.profile, list) or isinstance(section.placement, dict):
        return [*DENSE, "sdp"]
    # All digits: a name says exactly what is run.
    return [
        *DENSE,
        *(
            f"sdp-{by}-{masking}-{section.capacity!r}"
            for by in ("block", "neuron")
            for masking in ("forward", "backward")
        ),
    ]


def is_sdp(name: str) -> bool:
    return name.startswith("sdp")


def variant(name: str, config: Config, layers: int | None = None) -> Config:
    """The configuration that ``name`` is planned by, and SDP is run by; ``layers``: of the smaller model. Raises :class:`ConfigError`."""
    if name == "sdp":
        return config
    if is_sdp(name):
        found = _SDP.fullmatch(name)
        if found is None:
            raise ConfigError(
                f"--methods {name}: write sdp (as CONFIG says) or sdp-block-forward-0.5: block or neuron, forward or backward, C"
            )
        if isinstance(config.sdp.placement, dict):
            raise ConfigError(
                f"--methods {name}: sdp.placement lists the holders of every unit, whatever C; write sdp, for CONFIG as it is"
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
    """Why the method cannot be run here, or None. Raises :class:`ConfigError` for an unknown one."""
    own = variant(name, config)
    if name in ("zero2", "zero3") and importlib.util.find_spec("deepspeed") is None:
        return 'needs the package deepspeed; pip install "sdp-engine[deepspeed]"'
    if name == "hsdp" and (world % REPLICAS or world == REPLICAS):
        return f"needs an even number of ranks, 4 or more; there are {world}"
    if name == SMALLER and "num_hidden_layers" not in config.model:
        return "needs a model with num_hidden_layers, to take fewer of them"
    try:
        mesh = mesh_of(own, world)
        BatchSize.resolve(own, mesh)
        Layout.of(model_and_batch(own)[0](), own, mesh)
    except SDPError as error:
        return str(error)
    return None
