"""Schemas of the ``model`` section, one for each model that a configuration can name.

This file does not need torch, so that a misspelt key is found before a process starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ..engine.config.named_params import check_named_params
from ..engine.config.schema import Config
from ..engine.config.section import (
    Layers,
    NonNegative,
    PathText,
    Pixels,
    PositiveInt,
    Section,
    Tokens,
    Width,
    parse_section,
)
from ..engine.errors import ConfigError, shorten, suggestion

Depths = Annotated[list[Layers], Field(min_length=1, max_length=16)]
Heads = Annotated[list[Width], Field(min_length=1, max_length=16)]


class ResNetConfig(Section):
    """The ``model`` section of a ResNet-18. The data can give ``num_classes`` and ``image_size``.

    The ``stem`` is what comes before the first block: "imagenet" divides the image's side by 4, and
    "cifar", a single 3 × 3 convolution, keeps it. ``width`` is the number of channels of the first
    stage. ``image_size`` is the number of pixels per side; it is only used to compare the costs of
    units.

    ``stochastic_depth`` is the probability with which an image skips the convolutions of the last
    block in training. It falls linearly to 0 before the first block (arXiv 1603.09382). ``dropout``
    is the probability with which an element between the two convolutions of a block becomes zero
    (arXiv 1605.07146, section 2.4). Each rank draws its own random numbers.
    """

    num_classes: Width | None = None
    stem: Literal["cifar", "imagenet"] = "imagenet"
    width: Width = 64
    image_size: Pixels | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    stochastic_depth: Annotated[float, Field(ge=0, lt=1)] = 0.0


class SwinConfig(Section):
    """The ``model`` section of a Swin. The data can give ``num_classes`` and ``image_size``.

    The defaults are Swin-T's. ``depths`` has the number of blocks of each stage, and ``num_heads``
    the number of heads in each block of a stage. The first stage has ``embed_dim`` channels; every
    further stage halves the image's side and doubles the channels. ``patch_size`` is the number of
    pixels per side of a patch, ``window_size`` the number of patches per side of a window.
    ``image_size`` is the number of pixels per side; it is only used to compare the costs of units.

    ``stochastic_depth`` is the probability with which an image skips the branches of the last block
    in training. It falls linearly to 0 at the first block, as in torchvision. Each rank draws its
    own random numbers.
    """

    num_classes: Width | None = None
    image_size: Pixels | None = None
    patch_size: Pixels = 4
    embed_dim: Width = 96
    depths: Depths = Field(default_factory=lambda: [2, 2, 6, 2])
    num_heads: Heads = Field(default_factory=lambda: [3, 6, 12, 24])
    window_size: Pixels = 7
    mlp_ratio: Width = 4
    initializer_range: Annotated[float, Field(gt=0, le=1)] = 0.02
    stochastic_depth: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(self.depths) != len(self.num_heads):
            raise ValueError(
                f"depths names {len(self.depths)} stages and num_heads {len(self.num_heads)}; give both one number "
                "per stage"
            )
        for stage, heads in enumerate(self.num_heads):
            if self.channels(stage) % heads:
                raise ValueError(
                    f"num_heads: {heads} heads do not divide the {self.channels(stage)} channels of stage {stage + 1}"
                )
        return self

    def channels(self, stage: int) -> int:
        """Return the number of channels of a stage. The first stage is stage 0."""
        return self.embed_dim * 2**stage


def random_options(config: Section) -> list[str]:
    """List the options with which training draws random numbers, as ``"model.KEY VALUE"``."""
    keys = ("dropout", "attention_dropout", "residual_dropout", "stochastic_depth")
    rates = {key: getattr(config, key, 0.0) for key in keys}
    return [f"model.{key} {rate:g}" for key, rate in rates.items() if rate]


Rate = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]


class RopeScaling(Section):
    """Changes the rotary embedding for sequences ``factor`` times as long, as in transformers.

    The rotary embedding turns each pair of elements at a frequency of its own. A pair that turns
    often within ``original_max_position_embeddings`` tokens keeps its frequency. The frequency of a
    pair that turns rarely is divided by ``factor``. Between two numbers of turns, the frequency is
    interpolated:

    - ``rope_type`` "llama3", as in Llama 3: from ``low_freq_factor`` to ``high_freq_factor`` turns.
    - "yarn" (arXiv 2309.00071): from ``beta_slow`` (default 1) to ``beta_fast`` (32) turns. Queries
      and keys are multiplied by ``attention_factor`` (default 0.1 ln ``factor`` + 1).
    """

    rope_type: Literal["llama3", "yarn"]
    factor: Annotated[float, Field(ge=1)]
    original_max_position_embeddings: Tokens
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None

    @model_validator(mode="after")
    def _fits_the_type(self) -> Self:
        is_llama = self.rope_type == "llama3"
        for key in (
            ("attention_factor", "beta_fast", "beta_slow") if is_llama else ("low_freq_factor", "high_freq_factor")
        ):
            if getattr(self, key) is not None:
                raise ValueError(f'{key} has no effect with rope_type "{self.rope_type}"; remove it')
        if is_llama and None in (self.low_freq_factor, self.high_freq_factor):
            raise ValueError('rope_type "llama3" needs low_freq_factor and high_freq_factor; Llama 3 has 1.0 and 4.0')
        low, high = self.turns
        if low >= high:
            raise ValueError(
                f"the lower limit of turns, {low:g} (low_freq_factor or beta_slow), must be below the upper, {high:g}"
            )
        return self

    @property
    def turns(self) -> tuple[float, float]:
        """The two numbers of turns between which frequencies are interpolated, lower first."""
        if self.rope_type == "llama3":
            return self.low_freq_factor or 0.0, self.high_freq_factor or 0.0
        return self.beta_slow or 1.0, self.beta_fast or 32.0


class LlamaConfig(Section):
    """The ``model`` section of a LLaMA, with Hugging Face's names of keys.

    The data can give ``vocab_size``. ``qk_norm`` normalises each head's queries and keys before the
    rotation, as in Qwen3.

    ``z_loss`` is the factor of a term of the training loss: the mean square of the logarithm of the
    softmax's denominator (PaLM, arXiv 2204.02311, section 5).

    ``loss_chunk_tokens`` is the number of tokens whose logits exist at the same time while the loss
    is computed. If None, the head chooses a number that wastes neither memory nor time.

    With these three options, training draws random numbers. Each rank draws its own:

    - ``attention_dropout`` drops attention weights.
    - ``residual_dropout`` drops elements of what a branch adds (arXiv 1706.03762, section 5.4).
    - ``stochastic_depth`` is the probability with which a sequence skips the last layer. The
      probability falls linearly to 0 before the first layer (arXiv 1603.09382).
    """

    vocab_size: Width | None = None
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Width
    num_key_value_heads: Width | None = None
    head_dim: Width | None = None
    max_position_embeddings: Tokens = 2048
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    initializer_range: Annotated[float, Field(gt=0, le=1)] = 0.02
    z_loss: NonNegative = 0.0
    loss_chunk_tokens: PositiveInt | None = None
    attention_dropout: Rate = 0.0
    residual_dropout: Rate = 0.0
    stochastic_depth: Rate = 0.0

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}"
            )
        if self.num_attention_heads % self.key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not divisible by num_key_value_heads "
                f"{self.key_value_heads}"
            )
        if self.rope_scaling is not None and self.rope_theta <= 1:
            raise ValueError(f"rope_theta {self.rope_theta:g} must be above 1 if rope_scaling is set")
        if self.head_size % 2:
            raise ValueError(
                f"head_dim {self.head_size} (default: hidden_size / num_attention_heads) is odd; "
                "rotary embedding rotates pairs of elements, so it must be even"
            )
        return self

    @property
    def key_value_heads(self) -> int:
        """The number of key/value heads, by default one per attention head."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """The number of elements of a head, by default hidden size / attention heads."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


