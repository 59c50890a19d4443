"""DeepSpeed's keys that we do not act on: performance hints, and settings with a neutral value.

Performance hints may be ignored. Settings that change the results must not be ignored. Keys and
defaults: DeepSpeed 0.19, docs/_pages/config-json.md, and earlier versions for keys that public
files still have.
"""

from __future__ import annotations

import re
from typing import Any

DEEPSPEED_CLIPS_AT = 1.0  # DeepSpeed's gradient_clipping if the file does not set it

# Hints that DeepSpeed 0.19.8 does not know (any more), or that we apply ourselves. It does not get
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
    zero_optimization.overlap_comm zero_optimization.contiguous_gradients zero_optimization.reduce_scatter
    zero_optimization.reduce_bucket_size zero_optimization.allgather_bucket_size zero_optimization.allgather_partitions
    zero_optimization.sub_group_size zero_optimization.round_robin_gradients zero_optimization.ignore_unused_parameters
    zero_optimization.stage3_max_live_parameters zero_optimization.max_live_parameters
    zero_optimization.stage3_max_reuse_distance zero_optimization.max_reuse_distance
    zero_optimization.stage3_prefetch_bucket_size zero_optimization.prefetch_bucket_size
    zero_optimization.stage3_param_persistence_threshold zero_optimization.param_persistence_threshold
    zero_optimization.stage3_model_persistence_threshold zero_optimization.model_persistence_threshold
    zero_optimization.stage3_gather_16bit_weights_on_model_save zero_optimization.gather_16bit_weights_on_model_save
    zero_optimization.stage3_gather_fp16_weights_on_model_save
    zero_optimization.stage3_module_granularity_threshold zero_optimization.module_granularity_threshold
    zero_optimization.stage3_use_all_reduce_for_fetch_params zero_optimization.use_all_reduce_for_fetch_params
    zero_optimization.stage3_allgather_sequential zero_optimization.allgather_sequential
    zero_optimization.load_from_fp32_weights zero_optimization.parameter_alignment
    zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.elastic_checkpoint
    zero_optimization.memory_efficient_linear zero_optimization.pipeline_loading_checkpoint
    zero_optimization.override_module_apply zero_optimization.log_trace_cache_warnings
    zero_optimization.enable_sanity_checks zero_optimization.leaf_module zero_optimization.compute_grad_norm
    zero_optimization.save_muon_momentum_buffer_in_memory
    fp16.fp16_master_weights_and_grads
    bf16.check_grad_overflow bf16.immediate_grad_update bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
    torch_autocast.lower_precision_safe_modules tensor_parallel.tp_overlap_comm tensor_parallel.keep_module_on_host
    activation_checkpointing.contiguous_memory_optimization activation_checkpointing.synchronize_checkpoint_boundary
    activation_checkpointing.profile activation_checkpointing.partition_activations
    activation_checkpointing.cpu_checkpointing activation_checkpointing.number_checkpoints
    checkpoint.writer checkpoint.parallel_write
    """.split()
)
HINTS |= {
    f"zero_optimization.{section}.{key}"
    for section in ("offload_optimizer", "offload_param")
    for key in "nvme_path buffer_count buffer_size max_in_cpu pipeline pipeline_read pipeline_write fast_init ratio "
    "super_offload cpuadam_cores_perc".split()
}

# Sections that have no effect here, whatever is in them: by section, the reason, which is logged.
HINT_SECTIONS: dict[str, str] = {
    "aio": "it tunes reads and writes of NVMe disks",
    "compile": "it acts when the script calls engine.compile()",
    "compression_training": "DeepSpeed's init_compression and its engine act on it; the engine does not run here",
    "sparse_attention": "a model of DeepSpeed's SparseSelfAttention reads it, which DeepSpeed has removed",
    "hybrid_engine": "it makes generation faster",
    "pipeline": "it acts on a PipelineModule, which does not exist here",
    "flops_profiler": 'it measures; sdp.engine "deepspeed" has it',
    "comms_logger": 'it measures; sdp.engine "deepspeed" has it',
    "data_efficiency": "random-ltd acts when the script calls DeepSpeed's convert_to_random_ltd",
}

# Keys of public files that DeepSpeed ignores, because they are not its own or are in the wrong
# section. They have no effect here either; the log says so. By path, what to write instead.
_BELOW_ZERO = "DeepSpeed reads it in zero_optimization only, and ignores it here; move it there"
IGNORED_BY_DEEPSPEED: dict[str, str] = {
    "offload_optimizer": f"{_BELOW_ZERO}. So far nothing is offloaded",
    "offload_param": f"{_BELOW_ZERO}. So far nothing is offloaded",
    **{path.split(".")[1]: _BELOW_ZERO for path in sorted(HINTS) if re.fullmatch(r"zero_optimization\.\w+", path)},
    "max_grad_norm": "DeepSpeed ignores it; gradient_clipping clips gradients",
    "min_lr": "DeepSpeed ignores it; the schedule has its rates in scheduler.params",
    "log": "DeepSpeed ignores it; steps_per_print is a key of the top level",
    "comms_config": "DeepSpeed ignores it; comms_logger counts messages",
    "monitor_config": "DeepSpeed ignores it; tensorboard, csv_monitor and wandb are keys of the top level",
}

CURRICULUM = "data_efficiency.data_sampling.curriculum_learning.enabled"

# Settings that change the results and that we cannot honour: the values that are accepted,
# DeepSpeed's neutral one first, and why no other value is.
_FLOAT32 = "gradients are averaged in float32, and master weights are float32"
_ONE_GROUP = "it arranges the ranks of one data-parallel job; sdp.groups and zero_optimization.stage do so here"
_QUANTISED = "what ranks send is not quantised here"
_CURRICULUM = "it changes the order or the length of the samples; order the data set itself"
_COMPRESSION = "compression is out of scope, and DeepSpeed has removed it"
_MISSPELT = "the key is called enabled; DeepSpeed refuses this one, and its earlier versions ignored it"
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
    "fp16.auto_cast": (False,),
    "torch_autocast.enabled": (False,),
    "zero_optimization.offload_param.device": ("none", None),
}

# Why the DeepSpeed engine cannot honour a setting. Without a reason here, that of REFUSED holds.
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
    "zero_optimization.offload_optimizer.device": "a group's shards must be in memory to be averaged; offload to "
    '"cpu"',
    "zero_optimization.offload_param.device": "parameters on a host or disk are not followed between groups; offload "
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

# What DeepSpeed 0.19.8 refuses even with a neutral value, or does not know. It does not get them.
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
