"""A small LLaMA that is initialised as torchtitan's models are.

torchtitan cannot be installed without triton, so this model stands in for its llama3. It has the
same idioms, written for this test: blocks in a ModuleDict, ``init_weights`` that each module calls
for its parts, a table of complex numbers that is not saved, and a rule that depends on a layer's
depth.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TitanAttention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def init_weights(self, std: float) -> None:
        for linear in (self.wq, self.wk, self.wv):
            nn.init.trunc_normal_(linear.weight, std=0.02)
        nn.init.trunc_normal_(self.wo.weight, std=std)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        parts = [layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv)]
        turned = [self._turn(part, rotations[: x.shape[1]]) for part in parts[:2]]
        mixed = F.scaled_dot_product_attention(*turned, parts[2], is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))

    @staticmethod
    def _turn(x: Tensor, rotations: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * rotations).flatten(-2).type_as(x)


class TitanBlock(nn.Module):
    """Attention and a gated feed-forward. Its outputs start smaller in deeper layers."""

    def __init__(self, depth: int, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.std = 0.02 / (2 * (depth + 1)) ** 0.5
        self.attention = TitanAttention(width, heads)
        self.w1, self.w2, self.w3 = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.Linear(width, hidden)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)

    def init_weights(self) -> None:
        for norm in (self.attention_norm, self.ffn_norm):
            norm.reset_parameters()
        self.attention.init_weights(self.std)
        for linear in (self.w1, self.w2, self.w3):
            nn.init.trunc_normal_(linear.weight, std=0.02 if linear is self.w1 else self.std)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotations)
        inner = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(inner)) * self.w3(inner))


class TitanLlama(nn.Module):
    """Maps tokens (B, S) to logits (B, S, V)."""

    def __init__(
        self, vocabulary: int = 64, width: int = 32, hidden: int = 48, heads: int = 4, blocks: int = 4
    ) -> None:
        super().__init__()
        self.width, self.head_width, self.longest = width, width // heads, 16
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.register_buffer("freqs_cis", self._rotations(), persistent=False)
        self.layers = nn.ModuleDict({str(i): TitanBlock(i, width, hidden, heads) for i in range(blocks)})
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def _rotations(self) -> Tensor:
        speeds = 10000.0 ** -(torch.arange(0, self.head_width, 2).float() / self.head_width)
        angles = torch.outer(torch.arange(self.longest).float(), speeds)
        return torch.polar(torch.ones_like(angles), angles)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Fill all tensors in place. The table goes to ``buffer_device``."""
        with torch.device(buffer_device or self.freqs_cis.device):  # type: ignore[arg-type]
            self.freqs_cis = self._rotations()
        nn.init.normal_(self.tok_embeddings.weight)
        for layer in self.layers.values():
            layer.init_weights()  # type: ignore[operator]
        self.norm.reset_parameters()
        std = self.width**-0.5
        nn.init.trunc_normal_(self.output.weight, std=std, a=-3 * std, b=3 * std)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden, self.freqs_cis)
        return self.output(self.norm(hidden))
