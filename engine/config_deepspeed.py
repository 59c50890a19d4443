"""DeepSpeed's keys that we do not act on: hints that may be ignored, and semantics that must not be.

Keys and defaults: DeepSpeed 0.19, docs/_pages/config-json.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from .errors import ConfigError, suggestion

# Performance hints without effect here: accepted, and listed once at start.
HINTS = frozenset(
    """
    dump_state memory_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_allgather
    zero_optimization.overlap_comm zero_optimization.contiguous_gradients zero_optimization.reduce_scatter
    zero_optimization.reduce_bucket_size zero_optimization.allgather_bucket_size zero_optimization.allgather_partitions
    zero_optimization.sub_group_size zero_optimization.round_robin_gradients zero_optimization.ignore_unused_parameters
    zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance
    zero_optimization.stage3_prefetch_bucket_size zero_optimization.stage3_param_persistence_threshold
    zero_optimization.stage3_gather_16bit_weights_on_model_save zero_optimization.load_from_fp32_weights
    zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.elastic_checkpoint
    bf16.check_grad_overflow bf16.immediate_grad_update
    activation_checkpointing.contiguous_memory_optimization activation_checkpointing.synchronize_checkpoint_boundary
    activation_checkpointing.profile
    """.split()
)

# Semantics that we cannot honour: an error unless at DeepSpeed's neutral value.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "fp16.enabled": (False,),
    "amp.enabled": (False,),
    "flops_profiler.enabled": (False,),
    "comms_logger.enabled": (False,),
    "autotuning.enabled": (False,),
    "elasticity.enabled": (False,),
    "compression_training": ({}, None),
    "curriculum_learning.enabled": (False,),
    "data_efficiency.enabled": (False,),
    "progressive_layer_drop.enabled": (False,),
    "eigenvalue.enabled": (False,),
    "sparse_attention": ({}, None),
    "prescale_gradients": (False,),
    "gradient_predivide_factor": (1, 1.0),
    "sparse_gradients": (False,),
    "communication_data_type": (None, "fp32"),
    "data_types.grad_accum_dtype": (None, "fp32"),
    "graph_harvesting": (False,),
    "use_data_before_expert_parallelism": (False,),
    "zero_optimization.offload_optimizer.device": ("none", None),
    "zero_optimization.offload_param.device": ("none", None),
    "zero_optimization.cpu_offload": (False,),
    "zero_optimization.zero_hpz_partition_size": (1,),
    "zero_optimization.zero_quantized_weights": (False,),
    "zero_optimization.zero_quantized_nontrainable_weights": (False,),
    "zero_optimization.zero_quantized_gradients": (False,),
    "zero_optimization.mics_shard_size": (-1,),
    "zero_optimization.mics_hierarchical_params_gather": (False,),
    "activation_checkpointing.partition_activations": (False,),
    "activation_checkpointing.cpu_checkpointing": (False,),
    "activation_checkpointing.number_checkpoints": (None,),
    "checkpoint.tag_validation": ("Ignore", "Warn", "Fail"),
    "checkpoint.load_universal": (False,),
    "checkpoint.use_node_local_storage": (False,),
    "checkpoint.parallel_write": ({}, {"pipeline_stage": False}),
}

# Sections with a switch: their other keys do not matter while it is off.
_SWITCHES = {path.rpartition(".")[0]: path for path in NEUTRAL if path.endswith((".enabled", ".device"))}

# Sections in which nothing is ours.
_FOREIGN_SECTIONS = ("checkpoint", "data_types")


def split_foreign_keys(raw: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """``raw`` without the keys that only DeepSpeed acts on, and the hints among them.

    Raises :class:`ConfigError` for a setting that changes what is computed and cannot be honoured here.
    """
    hints: list[str] = []
    ours = _filter(raw, "", hints)
    return ours, tuple(hints)


def _filter(section: dict[str, Any], prefix: str, hints: list[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in section.items():
        path = f"{prefix}{key}"
        if path in HINTS:
            hints.append(path)
        elif path in NEUTRAL:
            _require_neutral(path, value)
        elif path in _SWITCHES and isinstance(value, dict):
            switch = _SWITCHES[path]
            _require_neutral(switch, value.get(switch.rpartition(".")[2], NEUTRAL[switch][0]))
        elif isinstance(value, dict) and any(known.startswith(f"{path}.") for known in (*HINTS, *NEUTRAL)):
            rest = _filter(value, f"{path}.", hints)
            if path not in _FOREIGN_SECTIONS:
                kept[key] = rest
            elif rest:
                unknown = next(iter(rest))
                raise ConfigError(f"{path}.{unknown}: unknown key{suggestion(unknown, _foreign_keys(f'{path}.'))}")
        else:
            kept[key] = value
    return kept


def _require_neutral(path: str, value: Any) -> None:
    if not any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL[path]):
        neutral = json.dumps(NEUTRAL[path][0])
        raise ConfigError(f"{path}: {json.dumps(value)} cannot be honoured by this engine; remove it or set it to {neutral}")


def known_keys(parents: Sequence[str], root: type[BaseModel]) -> list[str]:
    """All keys that may stand in the section at ``parents``, ours and DeepSpeed's: candidates for a suggestion."""
    prefix = "".join(f"{parent}." for parent in parents)
    model: Any = root
    for parent in parents:
        field = model.model_fields.get(parent) if isinstance(model, type) and issubclass(model, BaseModel) else None
        model = field.annotation if field else None
    ours = list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []
    return list(dict.fromkeys(ours + _foreign_keys(prefix)))


def _foreign_keys(prefix: str) -> list[str]:
    return [path.removeprefix(prefix).split(".")[0] for path in (*HINTS, *NEUTRAL) if path.startswith(prefix)]
