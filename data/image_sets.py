"""Prepares named image sets as arrays in files: scikit-learn's digits, CIFAR-10 and CIFAR-100.

A prepared directory has two files per split: ``SPLIT-images.npy``, uint8 of shape (samples,
channels, side, side), and ``SPLIT-labels.npy``, int64. Its index ``images.json`` is written last,
so a directory with an index is complete.

CIFAR is read from its binary archives. The archives of its Python version are pickles, which can
run code, so they are refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..engine.batch.positioned_file import PositionedFile
from ..engine.errors import ConfigError, DataError
from .files import read_at, read_index, require_regular
from .output import writing

INDEX_FILE = "images.json"
FORMAT = "sdp-images"
SPLITS = ("train", "held_out")
_AGAIN = "remove the directory to have it made again"
_CIFAR_URL = "https://www.cs.toronto.edu/~kriz/cifar.html"
_PICKLES = {"batches.meta", "meta", "train", "test", "test_batch", *(f"data_batch_{i}" for i in range(1, 6))}

# Images, uint8 of shape (samples, channels, side, side), and their labels.
Arrays = tuple[np.ndarray, np.ndarray]


_Count = Annotated[int, Field(gt=0, lt=2**40)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class ImageIndex(BaseModel):
    """Properties of an image set. For a prepared set, they are the content of ``images.json``.

    Attributes:
        counts: The number of images in each split.
        mean, std: For each channel, the mean and the standard deviation of the training pixels, on
            a scale from 0 to 1. A folder of images has the values of ImageNet.
        sha256: The hash of all arrays. For a folder of images, the hash of the files' names.
        mirrors: Whether a mirrored image still belongs to its class.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str
    num_classes: _Count
    image_size: _Count
    counts: dict[str, _Count]
    mean: list[_Finite]
    std: list[Annotated[_Finite, Field(gt=0)]]
    sha256: str
    mirrors: bool
    format: str

    @model_validator(mode="after")
    def _check_channels(self) -> ImageIndex:
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
            raise ValueError("mean and std do not have a value for each channel")
        return self

    @property
    def crop(self) -> int:
        """The largest random shift of a training image, in pixels.

        It is 0 for a folder, because images of a folder are cropped when they are read.
        """
        return self.image_size // 8 if self.format == FORMAT else 0


def prepare_images(name: str, path: Path | None, output: Path) -> ImageIndex:
    """Write the arrays of a named image set to ``output``, unless they are there already.

    ``path`` is CIFAR's archive, or the directory to which it was unpacked. The digits need no path.
    Raises DataError if the archive is missing or damaged, or has pickles.
    """
    if (output / INDEX_FILE).is_file() and load_image_index(output).name == name:
        return load_image_index(output)
    check_source(name, path)
    if path is None:
        splits = _digits()
    else:
        layout = _CIFAR[name]
        content = _read_files(path, layout)
        splits = {
            split: _records(path, [(file, content[file]) for file in getattr(layout, split)], layout)
            for split in SPLITS
        }
    facts = facts_of_set(name)
    digest = hashlib.sha256()
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
        for split, arrays in splits.items():
            for file, array in zip(_paths(output, split), arrays, strict=True):
                require_regular(file, _AGAIN)
                with _replacing(file) as temporary:
                    np.save(temporary, array, allow_pickle=False)
                digest.update(array.tobytes())
    images = splits["train"][0]
    pixels = images.reshape(*images.shape[:2], -1)
    # Counts of the 256 values give exact moments without a copy in floating point.
    counts = [np.bincount(channel.ravel(), minlength=256) for channel in pixels.swapaxes(0, 1)]
    moments = [_mean_and_std(count) for count in counts]
    if not all(std for _, std in moments):
        raise DataError(f"{path or name}: a colour channel has the same value in all images; take another archive")
    index = ImageIndex(
        name=name,
        num_classes=facts["num_classes"],
        image_size=facts["image_size"],
        counts={split: len(arrays[1]) for split, arrays in splits.items()},
        mean=[mean for mean, _ in moments],
        std=[std for _, std in moments],
        sha256=digest.hexdigest(),
        mirrors=name != "digits",
        format=FORMAT,
    )
    with writing(output), _replacing(output / INDEX_FILE) as temporary:
        temporary.write((json.dumps(index.model_dump(), indent=1) + "\n").encode())
    return index


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A context with a new file, which replaces ``path`` when it is complete.

    Several runs may write the same set at the same time.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def facts_of_set(name: str) -> dict[str, int]:
    """Return ``num_classes`` and ``image_size`` (pixels per side) of a named image set."""
    if name in _CIFAR:
        return {"num_classes": _CIFAR[name].classes, "image_size": 32}
    return {"num_classes": 10, "image_size": 8}


