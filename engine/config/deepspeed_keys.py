"""Which keys and values of DeepSpeed are accepted, ignored or refused.

Performance hints may be ignored. A setting that changes the results may not be ignored, so only the
value with which it does nothing is accepted. Keys and defaults are those of DeepSpeed 0.19
(docs/_pages/config-json.md in DeepSpeed's repository). Keys of earlier versions that public files
still have are known, too.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from ..errors import ConfigError, shorten, suggestion

DEEPSPEED_CLIPS_AT = 1.0  # DeepSpeed's gradient_clipping if the file does not set it

# Hints that DeepSpeed 0.19.8 does not know, or that we apply ourselves. DeepSpeed does not get
# them.
_OF_NO_ENGINE = frozenset(
    """
    cuda_visible_devices gradient_accumulation_dtype prescale_gradients gradient_predivide_factor sparse_gradients
    fp32_allreduce allgather_size
    zero_optimization.find_unused_parameters zero_optimization.gather_fp16_weights_on_model_save
    zero_optimization.max_elements_per_comm zero_optimization.legacy_stage1 zero_optimization.cpu_offload_use_pin_memory
    fp16.opt_level fp16.fp16_opt_level fp16.fp16_scale_tolerance
    bf16.opt_level bf16.auto_cast bf16.loss_scale bf16.loss_scale_window bf16.initial_scale_power
    bf16.hysteresis bf16.consecutive_hysteresis bf16.min_loss_scale
    """.split()
)

# Performance hints that have no effect here. They are accepted, and listed once at the start.
HINTS = _OF_NO_ENGINE | frozenset(
    """
    dump_state memory_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_allgather
    disable_python_gc log_level vocabulary_size seq_parallel_communication_data_type dataloader_drop_last
    fp16.fp16_master_weights_and_grads fp16.auto_cast
    bf16.check_grad_overflow bf16.immediate_grad_update bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
    torch_autocast.lower_precision_safe_modules tensor_parallel.tp_overlap_comm tensor_parallel.keep_module_on_host
    activation_checkpointing.contiguous_memory_optimization activation_checkpointing.synchronize_checkpoint_boundary
    activation_checkpointing.profile activation_checkpointing.partition_activations
    activation_checkpointing.cpu_checkpointing activation_checkpointing.number_checkpoints
    checkpoint.writer checkpoint.parallel_write
    """.split()
)
HINTS |= {
    f"zero_optimization.{key}"
    for key in """
    overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size allgather_bucket_size allgather_partitions
    sub_group_size round_robin_gradients ignore_unused_parameters load_from_fp32_weights parameter_alignment
    use_multi_rank_bucket_allreduce elastic_checkpoint memory_efficient_linear pipeline_loading_checkpoint
    override_module_apply log_trace_cache_warnings enable_sanity_checks leaf_module compute_grad_norm
    save_muon_momentum_buffer_in_memory stage3_gather_fp16_weights_on_model_save
    """.split()
}
HINTS |= {  # DeepSpeed takes these names with and without stage3_
    f"zero_optimization.{prefix}{key}"
    for prefix in ("", "stage3_")
    for key in """
    max_live_parameters max_reuse_distance prefetch_bucket_size param_persistence_threshold model_persistence_threshold
    gather_16bit_weights_on_model_save module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential
    """.split()
}
HINTS |= {
    f"zero_optimization.{section}.{key}"
    for section in ("offload_optimizer", "offload_param")
    for key in "pin_memory nvme_path buffer_count buffer_size max_in_cpu pipeline pipeline_read pipeline_write "
    "fast_init ratio super_offload cpuadam_cores_perc".split()
}

# Sections that have no effect here, with the reason, which is logged.
HINT_SECTIONS: dict[str, str] = {
    "aio": "it tunes reads and writes of NVMe disks, which are not used here",
    "compile": "it acts only when the script calls engine.compile()",
    "compression_training": "only DeepSpeed's init_compression and engine act on it, and that engine does not run here",
    "sparse_attention": "it is for models with SparseSelfAttention, a layer that DeepSpeed has removed",
    "hybrid_engine": "it only makes generation faster",
    "pipeline": "it acts on a PipelineModule, which does not exist here",
    "flops_profiler": 'it only measures, and needs sdp.engine "deepspeed"',
    "comms_logger": 'it only measures, and needs sdp.engine "deepspeed"',
    "data_efficiency": "its random-ltd acts only when the script calls DeepSpeed's convert_to_random_ltd",
}

# Keys of public files that DeepSpeed ignores, because it does not know them or they are in the
# wrong section. They have no effect here either, and the log says so. The value says what to write
# instead.
_BELOW_ZERO = "DeepSpeed reads this key only inside zero_optimization; move it into zero_optimization"
IGNORED_BY_DEEPSPEED: dict[str, str] = {
    "offload_optimizer": f"{_BELOW_ZERO}. Until then nothing is offloaded",
    "offload_param": f"{_BELOW_ZERO}. Until then nothing is offloaded",
    **{path.split(".")[1]: _BELOW_ZERO for path in sorted(HINTS) if re.fullmatch(r"zero_optimization\.\w+", path)},
    "max_grad_norm": "DeepSpeed ignores it; gradient_clipping clips gradients",
    "min_lr": "DeepSpeed ignores it; the schedule has its rates in scheduler.params",
    "log": "DeepSpeed ignores it; steps_per_print is a key of the top level",
    "comms_config": "DeepSpeed ignores it; comms_logger counts messages",
    "monitor_config": "DeepSpeed ignores it; tensorboard, csv_monitor and wandb are keys of the top level",
}

CURRICULUM = "data_efficiency.data_sampling.curriculum_learning.enabled"

# Settings that change the results and that we cannot honour. A value has the accepted values,
# DeepSpeed's neutral one first, and the reason why other values are refused.
_FLOAT32 = "gradients are averaged in float32, and master weights are float32"
_ONE_GROUP = "it arranges the ranks of one data-parallel job; sdp.groups and zero_optimization.stage do so here"
_QUANTISED = "what ranks send is not quantised here"
_CURRICULUM = "it changes the order or the length of the samples; order the data set itself"
_COMPRESSION = "compression is out of scope, and DeepSpeed has removed it"
_MISSPELT = "the key's name is enabled; DeepSpeed refuses enable, and earlier versions of DeepSpeed ignored it"
_HOST_ONLY = "the host's memory is supported, disks are not"
_OWN_FORMAT = "checkpoints have this project's format, which any layout can read"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "amp.enabled": ((False,), "DeepSpeed has removed it; use bf16, fp16 or torch_autocast"),
    "autotuning.enabled": (
        (False,),
        "a run trains with the file's own settings; choose them, sdp plan shows their memory",
    ),
    "elasticity.enabled": (
        (False,),
        "it chooses batch sizes for changing numbers of ranks, and DeepSpeed has removed it; give train_batch_size",
    ),
    "curriculum_learning.enabled": ((False,), _CURRICULUM),
    CURRICULUM: ((False,), _CURRICULUM),
    "progressive_layer_drop.enabled": (
        (False,),
        "it skips layers at random in each step, and DeepSpeed has removed it; "
        "sdp.groups and sdp.capacity leave blocks out",
    ),
    "eigenvalue.enabled": ((False,), _COMPRESSION),
    "nebula.enabled": ((False,), f"{_OWN_FORMAT}, and DeepSpeed has removed it"),
    "comet.enabled": ((False,), "tensorboard, csv_monitor and wandb are supported"),
    "expert_parallel.enabled": (
        (False,),
        "DeepSpeed's MoE layers are not supported; experts of the model itself train as other blocks do",
    ),
    "bf16.enable": ((False,), _MISSPELT),
    "fp16.enable": ((False,), _MISSPELT),
    "fp16.consecutive_hysteresis": ((False,), "the count of overflows starts again when the scale grows"),
    "quantize_training": (({}, None), _COMPRESSION),
    "communication_data_type": ((None, "fp32"), _FLOAT32),
    "data_types.grad_accum_dtype": ((None, "fp32"), _FLOAT32),
    "data_types.param_dtype": ((None, "fp32"), _FLOAT32),
    "data_types.buffer_dtype": ((None, "fp32"), "buffers have the type that the model gives them"),
    "data_types.keep_in_fp32_modules": ((None, "auto"), "bf16 and fp16 hold for the whole model"),
    "gradient_allreduce_op": (("mean",), "gradients are averaged"),
    "managed_gradient_accumulation": ((True,), "the engine divides the loss by the accumulation steps"),
    "graph_harvesting": ((False,), "DeepSpeed has removed it; training.compile compiles the model"),
    "use_data_before_expert_parallelism": ((False,), "DeepSpeed's MoE layers are not supported"),
    "sequence_parallel_size": ((1, None), "there is no sequence parallelism here"),
    "optimizer.legacy_fusion": ((False,), "the optimizers are torch's"),
    "optimizer.adam_w_mode": ((True,), 'give {"type": "Adam", "params": {"adam_w_mode": false}}'),
    "zero_optimization.offload_optimizer.device": (("none", None, "cpu"), _HOST_ONLY),
    "zero_optimization.offload_param.device": (("none", None, "cpu"), _HOST_ONLY),
    "zero_optimization.zero_hpz_partition_size": ((1,), _ONE_GROUP),
    "zero_optimization.zero_quantized_weights": ((False,), _QUANTISED),
    "zero_optimization.zero_quantized_nontrainable_weights": ((False,), _QUANTISED),
    "zero_optimization.zero_quantized_gradients": ((False,), _QUANTISED),
    "zero_optimization.zeropp_loco_param": (({}, None), _QUANTISED),
    "zero_optimization.zenflow": (
        ({}, None),
        "it updates some of the weights later than others; here a step updates them all",
    ),
    "zero_optimization.mics_shard_size": ((-1,), _ONE_GROUP),
    "zero_optimization.mics_hierarchical_params_gather": ((False,), _ONE_GROUP),
    "checkpoint.tag_validation": (("Ignore", "Warn", "Fail"), "DeepSpeed has no such value"),
    "checkpoint.load_universal": ((False,), _OWN_FORMAT),
    "checkpoint.use_node_local_storage": ((False,), "all ranks write into one folder, which every host sees"),
}

# The settings for which the DeepSpeed engine differs, with the values that it allows.
HONOURED_BY_DEEPSPEED: dict[str, tuple[Any, ...]] = {
    "torch_autocast.enabled": (False,),
    "zero_optimization.offload_param.device": ("none", None),
}

# Why the DeepSpeed engine cannot honour a setting, if the reason in REFUSED does not hold for it.
_OTHER_SHARDS = "the shards of a rank would differ from the other holders' shards, with which they are averaged"
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
    "zero_optimization.offload_optimizer.device": "a group's shards must be in memory to be averaged; offload to "
    '"cpu"',
    "zero_optimization.offload_param.device": "parameters on a host or disk cannot be averaged between groups; offload "
    'the optimizer, or use sdp.engine "fsdp2"',
    "communication_data_type": _ROUNDED,
    "elasticity.enabled": "the number of groups is fixed for a run",
    "autotuning.enabled": "it would start runs of its own with other layouts",
    "hybrid_engine": _NOT_BUILT,
    "fp16.auto_cast": 'inputs would be cast in training alone; cast them in the model, or use sdp.engine "fsdp2"',
    "fp16.fp16_master_weights_and_grads": _ROUNDED,
    "bf16.bf16_master_weights_and_grads": _ROUNDED,
    "bf16.bf16_optimizer_states": _ROUNDED,
    "torch_autocast.enabled": f'{_ROUNDED}; use sdp.engine "fsdp2", or bf16',
}

# Keys that DeepSpeed 0.19.8 refuses even with a neutral value, or does not know. They are not
# passed to DeepSpeed.
_REMOVED = frozenset(
    """
    compression_training nebula amp quantize_training eigenvalue sparse_attention elasticity
    graph_harvesting curriculum_learning progressive_layer_drop sequence_parallel_size optimizer.adam_w_mode
    zero_optimization.mics_shard_size zero_optimization.mics_hierarchical_params_gather
    zero_optimization.zeropp_loco_param
    data_efficiency bf16.enable fp16.enable
    """.split()
)
# DeepSpeed steps a unit at once, because other groups and checkpoints do not know its sub-groups.
_SUB_GROUPS = frozenset({"zero_optimization.sub_group_size"})
KEPT_FROM_DEEPSPEED = _OF_NO_ENGINE | _REMOVED | _SUB_GROUPS | IGNORED_BY_DEEPSPEED.keys()

# Other names of a key, from earlier versions of DeepSpeed.
ALIASES: dict[str, str] = {"bfloat16": "bf16"}

# DeepSpeed's schedules. It compares names with upper and lower case; we do not.
SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_NEVER = 2**40  # a number of steps that no run reaches
_COMMENTS = ("_", "#", "//")  # a key that starts like this is a comment

# Sections with a switch. While the switch is off, the other keys of the section do not matter.
_SWITCHES = {path.rpartition(".")[0]: path for path in REFUSED if path.endswith(".enabled")}

# Sections in which we use no key.
_FOREIGN_SECTIONS = ("checkpoint", "data_types")

# Our own sections and the settings that we apply ourselves. DeepSpeed does not get them.
_OURS = (
    "sdp",
    "model",
    "data",
    "training",
    "env",
    "activation_checkpointing",
    "tensor_parallel",
    "torch_autocast",
    "train_batch_size",
)
# Sections in which "auto" has a meaning of its own, or none.
_WITHOUT_AUTO = _OURS[:6]


def resolve_spellings(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration ``raw`` in the spelling of DeepSpeed 0.19.

    Old names and switches are replaced. Comments and keys with the value null are removed.
    """
    known = {key: value for key, value in raw.items() if key != "comment" and not key.startswith(_COMMENTS)}
    for old, new in ALIASES.items():
        if old in known and new not in known:
            known[new] = known.pop(old)
    if "steps_per_print" in known and _is_infinite(known["steps_per_print"]):
        known["steps_per_print"] = _NEVER
    scheduler = known.get("scheduler")
    if isinstance(scheduler, dict) and isinstance(scheduler.get("type"), str):
        names = {name.lower(): name for name in SCHEDULES}
        known["scheduler"] = scheduler | {"type": names.get(scheduler["type"].lower(), scheduler["type"])}
    optimizer = known.get("optimizer")
    if isinstance(optimizer, dict) and isinstance(optimizer.get("params"), dict):
        known["optimizer"] = optimizer | {"params": _without_equal_norm(optimizer["params"], known)}
    zero = known.get("zero_optimization")
    if isinstance(zero, bool):
        known["zero_optimization"] = {"stage": int(zero)}
    elif isinstance(zero, dict):
        known["zero_optimization"] = _resolve_offloads(zero)
    return {key: value for key, value in known.items() if value is not None}


