"""The files of configs/ for containers, Kubernetes and SkyPilot are well-formed, as far as they can
be checked without a cluster.
"""

import re
import shlex
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from sdp.tools.train.command import parse

ROOT = Path(__file__).resolve().parents[1]
CONTAINERS, CLUSTERS = ROOT / "configs/containers", ROOT / "configs/clusters"
# Those of Apptainer's documentation, "Definition Files".
SECTIONS = {
    "setup", "files", "post", "test", "environment", "startscript", "runscript", "labels", "help", "arguments",
}  # fmt: skip


def read_yaml(path: Path) -> Any:
    return pytest.importorskip("yaml").safe_load(path.read_text(encoding="utf-8"))


def check_shell(script: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr


def options_of(words: list[str]) -> Namespace:
    """Parse the command that ``words`` end with, which is sdp train."""
    start = words.index("sdp")
    assert words[start + 1] == "train"
    return parse(words[start + 2 :])


def test_the_dockerfile_is_one() -> None:
    dockerfile = pytest.importorskip("dockerfile")  # Docker's own parser
    lines = dockerfile.parse_file(str(CONTAINERS / "Dockerfile"))
    assert [line.cmd for line in lines] == ["ARG", "FROM", "COPY", "RUN", "WORKDIR", "CMD"]
    for line in lines:
        if line.cmd == "RUN":
            check_shell(line.value[0])


def test_the_apptainer_recipe_is_one() -> None:
    header, *sections = re.split(r"^%", (CONTAINERS / "sdp.def").read_text(encoding="utf-8"), flags=re.MULTILINE)
    keys = dict(line.split(": ", 1) for line in header.splitlines() if line and not line.startswith("#"))
    assert keys.keys() == {"Bootstrap", "From"} and keys["Bootstrap"] == "docker"
    bodies = dict(section.split("\n", 1) for section in sections)
    assert bodies.keys() <= SECTIONS and {"files", "post", "runscript"} <= bodies.keys()
    for name in ("post", "test", "runscript"):
        check_shell(bodies[name])


def test_both_images_are_made_the_same_way() -> None:
    docker, apptainer = ((CONTAINERS / name).read_text(encoding="utf-8") for name in ("Dockerfile", "sdp.def"))
    base = re.search(r"^ARG BASE=(.*)$", docker, re.MULTILINE)
    assert base is not None and f"From: {base[1]}\n" in apptainer
    for command in (
        "torch.__version__",
        'pip install --no-cache-dir -c /tmp/torch.txt "/opt/sdp-source[object-stores]"',
    ):
        assert command in docker and command in apptainer


def test_the_pods_follow_the_schema_of_kubernetes() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    job = read_yaml(CLUSTERS / "job.yaml")
    assert kubernetes_validate.validate(job, "1.33", strict=True)
    operator = read_yaml(CLUSTERS / "pytorchjob.yaml")
    assert (operator["apiVersion"], operator["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert operator["spec"].keys() == {"nprocPerNode", "pytorchReplicaSpecs"}
    assert isinstance(operator["spec"]["nprocPerNode"], str)
    for replicas in operator["spec"]["pytorchReplicaSpecs"].values():
        assert replicas.keys() == {"replicas", "restartPolicy", "template"}
        pod = {**replicas["template"]["spec"], "restartPolicy": replicas["restartPolicy"]}
        assert kubernetes_validate.validate({**job, "spec": {"template": {"spec": pod}}}, "1.33", strict=True)
        assert pod["containers"][0]["name"] == "pytorch"
    job["spec"]["template"]["spec"]["containers"][0]["img"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.33", strict=True)


@pytest.mark.parametrize("name", ["job.yaml", "pytorchjob.yaml", "skypilot.yaml"])
def test_the_commands_are_those_of_sdp(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SDP_CACHE", str(tmp_path))
    file = read_yaml(CLUSTERS / name)
    if name == "skypilot.yaml":
        check_shell(file["setup"])
        check_shell(file["run"])
        assert file.keys() == {"name", "num_nodes", "resources", "workdir", "setup", "run"}
        words = shlex.split(file["run"])
        assert (ROOT / words[words.index("train") + 1]).is_file()
    else:
        template = file["spec"].get("template") or file["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
        words = template["spec"]["containers"][0]["command"]
    options = options_of(words)
    assert options.resume and options.url == "s3://bucket/run" and options.checkpoints == "s3://bucket/run/checkpoints"