def check_source(name: str, path: Path | None) -> None:
    """Check that a named image set can be prepared.

    Raises ConfigError if scikit-learn is missing, and DataError if ``path`` has no binary files of
    CIFAR.
    """
    if name == "digits":
        if find_spec("sklearn") is None:
            raise ConfigError(
                'data.name: "digits" needs scikit-learn, which is not installed; pip install "sdp-engine[vision]"'
            )
        return
    assert path is not None  # the configuration requires it
    layout = _CIFAR[name]
    _read_files(path, layout, first_alone=True)


def load_image_index(directory: Path) -> ImageIndex:
    """Read the index of prepared images. Raises DataError if it is missing or damaged."""
    path = directory / INDEX_FILE
    missing = f"no prepared images here (no {INDEX_FILE}); sdp train makes them"
    content = read_index(path, missing, _AGAIN)
    try:
        index = ImageIndex.model_validate(content)
        if index.format != FORMAT or not {*SPLITS} <= index.counts.keys():
            raise ValueError(f"its format is not {FORMAT!r}, or a split is missing")
        return index
    except ValueError as error:
        raise DataError(f"{path}: not an index of images ({' '.join(str(error).split())}); {_AGAIN}") from None


class ArrayFile:
    """An array in a ``.npy`` file. ``file[i]`` reads entry ``i`` from the disk.

    Raises DataError if dtype or number of entries are not as expected, or if the file is cut off.
    """

    def __init__(self, path: Path, samples: int, dtype: str) -> None:
        self._path = path
        remedy = f"remove {path.parent} to have it made again"
        require_regular(path, remedy)
        try:
            with path.open("rb") as file:
                if (version := np.lib.format.read_magic(file)) != (1, 0):
                    raise ValueError(f"its .npy format has version {version}, not (1, 0)")
                shape, is_fortran, found = np.lib.format.read_array_header_1_0(file)
                self._start = file.tell()
            self._file = PositionedFile(path)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path}: cannot be read ({error}); {remedy}") from None
        if not shape or is_fortran or found != np.dtype(dtype):
            raise DataError(f"{path}: not an array of {dtype} with a sample in each row; {remedy}")
        if shape[0] != samples:
            raise DataError(f"{path}: has {shape[0]} samples instead of {samples}; {remedy}")
        self._shape, self._dtype = shape[1:], found
        self._size = math.prod(self._shape) * found.itemsize
        if samples:
            self[samples - 1]

    def __getitem__(self, item: int) -> np.ndarray:
        read = read_at(self._file, self._start + item * self._size, self._size)
        if len(read) < self._size:
            raise DataError(f"{self._path}: is cut off; remove {self._path.parent} to have it made again")
        # The copy can be written to, as torch wants it.
        return np.frombuffer(read, self._dtype).reshape(self._shape).copy()


def open_arrays(directory: Path, split: str, index: ImageIndex) -> tuple[ArrayFile, ArrayFile]:
    """Open images and labels of a split. Raises DataError if they do not match the index."""
    images, labels = _paths(directory, split)
    samples = index.counts[split]
    return ArrayFile(images, samples, "uint8"), ArrayFile(labels, samples, "<i8")


