"""Files of the whole model, from ranks that hold a part of it."""

import logging
from pathlib import Path

import pytest
import sdp
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from sdp.engine.errors import CheckpointError, ConfigError
from sdp.tests.support.cases import Case, said
from sdp.tests.support.ranks import RankPool

transformers = pytest.importorskip("transformers")


def _engine() -> sdp.SDPEngine:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2
    )
    return sdp.initialize(model=transformers.LlamaForCausalLM(config), config=_configuration(Case(2, 1)))[0]


def _save(folder: Path) -> tuple[list[str], int]:
    engine = _engine()
    with said(logging.WARNING) as records:
        partial = engine.module.state_dict()
        engine.module.state_dict()
    engine.save_pretrained(folder)
    engine.save_pretrained(folder / "half", dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="dtype 'bfloat16' is not a dtype of torch"):
        engine.save_pretrained(folder, dtype="bfloat16")  # type: ignore[arg-type]
    engine.save_16bit_model(folder / "16bit", "weights.safetensors")
    state = engine.full_state_dict()
    if dist.get_rank() == 0:
        torch.save(state, folder / "state.pt")
    return records, len(partial)


def _configuration(case: Case) -> dict:
    configuration = case.config()
    holders = [[0], [0, 1], [1], [1]]
    configuration["sdp"]["placement"] = {f"model.layers.{index}": held for index, held in enumerate(holders)}
    return configuration


def test_the_whole_model_is_written_and_a_partial_state_warns(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(_save, tmp_path, world=2)
    state = torch.load(tmp_path / "state.pt")
    for records, tensors in results:
        assert len(records) == 1 and "engine.full_state_dict()" in records[0]
        assert tensors < len(state)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM
    whole = transformers.LlamaForCausalLM(loaded.config)
    whole.load_state_dict(state)
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, whole(tokens).logits, rtol=0, atol=1e-6)
    assert load_file(tmp_path / "16bit" / "weights.safetensors").keys() == state.keys()
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert half.dtype == torch.bfloat16 and loaded.dtype == torch.float32
    assert all(torch.equal(tensor, state[name].bfloat16()) for name, tensor in half.state_dict().items())


def _save_below_a_file(folder: Path) -> list[str]:
    """Save where rank 0 cannot write; return this rank's errors."""
    engine, errors = _engine(), []
    for save in (engine.save_pretrained, engine.save_16bit_model):
        try:
            save(folder / "file" / "below")
        except CheckpointError as error:
            errors.append(str(error))
    return errors


def test_a_folder_that_cannot_be_written_is_one_line_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = ranks.run(_save_below_a_file, tmp_path, world=2, timeout=60)
    assert first == second
    assert len(first) == 2 and all("below: the model cannot be written (" in error for error in first)


def _adapted() -> torch.nn.Module:
    import peft

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2
    )
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)


def _train_adapters(folder: Path) -> tuple[torch.Tensor, bool]:
    """Logits of the full model after a step, and whether a group lacks an adapter."""
    configuration = Case(2, 1).config()
    holders = [[0], [0, 1], [1], [1]]
    layers = "base_model.model.model.layers"
    configuration["sdp"]["placement"] = {f"{layers}.{index}": held for index, held in enumerate(holders)}
    engine = sdp.initialize(model=_adapted(), config=configuration)[0]
    tokens = torch.arange(12).view(2, 6) + dist.get_rank()
    for _ in range(2):
        engine.backward(engine(input_ids=tokens, labels=tokens))
        engine.step()
    engine.save_pretrained(folder)
    engine.save_pretrained(folder / "half", dtype=torch.bfloat16)
    lacks = len([name for name in engine.parameters_here if "lora_" in name]) < 16
    with torch.no_grad(), engine.full_model() as model:
        return model(input_ids=torch.arange(12).view(2, 6)).logits, lacks


def test_adapters_are_written_as_peft_reads_them(ranks: RankPool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    answers = ranks.run(_train_adapters, tmp_path, world=2)
    assert all(lacks for _, lacks in answers)
    base = _adapted().unload()
    with torch.no_grad():
        tokens = torch.arange(12).view(2, 6)
        before = base(input_ids=tokens).logits
        after = peft.PeftModel.from_pretrained(base, tmp_path)(input_ids=tokens).logits
    torch.testing.assert_close(after, answers[0][0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(after, before, atol=1e-4)
    assert not (tmp_path / "model.safetensors").exists()
    assert {tensor.dtype for tensor in load_file(tmp_path / "half" / "adapter_model.safetensors").values()} == {
        torch.bfloat16
    }
