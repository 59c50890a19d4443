"""``sdp train`` on real digits, and mistakes found before a start."""

import io
import json
import math
import shutil
import tarfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from sdp.engine.config.load import load_config
from sdp.engine.distributed.mesh import Mesh
from sdp.engine.errors import SDPError
from sdp.tests.support.small_runs import run_sdp
from sdp.tools.cli import main
from sdp.tools.train import preflight

pytestmark = pytest.mark.skipif(not (find_spec("kornia") and find_spec("sklearn")), reason="extra 'vision'")


@pytest.fixture
def config() -> dict:
    return {
        "train_batch_size": 48,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
        "sdp": {"groups": 2, "capacity": 0.5, "check_interval": 2},
        "model": {"name": "resnet18", "stem": "cifar", "width": 4},
        "data": {"name": "digits"},
        "training": {"steps": 4, "evaluate_every": 2, "evaluate_batches": 3, "save_every": 2},
    }


def write(config: dict, tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def lines(dump_dir: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (dump_dir / name).read_text().splitlines()]


def test_two_processes_on_digits_and_a_resume(config, tmp_path, capsys):
    path = write(config, tmp_path)
    finished = run_sdp("train", path, "--dump-dir", tmp_path / "run")
    assert finished.returncode == 0, finished.stderr
    assert "digits (1,437 images to train on, 360 held out, 10 classes, 8 × 8 pixels" in finished.stderr
    metrics = lines(tmp_path / "run", "metrics.jsonl")
    assert [(line["step"], line["samples"], line["tokens"]) for line in metrics] == [
        (step, 48 * step, 48 * step) for step in range(1, 5)
    ]
    assert all(line["samples_per_second"] == line["tokens_per_second"] > 0 for line in metrics)
    evaluations = lines(tmp_path / "run", "evaluations.jsonl")
    assert [line["step"] for line in evaluations] == [0, 2, 4]
    assert "images/s" in finished.stderr and "token" not in finished.stderr
    assert all(0 <= line["accuracy"] <= 1 and "perplexity" not in line for line in evaluations)
    # A run that goes on reads the same samples in the same random form.
    shutil.copytree(tmp_path / "run", tmp_path / "halves")
    shutil.rmtree(tmp_path / "halves/checkpoints/step-4")
    resumed = run_sdp("train", path, "--dump-dir", tmp_path / "halves", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed from {tmp_path / 'halves/checkpoints/step-2'}" in resumed.stderr
    assert [line["loss"] for line in lines(tmp_path / "halves", "metrics.jsonl")] == [line["loss"] for line in metrics]
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["sequences"] == result["targets"] == 3 * 48
    assert result["loss"] == pytest.approx(evaluations[-1]["loss"], rel=1e-5)
    assert result["accuracy"] == pytest.approx(evaluations[-1]["accuracy"])
    assert result["perplexity"] is None
    assert main(["evaluate", str(tmp_path / "run"), "--json", "--batches", "8"]) == 0
    assert json.loads(capsys.readouterr().out)["sequences"] == 360, "also the last 24, half a batch"
    assert main(["export", str(tmp_path / "run"), "--to", "hf", str(tmp_path / "hf")]) == 2
    assert "trained resnet18 on images" in (said := capsys.readouterr().err) and "sdp evaluate" in said


def test_a_small_swin_learns_digits(config, tmp_path, capsys):
    config["model"] = {
        "name": "swin_t", "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [1, 2], "window_size": 3,
    }  # fmt: skip
    config["model"]["initializer_range"] = 0.2
    config["sdp"] = {"groups": 1}
    config["training"] |= {"steps": 40, "evaluate_every": 0, "save_every": 40}
    assert main(["train", write(config, tmp_path), "--dump-dir", str(tmp_path / "run")]) == 0
    first, last = lines(tmp_path / "run", "evaluations.jsonl")
    assert last["loss"] < 0.8 * first["loss"] and last["accuracy"] > 0.25
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(last["accuracy"])


def cifar_10(path: Path) -> Path:
    """The binary archive as its site has it, with 16 images a file."""
    generator = np.random.default_rng(0)
    with tarfile.open(path / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
            rows = generator.integers(0, 256, (16, 1 + 3072), dtype=np.uint8)
            rows[:, 0] %= 10
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = rows.nbytes
            archive.addfile(member, io.BytesIO(rows.tobytes()))
    return path / "cifar-10-binary.tar.gz"


def imagenet(path: Path) -> Path:
    """Folders as ImageNet's are once unpacked; 2 classes."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 4)):
        for wordnet in ("n01440764", "n01443537"):
            (path / split / wordnet).mkdir(parents=True)
            for index in range(count):
                picture = Image.fromarray(generator.integers(0, 256, (70, 90, 3), dtype=np.uint8))
                picture.save(path / split / wordnet / f"{wordnet}_{index}.JPEG")
    return path


@pytest.mark.parametrize(
    ("name", "make", "changes"),
    [
        pytest.param("resnet18_cifar10", cifar_10, ["train_micro_batch_size_per_gpu=2"], marks=pytest.mark.slow),
        ("swin_t_imagenet", imagenet, ["data.image_size=64", "model.embed_dim=24"]),
    ],
)
def test_configurations_for_large_data_train(name, make, changes, tmp_path):
    """All that they state, but at small sizes."""
    path = Path(__file__).parents[4] / "configs" / f"{name}.json"
    short = [
        "training.steps=2", "training.evaluate_every=0", "training.evaluate_batches=1",
        "data.num_workers=0",
    ]  # fmt: skip
    here = [
        "sdp.groups=2", "train_micro_batch_size_per_gpu=1", f"data.path={make(tmp_path)}", *short, *changes,
    ]  # fmt: skip
    finished = run_sdp("train", path, "--dump-dir", tmp_path / "run", "--set", *here)
    assert finished.returncode == 0, finished.stderr
    metrics = lines(tmp_path / "run", "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2]
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in metrics)
    assert all("accuracy" in line for line in lines(tmp_path / "run", "evaluations.jsonl"))


MISTAKES = [
    ({"data.name": "digit"}, "data.name: input should be 'digits', 'cifar10', 'cifar100' or 'folder'"),
    ({"data.sequence_length": 64}, 'data: sequence_length is for tokens, and data.name is "digits"; remove it'),
    ({"data.path": "somewhere"}, 'data: path has no meaning for "digits"'),
    ({"data.image_size": 16}, 'data: image_size is for "folder", and "digits" has images of a fixed size'),
    ({"data.name": "cifar10"}, 'data: path is required for "cifar10": cifar-10-binary.tar.gz'),
    ({"data.name": "cifar10", "data.path": "/nowhere.tar.gz"},
        "/nowhere.tar.gz: no such file or directory; take the binary version"),
    ({"data.name": "folder", "data.path": "/nowhere"}, "/nowhere: no such directory"),
    ({"data.name": None, "data.augment": True}, "data: augment is for images (data.name); remove it"),
    ({"data.name": None}, "model.name: resnet18 reads images, but the data section describes tokens"),
    ({"model": {"name": "llama"}}, "model.name: llama reads tokens, but the data section describes images"),
    ({"model.num_classes": 100}, "model.num_classes: 100, but the data has 10; remove model.num_classes"),
    ({"model.image_size": 32}, "model.image_size: 32, but the data's images have sides of 8"),
    ({"training.steps": None}, "training.steps: this key is required to train"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=[message[:40] for _, message in MISTAKES])
def test_mistakes_are_found_before_anything_starts(config, tmp_path, changes, message):
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    with pytest.raises(SDPError) as error:
        preflight.check(
            load_config(config, overrides), Mesh(2), tmp_path / "run", tmp_path / "run/checkpoints", resume=False
        )
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_nothing_is_wrong_with_the_configuration_itself(config, tmp_path):
    preflight.check(load_config(config), Mesh(2), tmp_path / "run", tmp_path / "run/checkpoints", resume=False)
