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
from sdp.engine.distributed.collectives import local_tensor
from sdp.engine.errors import ConfigError, ModelError
from sdp.models.registry import build_model
from sdp.tests.support.cases import elements_read, oracle_for
from sdp.tests.support.foreign.given_models import FAMILIES, make, rows, theirs
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


def _train(folder: Path, masking: str, stage: int, groups: int, steps: int = 2) -> tuple[Any, float, int, int]:
    """The full model after some steps, its loss, the elements that this rank read and holds."""
    with elements_read() as counts:
        model = build_model(_section(folder), 96)
        engine = sdp.initialize(model=model, config=_config(folder, groups, masking, stage))[0]
    held = sum(local_tensor(parameter.detach()).numel() for parameter in engine.parameters_here.values())
    for _ in range(steps):
        batch = rows(2, seed=engine.global_rank)
        engine.backward(engine(batch))
        engine.step()
    return engine.full_state_dict(), engine.evaluate([rows(2, seed=engine.global_rank)]), sum(counts), held


@pytest.mark.parametrize(
    ("family", "masking", "stage", "world"),
    [
        ("llama3", "forward", 0, 2), ("gemma3", "backward", 0, 2), ("gpt2", "forward", 0, 2),
        ("mixtral", "backward", 3, 4),
    ],
)  # fmt: skip
def test_two_groups_train_as_the_oracle_does(
    ranks: RankPool, tmp_path: Path, family: str, masking: str, stage: int, world: int
) -> None:
    folder = make(tmp_path / "model", family)
    answers = ranks.run(_train, folder, masking, stage, 2, world=world)
    oracle = oracle_for(theirs(folder), _config(folder, 2, masking) | {"training": {}}, world)
    batches = [rows(2, seed=rank) for rank in range(world)]
    for _ in range(2):
        oracle.step([batches], RATE)
    ours = answers[0][0]
    for name, value in oracle.state_dict().items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=f"{family}: {name}")
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    expected = sum(oracle.evaluate(batch) * count for batch, count in zip(batches, counts, strict=True)) / sum(counts)
    assert [answer[1] for answer in answers] == pytest.approx([expected] * world, rel=1e-5)
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


def _without_an_expert(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if ".experts.2." in name]:
        del tensors[name]


def _with_a_narrow_expert(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if name.endswith("experts.2.w1.weight"))
    tensors[name] = tensors[name][:, :-1].clone()


def _with_scalars(tensors: dict[str, torch.Tensor]) -> None:
    tensors |= {name: torch.tensor(1.0) for name in tensors if ".experts." in name}


def _with_both(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(4, 96, 32)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without_an_expert, r"from '.*w1.weight' .* like it, has shape \(3, 96, 32\) in the files, and \(4, 96, 32\)"),
        (_with_a_narrow_expert, "from '.*w1.weight' .* like it, cannot be made: .*; download or export"),
        (_with_scalars, "from '.*w1.weight' .* like it, cannot be made: .*; download or export"),
        (_with_both, "'.*gate_up_proj', which is joined from '.*w1.weight' .* or the files have it already"),
    ],
)
def test_experts_that_do_not_fit_are_one_line(tmp_path: Path, spoil: Any, message: str) -> None:
    folder = make(tmp_path / "model", "mixtral")
    spoil(tensors := load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message) as caught:
        sdp.initialize(model=build_model(_section(folder), 96), config=_config(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["HrmTextConfig", "OlmoHybridConfig", "Inkling2TextConfig"])
def test_files_may_join_or_split_tensors(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    """Ranks get the rows that they hold of what ``from_pretrained`` loads, and read no others."""
    folder = make(tmp_path / "model", (kind, FAMILIES["olmo2"][1] | {"num_hidden_layers": 2, "n_routed_experts": 8}))
    whole, plain = load_file(folder / "model.safetensors"), theirs(folder)
    loaded, parameters = plain.state_dict(), dict(plain.named_parameters())
    buffers = sum(tensor.numel() for name, tensor in loaded.items() if name not in parameters)
    answers = ranks.run(_train, folder, "backward", 3, 1, 0, world=3)
    assert all(torch.equal(answers[0][0][name], tensor) for name, tensor in loaded.items())
    for _, _, read, held in answers:
        assert read == held + buffers
    conversions = build_model(_section(folder), 96).weight_conversions(list(whole))
    assert conversions
    for conversion in conversions:
        (keys,) = conversion.parts
        split = conversion.split(0, {name: loaded[name] for name in conversion.names})
        assert split.keys() == set(keys) and all(torch.equal(split[key], whole[key]) for key in keys)
