"""Converts an exported run with llama.cpp's own converter, and compares the result with the export.

Run ``python -m lab.measurements.llama_cpp_converter EXPORT``. EXPORT is a folder that ``sdp
export`` wrote, for a run with a SentencePiece tokenizer. pip fetches the sources of
llama-cpp-python (77 MB), of which llama.cpp is a part; nothing is built. It also installs gguf and
scikit-build-core, which pip needs to read the sources, in a temporary folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from safetensors.numpy import load_file

PACKAGE = "llama-cpp-python==0.3.36"
# By the name in the export, the name in llama.cpp's file. q and k are left out: their rows are
# permuted.
TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}


def fetch_converter(folder: Path) -> Path:
    """Fetch llama.cpp's Python files into ``folder``, and return the folder with the converter."""
    packages = folder / "packages"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "--target", str(packages), "scikit-build-core"], check=True)
    subprocess.run(
        [*pip, "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder), PACKAGE],
        check=True,
        env=os.environ | {"PYTHONPATH": str(packages)},
    )
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        wanted = [name for name in archive.getnames() if "/vendor/llama.cpp/" in name and name.endswith(".py")]
        archive.extractall(folder, members=map(archive.getmember, wanted), filter="data")
    return next(folder.glob("*/vendor/llama.cpp"))


def values_of(reader: Any, key: str) -> list[Any]:
    """Return the values of the list ``key`` in a GGUF file."""
    field = reader.fields[key]
    return [field.parts[index] for index in field.data]


def compare(export: Path, converted: Path) -> None:
    """Raise AssertionError if the converted file differs from the export."""
    from gguf import GGUFReader

    reader: Any = GGUFReader(str(converted))
    trained = sentencepiece.SentencePieceProcessor(model_file=str(export / "tokenizer.model"))
    numbers = range(trained.vocab_size())
    pieces = [bytes(part).decode() for part in values_of(reader, "tokenizer.ggml.tokens")]
    scores = [float(part[0]) for part in values_of(reader, "tokenizer.ggml.scores")]
    assert pieces == [trained.id_to_piece(number) for number in numbers], "pieces"
    assert scores == [trained.get_score(number) for number in numbers], "scores"
    settings = json.loads((export / "tokenizer_config.json").read_text(encoding="utf-8"))
    for key, of_export in (("add_space_prefix", "add_prefix_space"), ("add_bos_token", "add_bos_token")):
        found = bool(values_of(reader, f"tokenizer.ggml.{key}")[0][0])
        assert found == settings[of_export], f"{key}: {found}"
    written = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    weights = load_file(export / "model.safetensors")
    for name, theirs in TENSORS.items():
        assert np.array_equal(written[theirs].reshape(weights[name].shape), weights[name]), name
    print(f"{len(pieces):,} pieces and scores, 2 flags and {len(TENSORS)} of {len(written)} tensors are equal")


def main(words: Sequence[str]) -> None:
    """Convert and compare."""
    export = Path(words[0])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources, converted = fetch_converter(folder), folder / "model.gguf"
        subprocess.run(
            [sys.executable, str(sources / "convert_hf_to_gguf.py"), str(export), "--outfile", str(converted),
             "--outtype", "f32"],
            check=True, env=os.environ | {"PYTHONPATH": str(sources / "gguf-py")},
        )  # fmt: skip
        compare(export, converted)


if __name__ == "__main__":
    main(sys.argv[1:])
