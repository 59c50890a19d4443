"""Files of the whole model, from ranks that hold a part of it."""

import logging
from pathlib import Path

import pytest
import sdp
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from sdp.engine.errors import CheckpointError, ModelError
from sdp.tests.support import models
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


class _Adapted(torch.nn.Module):
    """Has the parts of PEFT's model that count here: its package and its names."""

    __module__ = "peft.peft_model"

    def __init__(self) -> None:
        super().__init__()
        self.base_model = models.mlp()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.base_model(inputs, labels)


@pytest.mark.usefixtures("one_rank")
def test_names_of_peft_are_refused(tmp_path: Path) -> None:
    engine = sdp.initialize(model=_Adapted(), config=Case(1, 1, placement="full").config())[0]
    with pytest.raises(ModelError, match=r"a PEFT model, .*; call engine.full_state_dict\(\) on all ranks"):
        engine.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
