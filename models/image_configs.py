"""The shapes of ResNet-18 and Swin: the ``model`` section of a configuration."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ..engine.config.section import Layers, Pixels, Section, Width

Depths = Annotated[list[Layers], Field(min_length=1, max_length=16)]
Heads = Annotated[list[Width], Field(min_length=1, max_length=16)]


class ResNetConfig(Section):
    """Shape of a ResNet-18. The data can give ``num_classes`` and ``image_size``.

    ``stem``: "imagenet" divides the image's side by 4 before the first block; "cifar", a single 3 ×
    3 convolution, keeps it. ``width`` is the number of channels of the first stage. ``image_size``
    is the number of pixels per side; it is only used to compare the costs of units.

    ``stochastic_depth`` is the probability with which an image skips the convolutions of the last
    block in training. It falls linearly to 0 before the first block (arXiv 1603.09382). ``dropout``
    drops elements between the two convolutions of a block (arXiv 1605.07146, section 2.4). Each
    rank draws its own random numbers.
    """

    num_classes: Width | None = None
    stem: Literal["cifar", "imagenet"] = "imagenet"
    width: Width = 64
    image_size: Pixels | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    stochastic_depth: Annotated[float, Field(ge=0, lt=1)] = 0.0


class SwinConfig(Section):
    """Shape of a Swin. The defaults are Swin-T's. The data can give ``num_classes`` and
    ``image_size``.

    ``depths`` has the number of blocks of each stage, and ``num_heads`` the heads of each of its
    blocks. The first stage has ``embed_dim`` channels; every further stage halves the image's side
    and doubles the channels. ``patch_size`` is the number of pixels per side of a patch,
    ``window_size`` the number of patches per side of a window. ``image_size`` is the number of
    pixels per side; it is only used to compare the costs of units.

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
        """C of a stage; the first stage is 0."""
        return self.embed_dim * 2**stage


def random_options(config: ResNetConfig | SwinConfig) -> list[str]:
    """List the options that make training draw random numbers, as ``"model.KEY VALUE"``."""
    rates = {key: getattr(config, key, 0.0) for key in ("dropout", "stochastic_depth")}
    return [f"model.{key} {rate:g}" for key, rate in rates.items() if rate]
