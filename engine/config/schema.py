"""The schema of the configuration file: one validated class per section.

DeepSpeed's own keys keep DeepSpeed's meaning. The sections ``sdp``, ``model``, ``data`` and
``training`` are ours. docs/configuration.md explains every key. An unknown key is an error, with a
suggestion. Keys that only DeepSpeed acts on are removed before (``deepspeed_keys.py``).
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from ..errors import quote
from ..object_store import is_url
from .method import CopiesSection, Masking, MaskingSchedule, MaskingSetting, PathsSection, SyncSection
from .section import (
    NonNegativeInt,
    PathText,
    Pixels,
    PositiveInt,
    RankCount,
    Samples,
    Section,
    Seed,
    Tokens,
    Whole,
    Width,
)

# The variables that ``env`` may set, by subject. ``*`` stands for any characters. A
# configuration may come from somebody else. So a variable is listed only if no value of it chooses
# code that a rank runs, or a file that it writes. docs/clusters.md has the same table.
ALLOWED: dict[str, tuple[str, ...]] = {
    "NCCL": ("NCCL_*", "RCCL_*", "TORCH_NCCL_*"),
    "gloo": ("GLOO_*",),
    "UCX": (
        "UCX_TLS", "UCX_NET_DEVICES", "UCX_IB_*", "UCX_RC_*", "UCX_UD_*", "UCX_DC_*", "UCX_TCP_*", "UCX_RNDV_*",
        "UCX_MAX_*", "UCX_MEMTYPE_CACHE", "UCX_LOG_LEVEL", "UCX_WARN_UNUSED_ENV_VARS",
    ),
    "libfabric": (
        "FI_PROVIDER", "FI_CXI_*", "FI_EFA_*", "FI_OFI_*", "FI_MR_*", "FI_HMEM_*", "FI_LOG_LEVEL", "FI_UNIVERSE_SIZE",
    ),
    "threads": (
        "OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
        "KMP_AFFINITY", "KMP_BLOCKTIME", "TOKENIZERS_PARALLELISM",
    ),
    "torch and CUDA": (
        "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_CPP_LOG_LEVEL",
        "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES", "MPICH_GPU_SUPPORT_ENABLED",
    ),
}  # fmt: skip

# These are refused even if a pattern of ALLOWED matches: they load a library, or name a file or a
# program.
REFUSED = ("*PLUGIN*", "*FILE*", "*_PATH*", "*_DIR*", "*_LIB*", "*_CONF_FILE", "*_PIPE*")


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{quote(name)} cannot be the name of an environment variable; use letters, digits and _")
    allowed = any(fnmatchcase(name, pattern) for patterns in ALLOWED.values() for pattern in patterns)
    if not allowed or any(fnmatchcase(name, pattern) for pattern in REFUSED):
        raise ValueError(
            f"{name} cannot be set here, because it is not one of the listed variables of network libraries, threads "
            "and torch (docs/clusters.md); set it where the processes are started"
        )
    return name


VariableName = Annotated[str, AfterValidator(_check_name)]
VariableValue = Annotated[str, Field(pattern=r"^[^\x00]*$")] | int


class SourceSection(Section):
    """One of several data sets that are mixed: a directory of tokens, and its weight.

    The weights of the data sets are relative: samples are drawn in proportion to them.
    """

    path: PathText
    weight: Annotated[float, Field(ge=0, le=1e9)]  # the sum of all weights must be finite


class DataSection(Section):
    """The data to train on: tokens that ``sdp prepare`` wrote, or images if ``name`` is given."""

    name: Literal["digits", "cifar10", "cifar100", "folder"] | None = None
    path: PathText | None = None
    sources: Annotated[list[SourceSection], Field(min_length=1, max_length=1000)] | None = None
    sequence_length: Tokens = 512
    document_mask: bool = False
    tokenizer: PathText | None = None
    vocab_size: Width | None = None
    num_workers: NonNegativeInt = 0
    image_size: Pixels | None = None
    augment: bool | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        of_tokens, of_images = (
            ("sources", "sequence_length", "document_mask", "tokenizer", "vocab_size"),
            ("image_size", "augment"),
        )
        for key in of_images if self.name is None else of_tokens:
            # Compare with the default, because a run's own configuration file sets every key.
            if getattr(self, key) != type(self).model_fields[key].default:
                whose = (
                    "images (data.name)" if self.name is None else f"tokens, and data.name is {json.dumps(self.name)}"
                )
                raise ValueError(f"{key} is for {whose}; remove it")
        if self.sources is not None and self.path is not None:
            raise ValueError("path and sources are both given; remove path, or name it as one of the sources")
        if self.sources is not None and not any(source.weight for source in self.sources):
            raise ValueError("sources: every weight is 0; give at least one source a larger weight")
        if self.name == "digits" and self.path is not None:
            raise ValueError(
                'path has no meaning for "digits", which scikit-learn contains; remove it, or name another data set'
            )
        if self.name not in (None, "digits") and self.path is None:
            raise ValueError(f"path is required for {json.dumps(self.name)}: {_WHERE[self.name]}")
        if self.name is not None and self.path is not None and is_url(self.path):
            raise ValueError("path: images are read from a directory, not from an object store; copy them to this host")
        if self.name != "folder" and self.image_size is not None:
            raise ValueError(
                f'image_size is for "folder", and {json.dumps(self.name)} has images of a fixed size; remove the key'
            )
        return self

    @property
    def takes_default_corpus(self) -> bool:
        """Whether no data is named, so that the run prepares the default corpus."""
        return self.name is None and self.path is None and self.sources is None

    @property
    def tokens_per_sample(self) -> int:
        """The number of tokens in one sample. An image counts as one token."""
        return 1 if self.name is not None else self.sequence_length


_WHERE = {
    "cifar10": "cifar-10-binary.tar.gz, or the directory that it was unpacked to",
    "cifar100": "cifar-100-binary.tar.gz, or the directory that it was unpacked to",
    "folder": "the directory with train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg",
}


class TrainingSection(Section):
    """The length of the run, evaluations, checkpoints, and what happens when something fails.

    The time limit of a collective is the longest of the start, save and step timeouts.
    """

    steps: PositiveInt | None = None
    evaluate_every: NonNegativeInt = 0
    evaluate_batches: PositiveInt = 8
    save_every: NonNegativeInt = 0
    keep: PositiveInt = 2
    keep_every: NonNegativeInt = 0
    max_failed_saves: PositiveInt = 3
    max_skips: NonNegativeInt = 10
    loss_weighting: Literal["tokens", "ranks"] | None = None
    on_spike: Literal["none", "skip", "rollback", "stop"] = "none"
    spike_sigma: Annotated[float, Field(gt=0)] = 6.0
    spike_window: Annotated[int, Field(ge=2, le=2**16)] = 128
    init_from: PathText | None = None
    async_save: bool = False
    start_timeout: Annotated[float, Field(gt=0)] = 1800.0
    save_timeout: Annotated[float, Field(gt=0)] = 1800.0
    step_timeout: Annotated[float, Field(gt=0)] = 600.0
    seed: Seed = 0
    compile: bool = False
    deterministic: bool = False

    @model_validator(mode="after")
    def _can_roll_back(self) -> Self:
        if self.on_spike == "rollback" and not self.save_every:
            raise ValueError(
                'on_spike "rollback" returns to the last checkpoint, but save_every is 0; set how often to save'
            )
        return self


class NamedParams(Section):
    """DeepSpeed's ``{"type": name, "params": {…}}`` for an optimizer or a schedule.

    The keys in ``params`` depend on the type, so they are checked later.
    """

    type: str
    params: dict[str, Any] = Field(default_factory=dict)


class Enabled(Section):
    """A section whose only key is ``enabled``."""

    enabled: bool = False


class FP16Section(Section):
    """DeepSpeed's ``fp16`` section: compute in float16 and scale the loss.

    The loss is multiplied by ``loss_scale``, so that gradients do not underflow. 0 means a dynamic
    scale, which starts at 2 to the power ``initial_scale_power``. A step that overflows is skipped.
    After ``hysteresis`` such steps the scale is halved, but not below ``min_loss_scale``. After
    ``loss_scale_window`` steps without an overflow the scale is doubled.
    """

    enabled: bool = False
    loss_scale: Annotated[float, Field(ge=0)] = 0.0
    initial_scale_power: Annotated[int, Field(ge=0, le=64), Whole] = 16
    loss_scale_window: PositiveInt = 1000
    hysteresis: PositiveInt = 2
    min_loss_scale: Annotated[float, Field(gt=0)] = 1

    @model_validator(mode="after")
    def _begins_above_the_minimum(self) -> Self:
        if self.loss_scale == 0 and self.min_loss_scale > 2**self.initial_scale_power:
            raise ValueError(
                f"min_loss_scale {self.min_loss_scale:g} is more than the scale at the start, "
                f"2^{self.initial_scale_power}"
            )
        return self


class OffloadSection(Section):
    """DeepSpeed's ``offload_optimizer`` or ``offload_param``: keep a part of the state on the host.

    With a GPU, the host's memory is page-locked, so that copies overlap with computation.
    """

    device: Literal["none", "cpu"] = "none"


class ZeroSection(Section):
    """What the ranks of a group shard, as in DeepSpeed's ZeRO.

    Stage 0 shards nothing, 1 the optimizer state, 2 also the gradients, and 3 also the parameters.
    """

    stage: Literal[0, 1, 2, 3] = 0
    offload_optimizer: OffloadSection | None = None
    offload_param: OffloadSection | None = None

    @property
    def offloads(self) -> bool:
        """Whether optimizer state or parameters are kept in the host's memory."""
        sections = (self.offload_optimizer, self.offload_param)
        return any(section is not None and section.device == "cpu" for section in sections)