def _without_equal_norm(params: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """Return the optimizer's ``params`` without a ``max_grad_norm`` equal to gradient_clipping."""
    same = params.get("max_grad_norm") in (0, raw.get("gradient_clipping"))
    return {key: value for key, value in params.items() if key != "max_grad_norm" or not same}


def _is_infinite(value: Any) -> bool:
    """Whether ``value`` means that a line is never printed."""
    if isinstance(value, str):
        return value.lower() in ("inf", "infinity")
    return value is None or (isinstance(value, float) and math.isinf(value))


def _resolve_offloads(zero: dict[str, Any]) -> dict[str, Any]:
    """Return the section with today's names of the offload sections, and devices in lower case."""
    kept = {key: value for key, value in zero.items() if value is not None or not key.startswith("offload_")}
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_params", "offload_param"),
                     ("cpu_offload_param", "offload_param")):  # fmt: skip
        if isinstance(kept.get(old), bool):
            switch = kept.pop(old)
            kept.setdefault(new, {"device": "cpu" if switch else "none"})
    for key in ("offload_optimizer", "offload_param"):
        section = kept.get(key)
        if isinstance(section, dict):
            stated = {name: value for name, value in section.items() if value is not None}
            if isinstance(section.get("device"), str):
                stated["device"] = section["device"].lower()
            kept[key] = stated
    return kept


