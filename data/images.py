"""Image sets as map-style data sets, and their batches, which are cropped and mirrored at random.

The random crop of an image depends only on seed, epoch and index. A run is therefore the same
under every layout, with any number of loader processes, and after a resume. In shapes, B is the
number of samples and S the pixels per side.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..engine.errors import ConfigError, DataError, quote
from .files import require_regular
from .image_sets import ImageIndex, load_image_index, open_arrays

IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"}
HELD_OUT = 0.1  # the fraction of a folder that has no splits
_TEST_CROP = 0.875  # fraction of the shorter side; He et al., arXiv 1512.03385, test on 224 of 256
_SCALES, _RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)  # Szegedy et al., arXiv 1409.4842, section 6

Sample = tuple[torch.Tensor, int, int]  # uint8 image (C, S, S), label, position


class ImageArrays(Dataset[Sample]):
    """A map-style data set: one split of a prepared image set.

    A sample is (image, label, position), with a uint8 image (C, S, S). With N samples,
    position p is sample p mod N in epoch p // N. Raises DataError if a file does not match the
    index. If a file is cut off later, reading a lost sample raises DataError.
    """

    reads_positions = True

    def __init__(self, directory: Path, split: str) -> None:
        index = load_image_index(directory)
        self.images, self.labels = open_arrays(directory, split, index)
        self._directory, self._split, self.about = directory, split, index

    def __len__(self) -> int:
        return self.about.counts[self._split]

    def __getitem__(self, position: int) -> Sample:
        item = position % len(self)
        return torch.from_numpy(self.images[item]), int(self.labels[item]), position

    def __getstate__(self) -> dict[str, Any]:
        # Each worker process opens the files itself.
        return {**self.__dict__, "images": None, "labels": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.images, self.labels = open_arrays(self._directory, self._split, self.about)


class ImageFolder(Dataset[Sample]):
    """A map-style data set: a folder with a directory of images for each class.

    A sample is (image, label, position). The image is a square of ``image_size`` pixels per side,
    RGB in uint8, decoded when it is read. With a ``seed``, the square is a random crop of the
    picture, and every epoch has another crop. Without a seed, it is the middle of the picture.

    ``root`` has ``train/CLASS/…`` and ``val/CLASS/…`` (or ``test``, ``held_out``), or only
    ``CLASS/…``. In the second case a tenth is held out, chosen by the files' names.

    Raises DataError if there are no images, and on reading a file that is not an image.
    """

    reads_positions = True

    def __init__(self, root: Path, split: str, image_size: int, seed: int | None = None) -> None:
        self.root, self.image_size, self.seed = root, image_size, seed
        self.classes, files = _files_of(root, split)
        if not files:
            raise DataError(
                f"{root}: no images for the split {split!r}; expected train/CLASS/*.jpg and val/CLASS/*.jpg, or "
                "CLASS/*.jpg"
            )
        # Arrays, because worker processes would copy the pages of a list.
        self.paths = np.array([path for path, _ in files])
        self._labels = np.array([label for _, label in files])
        identity = hashlib.sha256("\n".join(path for path, _ in files).encode()).hexdigest()
        self.about = ImageIndex(
            name=root.name, num_classes=len(self.classes), image_size=image_size, counts={split: len(files)},
            mean=IMAGENET_MEAN, std=IMAGENET_STD, sha256=identity, mirrors=True, format="folder",
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, position: int) -> Sample:
        from PIL import Image

        epoch, item = divmod(position, len(self))
        path = self.root / str(self.paths[item])
        require_regular(path, "remove it")
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(
                f"{path}: cannot be read as an image ({' '.join(str(error).split())}); repair or remove it"
            ) from None
        width, height = image.size
        box = (
            _middle(width, height) if self.seed is None else _some_part(width, height, _random(self.seed, epoch, item))
        )
        square = image.resize((self.image_size, self.image_size), Image.Resampling.BILINEAR, box=box)
        return torch.from_numpy(np.array(square).transpose(2, 0, 1).copy()), int(self._labels[item]), position


def _files_of(root: Path, split: str) -> tuple[list[str], list[tuple[str, int]]]:
    """Return the classes in order, and the path below ``root`` and the label of every image."""
    if not root.is_dir():
        raise DataError(f"{root}: no such directory")
    folders = {"train": ["train"], "held_out": ["val", "test", "held_out"]}
    is_split = (root / "train").is_dir()
    classes_in = root / "train" if is_split else root
    classes = sorted(path.name for path in classes_in.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(classes) < 2:
        raise DataError(f"{classes_in}: {len(classes)} directories of classes; two or more are needed")
    base = next((root / name for name in folders[split] if (root / name).is_dir()), None) if is_split else root
    if base is None:
        raise DataError(f"{root}: has train/, but neither val/ nor test/ for evaluation; add one of them")
    strangers = sorted(
        {path.name for path in base.iterdir() if path.is_dir() and not path.name.startswith(".")} - set(classes)
    )
    if strangers:
        raise DataError(
            f"{base}: the class {quote(strangers[0])} is not in {classes_in}; add it there, or remove it here"
        )
    files = []
    for label, name in enumerate(classes):
        # A class may have no directory in the held-out split.
        paths = sorted(path for path in (base / name).rglob("*") if path.suffix.lower() in SUFFIXES)
        files += [(path.relative_to(root).as_posix(), label) for path in paths]
    if not is_split:
        files = [(path, label) for path, label in files if _is_held_out(path) == (split == "held_out")]
    return classes, files


def _is_held_out(path: str) -> bool:
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") < HELD_OUT * 2**32


def _random(seed: int, epoch: int, item: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, epoch, item]))


def _middle(width: int, height: int) -> tuple[float, float, float, float]:
    side = _TEST_CROP * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _some_part(width: int, height: int, random: np.random.Generator) -> tuple[float, float, float, float]:
    """Choose a box with a random part of the image's area and a random shape.

    If ten draws do not fit into the image, the box is its middle.
    """
    for _ in range(10):
        area = width * height * random.uniform(*_SCALES)
        ratio = np.exp(random.uniform(*np.log(_RATIOS)))
        wide, high = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if wide <= width and high <= height:
            left, top = random.uniform(0, width - wide), random.uniform(0, height - high)
            return left, top, left + wide, top + high
    return _middle(width, height)


def check_packages(name: str | None = None) -> None:
    """Raise ConfigError if the package kornia is missing, or for the image set "folder" Pillow."""
    for package, module in (("kornia", "kornia"), *([("Pillow", "PIL")] if name == "folder" else [])):
        if find_spec(module) is None:
            raise ConfigError(
                f"data.name: images need the package {package}, which is not installed; pip install "
                '"sdp-engine[vision]"'
            )


class Batches:
    """A ``collate_fn`` that makes ``{"images": (B, 3, S, S), "labels": (B,)}`` of B samples.

    Images become float32 and are normalised. With a ``seed``, they are cropped and mirrored at
    random, differently in each epoch. ``samples`` is the length of the data set, from which the
    epoch of a sample is computed. Raises ConfigError if kornia is missing.
    """

    def __init__(self, about: ImageIndex, samples: int, seed: int | None = None) -> None:
        check_packages()
        self.about, self.samples, self.seed = about, samples, seed

    def __call__(self, samples: list[Sample]) -> dict[str, torch.Tensor]:
        from kornia.enhance import normalize

        images = torch.stack([image for image, _, _ in samples]).float() / 255
        if self.seed is not None:
            images = self._crop_and_mirror(images, [position for _, _, position in samples])
        mean, std = torch.tensor(self.about.mean), torch.tensor(self.about.std)
        # A grey image becomes three equal channels.
        images = normalize(images, mean, std).expand(-1, 3, -1, -1).contiguous()
        return {"images": images, "labels": torch.tensor([label for _, label, _ in samples])}

    def _crop_and_mirror(self, images: torch.Tensor, positions: list[int]) -> torch.Tensor:
        """Shift the images by up to ``crop`` pixels, and mirror half of them.

        The edges are filled with zeros.
        """
        from kornia.geometry.transform import crop_by_indices, hflip

        assert self.seed is not None
        draws = [_random(self.seed, *divmod(position, self.samples)) for position in positions]
        if self.about.crop:
            corners = torch.tensor(np.stack([draw.integers(0, 2 * self.about.crop + 1, 2) for draw in draws]))
            last = self.about.image_size - 1
            square = torch.tensor([[0, 0], [last, 0], [last, last], [0, last]])
            padded = torch.nn.functional.pad(images, [self.about.crop] * 4)
            images = crop_by_indices(padded, (corners[:, None] + square).float(), size=(last + 1, last + 1))
        if self.about.mirrors:
            mirrored = torch.tensor([bool(draw.integers(2)) for draw in draws])
            images = torch.where(mirrored[:, None, None, None], hflip(images), images)
        return images
