"""Models and batches. Sizes are awkward: shards are uneven or empty."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

IN, WIDTH, HIDDEN, OUT = 5, 13, 11, 3
VOCABULARY, TOKENS = 37, 6
CLASSES, SIDE = 5, 24


class Block(nn.Module):
    """A residual block with a norm and biases."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Mlp(nn.Module):
    """Residual blocks between two projections. The output is the mean squared error.

    Four shards of 13 rows have 4, 4, 4 and 1 rows. Four shards of 3 rows have 1, 1, 1 and 0 rows.
    ``passes`` is how often a forward pass applies the blocks, one after the other.
    """

    def __init__(self, blocks: int = 4, passes: int = 1) -> None:
        super().__init__()
        self.passes = passes
        self.stem = nn.Linear(IN, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(x)
        for _ in range(self.passes):
            for layer in self.layers:
                hidden = layer(hidden)
        return F.mse_loss(self.head(hidden).float(), y.float())


class ExpertBlock(nn.Module):
    """A norm and two experts, of which each forward pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.experts[chosen](self.norm(x))


class Experts(nn.Module):
    """Residual blocks of two experts, and two heads. Each forward pass uses one of both."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(IN, WIDTH)
        self.layers = nn.ModuleList(ExpertBlock() for _ in range(blocks))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, OUT) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        chosen = int(expert[0])
        hidden = self.stem(x)
        for layer in self.layers:
            hidden = layer(hidden, chosen)
        return F.mse_loss(self.heads[chosen](hidden).float(), y.float())


def mlp(blocks: int = 4, seed: int = 0, device: str = "cpu", passes: int = 1) -> Mlp:
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return Mlp(blocks, passes)


def experts() -> Experts:
    """Build a model whose experts and heads are not used by every micro-batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return Experts()


# By step and micro-batch, the expert that runs. One expert is used by a part of the first step
# only.
EXPERTS = ((0, 1), (1, 1), (0, 0))


def llama(*, tied: bool, device: str = "meta", layers: int = 4) -> nn.Module:
    """Build a LLaMA with hidden size 10. Four shards of 10 rows have 3, 3, 3 and 1 rows."""
    from sdp.models.llama import Llama, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=10, intermediate_size=15, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=6, max_position_embeddings=32, tie_word_embeddings=tied, initializer_range=0.1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(1)
        return Llama(config)


def even_llama(*, tied: bool, device: str = "meta", **fields: Any) -> nn.Module:
    """Build a LLaMA for two tensor-parallel ranks. Shards of their parts are uneven."""
    from sdp.models.llama import Llama, LlamaConfig

    shape = {
        "vocab_size": VOCABULARY + 1, "hidden_size": 12, "intermediate_size": 14, "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 32, "initializer_range": 0.1,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(1)
        return Llama(LlamaConfig(**shape | fields, tie_word_embeddings=tied))


def wide_llama(*, tied: bool, device: str = "meta") -> nn.Module:
    """Build a LLaMA in which tensor-parallel ranks can share each half of a branch."""
    shape = {
        "hidden_size": 16, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4, "intermediate_size": 28,
    }  # fmt: skip
    return even_llama(tied=tied, device=device, **shape)


def modern_llama(*, device: str = "meta") -> nn.Module:
    """Build a LLaMA for two tensor-parallel ranks, with what newer models have."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    return even_llama(tied=True, device=device, qk_norm=True, rope_scaling=scaling, z_loss=0.02)


def resnet(device: str = "meta") -> nn.Module:
    """Build a thin ResNet-18. Its last stage sees 3 × 3 pixels."""
    from sdp.models.resnet import ResNet, ResNetConfig

    with torch.device(device):
        return ResNet(ResNetConfig(num_classes=CLASSES, stem="cifar", width=3, image_size=SIDE))


