"""Constants of DeepSpeed that scripts import, such as those of ``deepspeed.runtime.config``."""

from __future__ import annotations

from typing import Any

from ..config.load import load_config
from ..config.schema import Config
from ..errors import ConfigError as DeepSpeedConfigError
from .namespace import attributes

__all__ = ["DeepSpeedConfigError"]
__path__: list[str] = []


class DeepSpeedConfig(Config):
    """A configuration, made with the arguments of DeepSpeed's class."""

    def __new__(cls, config: Any, mpu: Any = None, mesh_device: Any = None) -> Any:
        """Read a file or a mapping with :func:`sdp.load_config`, and return the :class:`Config`."""
        return load_config(config)


# deepspeed.constants
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
CROSS_RANK, CROSS_SIZE, LOCAL_RANK = "CROSS_RANK", "CROSS_SIZE", "LOCAL_RANK"

# deepspeed.runtime.config: names of optimizers in lower case
ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"
MUADAM_OPTIMIZER, MUADAMW_OPTIMIZER, MUSGD_OPTIMIZER = "muadam", "muadamw", "musgd"
ONEBIT_ADAM_OPTIMIZER, ONEBIT_LAMB_OPTIMIZER, ZERO_ONE_ADAM_OPTIMIZER = "onebitadam", "onebitlamb", "zerooneadam"
DEEPSPEED_OPTIMIZERS = [
    ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, MUADAM_OPTIMIZER, MUADAMW_OPTIMIZER,
    MUSGD_OPTIMIZER, LION_OPTIMIZER, MUON_OPTIMIZER,
]  # fmt: skip
TORCH_ADAM_PARAM = "torch_adam"
ADAM_W_MODE = ADAM_W_MODE_PARAM = "adam_w_mode"
ADAM_W_MODE_DEFAULT = True

# deepspeed.runtime.constants
ROUTE_TRAIN, ROUTE_EVAL, ROUTE_PREDICT, ROUTE_ENCODE = "train", "eval", "predict", "encode"
PLD_THETA, PLD_GAMMA = "theta", "gamma"

# deepspeed.runtime.zero.constants, of earlier versions
ZERO_OPTIMIZATION_DISABLED, ZERO_OPTIMIZATION_OPTIMIZER_STATES = 0, 1
ZERO_OPTIMIZATION_GRADIENTS, ZERO_OPTIMIZATION_WEIGHTS = 2, 3

# deepspeed.checkpoint.constants: keys of DeepSpeed's checkpoints
OPTIMIZER_STATE_DICT = "optimizer_state_dict"
FP32_GROUPS, FP32_FLAT_GROUPS = "fp32_groups", "fp32_flat_groups"
SINGLE_PARTITION_OF_FP32_GROUPS = "single_partition_of_fp32_groups"
BASE_OPTIMIZER_STATE = "base_optimizer_state"
GROUP_PADDINGS = "group_paddings"
PARTITION_COUNT = "partition_count"
ZERO_STAGE = "zero_stage"
PARAM, PARAM_GROUPS, PARAM_SHAPES, BUFFER_NAMES = "param", "param_groups", "param_shapes", "buffer_names"
FROZEN_PARAM_SHAPES, FROZEN_PARAM_FRAGMENTS = "frozen_param_shapes", "frozen_param_fragments"
MODEL_FILE_PREFIX, MODEL_FILE_SUFFIX = "mp_rank_", "_model_states.pt"
ZERO_FILE_PREFIX, OPTIM_FILE_SUFFIX, LAYER_FILE_PREFIX = "zero_pp_rank_", "_optim_states.pt", "layer_"
DS_VERSION = "ds_version"
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
UNIVERSAL_CHECKPOINT_VERSION_KEY = "universal_checkpoint_version"
UNIVERSAL_CHECKPOINT_VERSION_VALUE = 0.4
VOCAB_TENSOR = "vocab_tensor"
PADDED_VOCAB_SIZE, ORIGINAL_VOCAB_SIZE = "padded_vocab_size", "original_vocab_size"
PARAM_SLICE_MAPPINGS = "param_slice_mappings"
VOCABULARY_PARAMETER_PATTERNS = "vocabulary_parameter_patterns"
PIPELINE_REPLICATED_PARAMETER_PATTERNS = "pipeline_replicated_parameter_patterns"
PARAMETER_TO_AVERAGE_PATTERNS = "parameter_to_average_patterns"
PARAMETER_WITH_ROW_PARALLELISM_PATTERNS = "parameter_with_row_parallelism_patterns"
TP_REPLICATED_PARAMETER_PATTERNS = "tp_replicated_parameter_patterns"
PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 = "parameter_with_2_sub_params_cat_dim_0"
PARAMETER_WITH_SUB_PARAMS = "parameter_with_sub_params"

__getattr__ = attributes(__name__)
