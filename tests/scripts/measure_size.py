"""How large the project is: lines, commands, keys, and what one training step runs.

    python -m sdp.tests.scripts.measure_size [--json]

"Files in a step" are the project's files whose code runs in the fourth step of a run with two
groups. A step is one call, one backward pass and one update. "Modules of sdp.initialize" are the
project's modules that are loaded when that call returns.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("engine", "launcher", "models", "data", "tools")
STEPS = 4


def lines(folder: str) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py"))


def protocols() -> Iterator[tuple[int, str]]:
    """Yield each Protocol's number of members, inherited ones too, and its name."""
    classes = {
        node.name: node
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }

    def bases(node: ast.ClassDef) -> list[str]:
        return [ast.unparse(base).partition("[")[0] for base in node.bases]

    def members(node: ast.ClassDef) -> set[str]:
        own = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        own |= {ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)}
        return own.union(*(members(classes[name]) for name in bases(node) if name in classes))

    for name, node in classes.items():
        if "Protocol" in bases(node):
            yield len(members(node)), name


def commands() -> int:
    shown = subprocess.run([sys.executable, "-m", "sdp", "--help"], capture_output=True, text=True, check=True).stdout
    return len(re.findall(r"^    [a-z][\w-]*", shown, re.MULTILINE))


def properties() -> int:
    """Count the properties of all sections of the configuration's schema."""
    from sdp.engine.config.load import json_schema

    schema = json_schema()
    return sum(len(section.get("properties", {})) for section in (schema, *schema.get("$defs", {}).values()))


def _rank(rank: int, out: str) -> None:
    """Train a small model for some steps as one of two ranks; rank 0 writes what ran to ``out``."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    import sdp
    import torch
    from sdp.models.llama import Llama, LlamaConfig

    torch.set_num_threads(1)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    model = Llama(LlamaConfig(vocab_size=32, max_position_embeddings=16, **shape))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "sdp": {"groups": 2, "capacity": 0.5},
    }
    engine, *_ = sdp.initialize(model=model, config=config)
    loaded = [name for name in sys.modules if name.startswith("sdp.") and ".tests" not in name]
    files: set[str] = set()
    for step in range(STEPS):
        if step == STEPS - 1:
            sys.setprofile(lambda frame, *_: files.add(frame.f_code.co_filename))
        tokens = torch.randint(32, (1, 16))
        engine.backward(engine({"input_ids": tokens, "labels": tokens}))
        engine.step()
    sys.setprofile(None)
    paths = [Path(file).resolve() for file in files if Path(file).is_absolute()]
    inside = sorted(
        str(path.relative_to(ROOT)) for path in paths if any(path.is_relative_to(ROOT / name) for name in SOURCES)
    )
    if rank == 0:
        Path(out).write_text(json.dumps({"step_files": inside, "modules": len(loaded)}))


def running() -> dict[str, Any]:
    """Return which files one step runs, and how many modules ``sdp.initialize`` loads."""
    from torch import multiprocessing

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ran.json"
        multiprocessing.spawn(_rank, (str(out),), nprocs=2)  # type: ignore[attr-defined]
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    ran = running()
    most, protocol = max(protocols(), default=(0, "none"))
    by_folder = {folder: lines(folder) for folder in (*SOURCES, "tests", "lab") if (ROOT / folder).is_dir()}
    figures = {
        "source lines": sum(by_folder[folder] for folder in SOURCES),
        **{f"  {folder}": count for folder, count in by_folder.items() if folder in SOURCES},
        "test lines": by_folder["tests"],
        "lines of lab": by_folder.get("lab", 0),
        f"members of the largest Protocol ({protocol})": most,
        "files in a step": len(ran["step_files"]),
        "modules of sdp.initialize": ran["modules"],
        "commands": commands(),
        "properties of the schema": properties(),
    }
    if arguments.json:
        print(json.dumps({**figures, "step_files": ran["step_files"]}, indent=1))
        return
    for name, value in figures.items():
        print(f"{name:48}{value:>8,}")
    print("\nfiles in a step:\n  " + "\n  ".join(ran["step_files"]))


if __name__ == "__main__":
    main()
