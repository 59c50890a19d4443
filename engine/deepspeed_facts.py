"""DeepSpeed's engine has a method for almost every key of its configuration. These are their values
here.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .config.schema import Config, MonitorSection
from .errors import ConfigError

Fact = Callable[[Config], Any]


def _offload(config: Config, key: str) -> Any:
    section = getattr(config.zero_optimization, key)
    return section if section is not None and section.device != "none" else None


def _is_scale_dynamic(config: Config) -> bool:
    return config.fp16.enabled and config.fp16.loss_scale == 0


# Methods without arguments of DeepSpeed's engine, with what they return.
FACTS_OF_CONFIG: dict[str, Fact] = {
    "autotp_size": lambda config: config.tensor_parallel.autotp_size,
    "bfloat16_enabled": lambda config: config.bf16.enabled,
    "communication_data_type": lambda config: torch.float32,
    "dataloader_drop_last": lambda config: False,
    "dynamic_loss_scale": _is_scale_dynamic,
    "fp16_auto_cast": lambda config: config.fp16.auto_cast,
    "fp16_enabled": lambda config: config.fp16.enabled,
    "get_data_types": lambda config: (getattr(torch, config.precision), torch.float32),
    "gradient_clipping": lambda config: config.gradient_clipping,
    "gradient_predivide_factor": lambda config: 1.0,
    "initial_dynamic_scale": lambda config: 2**config.fp16.initial_scale_power,
    "loss_scale": lambda config: config.fp16.loss_scale if config.fp16.enabled else 1.0,
    "managed_gradient_accumulation": lambda config: True,
    "optimizer_name": lambda config: config.optimizer.type.lower() if config.optimizer is not None else None,
    "optimizer_params": lambda config: dict(config.optimizer.params) if config.optimizer is not None else None,
    "postscale_gradients": lambda config: True,
    "scheduler_name": lambda config: config.scheduler.type if config.scheduler is not None else None,
    "scheduler_params": lambda config: dict(config.scheduler.params) if config.scheduler is not None else None,
    "steps_per_print": lambda config: config.steps_per_print,
    "torch_autocast_enabled": lambda config: config.torch_autocast.enabled,
    "wall_clock_breakdown": lambda config: config.wall_clock_breakdown,
    "zero_allow_untested_optimizer": lambda config: True,
    "zero_cpu_offload": lambda config: _offload(config, "offload_optimizer") is not None,
    "zero_gather_16bit_weights_on_model_save": lambda config: True,
    "zero_offload_optimizer": lambda config: _offload(config, "offload_optimizer"),
    "zero_offload_param": lambda config: _offload(config, "offload_param"),
    "zero_optimization_stage": lambda config: config.zero_optimization.stage,
    "zero_optimization": lambda config: config.zero_optimization.stage > 0,
    "zero_optimization_partition_gradients": lambda config: config.zero_optimization.stage >= 2,
    "zero_optimization_partition_weights": lambda config: config.zero_optimization.stage >= 3,
    "zero_use_cpu_optimizer": lambda config: _offload(config, "offload_optimizer") is not None,
}

# Parts of DeepSpeed that are not used here, so these methods return False.
FACTS_THAT_ARE_FALSE = frozenset(
    "amp_enabled bf16_master_weights_and_gradients bf16_optimizer_states fp16_master_weights_and_gradients "
    "autotuning_enabled autotuning_profile_model_info checkpoint_tag_validation_enabled "
    "checkpoint_tag_validation_fail curriculum_enabled_legacy curriculum_learning_enabled data_efficiency_enabled "
    "data_sampling_enabled dump_state dynamic_loss_scale_args eigenvalue_enabled flops_profiler_enabled is_compiled "
    "is_deepcompile_active is_deepcompile_enabled is_sanity_checks_enabled load_universal_checkpoint "
    "memory_breakdown optimizer_legacy_fusion pld_enabled quantize_training random_ltd_enabled "
    "sparse_gradients_enabled super_offload use_node_local_storage zero_load_from_fp32_weights "
    "zero_nvme_offload_optimizer zero_quantized_gradients zero_quantized_weights "
    "zero_quantized_nontrainable_weights".split()
)


# Names of DeepSpeed's engine that this project does not offer, with the reason.
METHODS_OUT_OF_SCOPE = {
    "set_batch_fn": "pipelines are not supported; call engine(batch)",
    "set_dataloader": "pipelines are not supported; call engine(batch)",
    "train_batch": "pipelines are not supported; call engine(batch), engine.backward(loss) and engine.step()",
    "eval_batch": "pipelines are not supported; call engine.evaluate(batches)",
    "reset_activation_shape": "pipelines are not supported",
    "register_comm_hook": "gradients are averaged among holders, so a hook of torch's DDP does not apply",
    "random_ltd_initialize": "DeepSpeed's random layer-wise token dropping is not supported",
    "set_custom_curriculum_learning_schedule": "DeepSpeed's curricula are not supported; order the data set itself",
    "offload_states": "states stay where they are; give zero_optimization.offload_optimizer in the configuration",
    "reload_states": "states stay where they are; give zero_optimization.offload_optimizer in the configuration",
    "load_moe_state_dict": "DeepSpeed's MoE layers are not supported",
    "get_sequence_parallel_group": "there is no sequence parallelism here",
    "curriculum_learning_config": "DeepSpeed's curricula are not supported; order the data set itself",
    "data_efficiency_config": "DeepSpeed's data pipeline is not supported; order the data set itself",
    "data_sampling_config": "DeepSpeed's data pipeline is not supported; order the data set itself",
    "random_ltd_config": "DeepSpeed's random layer-wise token dropping is not supported",
    "allreduce_gradients": "backward() averages the gradients at the accumulation boundary",
    "load_module_state_dict": "groups hold parts of the model; give the weights to sdp.initialize, or use "
    "load_checkpoint",
    "float": "the configuration chooses the model's type, with bf16 or fp16",
    "double": "the configuration chooses the model's type, with bf16 or fp16",
    "compile": "give training.compile in the configuration",
}
ATTRIBUTES_OUT_OF_SCOPE = {
    "random_ltd_scheduler": "DeepSpeed's random layer-wise token dropping is not supported",
    "curriculum_scheduler_legacy": "DeepSpeed's curricula are not supported; order the data set itself",
    "compression_scheduler": "DeepSpeed's compression is not supported",
    "quantizer": "DeepSpeed's compression is not supported",
    "eigenvalue": "DeepSpeed's compression is not supported",
    "progressive_layer_drop": "DeepSpeed's progressive layer drop is not supported",
    "grid": "pipelines are not supported; engine.layout.mesh has the layout",
    "checkpoint_engine": "engine.save_checkpoint writes checkpoints of this project's format",
    "timers": "wall_clock_breakdown in the configuration prints the times of a step",
    "expert_parallel_group": "DeepSpeed's MoE layers are not supported",
    "expert_data_parallel_group": "DeepSpeed's MoE layers are not supported",
    "seq_parallel_group": "there is no sequence parallelism here",
    "has_moe_layers": "DeepSpeed's MoE layers are not supported",
}


class OutOfScopeError(ConfigError, AttributeError):
    """A part of DeepSpeed is not offered here. ``hasattr`` is False for such an attribute."""


class ThroughputTimer:
    """The part of DeepSpeed's ``engine.tput_timer`` that scripts use."""

    def __init__(self) -> None:
        self.epoch_count = 0
        self.global_samples = 0
        self._start = time.perf_counter()

    def update_epoch_count(self) -> None:
        """Count one epoch more."""
        self.epoch_count += 1

    def avg_samples_per_sec(self) -> float:
        """Samples of all ranks per second since the engine was made."""
        return self.global_samples / (time.perf_counter() - self._start)


