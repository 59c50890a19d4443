"""Accelerate and the Trainer of transformers, with the real packages."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sdp.engine.environment.detect import LOOPBACK, free_port
from sdp.tests.deepspeed_compat.scripts import write_script
from sdp.tests.support.forks.command import ForkedScript
from sdp.tests.support.ranks import RankPool
from torch import nn
from torch.utils.data import DataLoader, Dataset

pytestmark = pytest.mark.slow  # it trains with two libraries, 20 seconds and more
transformers = pytest.importorskip("transformers", reason="transformers is not installed; the extra 'dev' has it")
pytest.importorskip("accelerate", reason="accelerate is not installed; the extra 'dev' has it")
pytest.importorskip("deepspeed", reason="deepspeed is not installed; the extra 'dev' has it")

HOLDERS = {"model.layers.0": [0], "model.layers.1": [0, 1], "model.layers.2": [1], "model.layers.3": [1]}


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, use_cache=False
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def _config(accumulation: int = 2) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2}, "sdp": {"groups": 2, "placement": HOLDERS},
    }  # fmt: skip


class Tokens(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(32, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def _whole_loss(state: dict[str, torch.Tensor]) -> float:
    model = _llama().eval()
    model.load_state_dict(state)
    batch = next(iter(DataLoader(Tokens(), batch_size=16)))
    with torch.no_grad():
        return model(**batch).loss.item()


def _accelerate(folder: str) -> None:
    import sdp.integrations
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs

    sdp.integrations.install()
    sdp.integrations.install()  # a second call changes nothing
    AcceleratorState._reset_state(reset_partial_state=True)
    # On a CPU, Accelerate joins the processes under DeepSpeed only if it is told the backend.
    backend = InitProcessGroupKwargs(backend="nccl" if torch.cuda.is_available() else "gloo")
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=_config()), kwargs_handlers=[backend])
    model = _llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(Tokens(), batch_size=2), schedule
    )
    assert isinstance(model.engine, sdp.SDPEngine)
    assert accelerator.unwrap_model(model) is model.module
    rates = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            rates += model.get_lr() if accelerator.sync_gradients else []
    assert model.global_steps == 2
    assert rates[0] > rates[-1]
    assert model.get_lr() == schedule.get_last_lr()
    accelerator.save_state(folder)
    state = accelerator.get_state_dict(model)
    batch = next(iter(loader))
    accelerator.backward(model(**batch).loss)
    accelerator.load_state(folder)
    assert model.global_steps == 2
    again = accelerator.get_state_dict(model)
    if dist.get_rank() == 0:
        assert state.keys() == _llama().state_dict().keys()
        assert all(torch.equal(again[name], value) for name, value in state.items())
    model.eval()
    box = [state]
    dist.broadcast_object_list(box, src=0)
    whole = next(iter(DataLoader(Tokens(), batch_size=16)))
    with torch.no_grad():
        assert model(**whole).loss.item() == pytest.approx(_whole_loss(box[0]), rel=1e-5)
    model.train()
    AcceleratorState._reset_state(reset_partial_state=True)


INSTALL = "import sdp.integrations; sdp.integrations.install()\n"
WITH_ACCELERATE = """
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, InitProcessGroupKwargs
plugin = DeepSpeedPlugin("ds_config.json")
"""
PREPARE = """
loader = torch.utils.data.DataLoader(dataset, batch_size=2)
accelerator.prepare(model, DummyOptim(model.parameters()), loader)
"""
# By name: a script, the engine in the configuration, and the line that the script ends with.
BYPASSES = {
    "the Trainer knows one process": (
        """
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments("out", deepspeed="ds_config.json", per_device_train_batch_size=2, learning_rate=1e-3)
Trainer(model=model, args=arguments, train_dataset=dataset).train()
""",
        "fsdp2",
        r"Accelerate knows 1 of the 2 ranks, .*; on CPUs, pass use_cpu=True to TrainingArguments, or kwargs_handlers",
    ),
    "Accelerate knows one process": (
        WITH_ACCELERATE + "accelerator = Accelerator(deepspeed_plugin=plugin)" + PREPARE,
        "fsdp2",
        r"Accelerate knows 1 of the 2 ranks, .*InitProcessGroupKwargs\(backend=\"gloo\"\)\] to Accelerator",
    ),
    "Accelerate leaves DeepSpeed out": (
        WITH_ACCELERATE + "accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)" + PREPARE,
        "fsdp2",
        r"Accelerate trains with MULTI_CPU instead of DeepSpeed, so SDP would not run",
    ),
    "the engine deepspeed": (
        WITH_ACCELERATE
        + """