def _paths(directory: Path, split: str) -> list[Path]:
    return [directory / f"{split}-{part}.npy" for part in ("images", "labels")]


def _mean_and_std(counts: np.ndarray) -> tuple[float, float]:
    """Compute mean and standard deviation of values 0 … 255 that occur ``counts`` times.

    Both are divided by 255.
    """
    values = np.arange(256) / 255
    mean = float((counts * values).sum() / counts.sum())
    return mean, float(np.sqrt((counts * (values - mean) ** 2).sum() / counts.sum()))


def _digits() -> dict[str, Arrays]:
    """Load 1,797 scans of handwritten digits with 8 × 8 pixels in 17 shades of grey.

    The last fifth, in the set's own order, is held out.
    """
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    images = np.round(digits.images[:, None] * (255 / 16)).astype(np.uint8)
    labels = digits.target.astype(np.int64)
    held_out = len(labels) // 5 + 1  # 360
    return {"train": (images[:-held_out], labels[:-held_out]), "held_out": (images[-held_out:], labels[-held_out:])}


@dataclass(frozen=True)
class _Cifar:
    """The files of a set.

    A record has ``label_bytes`` bytes, the last of which is the class, and then 32 × 32 bytes each
    for red, green and blue.
    """

    classes: int
    label_bytes: int
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    archive: str


_CIFAR = {
    "cifar10": _Cifar(
        10, 1, tuple(f"data_batch_{i}.bin" for i in range(1, 6)), ("test_batch.bin",), "cifar-10-binary.tar.gz"
    ),
    "cifar100": _Cifar(100, 2, ("train.bin",), ("test.bin",), "cifar-100-binary.tar.gz"),
}


def _read_files(path: Path, layout: _Cifar, *, first_alone: bool = False) -> dict[str, bytes]:
    """Read the binary files by name.

    ``first_alone`` stops after the first file. The check of an archive need not decompress more.
    """
    wanted, content, pickles = {*layout.train, *layout.held_out}, {}, False
    try:
        for name, read in _files(path):
            pickles |= name in _PICKLES
            if name in wanted:
                content[name] = read()
                if first_alone:
                    return content
    except FileNotFoundError:
        raise DataError(f"{path}: no such file or directory; {_take_binary(layout)}") from None
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(
            f"{path}: cannot be read ({str(error).splitlines()[0]}), damaged or cut off; {_take_binary(layout)}"
        ) from None
    missing = sorted(wanted - set(content))
    if missing:
        reason = "holds pickles, which are code and are not loaded" if pickles else f"has no {missing[0]}"
        raise DataError(f"{path}: {reason}; {_take_binary(layout)}")
    return content


def _files(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """List the files in an archive or a directory: their names, and functions that read them."""
    if path.is_dir():
        yield from ((file.name, file.read_bytes) for file in sorted(path.rglob("*")) if file.is_file())
        return
    require_regular(path, "give CIFAR's archive, or the directory to which it was unpacked")
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and (file := archive.extractfile(member)) is not None:
                yield Path(member.name).name, file.read


def _take_binary(layout: _Cifar) -> str:
    return f"take the binary version, {layout.archive}, from {_CIFAR_URL}"


def _records(path: Path, files: list[tuple[str, bytes]], layout: _Cifar) -> Arrays:
    size = layout.label_bytes + 3 * 32 * 32
    for name, data in files:
        if not data or len(data) % size:
            raise DataError(
                f"{path}: {name} has {len(data):,} bytes, not a multiple of {size:,}: damaged, or of another set"
            )
    records = np.frombuffer(b"".join(data for _, data in files), dtype=np.uint8).reshape(-1, size)
    labels = records[:, layout.label_bytes - 1].astype(np.int64)
    if labels.max() >= layout.classes:
        raise DataError(
            f"{path}: a label of {labels.max()}, but there are {layout.classes} classes: damaged, or of another set"
        )
    return records[:, layout.label_bytes :].reshape(-1, 3, 32, 32), labels
