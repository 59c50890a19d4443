"""Start values from a Hugging Face directory: every rank reads its own rows."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import sdp
import torch
from safetensors.torch import load_file, save_file
from sdp.engine.distributed.collectives import local_tensor
from sdp.engine.errors import ModelError
from sdp.engine.model_interface import Conversion
from sdp.tests.support import models
from sdp.tests.support.cases import Case, data_rank_of, elements_read, engine_of
from sdp.tests.support.ranks import RankPool

transformers = pytest.importorskip("transformers")
DENSE = Case(1, 1, placement="full", model="llama-meta")


def make(folder: Path, *, tied: bool = False, even: bool = False, **options: Any) -> Path:
    """Write a LLaMA of the shape of ``models.llama``, or of ``even_llama``."""
    torch.manual_seed(5)
    shape = {
        "vocab_size": models.VOCABULARY + even, "hidden_size": 10 + 2 * even, "intermediate_size": 15 - even,
        "num_attention_heads": 2 + 2 * even, "num_key_value_heads": 1 + even,
    }  # fmt: skip
    config = transformers.LlamaConfig(
        **shape, num_hidden_layers=4, head_dim=6, max_position_embeddings=32, tie_word_embeddings=tied
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.3)
    model.to(options.pop("dtype", torch.float32)).save_pretrained(folder, **options)
    return folder


def their_loss(folder: Path, data_ranks: int) -> float:
    """Over the batches of all data ranks, weighted by tokens, in float32."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(**models.rows_of_all("llama", 0, 0, data_ranks)).loss.item()


