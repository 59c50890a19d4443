"""The JSON file → validated objects.

DeepSpeed's own keys keep DeepSpeed's meaning; the sections ``sdp``, ``model``, ``data`` and ``training`` are ours. Unknown keys
anywhere are errors with a suggestion. What DeepSpeed knows and we do not act on is sorted out in ``config_deepspeed.py`` first.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from .section import NonNegativeInt, Pixels, PositiveInt, Ranks, Samples, Section, Tokens, Width


class NamedParams(Section):
    """DeepSpeed's ``{"type": name, "params": {…}}`` of optimizer and scheduler; ``params`` is checked by its builder."""

    type: str
    params: dict[str, Any] = Field(default_factory=dict)


class Enabled(Section):
    """A section that is only a switch."""

    enabled: bool = False


class FP16Section(Section):
    """DeepSpeed's ``fp16``: float16, its gradients kept from underflow by a loss that is multiplied by ``loss_scale``.

    0: by a scale that starts at 2 to the power ``initial_scale_power``. A step that overflows is skipped, and halves it once ``hysteresis``
    of them have (a good step forgives them where ``consecutive_hysteresis``), down to ``min_loss_scale``; after ``loss_scale_window``
    steps without one it is doubled.
    """

    enabled: bool = False
    loss_scale: Annotated[float, Field(ge=0)] = 0.0
    initial_scale_power: Annotated[int, Field(ge=0, le=64)] = 16
    loss_scale_window: PositiveInt = 1000
    hysteresis: PositiveInt = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: PositiveInt = 1

    @model_validator(mode="after")
    def _begins_above_the_minimum(self) -> Self:
        if self.loss_scale == 0 and self.min_loss_scale > 2**self.initial_scale_power:
            raise ValueError(
                f"min_loss_scale {self.min_loss_scale} is more than the scale at the start, 2^{self.initial_scale_power}"
            )
        return self


class ZeroSection(Section):
    """How state is sharded inside an SDP group (0 replicas, 1 optimizer, 2 + gradients, 3 + parameters)."""

    stage: Literal[0, 1, 2, 3] = 0


class TensorParallelSection(Section):
    """Degree of tensor parallelism inside an SDP group."""

    autotp_size: Ranks = 1


class ActivationCheckpointingSection(Section):
    """Which activations of a unit are recomputed in backward: none, all of them, or all but matrix products and attention."""

    mode: Literal["none", "full", "selective"] = "none"


class MonitorSection(Section):
    """DeepSpeed's ``tensorboard`` and ``csv_monitor``: files go to ``output_path/job_name`` (default: the run's dump directory)."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "sdp"


class WandbSection(Section):
    """DeepSpeed's ``wandb`` section; needs the package wandb."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "sdp"


Seed = Annotated[int, Field(ge=0, lt=2**63)]  # as torch's generators take it


class SDPSection(Section):
    """Subnetwork Data Parallelism: which group of ranks holds which part of the model.

    ``masking``: what a group does with a unit that it does not hold. forward: it is not there, neither in forward nor in backward.
    backward: it runs, in forward and for the gradients of activations, from a frozen copy in compute precision, which holders
    refresh after each step; only holders compute its weights' gradients, so these are those of the dense model.

    ``profile``: how many groups hold a unit, at the mean that ``capacity`` says: falling with depth, uniform, or listed by unit.

    ``branch_scale``: what a unit with k of N groups as holders adds to its input is multiplied (forward masking) by N / k in training
    ("train"), or by k / N in evaluations of the full model ("eval").

    ``group_sizes``: numbers of ranks of the groups, in rank order, where they differ (a big node and a small one): [8, 4]. Ranks weigh
    alike, so a group of twice the ranks has twice the samples.
    """

    groups: Ranks = 1
    capacity: float | list[float] = 1.0
    granularity: Literal["block", "neuron"] = "block"
    masking: Literal["forward", "backward"] = "forward"
    placement: (
        Literal["cyclic", "balanced", "random"] | Annotated[dict[str, list[NonNegativeInt]], Field(min_length=1)]
    ) = "cyclic"
    profile: Literal["depth", "uniform", "auto"] | list[PositiveInt] = "depth"
    units: Literal["auto"] | list[str] = "auto"
    protect: list[str] = Field(default_factory=list)
    branch_scale: Literal["none", "train", "eval"] = "none"
    group_sizes: list[Ranks] | None = None
    neuron_groups: Width = 8
    seed: Seed = 0
    engine: Literal["fsdp2", "deepspeed", "reference", "vectorized"] = "fsdp2"
    check_interval: NonNegativeInt = 100

    @property
    def in_one_process(self) -> bool:
        """Whether all groups are of one process, on one device."""
        return self.engine in ("reference", "vectorized")


