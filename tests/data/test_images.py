"""Image sets: what is read is what was written, and random forms can be repeated."""

import io
import itertools
import json
import os
import shutil
import tarfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sdp.data.image_sets import prepare_images
from sdp.data.images import Batches, ImageArrays, ImageFolder
from sdp.engine.batch.loader import ResumableLoader, evaluation_batches
from sdp.engine.errors import DataError

pytestmark = pytest.mark.skipif(not find_spec("kornia"), reason="extra 'vision'")


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("digits")
    prepare_images("digits", None, folder)
    return folder


def arrays_in(directory: Path, split: str) -> list[np.ndarray]:
    return [np.load(directory / f"{split}-{part}.npy") for part in ("images", "labels")]


@pytest.mark.parametrize("part", ["images", "labels"])
def test_arrays_that_are_cut_off_are_named(digits, tmp_path, part):
    """At opening, and in a read. A memory map would end the process by SIGBUS."""
    path = shutil.copytree(digits, tmp_path / "set") / f"train-{part}.npy"
    samples = ImageArrays(path.parent, "train")
    assert samples[0][0].shape == (1, 8, 8)
    os.truncate(path, 1000)
    for opened in (lambda: samples[len(samples) - 1], lambda: ImageArrays(path.parent, "train")):
        with pytest.raises(DataError, match=rf"train-{part}\.npy: is cut off; remove .*set to have it made again"):
            opened()
    os.truncate(path, 100)
    with pytest.raises(DataError, match=rf"train-{part}\.npy: cannot be read .*; remove .*set to have it made again"):
        ImageArrays(path.parent, "train")


def records(count: int, label_bytes: int, classes: int, seed: int) -> np.ndarray:
    rows = np.random.default_rng(seed).integers(0, 256, (count, label_bytes + 3072), dtype=np.uint8)
    rows[:, :label_bytes] = np.arange(count)[:, None] * 7 % classes
    return rows


def cifar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"cifar/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def test_digits_are_scikit_learns(digits, tmp_path):
    from sklearn.datasets import load_digits

    index = prepare_images("digits", None, digits)
    assert (index.num_classes, index.image_size, index.counts) == (10, 8, {"train": 1437, "held_out": 360})
    parts = [arrays_in(digits, split) for split in ("train", "held_out")]
    images, labels = (np.concatenate(both) for both in zip(*parts, strict=True))
    theirs: Any = load_digits()
    assert images.shape == (1797, 1, 8, 8)
    assert np.abs(images[:, 0] / 255 * 16 - theirs.images).max() < 0.04
    assert (labels == theirs.target).all()
    assert index.mean == pytest.approx([(parts[0][0] / 255).mean()])
    assert index.std == pytest.approx([(parts[0][0] / 255).std()])
    assert np.bincount(parts[1][1]).min() > 25, "every class is held out"


@pytest.mark.parametrize(("name", "label_bytes", "classes"), [("cifar10", 1, 10), ("cifar100", 2, 100)])
@pytest.mark.parametrize("unpacked", [False, True])
def test_cifar_from_its_binary_archive(tmp_path, name, label_bytes, classes, unpacked):
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if name == "cifar10" else ["train.bin"]
    rows = {file: records(3, label_bytes, classes, seed) for seed, file in enumerate(names)}
    rows["test_batch.bin" if name == "cifar10" else "test.bin"] = records(2, label_bytes, classes, 9)
    path = cifar(tmp_path / "archive.tar.gz", {file: data.tobytes() for file, data in reversed(rows.items())})
    if unpacked:
        shutil.unpack_archive(path, tmp_path / "unpacked")
        path = tmp_path / "unpacked"
    index = prepare_images(name, path, tmp_path / "arrays")
    images, labels = arrays_in(tmp_path / "arrays", "train")
    expected = np.concatenate([rows[file] for file in names])
    assert (labels == expected[:, label_bytes - 1]).all()
    assert (images.reshape(len(expected), -1) == expected[:, label_bytes:]).all()
    assert index.counts == {"train": len(expected), "held_out": 2}
    assert index.mean == pytest.approx((images / 255).mean((0, 2, 3)).tolist())
    assert index.std == pytest.approx((images / 255).std((0, 2, 3)).tolist())
    sample = ImageArrays(tmp_path / "arrays", "train")[1][0]
    assert sample.shape == (3, 32, 32)
    assert sample[2, 0, 1] == expected[1, label_bytes + 2 * 1024 + 1], "planes are red, green, blue"


