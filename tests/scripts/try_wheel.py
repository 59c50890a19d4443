"""Tries a wheel with the Python into which it was installed: ``python try_wheel.py WHEEL``.

It has what the package needs and nothing of tests or the laboratory, and its commands run outside
of the checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.resources import files
from pathlib import Path

TEXT = "The cat sat on the mat, and the dog sat under the tree. " * 40


def main() -> int:
    """Raises AssertionError for a wheel that has too much, and CalledProcessError for a command."""
    names = zipfile.ZipFile(sys.argv[1]).namelist()
    strangers = [name for name in names if name.startswith(("sdp/tests/", "sdp/lab/", "sdp/docs/", "tests/", "lab/"))]
    assert not strangers, strangers[:3]
    sources = [name for name in names if name.endswith(".py")]
    print(f"{len(names)} files, {len(sources)} of them Python, {Path(sys.argv[1]).stat().st_size:,} bytes")
    with tempfile.TemporaryDirectory() as folder:
        config = str(files("sdp.configs") / "quickstart.json")
        assert folder not in config and "site-packages" in config, config
        for number in range(40):
            (Path(folder) / f"{number}.txt").write_text(f"{number}. {TEXT}")
        small = ["--set", "training.steps=4", "training.save_every=4", "data.sequence_length=64", "data.path=data"]
        small += ["data.tokenizer=bytes", "data.vocab_size=null"]
        commands = [
            ["--version"],
            ["prepare", "--input", "*.txt", "--output", "data", "--tokenizer", "bytes", "--workers", "1"],
            ["plan", config],
            ["train", config, "--dump-dir", "run", "--groups", "2", *small],
            ["evaluate", "run"],
            ["export", "run", "--to", "hf", "out"],
            ["report", "run"],
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for words in commands:
            print("sdp", *words, flush=True)
            subprocess.run(
                [Path(sys.executable).with_name("sdp"), *words],
                cwd=folder,
                env=environment,
                check=True,
                stdout=subprocess.DEVNULL,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