class DataSection(Section):
    """Token shards to train on; without ``path`` the sources of Python's standard library are prepared and used. With ``name``: images.

    ``tokenizer`` (None: sentencepiece) and ``vocab_size`` are what those are prepared with; where ``path`` is given, it must have
    been prepared with them. ``verify``: hash the shards at the start of a run; auto: unless they are so large that it takes minutes.

    ``name``: "digits" are scikit-learn's; "cifar10" and "cifar100" are read from their binary archive at ``path``; "folder" has a
    directory of images a class in ``path``, read as squares of ``image_size`` pixels (224). ``augment``: crop and mirror at random.
    """

    name: Literal["digits", "cifar10", "cifar100", "folder"] | None = None
    path: str | None = None
    sequence_length: Tokens = 512
    tokenizer: str | None = None
    vocab_size: Width | None = None
    num_workers: NonNegativeInt = 0
    verify: Literal["auto", "always", "never"] = "auto"
    image_size: Pixels | None = None
    augment: bool | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        of_tokens, of_images = ("sequence_length", "tokenizer", "vocab_size", "verify"), ("image_size", "augment")
        for key in of_images if self.name is None else of_tokens:
            if (
                getattr(self, key) != type(self).model_fields[key].default
            ):  # not "was set": a run's own file states every key
                whose = (
                    "images (data.name)" if self.name is None else f"tokens, and data.name is {json.dumps(self.name)}"
                )
                raise ValueError(f"{key} is for {whose}; remove it")
        if self.name == "digits" and self.path is not None:
            raise ValueError(
                'path has no meaning for "digits", which scikit-learn brings; remove it, or name another set'
            )
        if self.name not in (None, "digits") and self.path is None:
            raise ValueError(f"path is required for {json.dumps(self.name)}: {_WHERE[self.name]}")
        if self.name != "folder" and self.image_size is not None:
            raise ValueError(
                f'image_size is for "folder"; the images of {json.dumps(self.name)} have a size of their own, remove it'
            )
        return self

    @property
    def tokens_per_sample(self) -> int:
        """What a sample counts in ``tokens``: an image counts as one."""
        return 1 if self.name is not None else self.sequence_length


_WHERE = {
    "cifar10": "cifar-10-binary.tar.gz, or the directory that it was unpacked to",
    "cifar100": "cifar-100-binary.tar.gz, or the directory that it was unpacked to",
    "folder": "the directory with train/CLASS/*.jpg and val/CLASS/*.jpg, or CLASS/*.jpg",
}


class TrainingSection(Section):
    """Length of the run, and every how many steps to evaluate and to save.

    0: evaluate only before the first step and after the last, and save only when a signal ends the run. ``max_skips``: steps in a
    row whose gradient is no number, and which are skipped, before the run stops. ``start_timeout``: seconds that the start with the
    first step or an evaluation may take; ``save_timeout``: a save; ``step_timeout``: a part of a later step; any collective: the longest.
    ``init_from``: a directory with the weights to start from, in Hugging Face's format, or a DeepSpeed checkpoint's. ``compile``: units by
    ``torch.compile``.
    ``recalibrate_batches``: training batches a rank over which batch norm's statistics of the full model are measured before it is
    evaluated or saved; 0: the means over the holders' subnetworks are used.
    """

    steps: PositiveInt | None = None
    tokens: PositiveInt | None = None
    evaluate_every: NonNegativeInt = 0
    evaluate_batches: PositiveInt = 8
    recalibrate_batches: NonNegativeInt = 8
    save_every: NonNegativeInt = 0
    keep: PositiveInt = 2
    max_skips: NonNegativeInt = 10
    init_from: str | None = None
    async_save: bool = False
    start_timeout: Annotated[float, Field(gt=0)] = 1800.0
    save_timeout: Annotated[float, Field(gt=0)] = 1800.0
    step_timeout: Annotated[float, Field(gt=0)] = 600.0
    seed: Seed = 0
    compile: bool = False


# What a launcher says about a rank's place, and what a process has read before it reads its configuration.
_NOT_FOR_ENV = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_\w+|GROUP_RANK|MASTER_(ADDR|PORT)|(SDP|SLURM|OMPI|PMIX?|TORCHELASTIC)_\w+|(CUDA|HIP|ROCR)_VISIBLE_DEVICES"
    r"|LD_\w+|PYTHON\w*|MALLOC_\w+|PATH|HOME"
)


def _variable_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{json.dumps(name)} is no name of an environment variable")
    if _NOT_FOR_ENV.fullmatch(name):
        raise ValueError(
            f"{name} is the launcher's, or is read before the configuration is; set it where the processes are started"
        )
    return name


VariableName = Annotated[str, AfterValidator(_variable_name)]
VariableValue = Annotated[str, Field(pattern=r"^[^\x00]*$")] | int


class Config(Section):
    """A whole run. See the README for what each key means; ``sdp config --schema`` prints the JSON schema.

    ``env``: variables for NCCL, UCX, gloo … that every rank sets before it loads them, over what its environment has.
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
    _deepspeed: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def precision(self) -> Literal["float32", "bfloat16", "float16"]:
        """torch's name of the type that the model computes in."""
        return "bfloat16" if self.bf16.enabled else "float16" if self.fp16.enabled else "float32"

    @property
    def compute_bytes(self) -> int:
        """Of one element of it."""
        return 4 if self.precision == "float32" else 2

    @property
    def deepspeed(self) -> dict[str, Any]:
        """The file as DeepSpeed is to read it (``sdp.engine`` "deepspeed"); a copy."""
        return copy.deepcopy(self._deepspeed)

    def resolved(self) -> dict[str, Any]:
        """Every setting with its value, as JSON: a file that trains the same, keys that DeepSpeed alone acts on included."""
        return _completed(self.model_dump(mode="json"), self._deepspeed)

    def without_monitors_of_deepspeed(self) -> Config:
        """For a run that writes ``tensorboard``, ``csv_monitor`` and ``wandb`` itself."""
        changed = self.model_copy()
        changed._deepspeed = {
            key: value for key, value in self._deepspeed.items() if key not in ("tensorboard", "csv_monitor", "wandb")
        }
        return changed

    @property
    def hints(self) -> tuple[str, ...]:
        """DeepSpeed's performance hints found in the file that have no effect here."""
        return self._hints


def _completed(settings: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` with the keys of ``more`` that they lack, at every level."""
    nested = (key for key in settings if isinstance(settings[key], dict) and isinstance(more.get(key), dict))
    both = {key: _completed(settings[key], more[key]) for key in nested}
    return {**settings, **both, **{key: copy.deepcopy(value) for key, value in more.items() if key not in settings}}
