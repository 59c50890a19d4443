"""LLaMA, with the parameter names and numerics of Hugging Face's ``LlamaForCausalLM``.

Weights can therefore be exchanged without changes. Sources: Touvron et al., arXiv 2302.13971 (the
model); Su et al., arXiv 2104.09864 (rotary embedding); Shazeer, arXiv 2002.05202 (SwiGLU); Ainslie
et al., arXiv 2305.13245 (grouped-query attention).

Letters of shapes: B sequences, S tokens, D hidden size, H attention heads, K key/value heads, E
head size, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from ..engine.errors import ConfigError, ModelError
from ..engine.model_interface import Branch, Column, Constant, Gather, Head, Init, Normal, Row, Style, Vocabulary, Whole
from .layers import (
    LanguageModelHead,
    Mask,
    causal_attention,
    document_mask,
    document_starts,
    drop_rows,
    has_kernel_for_documents,
)
from .sections import LlamaConfig as LlamaConfig  # re-exported
from .sections import random_options


class LlamaRMSNorm(nn.RMSNorm):
    """RMSNorm. The output has the dtype of the input, also under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rotary_frequencies(config: LlamaConfig, device: torch.device) -> tuple[Tensor, float]:
    """Return the frequency of each pair of elements, (E/2,), and a factor for cosines and sines."""
    size, theta, scaling = config.head_size, config.rope_theta, config.rope_scaling
    even = torch.arange(0, size, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / theta ** (even / size)
    if scaling is None:
        return frequencies, 1.0
    tokens, (few, many) = scaling.original_max_position_embeddings, scaling.turns
    if scaling.rope_type == "llama3":
        kept = ((frequencies * tokens / (2 * math.pi) - few) / (many - few)).clamp(0, 1)
        factor = 1.0
    else:
        # The numbers of the pairs that turn so often.
        first, last = (size * math.log(tokens / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (many, few))
        first, last = max(math.floor(first), 0), min(math.ceil(last), size - 1)
        kept = 1 - ((even / 2 - first) / ((last - first) or 0.001)).clamp(0, 1)
        factor = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1
    return frequencies * (kept + (1 - kept) / scaling.factor), factor


def rotary_table(tokens: int, config: LlamaConfig, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary embedding for positions 0 … ``tokens`` - 1.

    Both are (S, E), in the dtype and on the device of ``like``. The angles are always computed in
    float32.
    """
    frequencies, factor = rotary_frequencies(config, like.device)
    positions = torch.arange(tokens, dtype=torch.float32, device=like.device)
    angles = repeat(torch.outer(positions, frequencies), "s e -> s (two e)", two=2)
    return (angles.cos() * factor).to(like.dtype), (angles.sin() * factor).to(like.dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to ``heads`` (B, H, S, E): rotate the pairs (i, i + E/2).

    ``cos`` and ``sin`` (S, E) are the cosines and sines of the angles.
    """
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaAttention(nn.Module):
    """Causal self-attention with rotary positions. H / K query heads share a key/value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_size, self.dropout = config.head_size, config.attention_dropout
        queries, keys = config.num_attention_heads * self.head_size, config.key_value_heads * self.head_size
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            LlamaRMSNorm(self.head_size, config.rms_norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None) -> Tensor:
        # The number of heads follows from the projections' width, so this also works for
        # column-parallel projections.
        query, key, value = (
            rearrange(projection(hidden), "b s (h e) -> b h s e", e=self.head_size)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        dropout = self.dropout if self.training else 0.0
        query, key = rotate(self.q_norm(query), cos, sin), rotate(self.k_norm(key), cos, sin)
        attended = causal_attention(query, key, value, dropout, mask)
        return self.o_proj(rearrange(attended, "b h s e -> b s (h e)"))


class LlamaMLP(nn.Module):
    """SwiGLU feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class LlamaDecoderLayer(nn.Module):
    """A residual block: attention, then feed-forward, each with a norm before it.

    ``survival`` is the probability with which a sequence keeps the block in training.
    """

    def __init__(self, config: LlamaConfig, survival: float = 1.0) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout, self.survival = config.residual_dropout, survival

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None) -> Tensor:
        """Return new hidden states (B, S, D). ``cos`` and ``sin`` are from :func:`rotary_table`."""
        attended = hidden + self._dropped(self.self_attn(self.input_layernorm(hidden), cos, sin, mask))
        output = attended + self._dropped(self.mlp(self.post_attention_layernorm(attended)))
        return hidden + drop_rows(output - hidden, self.survival) if self.training and self.survival < 1 else output

    def _dropped(self, added: Tensor) -> Tensor:
        return F.dropout(added, self.dropout) if self.training and self.dropout else added


class LlamaModel(nn.Module):
    """Embedding, decoder layers and final norm: token ids (B, S) → hidden states (B, S, D)."""

    def __init__(self, config: LlamaConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(vocab_size, config.hidden_size)
        slope = config.stochastic_depth / config.num_hidden_layers
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, 1 - slope * layer) for layer in range(1, config.num_hidden_layers + 1)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, documents: Tensor | None = None) -> Tensor:
        hidden = self.embed_tokens(input_ids)
        # Computed in each forward pass and passed down, because a buffer would have to be
        # materialised and moved.
        cos, sin = rotary_table(input_ids.shape[1], self.config, like=hidden)
        mask = () if documents is None else (self._mask(documents, hidden),)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, *mask)
        return self.norm(hidden)

    def _mask(self, documents: Tensor, hidden: Tensor) -> Mask:
        drops = self.training and self.config.attention_dropout > 0
        fast = not drops and has_kernel_for_documents(hidden, self.config.head_size)
        return document_starts(documents) if fast else document_mask(documents)


