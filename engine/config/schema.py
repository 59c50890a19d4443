"""The schema of the configuration file: one validated class per section.

DeepSpeed's own keys keep DeepSpeed's meaning. The sections ``sdp``, ``model``, ``data`` and
``training`` are ours. An unknown key is an error everywhere, with a suggestion. Before this,
``deepspeed_filter.py`` removes the keys that only DeepSpeed acts on.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from .data_section import DataSection
from .masking import Masking, MaskingSchedule, MaskingSetting
from .section import NonNegativeInt, PathText, PositiveInt, RankCount, Samples, Section, Seed, Whole, Width
from .sync import SyncSection
from .training_section import TrainingSection
from .variables import VariableName, VariableValue


class NamedParams(Section):
    """DeepSpeed's ``{"type": name, "params": {…}}``. The builder of ``type`` checks ``params``."""

    type: str
    params: dict[str, Any] = Field(default_factory=dict)


class Enabled(Section):
    """A section that has only a switch."""

    enabled: bool = False


class FP16Section(Section):
    """DeepSpeed's ``fp16`` section: compute in float16 and scale the loss.

    The loss is multiplied by ``loss_scale``, so that gradients do not underflow. 0 means a dynamic
    scale, which starts at 2 to the power ``initial_scale_power``. A step that overflows is skipped.
    After ``hysteresis`` such steps the scale is halved, but not below ``min_loss_scale``. With
    ``consecutive_hysteresis``, a step without an overflow starts this count again. After
    ``loss_scale_window`` steps without an overflow the scale is doubled.
    """

    enabled: bool = False
    loss_scale: Annotated[float, Field(ge=0)] = 0.0
    initial_scale_power: Annotated[int, Field(ge=0, le=64), Whole] = 16
    loss_scale_window: PositiveInt = 1000
    hysteresis: PositiveInt = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Annotated[float, Field(gt=0)] = 1
    auto_cast: bool = False

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

    ``pin_memory``: whether its memory is page-locked, so that copies overlap with computation.
    """

    device: Literal["none", "cpu"] = "none"
    pin_memory: bool = True


class ZeroSection(Section):
    """The state that an SDP group shards: 0 nothing, 1 optimizer, 2 also gradients, 3 also
    parameters.
    """

    stage: Literal[0, 1, 2, 3] = 0
    offload_optimizer: OffloadSection | None = None
    offload_param: OffloadSection | None = None

    @property
    def offloads(self) -> bool:
        """Whether a part of the state is on the host."""
        return bool(self._on_host)

    @property
    def pins_memory(self) -> bool:
        """Whether the state on the host is in page-locked memory."""
        return all(section.pin_memory for section in self._on_host)

    @property
    def _on_host(self) -> list[OffloadSection]:
        sections = (self.offload_optimizer, self.offload_param)
        return [section for section in sections if section is not None and section.device == "cpu"]


class TorchAutocastSection(Section):
    """DeepSpeed's ``torch_autocast``: run the forward pass under ``torch.autocast``.

    ``dtype``: the type of the operations that autocast lowers. Parameters, gradients and the
    averages stay float32.
    """

    enabled: bool = False
    dtype: Literal["bfloat16", "float16", "torch.bfloat16", "torch.float16", "bf16", "fp16"] = "bfloat16"


class TensorParallelSection(Section):
    """The degree of tensor parallelism inside an SDP group."""

    autotp_size: RankCount = 1


class ActivationCheckpointingSection(Section):
    """Which activations to recompute. "selective" keeps matrix products and attention."""

    mode: Literal["none", "full", "selective"] = "none"


class MonitorSection(Section):
    """DeepSpeed's monitors. They write to ``output_path/job_name``, or to the dump directory."""

    enabled: bool = False
    output_path: PathText = ""
    job_name: str = "sdp"