class HuggingFaceConfig(Section):
    """The ``model`` section of any causal language model of transformers.

    ``path`` is a folder with the model's ``config.json``. A run starts from the weights in this
    folder, unless ``training.init_from`` names another folder.
    """

    path: PathText


SECTIONS: Mapping[str, type[Section]] = {
    "llama": LlamaConfig,
    "resnet18": ResNetConfig,
    "swin_t": SwinConfig,
    "huggingface": HuggingFaceConfig,
}


def require_known(name: object) -> str:
    """Return ``name`` if a model has this name. Raises ConfigError otherwise."""
    known = ", ".join(SECTIONS)
    if name is None:
        raise ConfigError(f"model.name: this key is required; known: {known}")
    if not isinstance(name, str) or name not in SECTIONS:
        hint = suggestion(str(name), list(SECTIONS)) or f"; known: {known}"
        raise ConfigError(f'model.name: unknown model "{shorten(name)}"{hint}')
    return name


def check_section(section: Mapping[str, Any], init_from: str | None) -> None:
    """Check the ``model`` section of a configuration.

    An empty section is accepted, because a script may bring its own model. If ``init_from`` names a
    folder with weights, this folder completes the section later, so values are not checked yet.

    Raises:
        ConfigError: The name or a key is unknown, or a value has the wrong type.
    """
    if not section:
        return
    fields = dict(section)
    name = fields.pop("name", None)
    if name is None and init_from is not None:
        return
    schema = SECTIONS[require_known(name)]
    if init_from is None or not fields.keys() <= schema.model_fields.keys():
        parse_section(schema, fields, "model")


def check_names(config: Config) -> None:
    """Check the sections whose keys depend on a name: optimizer, scheduler and model.

    Only the command line calls this. A script may bring its own optimizer or model, and the section
    for it then has no effect.

    Raises:
        ConfigError: A name or a key is unknown, or a value has the wrong type.
    """
    check_named_params(config.optimizer, config.scheduler)
    check_section(config.model, config.training.init_from)
