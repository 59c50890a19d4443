"""Shows what AdamW does with a second moment in bfloat16, rounded to nearest or stochastically.

``python -m lab.measurements.second_moment`` prints the mean of a second moment after the squares of
the gradients have fallen to a hundredth. ``--train KIND --corpus SHARDS`` trains a LLaMA of 0.2 M
parameters on token shards with a vocabulary of at most 1,024, and prints its loss. KIND is
``float32``, ``nearest`` or ``stochastic``. With the last two, the first moment is rounded to
nearest.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sdp.models.llama import Llama, LlamaConfig
from torch import Tensor, nn

TOKENS, ROWS, VOCABULARY = 64, 8, 1024


def stochastic(x: Tensor) -> Tensor:
    """Round float32 to bfloat16 up or down at random, so that the expected value stays."""
    bits = x.view(torch.int32)
    return ((bits + torch.randint_like(bits, 0, 1 << 16)) & -65536).view(torch.float32).to(torch.bfloat16)


def nearest(x: Tensor) -> Tensor:
    """Round float32 to the nearest bfloat16, as torch does."""
    return x.to(torch.bfloat16)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {"float32": torch.clone, "nearest": nearest, "stochastic": stochastic}


def decay(beta2: float, steps: int, elements: int = 10_000) -> dict[str, float]:
    """Return for each rounding the mean of a second moment that was 1, after smaller gradients.

    The gradients have the variance 0.01, so the mean should fall to 0.01.
    """
    means = {}
    for kind, rounded in KINDS.items():
        draws = torch.Generator().manual_seed(1)
        second = rounded(torch.ones(elements))
        for _ in range(steps):
            gradient = torch.randn(elements, generator=draws) * 0.1
            second = rounded(second.float().mul(beta2).addcmul(gradient, gradient, value=1 - beta2))
        means[kind] = second.float().mean().item()
    return means


def train(kind: str, corpus: Path, beta2: float, steps: int, seed: int) -> tuple[float, float]:
    """Train with AdamW. Returns the mean losses of the last 50 steps and of 60 held-out batches."""
    torch.manual_seed(seed)
    data = np.memmap(corpus / "train-00000.bin", dtype=np.uint16, mode="r")
    cut = int(len(data) * 0.95)
    model = Llama(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=TOKENS,
        )
    )  # fmt: skip
    parameters = list(model.parameters())
    for parameter in parameters:
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    of_first, of_second = (torch.clone if kind == "float32" else nearest), KINDS[kind]
    first, second = ([round_(torch.zeros_like(p)) for p in parameters] for round_ in (of_first, of_second))
    draws, losses = np.random.default_rng(seed), []
    for step in range(1, steps + 1):
        cooling = 1 if step < 0.7 * steps else max(0.05, (steps - step) / (0.3 * steps))
        rate = 2e-3 * min(1, step / 50) * cooling
        ids = batch(data, 0, cut, draws)
        loss = model(ids, ids)
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(parameters, 1.0)
        with torch.no_grad():
            for index, parameter in enumerate(parameters):
                gradient, parameter.grad = parameter.grad, None
                assert gradient is not None
                average = first[index].float().lerp(gradient, 0.1)
                first[index] = of_first(average)
                second[index] = of_second(second[index].float().mul(beta2).addcmul(gradient, gradient, value=1 - beta2))
                denominator = (second[index].float() / (1 - beta2**step)).sqrt().add_(1e-8)
                parameter.mul_(1 - rate * 0.1).addcdiv_(average, denominator, value=-rate / (1 - 0.9**step))
    held_out = np.random.default_rng(99)
    with torch.no_grad():
        after = [model(ids, ids).item() for ids in (batch(data, cut, len(data), held_out) for _ in range(60))]
    return sum(losses[-50:]) / len(losses[-50:]), sum(after) / len(after)


def batch(data: np.ndarray, low: int, high: int, draws: np.random.Generator) -> Tensor:
    """Return rows of tokens that begin at random places of ``data[low:high]``."""
    starts = draws.integers(low, high - TOKENS - 1, ROWS)
    return torch.from_numpy(np.stack([data[start : start + TOKENS].astype(np.int64) for start in starts]))


def main() -> None:
    """Print the mean of a second moment, or train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", choices=KINDS)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.train is not None:
        last, held_out = train(options.train, options.corpus, options.beta2, options.steps, options.seed)
        print(f"{options.train}, beta2 {options.beta2}: training {last:.4f}, held out {held_out:.4f}")
        return
    for beta2, steps in ((0.999, 3000), (0.95, 300)):
        means = ", ".join(f"{kind} {mean:.4f}" for kind, mean in decay(beta2, steps).items())
        print(f"beta2 {beta2}, {steps} steps: {means}")


if __name__ == "__main__":
    main()