class TorchAutocastSection(Section):
    """DeepSpeed's ``torch_autocast``: run the forward pass under ``torch.autocast``.

    Autocast computes in ``dtype``. Parameters, gradients and their averages stay float32.
    """

    enabled: bool = False
    dtype: Literal["bfloat16", "float16", "torch.bfloat16", "torch.float16", "bf16", "fp16"] = "bfloat16"


class TensorParallelSection(Section):
    """Tensor parallelism inside a group. ``autotp_size`` ranks share every matrix."""

    autotp_size: RankCount = 1


class ActivationCheckpointingSection(Section):
    """Which activations backward computes again, instead of keeping them in memory.

    "selective" keeps the results of matrix products and of attention.
    """

    mode: Literal["none", "full", "selective"] = "none"


class MonitorSection(Section):
    """DeepSpeed's ``tensorboard`` or ``csv_monitor`` section: write curves of the run to files.

    The files go to ``output_path/job_name``. If no path is given, ``sdp train`` writes them to the
    dump directory, and a script to ``runs/job_name``.
    """

    enabled: bool = False
    output_path: PathText = ""
    job_name: str = "sdp"


class WandbSection(Section):
    """DeepSpeed's ``wandb`` section: log to Weights & Biases. This needs the package wandb."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "sdp"


class SDPSection(Section):
    """Subnetwork Data Parallelism: how many groups there are, and which units each group holds."""

    groups: RankCount = 1
    capacity: float | list[float] = 1.0
    granularity: Literal["block", "neuron"] = "block"
    masking: MaskingSetting = "forward"
    placement: (
        Literal["cyclic", "balanced", "contiguous", "random"]
        | Annotated[dict[str, list[NonNegativeInt]], Field(min_length=1)]
    ) = "cyclic"
    profile: Literal["depth", "uniform", "auto"] | list[PositiveInt] = "depth"
    units: Literal["auto"] | list[str] = "auto"
    protect: list[str] = Field(default_factory=list)
    branch_scale: Literal["none", "train", "eval"] = "none"
    neuron_groups: Width = 8
    seed: Seed = 0
    engine: Literal["fsdp2", "deepspeed"] = "fsdp2"
    check_interval: NonNegativeInt = 100
    copies: CopiesSection = Field(default_factory=CopiesSection)
    sync: SyncSection | None = None
    lr_scale: Literal["none", "auto"] | Annotated[float, Field(ge=0, le=4)] = "none"
    paths: PathsSection | None = None

    @model_validator(mode="before")
    @classmethod
    def _contiguous_is_uniform(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("placement") == "contiguous":
            return {"profile": "uniform", **values}
        return values

    @property
    def maskings(self) -> tuple[Masking, ...]:
        """The maskings that the phases of the run use, each listed once."""
        if isinstance(self.masking, str):
            return (self.masking,)
        return tuple(dict.fromkeys(phase.masking for phase in self.masking))


class Config(Section):
    """The configuration of a run. docs/configuration.md explains every key."""

    train_batch_size: Samples | None = None
    train_micro_batch_size_per_gpu: Samples | None = None
    gradient_accumulation_steps: Samples | None = None
    gradient_clipping: Annotated[float, Field(ge=0)] = 0.0
    steps_per_print: PositiveInt = 10
    wall_clock_breakdown: bool = False
    optimizer: NamedParams | None = None
    scheduler: NamedParams | None = None
    bf16: Enabled = Enabled()
    fp16: FP16Section = FP16Section()
    torch_autocast: TorchAutocastSection = TorchAutocastSection()
    zero_optimization: ZeroSection = ZeroSection()
    tensor_parallel: TensorParallelSection = TensorParallelSection()
    activation_checkpointing: ActivationCheckpointingSection = ActivationCheckpointingSection()
    tensorboard: MonitorSection = MonitorSection()
    csv_monitor: MonitorSection = MonitorSection()
    wandb: WandbSection = WandbSection()
    sdp: SDPSection = SDPSection()
    model: dict[str, Any] = Field(default_factory=dict)
    data: DataSection = DataSection()
    training: TrainingSection = TrainingSection()
    env: dict[VariableName, VariableValue] = Field(default_factory=dict)

    _hints: tuple[str, ...] = PrivateAttr(default=())
    _autos: tuple[str, ...] = PrivateAttr(default=())
    _replaces_deepspeed: bool = PrivateAttr(default=False)
    _deepspeed: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def precision(self) -> Literal["float32", "bfloat16", "float16"]:
        """The dtype in which the model computes, by torch's name."""
        return "bfloat16" if self.bf16.enabled else "float16" if self.fp16.enabled else "float32"

    @property
    def autocast_dtype(self) -> Literal["bfloat16", "float16"] | None:
        """The dtype of ``torch_autocast`` by torch's name, or None if it is off."""
        if not self.torch_autocast.enabled:
            return None
        return "bfloat16" if "bf" in self.torch_autocast.dtype else "float16"

    @property
    def scales_loss(self) -> bool:
        """Whether a part of the run computes in float16, so that the loss must be scaled."""
        return self.fp16.enabled or self.autocast_dtype == "float16"

    @property
    def masking_schedule(self) -> MaskingSchedule:
        """The schedule that says which masking each step has."""
        return MaskingSchedule.of(self.sdp.masking, self.training.steps)

    @property
    def compute_bytes(self) -> int:
        """The size in bytes of one element in :attr:`precision`."""
        return 4 if self.precision == "float32" else 2

    @property
    def deepspeed(self) -> dict[str, Any]:
        """A copy of the settings for the DeepSpeed engine. Empty if the engine is "fsdp2"."""
        return copy.deepcopy(self._deepspeed)

    def resolved(self) -> dict[str, Any]:
        """Return all settings as JSON, with all defaults. This JSON starts the same run."""
        return _completed(self.model_dump(mode="json"), self._deepspeed)

    def without_monitors(self) -> Config:
        """Return a copy without monitors, for a caller that writes the curves itself."""
        off = MonitorSection()
        return self.model_copy(update={"tensorboard": off, "csv_monitor": off, "wandb": WandbSection()})

    @property
    def autos(self) -> tuple[str, ...]:
        """The keys of DeepSpeed that are "auto" in the file. Defaults apply in their place."""
        return self._autos

    @property
    def replaces_deepspeed(self) -> bool:
        """Whether "fsdp2" runs although the file says "deepspeed", because the stage is 0."""
        return self._replaces_deepspeed

    @property
    def hints(self) -> tuple[str, ...]:
        """The keys in the file that are performance hints for DeepSpeed and have no effect here."""
        return self._hints


def _completed(settings: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings`` plus the keys of ``more`` that are missing in it, at every level."""
    nested = (key for key in settings if isinstance(settings[key], dict) and isinstance(more.get(key), dict))
    both = {key: _completed(settings[key], more[key]) for key in nested}
    return {**settings, **both, **{key: copy.deepcopy(value) for key, value in more.items() if key not in settings}}