def drop_autos(raw: dict[str, Any], is_known: Callable[[str], bool]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Remove the keys of DeepSpeed with the value "auto", so that their defaults apply.

    "auto" is a word of Hugging Face: the Trainer replaces it before DeepSpeed reads the file.

    Args:
        raw: The content of the configuration file.
        is_known: Returns whether the schema has a key with a given path. Unknown keys stay.

    Returns:
        The content without these keys, and the paths of the removed keys.
    """
    dropped: list[str] = []

    def keep(section: dict[str, Any], prefix: str) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, value in section.items():
            path = f"{prefix}{key}"
            is_ours = path in _WITHOUT_AUTO or path in HINT_SECTIONS or path in IGNORED_BY_DEEPSPEED
            may_be = path in HINTS or path in REFUSED or path.startswith(("optimizer.params.", "scheduler.params."))
            if isinstance(value, dict) and not is_ours:
                kept[key] = keep(value, f"{path}.")
            elif value == "auto" and not is_ours and (may_be or is_known(path)):
                dropped.append(path)
            else:
                kept[key] = value
        return kept

    return keep(raw, ""), tuple(dropped)


def split_foreign_keys(raw: dict[str, Any], *, deepspeed: bool = False) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Remove the keys that only DeepSpeed acts on, and refuse those that cannot be ignored.

    Args:
        raw: The content of the configuration file.
        deepspeed: Whether the DeepSpeed engine runs, which acts on the removed keys.

    Returns:
        ``raw`` without these keys, and the paths of the removed keys that have no effect.

    Raises:
        ConfigError: A setting would change the results, and the engine cannot honour it.
    """
    hints: list[str] = []
    ours = _filter(raw, "", hints, deepspeed)
    if deepspeed:
        hints = [path for path in hints if path in KEPT_FROM_DEEPSPEED or path.split(".")[0] in _OURS]
    return ours, tuple(hints)


def for_deepspeed(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the configuration that the DeepSpeed engine gets.

    The result lacks our own sections, the settings that we apply ourselves, and keys that DeepSpeed
    does not know any more.
    """
    theirs = {key: copy.deepcopy(value) for key, value in raw.items() if key not in _OURS and value is not None}
    for path in KEPT_FROM_DEEPSPEED:
        section, _, key = path.rpartition(".")
        holder = theirs.get(section) if section else theirs
        if isinstance(holder, dict):
            holder.pop(key, None)
    return theirs


def _filter(section: dict[str, Any], prefix: str, hints: list[str], deepspeed: bool) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in section.items():
        path = f"{prefix}{key}"
        if path in HINTS or path in HINT_SECTIONS or path in IGNORED_BY_DEEPSPEED:
            if not value or _is_switched_off(value):
                continue
            if deepspeed and path in WHY_NOT_DEEPSPEED:
                raise ConfigError(_refusal(path, value, {"enabled": False} if path in HINT_SECTIONS else False, True))
            if CURRICULUM.startswith(f"{path}."):
                _require_no_curriculum(value, deepspeed)
            hints.append(path)
        elif path in REFUSED:
            if not _is_switched_off(value):
                _require_neutral(path, value, deepspeed)
            if path.startswith("zero_optimization.offload_"):  # the host's memory, which we act on
                kept[key] = value
        elif path in _SWITCHES and isinstance(value, dict):
            switch = _SWITCHES[path]
            _require_neutral(switch, value.get("enabled", REFUSED[switch][0][0]), deepspeed)
        elif isinstance(value, dict) and any(known.startswith(f"{path}.") for known in (*HINTS, *REFUSED)):
            rest = _filter(value, f"{path}.", hints, deepspeed)
            if path not in _FOREIGN_SECTIONS:
                kept[key] = rest
            elif rest:
                unknown = next(iter(rest))
                raise ConfigError(
                    f"{path}.{shorten(unknown)}: unknown key{suggestion(unknown, _foreign_keys(f'{path}.'))}"
                )
        else:
            if deepspeed and path in HONOURED_BY_DEEPSPEED:
                _require_neutral(path, value, deepspeed)
            kept[key] = value
    return kept


def _is_switched_off(value: Any) -> bool:
    return isinstance(value, dict) and value.get("enabled") is False


def _require_no_curriculum(data_efficiency: Any, deepspeed: bool) -> None:
    """Raise ConfigError for a curriculum that is switched on, in a section that is switched on."""
    section = data_efficiency
    for key in CURRICULUM.split(".")[1:]:
        if not isinstance(section, dict) or _is_switched_off(section):
            return
        section = section.get(key, False)
    _require_neutral(CURRICULUM, section, deepspeed)


def _require_neutral(path: str, value: Any, deepspeed: bool) -> None:
    allowed: tuple[Any, ...] = REFUSED[path][0] if path in REFUSED else ()
    if deepspeed:
        allowed = HONOURED_BY_DEEPSPEED.get(path, allowed)
    if any(_same(value, neutral) for neutral in allowed):
        return
    if path.endswith(".enabled") and not isinstance(value, bool):
        raise ConfigError(f"{path}: input should be a valid boolean (found {shorten(json.dumps(value))})")
    raise ConfigError(_refusal(path, value, allowed[0], deepspeed))


def _refusal(path: str, value: Any, neutral: Any, deepspeed: bool) -> str:
    reason = REFUSED[path][1] if path in REFUSED else ""
    reason = WHY_NOT_DEEPSPEED.get(path, reason) if deepspeed else reason
    engine = 'sdp.engine "deepspeed"' if deepspeed else "this engine"
    return (
        f"{path}: {shorten(json.dumps(value))} cannot be honoured by {engine}{f': {reason}' if reason else ''}; "
        f"remove it or set it to {json.dumps(neutral)}"
    )


def _same(value: Any, neutral: Any) -> bool:
    """Whether the values are equal. Upper and lower case do not matter, and 1.0 is 1."""
    if isinstance(value, str) and isinstance(neutral, str):
        return value.lower() == neutral.lower()
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


def known_keys(parents: Sequence[str], root: type[BaseModel]) -> list[str]:
    """List the keys of a section, this project's and DeepSpeed's, to suggest one in an error.

    ``parents`` are the keys that lead to the section from ``root``, the schema of the whole file.
    """
    prefix = "".join(f"{parent}." for parent in parents)
    models: list[type[BaseModel]] = [root]
    for parent in parents:
        if parent.isdigit():  # the index of a section in a list
            continue
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
    paths = (*HINTS, *REFUSED, *HINT_SECTIONS)
    return sorted({path.removeprefix(prefix).split(".")[0] for path in paths if path.startswith(prefix)})
