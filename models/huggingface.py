"""The residual branches of models of transformers, for ``sdp.granularity`` "neuron".

These models are not written for SDP. :func:`declare_neuron_branches` tells SDP where their neurons
are, and makes two of their layers work with a part of the neurons. Names and shapes of all
parameters stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..engine.errors import ModelError
from ..engine.model_interface import Branch

# A branch: the module before which its weights are needed, what counts its neurons, and the
# dimension of each parameter along which they lie. "width" counts the outputs of the first layer,
# "heads" the key/value heads. A dimension such as "3:1" means: queries, keys and values, one after
# the other.
_Part = tuple[str, str, Mapping[str, int | str]]
_GATED: _Part = ("mlp", "width", {"mlp.gate_proj.weight": 0, "mlp.up_proj.weight": 0, "mlp.down_proj.weight": 1})
_HEADS: _Part = (
    "self_attn",
    "heads",
    {
        **{f"self_attn.{key}_proj.{kind}": 0 for key in "qkv" for kind in ("weight", "bias")},
        "self_attn.o_proj.weight": 1,
    },
)
_LLAMA = [_HEADS, _GATED]
_GPT2: list[_Part] = [
    ("attn", "heads", {"attn.c_attn.weight": "3:1", "attn.c_attn.bias": "3:0", "attn.c_proj.weight": 0}),
    ("mlp", "width", {"mlp.c_fc.weight": 1, "mlp.c_fc.bias": 0, "mlp.c_proj.weight": 0}),
]
_NEOX: list[_Part] = [
    (
        "attention",
        "heads",
        {"attention.query_key_value.weight": 0, "attention.query_key_value.bias": 0, "attention.dense.weight": 1},
    ),
    ("mlp", "width", {"mlp.dense_h_to_4h.weight": 0, "mlp.dense_h_to_4h.bias": 0, "mlp.dense_4h_to_h.weight": 1}),
]
_OPT: list[_Part] = [
    (
        "self_attn",
        "heads",
        {
            **{f"self_attn.{key}_proj.{kind}": 0 for key in "qkv" for kind in ("weight", "bias")},
            "self_attn.out_proj.weight": 1,
        },
    ),
    ("fc1", "width", {"fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1}),
]
_BERT: list[_Part] = [
    (
        "attention",
        "heads",
        {
            **{f"attention.self.{key}.{kind}": 0 for key in ("query", "key", "value") for kind in ("weight", "bias")},
            "attention.output.dense.weight": 1,
        },
    ),
    ("intermediate", "width",
     {"intermediate.dense.weight": 0, "intermediate.dense.bias": 0, "output.dense.weight": 1}),
]  # fmt: skip
_ALBERT: list[_Part] = [
    (
        "attention",
        "heads",
        {
            **{f"attention.{key}.{kind}": 0 for key in ("query", "key", "value") for kind in ("weight", "bias")},
            "attention.dense.weight": 1,
        },
    ),
    ("ffn", "width", {"ffn.weight": 0, "ffn.bias": 0, "ffn_output.weight": 1}),
]
_VIT: list[_Part] = [
    (
        "attention",
        "heads",
        {
            **{f"attention.{key}_proj.{kind}": 0 for key in "qkv" for kind in ("weight", "bias")},
            "attention.o_proj.weight": 1,
        },
    ),
    ("mlp", "width", {"mlp.fc1.weight": 0, "mlp.fc1.bias": 0, "mlp.fc2.weight": 1}),
]
# By model_type of the configuration: the end of the name of the list of layers, and the branches of
# a layer.
_FAMILIES: dict[str, tuple[str, list[_Part]]] = {
    "albert": ("albert_layers", _ALBERT),
    "bert": ("encoder.layer", _BERT),
    "gemma": ("layers", _LLAMA),
    "gemma2": ("layers", _LLAMA),
    "gpt2": ("h", _GPT2),
    "gpt_neox": ("layers", _NEOX),
    "llama": ("layers", _LLAMA),
    "mistral": ("layers", _LLAMA),
    "opt": ("decoder.layers", _OPT),
    "qwen2": ("layers", _LLAMA),
    "qwen3": ("layers", _LLAMA),
    "roberta": ("encoder.layer", _BERT),
    "vit": ("layers", _VIT),
}


def declare_neuron_branches(model: nn.Module) -> nn.Module:
    """Give a model of transformers the hook ``neuron_branches``, in place, and return the model.

    Call it before :func:`sdp.initialize`. Attention is cut by key/value heads, and the feed-forward
    by hidden units. With GPT-2, ``sdp.branch_scale`` other than "none" is refused: its layers store
    their weights the other way around.

    Raises:
        ModelError: The branches of this kind of model are not known here.
    """
    branches = neuron_branches(model)
    kind = str(getattr(model.config, "model_type", ""))
    for module in list(model.modules()):
        if kind == "gpt2" and type(module).__name__ == "Conv1D":
            module.__class__ = _subclass(type(module), {"forward": _apply_conv1d, "has_inputs_first": True})
        elif type(module).__name__ == "GPT2Attention":
            width = property(lambda self: self.c_attn.weight.shape[1] // 3)
            module.__dict__.pop("split_size", None)
            module.__class__ = _subclass(type(module), {"split_size": width})
        elif type(module).__name__ == "OPTAttention":
            module.register_forward_pre_hook(_count_heads)
    object.__setattr__(model, "neuron_branches", lambda: branches)
    return model


def neuron_branches(model: nn.Module) -> list[Branch]:
    """List the residual branches of a model of transformers, layer by layer.

    Raises:
        ModelError: The branches of this kind of model are not known here.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in _FAMILIES:
        raise ModelError(
            f"neuron_branches: the branches of {type(model).__name__} ({kind}) are not known; known: "
            f"{', '.join(_FAMILIES)}. Define neuron_branches() on the model, see docs/your_model.md"
        )
    ending, parts = _FAMILIES[kind]
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    known = dict(model.named_parameters(remove_duplicate=False))
    branches = []
    for layers, modules in model.named_modules():
        if not isinstance(modules, nn.ModuleList) or not f".{layers}".endswith(f".{ending}"):
            continue
        for layer in (f"{layers}.{index}" for index in range(len(modules))):
            for name, counts, dims in parts:
                cut = {f"{layer}.{key}": dim for key, dim in dims.items() if f"{layer}.{key}" in known}
                first, dim = next(iter(cut.items()))
                neurons = heads if counts == "heads" else known[first].shape[int(str(dim)[-1])]
                branches.append(
                    Branch(
                        f"{layer}.{name}",
                        neurons,
                        tuple((key, int(str(dim)[-1])) for key, dim in cut.items()),
                        three_parts=tuple(key for key, dim in cut.items() if str(dim).startswith("3:")),
                    )
                )
    return branches


def _subclass(kind: type, members: dict[str, Any]) -> type:
    return type(kind.__name__, (kind,), members)


def _apply_conv1d(self: Any, x: Tensor) -> Tensor:
    """Apply the ``Conv1D`` of transformers, whose weight is (inputs, outputs), with some outputs or
    inputs.
    """
    weight = self.weight
    y = x @ weight + self.bias if weight.shape[0] else x.new_zeros((*x.shape[:-1], weight.shape[1])) + self.bias
    slices = getattr(self, "slices", {}).get("weight")
    return slices.in_parts(y, -1) if slices is not None and slices.dim == 1 else y


def _count_heads(module: Any, _: Any) -> None:
    """Set the number of heads of OPT's attention to those that are present."""
    projection = module.q_proj
    slices = getattr(projection, "slices", None)
    width = sum(len(piece) for piece in slices["weight"].tensors(projection)) if slices else projection.out_features
    module.num_heads = width // module.head_dim
