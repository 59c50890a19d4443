"""Swin-T, with the parameter names, buffers and numerics of torchvision's ``swin_t``.

Weights can therefore be exchanged without changes. Source: Liu et al., arXiv 2103.14030.

Letters of shapes: B images, H × W patches, C channels, M patches per side of a window, h heads, N
classes.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from einops.layers.torch import Rearrange
from torch import Tensor, nn

from ..engine.errors import ConfigError, ModelError
from ..engine.model_interface import Branch, Constant, Init, Normal, Table, Uniform
from .layers import Measure, attention, drop_rows, measure_logits
from .sections import SwinConfig, random_options

_MASKED = -100.0  # torchvision adds it to scores across the seam of a shifted image


def relative_positions(window: int, device: str | None = None) -> Tensor:
    """Return the row of the bias table for every pair (query, key) of a window's patches, (M⁴,).

    The table has (2M − 1)² rows, one for each distance down and across.
    """
    steps = torch.arange(window, device=device)
    coordinates = torch.cartesian_prod(steps, steps)
    down, across = (coordinates[:, None] - coordinates[None] + window - 1).unbind(-1)
    return (down * (2 * window - 1) + across).flatten()


class WindowAttention(nn.Module):
    """Self-attention inside windows of M × M patches.

    Every second block shifts the windows by half a window, and wraps them around the image's edges.
    Patches that are neighbours only because of the shift do not attend to each other. Scores have a
    learned bias by relative position.
    """

    def __init__(self, channels: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.head_size, self.window, self.shift = channels // heads, window, shift
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        self.register_buffer("relative_position_index", relative_positions(window))

    def forward(self, x: Tensor) -> Tensor:
        """Compute attention inside windows for ``x`` (B, H, W, C). The output has the same shape.

        If windows do not fit, ``x`` is padded with zeros, and attention sees these zeros.
        """
        height, width = x.shape[1:3]
        x = F.pad(x, (0, 0, 0, -width % self.window, 0, -height % self.window))
        sides = x.shape[1:3]
        # A single window is not shifted.
        shifts = tuple(self.shift if side > self.window else 0 for side in sides)
        windows = rearrange(
            x.roll([-s for s in shifts], (1, 2)), "b (y m) (x n) c -> b (y x) (m n) c", m=self.window, n=self.window
        )
        attended = self._attend(windows, self._seams(sides, shifts, x.device))
        across = sides[1] // self.window
        x = rearrange(self.proj(attended), "b (y x) (m n) c -> b (y m) (x n) c", x=across, m=self.window).roll(
            shifts, (1, 2)
        )
        return x[:, :height, :width]

    def _attend(self, windows: Tensor, seams: Tensor | None) -> Tensor:
        """Attention among the patches of each window: (B, windows, M², C) → the same shape.

        The number of heads follows from ``qkv``'s width.
        """
        query, key, value = rearrange(
            self.qkv(windows), "b w p (three h e) -> three b w h p e", three=3, e=self.head_size
        )
        rows = self.relative_position_bias_table[self.relative_position_index]  # type: ignore[index]
        bias = rearrange(rows, "(p q) h -> h p q", p=windows.shape[2])
        if seams is not None:
            bias = bias + seams[:, None].to(bias.dtype)
        return rearrange(attention(query, key, value, bias), "b w h p e -> b w p (h e)")

    def _seams(self, sides: torch.Size, shifts: tuple[int, ...], device: torch.device) -> Tensor | None:
        """The mask for the scores of a shifted image, (windows, M², M²).

        It separates patches from opposite edges of the image.
        """
        if not any(shifts):
            return None
        down, across = (
            (torch.arange(side, device=device) >= side - shift).long()
            if shift
            else torch.zeros(side, dtype=torch.long, device=device)
            for side, shift in zip(sides, shifts, strict=True)
        )
        regions = rearrange(2 * down[:, None] + across, "(y m) (x n) -> (y x) (m n)", m=self.window, n=self.window)
        return torch.where(regions[:, :, None] == regions[:, None], 0.0, _MASKED)


class SwinBlock(nn.Module):
    """A residual block: attention in windows, then a feed-forward per patch.

    Each branch has a norm before it. In training, an image keeps attention with the probability
    ``survival``. It keeps the feed-forward with the same probability, drawn separately.
    """

    def __init__(
        self, channels: int, heads: int, window: int, shift: int, mlp_ratio: int, survival: float = 1.0
    ) -> None:
        super().__init__()
        self.survival = survival
        self.norm1 = nn.LayerNorm(channels)
        self.attn = WindowAttention(channels, heads, window, shift)
        self.norm2 = nn.LayerNorm(channels)
        hidden = mlp_ratio * channels
        # torchvision has a dropout at index 2, so the second layer is named 3.
        self.mlp = nn.Sequential(nn.Linear(channels, hidden), nn.GELU(), nn.Identity(), nn.Linear(hidden, channels))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output for ``x``, both (B, H, W, C), so a block can be skipped."""
        x = x + self._dropped(self.attn(self.norm1(x)))
        return x + self._dropped(self.mlp(self.norm2(x)))

    def _dropped(self, added: Tensor) -> Tensor:
        return drop_rows(added, self.survival) if self.training else added