backend = InitProcessGroupKwargs(backend="gloo")
accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[backend])"""
        + PREPARE,
        "deepspeed",
        r'"deepspeed" does not run under Accelerate and the Trainer; use "fsdp2"',
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs, Accelerate joins the processes")
@pytest.mark.parametrize("name", BYPASSES)
def test_what_accelerate_would_train_without_sdp_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Without the line, ranks read the same samples, or train the whole model, and exit with 0."""
    script, engine, line = BYPASSES[name]
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    settings = _config() | {"optimizer": optimizer, "sdp": {"groups": 2, "engine": engine}}
    path = write_script(tmp_path, INSTALL + script, json.dumps(settings | {"gradient_accumulation_steps": 1}))
    monkeypatch.chdir(tmp_path)
    shared = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": free_port(), "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    started = [ForkedScript(path, environment=shared | {"RANK": rank, "LOCAL_RANK": rank}) for rank in range(2)]
    for code, printed in [rank.end() for rank in started]:
        (last,) = [text for text in printed.splitlines() if "ConfigError: " in text]
        assert code != 0 and re.search(line, last), printed


def test_a_call_outside_of_accelerate_stays_deepspeeds() -> None:
    import deepspeed
    import sdp.integrations

    before = deepspeed.initialize
    sdp.integrations.install()
    assert deepspeed.initialize is before


def test_accelerate_trains_saves_and_loads(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_accelerate, str(tmp_path), world=2, timeout=90)


def _trainer(folder: str, stage: int) -> tuple[list[float], float]:
    import sdp.integrations
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

    sdp.integrations.install()
    AcceleratorState._reset_state(reset_partial_state=True)
    arguments = transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=2,
        learning_rate=1e-2,
        lr_scheduler_type="linear", deepspeed=_config() | {"zero_optimization": {"stage": stage}}, report_to=[],
        logging_steps=1, save_strategy="epoch", eval_strategy="epoch",
        per_device_eval_batch_size=8, disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip

    def start() -> Any:
        model = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/start")
        assert all(hasattr(parameter, "ds_id") is (stage == 3) for parameter in model.parameters())
        return transformers.Trainer(model=model, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens())

    if dist.get_rank() == 0:
        _llama().save_pretrained(f"{folder}/start")
    dist.barrier()
    trainer = start()
    trainer.train()
    engine = trainer.model_wrapped.engine
    assert isinstance(engine, sdp.SDPEngine)
    trainer.save_model(f"{folder}/last")
    dist.barrier()
    rates = [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert engine.global_steps == 4
    assert engine.get_lr()[0] == pytest.approx(trainer.lr_scheduler.get_last_lr()[0])
    settings = arguments.hf_deepspeed_config
    unset_hf_deepspeed_config()  # rank 0 reads alone now
    if dist.get_rank() == 0:
        saved = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/last")
        assert type(saved) is transformers.LlamaForCausalLM
        state = saved.state_dict()
        assert losses[-1] == pytest.approx(_whole_loss(state), rel=1e-5)
    set_hf_deepspeed_config(settings)
    AcceleratorState._reset_state()  # the Trainer makes a second Accelerator
    resumed = start()
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    again = resumed.model_wrapped.engine.full_state_dict()
    last = engine.full_state_dict()
    if dist.get_rank() == 0:
        for name, value in last.items():
            torch.testing.assert_close(again[name], value, rtol=1e-5, atol=1e-6)
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    return rates, losses[-1]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_trainer_trains_saves_the_whole_model_and_resumes(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    """At stage 3, transformers partitions a model that it reads from a folder."""
    (rates, loss), (_, other) = ranks.run(_trainer, str(tmp_path), stage, world=2, timeout=90)
    assert len(rates) == 4
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1]
    assert loss == pytest.approx(other)
