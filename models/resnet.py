"""ResNet-18, with the parameter names, buffers and numerics of torchvision's ``resnet18``.

Weights can therefore be exchanged without changes. Sources: He et al., arXiv 1512.03385 (the model,
and in section 4.2 the small stem for small images); He et al., arXiv 1502.01852 (initialisation).

Letters of shapes: B images, C channels, H × W pixels, N classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from ..engine.errors import ConfigError, ModelError
from ..engine.model_interface import Branch, Constant, Init, Normal, Uniform
from .layers import Measure, drop_rows, measure_logits
from .sections import ResNetConfig, random_options

# Stages of two blocks. The first block of each later stage halves the image and doubles the
# channels.
STAGES = (1, 2, 3, 4)
_BATCH_NORM = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0, "num_batches_tracked": 0.0}


class BatchNorm2d(nn.BatchNorm2d):
    """torch's batch norm, which also works if the engine computes in bfloat16.

    The kernels need scale and shift in the dtype of the statistics, so both are cast to float32.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input`` (B, C, H, W) of any floating type. Shape and dtype stay."""
        assert self.num_batches_tracked is not None and self.momentum is not None
        if self.training and input.numel() == self.num_features:
            raise ModelError(
                f"batch norm of {self.num_features} channels: needs two values or more in a channel, and the input "
                f"{tuple(input.shape)} has one; raise train_micro_batch_size_per_gpu, or take larger images"
            )
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        tracked = not self.training or self.track_running_stats
        mean, variance = (self.running_mean, self.running_var) if tracked else (None, None)
        return F.batch_norm(
            input, mean, variance, self.weight.float(), self.bias.float(), self.training, self.momentum, self.eps
        )


class BasicBlock(nn.Module):
    """A residual block of two 3 × 3 convolutions: (B, C, H, W) → (B, C', H / stride, W / stride).

    A block with stride 1 and C' = C can be skipped. Its last ReLU would not change the block's
    input, which comes from another ReLU. In training, ``survival`` is the probability with which
    an image keeps the convolutions. ``dropout`` is the probability with which an element between
    the convolutions becomes zero.
    """

    def __init__(
        self, channels_in: int, channels: int, stride: int, survival: float = 1.0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.survival, self.dropout = survival, dropout
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = BatchNorm2d(channels)
        self.downsample = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), BatchNorm2d(channels)
            )

    def forward(self, images: Tensor) -> Tensor:
        skipped = images if self.downsample is None else self.downsample(images)
        hidden = F.relu(self.bn1(self.conv1(images)))
        if self.training and self.dropout:
            hidden = F.dropout(hidden, self.dropout)
        added = self.bn2(self.conv2(hidden))
        return F.relu((drop_rows(added, self.survival) if self.training else added) + skipped)


class ResNet(nn.Module):
    """A ResNet-18 with its classifier.

    With the stem "imagenet" and width 64, state dicts are those of torchvision's ``resnet18``.
    Raises ConfigError if ``config.num_classes`` is not set.
    """

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        if config.num_classes is None:
            raise ConfigError("model.num_classes: not set, and the data does not give it; add it to the model section")
        self.config = config
        width = config.width
        small = config.stem == "cifar"
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False) if small else nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = BatchNorm2d(width)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        # Blocks 1 to 8. The probability of skipping falls linearly to 0 before the first one.
        survival = [1 - config.stochastic_depth * block / 8 for block in range(1, 9)]
        self.layer1 = _stage(width, width, 1, survival[:2], config.dropout)
        self.layer2 = _stage(width, 2 * width, 2, survival[2:4], config.dropout)
        self.layer3 = _stage(2 * width, 4 * width, 2, survival[4:6], config.dropout)
        self.layer4 = _stage(4 * width, 8 * width, 2, survival[6:], config.dropout)
        self.fc = nn.Linear(8 * width, config.num_classes)

    def forward(self, images: Tensor, labels: Tensor | None = None, measure: Measure = "loss") -> Tensor:
        """Compute the logits (B, N) of ``images`` (B, 3, H, W).

        If ``labels`` (B) are given, compute the mean loss or the accuracy, a float32 scalar.
        """
        hidden = self.maxpool(F.relu(self.bn1(self.conv1(images))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            hidden = stage(hidden)
        logits = self.fc(F.adaptive_avg_pool2d(hidden, 1).flatten(1))
        return logits if labels is None else measure_logits(logits, labels, measure)

    def unit_patterns(self) -> list[str]:
        """Return patterns of the units' module paths: blocks that keep their input's shape."""
        return ["layer1.*", "layer2.1", "layer3.1", "layer4.1"]

    def random_options(self) -> list[str]:
        """List the options with which training draws random numbers."""
        return random_options(self.config)

    def unit_flops(self) -> dict[str, int]:
        """Count the floating-point operations of a forward pass of one image, by unit.

        Each weight of a convolution takes 2 operations per position.
        """
        side = self.config.image_size or (32 if self.config.stem == "cifar" else 224)
        if self.config.stem == "imagenet":
            side = math.ceil(math.ceil(side / 2) / 2)
        flops = {}
        for stage in STAGES:
            channels = self.config.width * 2 ** (stage - 1)
            block = 2 * 2 * 9 * channels**2 * side**2
            flops |= {f"layer{stage}.{index}": block for index in ((0, 1) if stage == 1 else (1,))}
            side = math.ceil(side / 2)
        return flops

    def neuron_branches(self) -> list[Branch]:
        """List the residual branches with neurons that groups may hold: one for each unit.

        A neuron is a channel between a block's two convolutions, with its batch norm's entries.
        """
        branches = []
        for name, flops in self.unit_flops().items():
            parameters = (
                (f"{name}.conv1.weight", 0),
                (f"{name}.bn1.weight", 0),
                (f"{name}.bn1.bias", 0),
                (f"{name}.conv2.weight", 1),
            )
            buffers = (f"{name}.bn1.running_mean", f"{name}.bn1.running_var")
            neurons = self.get_parameter(parameters[0][0]).shape[0]
            branches.append(Branch(name, neurons, parameters, buffers=buffers, flops=flops))
        return branches

    def parameter_init(self, name: str) -> Init:
        """Return torchvision's initialisation of the parameter or buffer with this canonical name.

        Convolutions are normal with variance 2 / (output channels × kernel positions), so that
        gradients neither grow nor vanish. The classifier has torch's own initialisation. Raises
        ModelError if the model has no tensor of this name.
        """
        module, _, leaf = name.rpartition(".")
        kind = type(dict(self.named_modules()).get(module))
        if kind is nn.Conv2d and leaf == "weight":
            weight = self.get_parameter(name)
            return Normal(math.sqrt(2 / (weight.shape[0] * weight.shape[2:].numel())))
        if kind is nn.Linear and leaf in ("weight", "bias"):
            return Uniform(1 / math.sqrt(8 * self.config.width))
        if kind is BatchNorm2d and leaf in _BATCH_NORM:
            return Constant(_BATCH_NORM[leaf])
        raise ModelError(f"{name}: ResNet has no parameter or buffer of this name")


def _stage(channels_in: int, channels: int, stride: int, survival: Sequence[float], dropout: float) -> nn.Sequential:
    return nn.Sequential(
        BasicBlock(channels_in, channels, stride, survival[0], dropout),
        BasicBlock(channels, channels, 1, survival[1], dropout),
    )
