"""DeepSpeed's keys that we do not act on, and the settings that are passed on to DeepSpeed.

There are two kinds of such keys. Performance hints may be ignored. Settings that change the
results must not be ignored. Keys and defaults: DeepSpeed 0.19, docs/_pages/config-json.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel

from ..errors import ConfigError, shorten, suggestion

DEEPSPEED_CLIPS_AT = 1.0  # DeepSpeed's gradient_clipping if the file does not set it
# Performance hints that have no effect here. They are accepted, and listed once at start.
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

# Settings that change the results and that we cannot honour. Any value but DeepSpeed's neutral
# one is an error.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "fp16.auto_cast": (False,),
    "fp16.fp16_master_weights_and_grads": (False,),
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

# The settings that the DeepSpeed engine honours in addition to the hints, with the allowed values.
HONOURED_BY_DEEPSPEED: dict[str, tuple[Any, ...]] = {
    "flops_profiler.enabled": (False, True),
    "comms_logger.enabled": (False, True),
    "zero_optimization.offload_optimizer.device": ("none", None, "cpu"),
}

# Why the DeepSpeed engine cannot honour a setting of DeepSpeed. NEUTRAL has the neutral values.
_OTHER_SHARDS = "a rank's shards would no longer be those of the other holders' ranks, with which they are averaged"
_ROUNDED = "the gradients that holders average would be rounded differently in every group"
_NOT_BUILT = "DeepSpeed would change the model or its schedule inside one group only"
WHY_NOT_DEEPSPEED: dict[str, str] = {
    "zero_optimization.round_robin_gradients": _OTHER_SHARDS,
    "zero_optimization.zero_hpz_partition_size": _OTHER_SHARDS,
    "zero_optimization.mics_shard_size": _OTHER_SHARDS,
    "zero_optimization.mics_hierarchical_params_gather": _OTHER_SHARDS,
    "zero_optimization.zero_quantized_weights": _ROUNDED,
    "zero_optimization.zero_quantized_nontrainable_weights": _ROUNDED,
    "zero_optimization.zero_quantized_gradients": _ROUNDED,
    "zero_optimization.offload_optimizer.device": 'a group\'s shards must be in memory to be averaged; offload to "cpu"',
    "zero_optimization.offload_param.device": "parameters on a host or disk are not followed between groups; offload the optimizer",
    "communication_data_type": _ROUNDED,
    "data_types.grad_accum_dtype": "the shards that are averaged would lie elsewhere",
    "prescale_gradients": "gradients are averaged over groups, of which DeepSpeed knows one",
    "gradient_predivide_factor": "gradients are averaged over groups, of which DeepSpeed knows one",
    "elasticity.enabled": "the number of groups is fixed for a run",
    "autotuning.enabled": "it would start runs of its own with other layouts",
    "compression_training": _NOT_BUILT,
    "curriculum_learning.enabled": _NOT_BUILT,
    "data_efficiency.enabled": _NOT_BUILT,
    "progressive_layer_drop.enabled": _NOT_BUILT,
    "eigenvalue.enabled": _NOT_BUILT,
    "sparse_attention": _NOT_BUILT,
    "fp16.auto_cast": "inputs would be cast in training alone; cast them in the model",
    "fp16.fp16_master_weights_and_grads": _ROUNDED,
    "amp.enabled": "DeepSpeed has removed it; use bf16, or fp16",
}

# Sections with a switch. While the switch is off, the other keys of the section do not matter.
_SWITCHES = {path.rpartition(".")[0]: path for path in NEUTRAL if path.endswith((".enabled", ".device"))}

# Sections in which we use no key.
_FOREIGN_SECTIONS = ("checkpoint", "data_types")


def split_foreign_keys(raw: dict[str, Any], *, deepspeed: bool = False) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Remove the keys that only DeepSpeed acts on.

    Args:
        raw: The configuration file.
        deepspeed: Whether the DeepSpeed engine runs. It gets the removed keys.

    Returns:
        ``raw`` without these keys, and those of the removed hints that have no effect.

    Raises:
        ConfigError: A setting would change the results, and the engine cannot honour it.
    """
    hints: list[str] = []
    ours = _filter(raw, "", hints, deepspeed)
    return ours, tuple(path for path in hints if not deepspeed or path.startswith("activation_checkpointing."))


def for_deepspeed(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the file that DeepSpeed reads.

    Our own sections are left out, and the settings that we act on ourselves.
    """
    ours = (
        "sdp",
        "model",
        "data",
        "training",
        "env",
        "activation_checkpointing",
        "tensor_parallel",
        "train_batch_size",
    )
    return {key: value for key, value in raw.items() if key not in ours and value is not None}


def _filter(section: dict[str, Any], prefix: str, hints: list[str], deepspeed: bool) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in section.items():
        path = f"{prefix}{key}"
        if path in HINTS:
            if deepspeed and path in WHY_NOT_DEEPSPEED and value is not False:
                raise ConfigError(_refusal(path, value, False))
            hints.append(path)
        elif path in NEUTRAL:
            _require_neutral(path, value, deepspeed)
        elif path in _SWITCHES and isinstance(value, dict):
            switch = _SWITCHES[path]
            _require_neutral(switch, value.get(switch.rpartition(".")[2], NEUTRAL[switch][0]), deepspeed)
        elif isinstance(value, dict) and any(known.startswith(f"{path}.") for known in (*HINTS, *NEUTRAL)):
            rest = _filter(value, f"{path}.", hints, deepspeed)
            if path not in _FOREIGN_SECTIONS:
                kept[key] = rest
            elif rest:
                unknown = next(iter(rest))
                raise ConfigError(
                    f"{path}.{shorten(unknown)}: unknown key{suggestion(unknown, _foreign_keys(f'{path}.'))}"
                )
        else:
            kept[key] = value
    return kept


def _refusal(path: str, value: Any, neutral: Any) -> str:
    why = f": {WHY_NOT_DEEPSPEED[path]}" if path in WHY_NOT_DEEPSPEED else ""
    return (
        f'{path}: {shorten(json.dumps(value))} cannot be honoured by sdp.engine "deepspeed"{why};'
        f" remove it or set it to {json.dumps(neutral)}"
    )


def _require_neutral(path: str, value: Any, deepspeed: bool) -> None:
    allowed = HONOURED_BY_DEEPSPEED.get(path, NEUTRAL[path]) if deepspeed else NEUTRAL[path]
    if not any(value == neutral and type(value) is type(neutral) for neutral in allowed):
        if deepspeed:
            raise ConfigError(_refusal(path, value, NEUTRAL[path][0]))
        neutral = json.dumps(NEUTRAL[path][0])
        raise ConfigError(
            f"{path}: {shorten(json.dumps(value))} cannot be honoured by this engine; remove it or set it to {neutral}"
        )


def known_keys(parents: Sequence[str], root: type[BaseModel]) -> list[str]:
    """List all keys that the section at ``parents`` may have, ours and DeepSpeed's.

    They are the candidates for a suggestion.
    """
    prefix = "".join(f"{parent}." for parent in parents)
    models: list[type[BaseModel]] = [root]
    for parent in parents:
        fields = [model.model_fields[parent] for model in models if parent in model.model_fields]
        models = [model for field in fields for model in _sections_in(field.annotation)]
    ours = [key for model in models for key in model.model_fields]
    return list(dict.fromkeys(ours + _foreign_keys(prefix)))


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a field may hold: one, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in _sections_in(inner)]


def _foreign_keys(prefix: str) -> list[str]:
    return [path.removeprefix(prefix).split(".")[0] for path in (*HINTS, *NEUTRAL) if path.startswith(prefix)]