class WandbSection(Section):
    """DeepSpeed's ``wandb`` section. It needs the package wandb."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "sdp"


class SDPSection(Section):
    """Subnetwork Data Parallelism: which group of ranks holds which part of the model.

    ``masking``: how a group treats a unit that it does not hold. With "forward" the unit is absent
    from the forward and the backward pass. With "backward" the group runs a frozen copy of the
    unit, in the forward pass and for the gradients of activations. The copy has compute precision,
    and the holders refresh it after each step. Only holders compute the gradients of the unit's
    weights, so these gradients are those of the dense model. A list of phases changes the masking
    during the run: [{"until": 0.75, "masking": "forward"}, {"masking": "backward"}].
    ``profile``: how many groups hold each unit. The number falls with depth, is uniform, or is
    given for each unit. Its mean follows from ``capacity``.
    ``branch_scale``: a factor for what a unit adds to its input, under forward masking. If k of N
    groups hold it, the factor is N / k in training ("train"). For "eval" it is k / N, in
    evaluations of the full model.
    ``sync``: local steps. Groups average their weights every few steps, not their gradients in
    every step.
    ``lr_scale``: a unit's learning rate is multiplied by (k / mean k) to this power, where k is its
    number of holders. "auto" is 1 for SGD and 0.5 for other optimizers.
    """

    groups: RankCount = 1
    capacity: float | list[float] = 1.0
    granularity: Literal["block", "neuron"] = "block"
    masking: MaskingSetting = "forward"
    placement: (
        Literal["cyclic", "balanced", "random"] | Annotated[dict[str, list[NonNegativeInt]], Field(min_length=1)]
    ) = "cyclic"
    profile: Literal["depth", "uniform", "auto"] | list[PositiveInt] = "depth"
    units: Literal["auto"] | list[str] = "auto"
    protect: list[str] = Field(default_factory=list)
    branch_scale: Literal["none", "train", "eval"] = "none"
    neuron_groups: Width = 8
    seed: Seed = 0
    engine: Literal["fsdp2", "deepspeed"] = "fsdp2"
    check_interval: NonNegativeInt = 100
    sync: SyncSection | None = None
    lr_scale: Literal["none", "auto"] | Annotated[float, Field(ge=0, le=4)] = "none"

    @property
    def maskings(self) -> tuple[Masking, ...]:
        """The maskings that the run uses, each once."""
        if isinstance(self.masking, str):
            return (self.masking,)
        return tuple(dict.fromkeys(phase.masking for phase in self.masking))


class Config(Section):
    """A whole run. The documentation explains each key; ``sdp config --schema`` prints the schema.

    ``env``: environment variables for NCCL, UCX, gloo and others. Every rank sets them before it
    loads these libraries. They replace the values of the rank's environment.
    """

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
        """Whether a part of the run computes in float16, whose gradients need a loss scale."""
        return self.fp16.enabled or self.autocast_dtype == "float16"

    @property
    def masking_schedule(self) -> MaskingSchedule:
        """Which masking a step has."""
        return MaskingSchedule.of(self.sdp.masking, self.training.steps)

    @property
    def compute_bytes(self) -> int:
        """The size in bytes of one element in :attr:`precision`."""
        return 4 if self.precision == "float32" else 2

    @property
    def deepspeed(self) -> dict[str, Any]:
        """A copy of the settings that DeepSpeed reads, if ``sdp.engine`` is "deepspeed"."""
        return copy.deepcopy(self._deepspeed)

    def resolved(self) -> dict[str, Any]:
        """Return every setting, DeepSpeed's own included, as JSON that starts the same run."""
        return _completed(self.model_dump(mode="json"), self._deepspeed)

    def without_monitors(self) -> Config:
        """Return a copy without monitors, for a run that writes them itself."""
        off = MonitorSection()
        return self.model_copy(update={"tensorboard": off, "csv_monitor": off, "wandb": WandbSection()})

    @property
    def autos(self) -> tuple[str, ...]:
        """The keys of DeepSpeed that are "auto" in the file, for which defaults apply."""
        return self._autos

    @property
    def replaces_deepspeed(self) -> bool:
        """Whether the file names the engine "deepspeed" at stage 0, so that "fsdp2" runs."""
        return self._replaces_deepspeed

    @property
    def hints(self) -> tuple[str, ...]:
        """The performance hints of DeepSpeed in the file that have no effect here."""
        return self._hints


def _completed(settings: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings`` plus the keys of ``more`` that are missing in it, at every level."""
    nested = (key for key in settings if isinstance(settings[key], dict) and isinstance(more.get(key), dict))
    both = {key: _completed(settings[key], more[key]) for key in nested}
    return {**settings, **both, **{key: copy.deepcopy(value) for key, value in more.items() if key not in settings}}
