"""``model.name`` "huggingface": any causal language model of transformers, from its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sdp
import torch
from safetensors.torch import load_file, save_file
from sdp.engine.errors import ConfigError, ModelError
from sdp.engine.subnetwork.initialisation import WeightFiles
from sdp.models.registry import build_model
from sdp.tests.support.cases import oracle_for
from sdp.tests.support.foreign.given_models import EXPERTS, FAMILIES, make, rows, theirs
from sdp.tests.support.ranks import RankPool

pytest.importorskip("transformers", reason="transformers is not installed; the extra 'dev' has it")

RATE = 0.1


def _config(folder: Path, groups: int = 1, masking: str = "forward", stage: int = 0) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": stage},
        "sdp": {"groups": groups, "masking": masking} | ({"capacity": 0.5} if groups > 1 else {}),
        "training": {"init_from": str(folder)},
    }


def _section(folder: Path) -> dict[str, Any]:
    return {"name": "huggingface", "path": str(folder)}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_one_step_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder = make(tmp_path / "model", family)
    plain, batch = theirs(folder), rows(2)
    with torch.no_grad():
        logits = plain.eval()(batch["input_ids"]).logits
    loss = plain.train()(**batch).loss
    loss.backward()
    torch.optim.SGD(plain.parameters(), RATE).step()
    for masking in ("forward", "backward"):
        engine = sdp.initialize(model=build_model(_section(folder), 96), config=_config(folder, masking=masking))[0]
        with torch.no_grad(), engine.full_model() as model:
            torch.testing.assert_close(model(batch["input_ids"]).logits, logits, rtol=1e-5, atol=1e-5)
        ours = engine(batch)
        torch.testing.assert_close(ours.loss, loss, rtol=1e-6, atol=0)
        engine.backward(ours)
        engine.step()
        state, expected = engine.full_state_dict(), plain.state_dict()
        assert state is not None and state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6, msg=f"{masking}: {name}")


def _train(folder: Path, masking: str, stage: int, groups: int) -> tuple[Any, float, int, int]:
    """The full model after two steps, its loss, the elements that this rank read and holds."""
    read, fill = 0, WeightFiles.fill

    def counted(self: WeightFiles, out: torch.Tensor, start: int, key: str) -> None:
        nonlocal read
        read += out.numel()
        fill(self, out, start, key)

    WeightFiles.fill = counted  # type: ignore[method-assign]
    try:
        model = build_model(_section(folder), 96)
        engine = sdp.initialize(model=model, config=_config(folder, groups, masking, stage))[0]
    finally:
        WeightFiles.fill = fill  # type: ignore[method-assign]
    held = sum(parameter.numel() for parameter in engine.parameters_here.values())
    for _ in range(2):
        batch = rows(2, seed=engine.global_rank)
        engine.backward(engine(batch))
        engine.step()
    return engine.full_state_dict(), engine.evaluate([rows(2, seed=engine.global_rank)]), read, held


@pytest.mark.parametrize(("family", "masking"), [("llama3", "forward"), ("gemma3", "backward"), ("gpt2", "forward")])
def test_two_groups_train_as_the_oracle_does(ranks: RankPool, tmp_path: Path, family: str, masking: str) -> None:
    folder = make(tmp_path / "model", family)
    answers = ranks.run(_train, folder, masking, 0, 2, world=2)
    oracle = oracle_for(theirs(folder), _config(folder, 2, masking) | {"training": {}}, 2)
    batches = [rows(2, seed=rank) for rank in range(2)]
    for _ in range(2):
        oracle.step([batches], RATE)
    ours = answers[0][0]
    for name, value in oracle.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=f"{family}: {name}")
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    expected = sum(oracle.evaluate(batch) * count for batch, count in zip(batches, counts, strict=True)) / sum(counts)
    assert [answer[1] for answer in answers] == pytest.approx([expected] * 2, rel=1e-5)
    whole = sum(value.numel() for value in theirs(folder).parameters())
    for _, _, read, held in answers:
        assert read == held < whole


@pytest.mark.usefixtures("one_rank")
def test_keys_of_older_files_have_their_tensors(tmp_path: Path) -> None:
    """Files of a base model have no prefix, and older versions of transformers wrote tables."""
    folder = make(tmp_path / "model", "gpt2")
    whole = load_file(folder / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in whole.items() if name != "lm_head.weight"}
    old |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64) for layer in range(3)}
    save_file(old, folder / "model.safetensors")
    state = sdp.initialize(model=build_model(_section(folder), 96), config=_config(folder))[0].full_state_dict()
    assert state is not None and all(torch.equal(state[name], tensor) for name, tensor in whole.items())


def _spoil(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


REFUSED = {
    "no folder": (lambda folder: shutil.rmtree(folder), "is not a directory; a model of the Hugging"),
    "quantised": (lambda folder: _spoil(folder, quantization_config={"bits": 4}), "holds a quantised model"),
    "code of its own": (
        lambda folder: _spoil(folder, model_type="mine", auto_map={"AutoModelForCausalLM": "code.Mine"}),
        'builds no causal language model of type "mine"',
    ),
    "no language model": (lambda folder: _spoil(folder, model_type="vit"), 'no causal language model of type "vit"'),
    "a bad value": (lambda folder: _spoil(folder, hidden_size="wide"), "builds no causal language model"),
}  # fmt: skip


@pytest.mark.parametrize("how", REFUSED)
def test_what_is_not_such_a_model_is_one_line(tmp_path: Path, how: str) -> None:
    folder = make(tmp_path / "model", "llama3")
    spoil, message = REFUSED[how]
    (folder / "code.py").write_text("raise SystemExit('code of a folder was run')")
    spoil(folder)
    with pytest.raises(ConfigError, match=message) as caught:
        build_model(_section(folder))
    assert "\n" not in str(caught.value)


def test_the_vocabulary_may_be_padded_and_another_tokenizer_gets_advice(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "qwen2")
    build_model(_section(folder), 90)
    with pytest.raises(ConfigError, match=rf"vocab_size: 96, but .* has 50; .* sdp prepare --tokenizer hf:{folder}"):
        build_model(_section(folder), 50)


@pytest.mark.usefixtures("one_rank")
def test_experts_that_transformers_joins_are_refused_with_a_way_out(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", EXPERTS)
    with pytest.raises(ModelError, match=r"'.*experts.* joins .*; load the model with from_pretrained") as caught:
        sdp.initialize(model=build_model(_section(folder), 96), config=_config(folder))
    assert "\n" not in str(caught.value)
    plain, batch = theirs(folder).train(), rows(2)  # the way out
    plain(**batch).loss.backward()
    torch.optim.SGD(plain.parameters(), RATE).step()
    config = {key: value for key, value in _config(folder, masking="backward").items() if key != "training"}
    engine = sdp.initialize(model=theirs(folder).train(), config=config)[0]
    engine.backward(engine(batch))
    engine.step()
    engine.save_pretrained(tmp_path / "out")
    with torch.no_grad():
        logits = plain.eval()(batch["input_ids"]).logits
        torch.testing.assert_close(theirs(tmp_path / "out").eval()(batch["input_ids"]).logits, logits)