def swin(device: str = "meta") -> nn.Module:
    """Build a Swin of two stages, whose patches do not fill their windows."""
    from sdp.models.swin import Swin, SwinConfig

    with torch.device(device):
        config = SwinConfig(
            num_classes=CLASSES, image_size=SIDE, patch_size=2, embed_dim=6, depths=[2, 2], num_heads=[2, 3],
            window_size=5,
            initializer_range=0.3,
        )  # fmt: skip
        return Swin(config)


def unit_names(kind: str) -> list[str]:
    if kind.startswith("resnet"):
        return ["layer1.0", "layer1.1", "layer2.1", "layer3.1", "layer4.1"]
    if kind.startswith("swin"):
        return ["features.1.0", "features.1.1", "features.3.0", "features.3.1"]
    return [f"layers.{index}" for index in range(4)]


def build(kind: str) -> nn.Module:
    """Build a model by name. Names that end in ``-meta`` stand for models without weights."""
    makers = {
        "mlp": lambda: mlp(),
        "mlp-meta": lambda: mlp(device="meta"),
        "mlp-of-3": lambda: mlp(blocks=3),
        "mlp-three-times": lambda: mlp(passes=3),
        "llama": lambda: llama(tied=False, device="cpu"),
        "llama-meta": lambda: llama(tied=False),
        "llama-tied": lambda: llama(tied=True, device="cpu"),
        "llama-tied-meta": lambda: llama(tied=True),
        "llama-of-3": lambda: even_llama(tied=False, device="cpu", num_attention_heads=6, num_key_value_heads=3,
            intermediate_size=15, vocab_size=VOCABULARY + 2),
        "even-llama": lambda: even_llama(tied=False, device="cpu"),
        "even-llama-meta": lambda: even_llama(tied=False),
        "even-llama-tied": lambda: even_llama(tied=True, device="cpu"),
        "even-llama-tied-meta": lambda: even_llama(tied=True),
        "wide-llama": lambda: wide_llama(tied=False, device="cpu"),
        "wide-llama-meta": lambda: wide_llama(tied=False),
        "wide-llama-tied": lambda: wide_llama(tied=True, device="cpu"),
        "wide-llama-tied-meta": lambda: wide_llama(tied=True),
        "modern-llama": lambda: modern_llama(device="cpu"),
        "modern-llama-meta": lambda: modern_llama(),
        "experts": experts,
        "experts-by-rank": experts,
        "resnet-meta": resnet,
        "swin-meta": swin,
    }  # fmt: skip
    return makers[kind]()


def micro_batch(kind: str, step: int, micro: int, data_rank: int, rows: int = 2) -> dict[str, torch.Tensor]:
    """Make the rows of a data rank. Ranks ignore different numbers of labels."""
    generator = torch.Generator().manual_seed(100_000 + step * 10_000 + micro * 100 + data_rank)
    if kind.startswith("mlp"):
        x = torch.randn(rows, IN, generator=generator)
        return {"x": x, "y": torch.sin(3 * x[:, :OUT]) + 1.0}
    if kind.startswith("experts"):
        x = torch.randn(rows, IN, generator=generator)
        expert = (EXPERTS[step][micro] + (data_rank if kind == "experts-by-rank" else 0)) % 2
        return {"x": x, "y": torch.sin(3 * x[:, :OUT]) + 1.0, "expert": torch.full((rows,), expert)}
    if kind.startswith(("resnet", "swin")):
        images = torch.randn(rows, 3, SIDE, SIDE, generator=generator)
        return {"images": images, "labels": torch.randint(CLASSES, (rows,), generator=generator)}
    tokens = torch.randint(VOCABULARY, (rows, TOKENS), generator=generator)
    labels = tokens.clone()
    labels[0, 1 : 1 + (data_rank + micro) % 4] = -100
    return {"input_ids": tokens, "labels": labels}


def rows_of_all(kind: str, step: int, micro: int, data_ranks: int) -> dict[str, torch.Tensor]:
    """Join the rows of all data ranks, in rank order, for a model of plain torch."""
    parts = [micro_batch(kind, step, micro, rank) for rank in range(data_ranks)]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def on_device(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {key: tensor.to(device) for key, tensor in batch.items()}


def cpu_state(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