class PatchMerging(nn.Module):
    """Merges 2 × 2 patches into one patch with 2 C channels.

    The shapes are (B, H, W, C) → (B, ⌈H / 2⌉, ⌈W / 2⌉, 2 C).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduction = nn.Linear(4 * channels, 2 * channels, bias=False)
        self.norm = nn.LayerNorm(4 * channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        return self.reduction(self.norm(rearrange(x, "b (y m) (x n) c -> b y x (n m c)", m=2, n=2)))


class Swin(nn.Module):
    """A Swin with its classifier.

    With the default sizes, state dicts are those of torchvision's ``swin_t``. Raises ConfigError if
    ``config.num_classes`` is not set.
    """

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        if config.num_classes is None:
            raise ConfigError("model.num_classes: not set, and the data does not give it; add it to the model section")
        self.config = config
        patch = nn.Conv2d(3, config.embed_dim, config.patch_size, config.patch_size)
        self.features = nn.Sequential(
            nn.Sequential(patch, Rearrange("b c h w -> b h w c"), nn.LayerNorm(config.embed_dim))
        )
        slope = config.stochastic_depth / max(1, sum(config.depths) - 1)  # 0 in the first block, as in torchvision
        for stage, (depth, heads) in enumerate(zip(config.depths, config.num_heads, strict=True)):
            before = sum(config.depths[:stage])
            channels = config.channels(stage)
            if stage:
                self.features.append(PatchMerging(channels // 2))
            shifts = [0 if index % 2 == 0 else config.window_size // 2 for index in range(depth)]
            blocks = (
                SwinBlock(channels, heads, config.window_size, shift, config.mlp_ratio, 1 - slope * (before + index))
                for index, shift in enumerate(shifts)
            )
            self.features.append(nn.Sequential(*blocks))
        self.norm = nn.LayerNorm(config.channels(len(config.depths) - 1))
        self.head = nn.Linear(self.norm.normalized_shape[0], config.num_classes)

    def forward(self, images: Tensor, labels: Tensor | None = None, measure: Measure = "loss") -> Tensor:
        """Compute the logits (B, N) of ``images`` (B, 3, pixels, pixels).

        If ``labels`` (B) are given, compute the mean loss or the accuracy, a float32 scalar.
        """
        logits = self.head(self.norm(self.features(images)).mean((1, 2)))
        return logits if labels is None else measure_logits(logits, labels, measure)

    def unit_patterns(self) -> list[str]:
        """Return patterns of the units' module paths: the residual blocks of every stage."""
        return [f"features.{2 * stage + 1}.*" for stage in range(len(self.config.depths))]

    def random_options(self) -> list[str]:
        """List the options with which training draws random numbers."""
        return random_options(self.config)

    def neuron_branches(self) -> list[Branch]:
        """List the residual branches with neurons that groups may hold, block by block.

        Neurons are heads of attention, and hidden channels of the feed-forward. A head owns its
        column of the table of biases.
        """
        flops = self._branch_flops()
        branches = []
        for stage, heads in enumerate(self.config.num_heads):
            for block in (f"features.{2 * stage + 1}.{index}" for index in range(self.config.depths[stage])):
                attention, mlp = f"{block}.attn", f"{block}.mlp"
                qkv = (f"{attention}.qkv.weight", f"{attention}.qkv.bias")
                of_heads = (
                    (f"{attention}.relative_position_bias_table", 1),
                    (qkv[0], 0),
                    (qkv[1], 0),
                    (f"{attention}.proj.weight", 1),
                )
                branches.append(Branch(attention, heads, of_heads, three_parts=qkv, flops=flops[attention]))
                hidden = self.config.mlp_ratio * self.config.channels(stage)
                of_hidden = ((f"{mlp}.0.weight", 0), (f"{mlp}.0.bias", 0), (f"{mlp}.3.weight", 1))
                branches.append(Branch(mlp, hidden, of_hidden, flops=flops[mlp]))
        return branches

    def unit_flops(self) -> dict[str, int]:
        """Count the floating-point operations of a forward pass of one image, by unit.

        Each weight of a matrix takes 2 operations per patch. Both products of attention count.
        """
        flops: dict[str, int] = {}
        for branch, count in self._branch_flops().items():
            block = branch.rpartition(".")[0]
            flops[block] = flops.get(block, 0) + count
        return flops

    def _branch_flops(self) -> dict[str, int]:
        config, flops = self.config, {}
        side, window = (config.image_size or 224) // config.patch_size, config.window_size
        for stage, depth in enumerate(config.depths):
            channels, padded = config.channels(stage), math.ceil(side / window) * window
            attention = padded**2 * (2 * 4 * channels**2 + 2 * 2 * window**2 * channels)
            mlp = side**2 * 2 * 2 * config.mlp_ratio * channels**2
            for block in (f"features.{2 * stage + 1}.{index}" for index in range(depth)):
                flops |= {f"{block}.attn": attention, f"{block}.mlp": mlp}
            side = math.ceil(side / 2)
        return flops

    def parameter_init(self, name: str) -> Init:
        """Return torchvision's initialisation of the parameter or buffer with this canonical name.

        Raises ModelError if the model has no tensor of this name.
        """
        path, _, leaf = name.rpartition(".")
        kind = type(dict(self.named_modules()).get(path))
        if kind is WindowAttention and leaf == "relative_position_index":
            return Table(relative_positions(self.config.window_size, device="cpu"))
        if (kind is WindowAttention and leaf == "relative_position_bias_table") or (
            kind is nn.Linear and leaf == "weight"
        ):
            return Normal(self.config.initializer_range)
        if kind is nn.LayerNorm and leaf in ("weight", "bias"):
            return Constant(1.0 if leaf == "weight" else 0.0)
        if kind is nn.Linear and leaf == "bias" and not path.endswith("reduction"):
            return Constant(0.0)
        if kind is nn.Conv2d and leaf in ("weight", "bias"):
            return Uniform(1 / math.sqrt(3 * self.config.patch_size**2))
        raise ModelError(f"{name}: Swin has no parameter or buffer of this name")