class Llama(nn.Module):
    """A LLaMA with its language-model head, and the hooks that all features of the engine need.

    Raises ConfigError if ``config.vocab_size`` is not set.
    """

    loss_type = "ForCausalLM"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ConfigError("model.vocab_size: not set, and the data does not give one; add it to the model section")
        self.config = config
        self.model = LlamaModel(config, config.vocab_size)
        self.lm_head = LanguageModelHead(config.hidden_size, config.vocab_size, config.loss_chunk_tokens, config.z_loss)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Compute the logits (B, S, V) of ``input_ids`` (B, S), or if labels are given, the loss.

        The loss is the mean next-token loss, a float32 scalar. ``labels`` (B, S) are input ids or
        -100 for tokens that do not count. This method shifts them. If a sequence has several
        documents, ``documents`` (B, S) has each token's document number, and attention stays inside
        a document. Raises ModelError if a sequence is longer than ``max_position_embeddings``.
        """
        tokens, limit = input_ids.shape[1], self.config.max_position_embeddings
        if tokens > limit:
            raise ModelError(
                f"a sequence of {tokens} tokens is longer than model.max_position_embeddings = {limit}; "
                "raise it, or lower data.sequence_length"
            )
        return self.lm_head(self.model(input_ids, documents), labels)

    def unit_patterns(self) -> list[str]:
        """Return the pattern of the units' module paths. The units are the decoder layers."""
        return ["model.layers.*"]

    def random_options(self) -> list[str]:
        """List the options with which training draws random numbers."""
        return random_options(self.config)

    def neuron_branches(self) -> list[Branch]:
        """List the residual branches with neurons that groups may hold, layer by layer.

        Neurons are key/value heads of attention, and hidden units of the feed-forward.
        """
        branches = []
        for layer in (f"model.layers.{index}" for index in range(self.config.num_hidden_layers)):
            attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
            cuts = {
                attention: (self.config.key_value_heads, {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}),
                mlp: (self.config.intermediate_size, {"gate_proj": 0, "up_proj": 0, "down_proj": 1}),
            }
            for name, (neurons, dims) in cuts.items():
                branches.append(
                    Branch(name, neurons, tuple((f"{name}.{key}.weight", dim) for key, dim in dims.items()))
                )
        return branches

    def tensor_parallel_plan(self) -> dict[str, Style]:
        """Return the styles in which tensor parallelism cuts modules, by patterns of module paths.

        Attention is cut by heads, the feed-forward by hidden features, and embedding and head by
        rows of the vocabulary.
        """
        heads, key_value_heads = self.config.num_attention_heads, self.config.key_value_heads
        layer = "model.layers.*"
        norms = ("q_norm", "k_norm") if self.config.qk_norm else ()
        return {
            "model.embed_tokens": Vocabulary(),
            f"{layer}.input_layernorm": Whole(),
            f"{layer}.self_attn": Gather(),
            f"{layer}.self_attn.q_proj": Column(heads),
            f"{layer}.self_attn.k_proj": Column(key_value_heads),
            f"{layer}.self_attn.v_proj": Column(key_value_heads),
            f"{layer}.self_attn.o_proj": Row(),
            **{f"{layer}.self_attn.{norm}": Whole() for norm in norms},
            f"{layer}.post_attention_layernorm": Whole(),
            f"{layer}.mlp": Gather(),
            f"{layer}.mlp.gate_proj": Column(),
            f"{layer}.mlp.up_proj": Column(),
            f"{layer}.mlp.down_proj": Row(),
            "model.norm": Whole(),
            "lm_head": Head(),
        }

    def parameter_init(self, name: str) -> Init:
        """Return Hugging Face's initialisation of the parameter with this canonical name.

        Raises ModelError if the model has no parameter of this name.
        """
        module, _, leaf = name.rpartition(".")
        kind = module.rpartition(".")[2]
        if leaf == "weight" and kind.endswith("norm"):
            return Constant(1.0)
        if leaf == "weight" and kind.endswith(("_proj", "embed_tokens", "lm_head")):
            return Normal(self.config.initializer_range)
        raise ModelError(f"{name}: LLaMA has no parameter of this name")

    def canonical_name(self, key: str) -> str | None:
        """Return the parameter's name for ``key`` in a Hugging Face file.

        Returns None for the rotary table in old files, which is not a parameter.
        """
        if key.endswith("rotary_emb.inv_freq"):
            return None
        # Files of LlamaModel, which has no head, have no prefix.
        return key if key.startswith(("model.", "lm_head.")) else f"model.{key}"

    def sharding_groups(self) -> list[str]:
        """List the modules outside the units that are sharded by themselves: embedding and head.

        If they share a weight, they must be sharded together, and the list is empty.
        """
        return [] if self.config.tie_word_embeddings else ["model.embed_tokens", "lm_head"]

    def flops_per_token(self, sequence_length: int) -> dict[str, float]:
        """Count the floating-point operations of forward and backward per token.

        The keys are the units, and ``"shared"`` for the head. A matrix product takes 2 operations
        per weight, and the two products of attention take 4 H E S. The backward pass costs twice
        the forward pass (PaLM, arXiv 2204.02311, appendix B). As in that paper, the whole S x S
        attention counts, although half of it is masked. Norms, rotary embedding, the embedding
        look-up and recomputation do not count.
        """
        config = self.config
        assert config.vocab_size is not None  # checked on construction
        queries, keys = config.num_attention_heads * config.head_size, config.key_value_heads * config.head_size
        weights = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
        layer = 3.0 * (2 * weights + 4 * queries * sequence_length)
        head = 3.0 * 2 * config.hidden_size * config.vocab_size
        return {f"model.layers.{index}": layer for index in range(config.num_hidden_layers)} | {"shared": head}
