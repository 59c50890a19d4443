"""The shape of a LLaMA: the ``model`` section of a configuration."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from ..engine.config.section import Layers, PositiveInt, Section, Tokens, Width

Rate = Annotated[float, Field(ge=0, lt=1)]


class LlamaConfig(Section):
    """Shape of a LLaMA, with Hugging Face's field names. The data can give ``vocab_size``.

    ``loss_chunk_tokens`` is the number of tokens whose logits exist at the same time while the loss
    is computed. None chooses a number that wastes neither memory nor time.

    With three options, training draws random numbers. Each rank draws its own:

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
    tie_word_embeddings: bool = False
    initializer_range: Annotated[float, Field(gt=0, le=1)] = 0.02
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
        if self.head_size % 2:
            raise ValueError(
                f"head_dim {self.head_size} (default: hidden_size / num_attention_heads) is odd; "
                "rotary embedding rotates pairs of elements, so it must be even"
            )
        return self

    @property
    def key_value_heads(self) -> int:
        """K: ``num_key_value_heads``, or by default one per attention head."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """E: ``head_dim``, or by default hidden size / heads."""
        return self.head_dim or self.hidden_size // self.num_attention_heads
