"""Every command of docs/given_model.md runs in a folder that has a model and a text, and nothing
else.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from sdp.tests.support.foreign.given_models import add_tokenizer, make
from sdp.tests.support.forks.command import ForkedScript
from sdp.tests.support.small_runs import run_sdp

transformers = pytest.importorskip("transformers", reason="transformers is not installed; the extra 'dev' has it")

PAGE = Path(__file__).parents[2] / "docs" / "given_model.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def shape(line: str) -> str:
    """A line without what differs between machines: numbers, and columns of spaces."""
    return re.sub(r"[\d.,:]+", "0", re.sub(r"\s+", " ", line.strip()))


def expect(shown: str, printed: str) -> None:
    lines = {shape(line) for line in printed.splitlines()}
    assert [line for line in shown.splitlines() if line != "…" and shape(line) not in lines] == []


def test_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    add_tokenizer(make(Path("my-model"), "llama3", dtype=torch.bfloat16))
    rows = ({"text": " ".join(f"w{(7 * line + word) % 85}" for word in range(60))} for line in range(400))
    Path("notes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = []
    for language, block in BLOCKS:
        if language == "json":
            Path("config.json").write_text(block)
        elif block.startswith("$ sdp"):
            for command, shown in re.findall(r"^\$ sdp (.*)\n((?:[^$].*\n)*)", block, re.MULTILINE):
                finished = run_sdp(*shlex.split(command))
                assert finished.returncode == 0, finished.stderr
                expect(shown, finished.stdout + finished.stderr)
                done.append(command.split()[0])
    assert done == ["prepare", "evaluate", "train", "export", "evaluate", "generate"]
    for path in Path("my-model").iterdir():
        if path.suffix != ".safetensors":
            assert (Path("my-model-2") / path.name).read_bytes() == path.read_bytes()


def test_the_script_trains_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    (script,) = (block for language, block in BLOCKS if language == "python")
    folder = add_tokenizer(make(tmp_path / "my-model", "llama3", dtype=torch.bfloat16))
    rows = ({"text": " ".join(f"w{(7 * line + word) % 85}" for word in range(60))} for line in range(60))
    (tmp_path / "notes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--input", tmp_path / "notes.jsonl", "--output", tmp_path / "data", "--tokenizer", f"hf:{folder}"]
    assert run_sdp("prepare", *arguments, "--workers", 1).returncode == 0
    (tmp_path / "adapters.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    code, printed = ForkedScript(tmp_path / "adapters.py").end(timeout=240)
    assert code == 0, printed
    expect(re.findall(r"^\$ python adapters.py\n(.*)$", PAGE.read_text(), re.MULTILINE)[0], printed)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(12).view(2, 6)
    before = base(input_ids=tokens).logits.detach().clone()
    assert not torch.equal(
        peft.PeftModel.from_pretrained(base, tmp_path / "my-adapters")(input_ids=tokens).logits, before
    )