class DeepSpeedMonitor:
    """``engine.monitor``: writes a script's own curves, as DeepSpeed's monitor does.

    The sections ``tensorboard`` and ``csv_monitor`` of the configuration say where. ``wandb`` is
    used by ``sdp train`` only.
    """

    def __init__(self, config: Config, *, writes: bool):
        """``writes``: whether this rank writes. Only rank 0 does."""
        self._writes = writes
        self._tensorboard, self._csv = config.tensorboard, config.csv_monitor
        self._writer: Any = None
        self.enabled = config.tensorboard.enabled or config.csv_monitor.enabled

    def write_events(self, events: Sequence[tuple[str, Any, int]]) -> None:
        """Write points of curves: the curve's name, the value, and its place on the x axis."""
        for name, value, step in events if self._writes else ():
            if self._tensorboard.enabled:
                if self._writer is None:
                    from torch.utils.tensorboard import SummaryWriter  # takes a second to import

                    self._writer = SummaryWriter(str(_folder(self._tensorboard)))
                self._writer.add_scalar(name, value, step)
                self._writer.flush()
            if self._csv.enabled:
                self._write_row(name, value, step)

    def _write_row(self, name: str, value: Any, step: int) -> None:
        folder = _folder(self._csv)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{name.replace('/', '_')}.csv"
        is_new = not file.exists()
        with file.open("a", newline="", encoding="utf-8") as stream:
            rows = csv.writer(stream)
            if is_new:
                rows.writerow(["step", name.rsplit("/", 1)[-1]])
            rows.writerow([step, float(value)])


def _folder(section: MonitorSection) -> Path:
    return Path(section.output_path or "runs") / section.job_name