def _start(case: Case, folder: str) -> tuple[Any, float, int, int]:
    """The full model, its first loss, elements that this rank read, and those that it holds."""
    with elements_read() as counts:
        engine = engine_of(case, training={"init_from": folder})
    loss = engine.evaluate([models.micro_batch("llama", 0, 0, data_rank_of(case))])
    held = sum(local_tensor(parameter.detach()).numel() for parameter in engine.parameters_here.values())
    return engine.full_state_dict(), loss, sum(counts), held


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 2, stage=3, placement="profile", model="llama-tied-meta"),
        Case(2, 2, stage=0, placement="profile", model="llama-meta"),
        Case(2, 1, stage=0, placement="profile", model="even-llama-tied-meta", tp=2),
        Case(1, 2, stage=3, placement="full", model="even-llama-meta", tp=2),
    ],
    ids=str,
)
def test_ranks_read_their_rows_and_the_loss_is_hugging_faces(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    tied = "tied" in case.model
    folder = make(tmp_path / "model", tied=tied, even=case.tp > 1, max_shard_size="3KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    answers = ranks.run(_start, case, str(folder), world=case.world)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
    state = answers[0][0]
    assert state.keys() == theirs.keys()
    assert all(torch.equal(state[name], theirs[name]) for name in theirs)
    expected = [their_loss(folder, case.data_ranks)] * case.world
    assert [answer[1] for answer in answers] == pytest.approx(expected, rel=1e-5)
    assert case.tp > 1 or all(read == held for _, _, read, held in answers)  # columns are cut from whole rows
    whole = sum(tensor.numel() for name, tensor in theirs.items() if not (tied and name == "lm_head.weight"))
    assert all(held < whole for *_, held in answers)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_float_becomes_a_float32_master(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make(tmp_path / "model", dtype=dtype)
    engine = engine_of(DENSE, training={"init_from": str(folder)})
    saved = load_file(folder / "model.safetensors")
    state = engine.full_state_dict()
    assert state.keys() == saved.keys()
    assert all(saved[name].dtype == dtype and torch.equal(state[name], saved[name].float()) for name in saved)
    assert engine.evaluate([models.micro_batch("llama", 0, 0, 0)]) == pytest.approx(their_loss(folder, 1), rel=1e-5)


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change({name: tensor.clone() for name, tensor in tensors.items()}), folder / "model.safetensors")


ACCEPTED = {
    "a head beside a tie": lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"].clone()},
    "the head's name alone": lambda t: {
        ("lm_head.weight" if "embed" in name else name): tensor for name, tensor in t.items()
    },
    "no prefix": lambda t: {name.removeprefix("model."): tensor for name, tensor in t.items()},
    "of a compiled model": lambda t: {f"_orig_mod.{name}": tensor for name, tensor in t.items()},
    "of compiled blocks": lambda t: {
        name.replace("layers.1.", "layers.1._orig_mod."): tensor for name, tensor in t.items()
    },
    "rotary tables": lambda t: t | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(3) for i in range(4)},
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("layout", ACCEPTED)
def test_layouts_of_keys(tmp_path: Path, layout: str) -> None:
    folder = make(tmp_path / "model", tied=True)
    expected = load_file(folder / "model.safetensors")
    rewrite(folder, ACCEPTED[layout])
    state = engine_of(
        Case(1, 1, placement="full", model="llama-tied-meta"), training={"init_from": str(folder)}
    ).full_state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


REFUSED = {
    "missing": (lambda t: {name: v for name, v in t.items() if "2.mlp.up" not in name},
        "has no 'model.layers.2.mlp.up_proj.weight'"),
    "untied head missing": (lambda t: {name: v for name, v in t.items() if "lm_head" not in name},
        "has no 'lm_head.weight'"),
    "another shape": (lambda t: t | {"model.norm.weight": torch.ones(11)},
        "'model.norm.weight' has shape (11,) in the files, and (10,) in the model"),
    "one more": (lambda t: t | {"model.layers.0.self_attn.q_proj.bias": torch.ones(12)},
        "q_proj.bias', which this model does not have"),
    "quantised": (lambda t: t | {"model.norm.weight": torch.ones(10, dtype=torch.int8)}, "is I8 in the files"),
}  # fmt: skip


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("how", REFUSED)
def test_files_of_another_model_are_refused(tmp_path: Path, how: str) -> None:
    change, message = REFUSED[how]
    folder = make(tmp_path / "model")
    rewrite(folder, change)
    with pytest.raises(ModelError) as error:
        engine_of(DENSE, training={"init_from": str(folder)})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def damage(folder: Path, how: str) -> None:
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if how == "truncated":
        whole.write_bytes(whole.read_bytes()[:-100])
    elif how == "no weights":
        whole.unlink()
    elif how == "pickle":
        whole.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"")
    elif how == "shard missing":
        whole.unlink()
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}))
    elif how == "index damaged":
        index.write_text("{")
    elif how == "file outside":
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../model/model.safetensors"}}))
    elif how == "FIFO":
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": "pipe.safetensors"}}))
        os.mkfifo(folder / "pipe.safetensors")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", "cannot be read"),
        ("no weights", "neither model.safetensors nor"),
        ("pickle", "pytorch_model.bin, a pickle"),
        ("shard missing", "model-00001-of-00001.safetensors: is missing"),
        ("index damaged", "is not an index of weights"),
        ("file outside", "names the file '../model/model.safetensors', which is not in this directory"),
        ("FIFO", "pipe.safetensors: is not a regular file"),
    ],
)
def test_damaged_files_are_one_line(tmp_path: Path, how: str, message: str) -> None:
    folder = make(tmp_path / "model")
    damage(folder, how)
    with pytest.raises(ModelError, match=message) as error:
        engine_of(DENSE, training={"init_from": str(folder)})
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("one_rank")
def test_a_model_with_weights_has_its_start_already(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has weights already"):
        engine_of(Case(1, 1, placement="full", model="llama"), training={"init_from": str(make(tmp_path / "model"))})


# -- the hook weight_conversions: tensors that files store in another form -------------------------

WEIGHT, BIAS = "layers.0.up.weight", "layers.0.up.bias"


def _started(folder: Path, name: str, stored: dict[str, torch.Tensor], join: Any, dim: int | None) -> torch.Tensor:
    """The tensor ``name`` of a model whose files have other tensors, ``stored``, in its place."""
    torch.manual_seed(1)
    tensors = {key: torch.randn_like(value) for key, value in models.mlp().state_dict().items() if key != name}
    save_file(tensors | stored, folder / "model.safetensors")
    model = models.mlp(device="meta")
    conversion = Conversion((name,), [tuple(stored)], lambda _, found: {name: join(found)}, lambda *_: {}, dim)
    object.__setattr__(model, "weight_conversions", lambda _: [conversion])
    config = Case(1, 1, placement="full").config(training={"init_from": str(folder)})
    return sdp.initialize(model=model, config=config)[0].full_state_dict()[name]  # type: ignore[index]


@pytest.mark.usefixtures("one_rank")
def test_a_model_may_describe_how_files_store_its_tensors(tmp_path: Path) -> None:
    weight, bias = torch.randn(models.HIDDEN, models.WIDTH), torch.randn(models.HIDDEN)
    order = torch.randperm(models.HIDDEN, generator=torch.Generator().manual_seed(1))
    for name, value, stored, join, dim in [
        (WEIGHT, weight, {"a": weight[order[:2]], "b": weight[order[2:]]},
            lambda x: torch.cat([x["a"], x["b"]])[order.argsort()], 0),
        (WEIGHT, weight, {"a": weight[:, :2], "b": weight[:, 2:]}, lambda x: torch.cat([x["a"], x["b"]], 1), 1),
        (WEIGHT, weight, {"a": weight.T}, lambda x: x["a"].T, None),
        (BIAS, bias, {"a": bias.flip(0)}, lambda x: x["a"].flip(0), 0),
        (BIAS, bias, {str(at): number for at, number in enumerate(bias)}, lambda x: torch.stack([*x.values()]), None),
    ]:  # fmt: skip
        stored = {key: part.clone(memory_format=torch.contiguous_format) for key, part in stored.items()}
        assert torch.equal(_started(tmp_path, name, stored, join, dim), value)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("shape", "join", "dim"),
    [
        ((models.HIDDEN - 1, models.WIDTH), lambda x: torch.nn.functional.pad(x["a"], (0, 0, 0, 1)), 0),
        ((models.HIDDEN, models.WIDTH), lambda x: x["a"].bfloat16().float(), 0),  # values change
        ((models.HIDDEN, models.WIDTH, 1), lambda x: x["a"].squeeze(-1), 0),  # rows change
        ((models.WIDTH, models.HIDDEN), lambda x: x["a"].T, 0),
        ((models.WIDTH, models.HIDDEN), lambda x: x["a"].T, 1),
        ((), lambda x: x["a"].expand(models.HIDDEN, models.WIDTH), 0),
    ],
)
def test_a_description_that_does_not_fit_is_one_line(tmp_path: Path, shape: Any, join: Any, dim: int) -> None:
    with pytest.raises(ModelError, match=f"'{WEIGHT}', which is joined from 'a' .* cannot be made") as caught:
        _started(tmp_path, WEIGHT, {"a": torch.ones(shape)}, join, dim)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("parts", "dim"), [([("a",)], -1), ([("a",), ("b",)], 0)])
def test_a_dimension_is_for_one_part(parts: Any, dim: int) -> None:
    with pytest.raises(ModelError, match=f"weight_conversions: dim {dim} of 'w' must be 0 or more, for one part"):
        Conversion(("w",), parts, lambda *_: {}, lambda *_: {}, dim)
