"""The model and the facts of the study: questions of three words, each with one word as answer.

The model is a residual MLP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

WORDS = 32


@dataclass(frozen=True)
class Shape:
    """The size of a model: the number of blocks, and the neurons of each."""

    blocks: int = 8
    neurons: int = 64


class Block(nn.Module):
    """A residual block: x + W2 · gelu(W1 · norm(x)). Weights have the shapes of ``nn.Linear``."""

    def __init__(self, width: int, shape: Shape):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, shape.neurons, bias=False)
        self.down = nn.Linear(shape.neurons, width, bias=False)
        nn.init.normal_(self.up.weight, std=1.4 * width**-0.5)
        nn.init.normal_(self.down.weight, std=(2 * shape.blocks * shape.neurons) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Answers(nn.Module):
    """A model whose ``forward(questions, answers)`` returns the mean loss of the answers, in nats.

    ``questions`` are words of shape (rows, 3), and ``answers`` words of shape (rows,).
    """

    def __init__(self, shape: Shape, width: int = 32):
        super().__init__()
        self.embedding = nn.Embedding(3 * WORDS, width)
        self.blocks = nn.ModuleList(Block(width, shape) for _ in range(shape.blocks))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.6)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, questions: Tensor, answers: Tensor) -> Tensor:
        x = self.embedding(questions + WORDS * torch.arange(3, device=questions.device)).sum(1)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)), answers)


def make_facts(count: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` different questions (count, 3), and random answers (count,).

    They are equal in every run, so that all models learn the same facts.
    """
    generator = torch.Generator().manual_seed(999)
    numbers = torch.randperm(WORDS**3, generator=generator)[:count]
    questions = torch.stack((numbers // WORDS**2, numbers // WORDS % WORDS, numbers % WORDS), 1)
    return questions, torch.randint(WORDS, (count,), generator=generator)


def facts_at(bits: float, parameters: int) -> int:
    """Return how many facts have ``bits`` bits of information for each of ``parameters``."""
    return round(bits * parameters / math.log2(WORDS))