def broken_archives(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    data = records(2, 1, 10, 0).tobytes()
    whole = {f"data_batch_{i}.bin": data for i in range(1, 6)} | {"test_batch.bin": data}
    cut = cifar(tmp_path / "cut.tar.gz", whole)
    cut.write_bytes(cut.read_bytes()[:-4000])
    return {
        "of pickles": (cifar(tmp_path / "a.tar.gz", {"data_batch_1": b"", "batches.meta": b""}),
            "holds pickles, which are code"),
        "of another set": (cifar(tmp_path / "b.tar.gz", {"train.bin": data}), r"has no data_batch_1\.bin"),
        "cut off": (cut, "damaged or cut off"),
        "no archive": (Path(__file__), "damaged or cut off"),
        "missing": (tmp_path / "nowhere.tar.gz", "no such file"),
        "of odd size": (cifar(tmp_path / "c.tar.gz", whole | {"data_batch_3.bin": data[:-1]}),
            r"data_batch_3\.bin has 6,145 bytes"),
        "of wrong labels": (cifar(tmp_path / "d.tar.gz", whole | {"test_batch.bin": b"\x0a" + data[1:]}),
            "a label of 10"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "kind", ["of pickles", "of another set", "cut off", "no archive", "missing", "of odd size", "of wrong labels"]
)
def test_a_broken_archive_is_named(tmp_path, kind):
    path, message = broken_archives(tmp_path)[kind]
    with pytest.raises(DataError, match=message) as error:
        prepare_images("cifar10", path, tmp_path / "arrays")
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "arrays" / "images.json").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"counts": 3}, {"counts": {}}, {"counts": {"train": 10**30, "held_out": 1}}, {"num_classes": "10"},
        {"image_size": 0}, {"mean": ["x"]}, {"mean": 1.0}, {"std": [0.0]}, {"std": []}, {"sha256": 1}, {"mirrors": 1},
        {"name": None}, {"more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_an_index_of_images_with_other_values_is_refused(digits, tmp_path, change):
    content = json.loads((digits / "images.json").read_text())
    (tmp_path / "images.json").write_text(json.dumps(content | change))
    with pytest.raises(DataError, match=r"images\.json: not an index of images .*; remove the directory"):
        ImageArrays(tmp_path, "train")


@pytest.mark.parametrize("dtype", ["float64", "O"])
def test_an_array_of_another_type_is_refused(digits, tmp_path, dtype):
    """An array of objects would be a pickle."""
    path = shutil.copytree(digits, tmp_path / "set") / "train-labels.npy"
    np.save(path, np.load(path).astype(dtype), allow_pickle=True)
    with pytest.raises(DataError, match=r"train-labels\.npy: not an array of <i8"):
        ImageArrays(path.parent, "train")


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two classes; an image is of one colour, and a quarter of it at the right is black."""
    for split, count in (("train", 4), ("val", 2)):
        for label, name in enumerate(("cat", "dog")):
            for number in range(count):
                path = tmp_path / split / name / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = np.full((40, 80, 3), 100 + 50 * label + number, dtype=np.uint8)
                pixels[:, 60:] = 0
                Image.fromarray(pixels).save(path)
    return tmp_path


def test_a_folder_is_decoded_when_it_is_read(folder):
    held_out = ImageFolder(folder, "held_out", 16)
    assert len(held_out) == 4
    assert [held_out[i][1] for i in range(4)] == [0, 0, 1, 1]
    image, _, _ = held_out[3]
    assert image.shape == (3, 16, 16)
    assert image.eq(151).all(), "the middle alone"
    train = ImageFolder(folder, "train", 16, seed=0)
    forms = [train[epoch * 8 + 2][0] for epoch in range(6)]
    assert all(torch.equal(form, train[epoch * 8 + 2][0]) for epoch, form in enumerate(forms))
    assert len({form.numpy().tobytes() for form in forms}) > 1
    (folder / "train" / "dog" / "1.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"dog/1\.png: cannot be read as an image"):
        train[5]


def test_a_folder_that_is_not_split_is_split_by_name(folder):
    for number in range(60):
        shutil.copy(folder / "train" / "cat" / "0.png", folder / "train" / "cat" / f"more-{number}.png")
    train, held_out = ImageFolder(folder / "train", "train", 8), ImageFolder(folder / "train", "held_out", 8)
    assert len(train) + len(held_out) == 68
    assert 1 <= len(held_out) <= 20
    assert not {*train.paths} & {*held_out.paths}


def test_a_folder_without_classes_is_refused(folder):
    (folder / "val" / "cow").mkdir()
    with pytest.raises(DataError, match="the class 'cow' is not in"):
        ImageFolder(folder, "held_out", 8)
    with pytest.raises(DataError, match="0 directories of classes"):
        ImageFolder(folder / "train" / "cat", "train", 8)


def test_held_out_batches_are_normalised_alone(digits):
    dataset = ImageArrays(digits, "held_out")
    batch = next(iter(evaluation_batches(dataset, 360, collate_fn=Batches(dataset.about, len(dataset)))))
    images, labels = arrays_in(digits, "held_out")
    expected = (torch.tensor(images / 255) - dataset.about.mean[0]) / dataset.about.std[0]
    torch.testing.assert_close(batch["images"], expected.float().expand(-1, 3, -1, -1))
    assert batch["labels"].tolist() == labels.tolist()


def mirrored_set(digits: Path) -> ImageArrays:
    dataset = ImageArrays(digits, "train")
    dataset.about = dataset.about.model_copy(update={"mirrors": True})
    return dataset


def batches_of(
    dataset: ImageArrays, ranks: int, micro: int, steps: int, start: int = 0, workers: int = 0
) -> list[dict]:
    """What all data ranks read together in each step, in rank order."""
    collate = Batches(dataset.about, len(dataset), seed=3)
    loaders = [
        ResumableLoader(dataset, micro, rank, ranks, seed=5, collate_fn=collate, num_workers=workers)
        for rank in range(ranks)
    ]
    for loader in loaders:
        loader.load_state_dict({"seed": 5, "consumed": start, "num_samples": len(dataset)})
    parts = [list(itertools.islice(loader, steps)) for loader in loaders]
    return [
        {key: torch.cat([part[step][key] for part in parts]) for key in ("images", "labels")} for step in range(steps)
    ]


def test_the_same_pictures_under_every_layout_and_after_a_resume(digits):
    dataset = mirrored_set(digits)
    whole = batches_of(dataset, 1, 24, 4, start=1416)  # into the second epoch
    for others in (
        batches_of(dataset, 4, 6, 4, start=1416),
        batches_of(dataset, 2, 12, 4, start=1416, workers=2),
        whole[:2] + batches_of(dataset, 2, 12, 2, start=1416 + 48),
    ):
        for batch, other in zip(whole, others, strict=True):
            assert torch.equal(batch["images"], other["images"])
            assert torch.equal(batch["labels"], other["labels"])


def test_every_epoch_has_a_form_of_its_own(digits):
    """All shifts of a pixel and both mirrorings occur, of the picture that the sample is."""
    dataset = mirrored_set(digits)
    collate = Batches(dataset.about, len(dataset), seed=3)
    forms = collate([dataset[epoch * len(dataset) + 7] for epoch in range(200)])["images"]
    raw = Batches(dataset.about, len(dataset))([dataset[7]])["images"][0]
    black = (0 - dataset.about.mean[0]) / dataset.about.std[0]
    padded = torch.nn.functional.pad(raw, [1] * 4, value=black)
    shifted = [padded[:, y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
    expected = [form for image in shifted for form in (image, image.flip(-1))]
    seen = [min(range(18), key=lambda i: (form - expected[i]).abs().max().item()) for form in forms]
    assert all((form - expected[i]).abs().max() < 1e-5 for form, i in zip(forms, seen, strict=True))
    assert set(seen) == set(range(18))


def test_arrays_appear_only_when_they_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several runs may write the same set, and read it, at the same time."""
    prepare_images("digits", None, tmp_path / "whole")
    seen: list[list[str]] = []

    def save(file: Any, array: Any, **keywords: Any) -> None:
        file.write(b"half of it")
        seen.append([path.name for path in (tmp_path / "set").glob("*.npy")])
        file.seek(0)
        np.lib.format.write_array(file, np.asarray(array), **keywords)

    monkeypatch.setattr(np, "save", save)
    prepare_images("digits", None, tmp_path / "set")
    assert [len(names) for names in seen] == [0, 1, 2, 3]
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "set" / path.name).read_bytes() == path.read_bytes()
    assert not [*(tmp_path / "set").glob("*.tmp")]
