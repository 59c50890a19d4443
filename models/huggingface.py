"""Builds causal language models of transformers, and declares the neurons of its models.

:func:`build` makes the model of a folder. For ``sdp.granularity`` "neuron",
:func:`declare_neuron_branches` says which slices of parameters are neurons, and changes layers of
GPT-2 and OPT, so that they work with a part of the neurons. Names and shapes of all parameters stay
as they are.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.errors import ConfigError, ModelError, shorten
from ..engine.json_files import read_json_file
from ..engine.model_interface import Branch, Conversion, Tensors
from .sections import HuggingFaceConfig


def read_config(directory: Path) -> dict[str, Any]:
    """Read a folder's ``config.json``. Raises ConfigError unless it describes a model."""
    path = directory / "config.json"
    if not directory.is_dir():
        raise ConfigError(
            f"{shorten(directory)} is not a directory; a model of the Hugging Face Hub must be downloaded first, with "
            "hf download NAME --local-dir DIR"
        )
    try:
        content = read_json_file(path)
        content["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is not a model's configuration; give a directory in Hugging Face's format") from None
    return content


def build_from(content: Mapping[str, Any]) -> nn.Module:
    """Build the causal language model of a ``config.json``'s content, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**content), dtype=torch.float32)


def build(section: HuggingFaceConfig) -> nn.Module:
    """Build the causal language model of the folder ``section.path``, on the default device.

    Its parameters are float32. The weights in the folder are not read, and no code in the folder is
    run. Raises ConfigError if the folder has no ``config.json`` of a causal language model that
    transformers knows, or if its weights are quantised.
    """
    directory = Path(section.path)
    content = read_config(directory)
    if content.get("quantization_config") is not None:
        raise ConfigError(
            f"model.path: {directory} holds a quantised model, and training needs plain weights; take the folder of "
            "the model before quantisation"
        )
    # transformers may import DeepSpeed, which prints warnings to the standard output it finds.
    with contextlib.redirect_stdout(sys.stderr):
        config, model, mapping = _build(directory, content["model_type"])
    config.use_cache = False  # training does not need cached keys and values
    _add_file_hooks(model, mapping)
    return model


def _build(directory: Path, kind: object) -> tuple[Any, Any, list[Any]]:
    """Return the configuration, the model, and how ``from_pretrained`` would convert weights."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, logging
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        raise ConfigError(
            "model.name: huggingface needs the transformers package: pip install 'sdp-engine[huggingface]'"
        ) from None
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        return config, model, get_model_conversion_mapping(model)
    except Exception as error:  # each kind of model has checks
        raise ConfigError(
            f"model.path: {directory}: transformers builds no causal language model of type "
            f"{json.dumps(kind)} ({shorten(' '.join(str(error).split()))})"
        ) from None
    finally:
        logging.set_verbosity(verbosity)


def _add_file_hooks(model: Any, mapping: list[Any]) -> None:
    """Give ``model`` the hooks that read weight files as ``from_pretrained`` does."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    kept = dict.fromkeys(model.state_dict(), True)
    computed = {name for name, _ in model.named_buffers()} - kept.keys()
    # Tables that older versions of transformers wrote to files.
    ignored = re.compile("|".join([r"rotary_emb\.inv_freq$", *(model._keys_to_ignore_on_load_unexpected or ())]))
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    converter_of = {pattern: one for one in converters for pattern in one.source_patterns}

    def renamed(key: str) -> tuple[str, str | None]:
        if key in kept:
            return key, None
        return rename_source_key(key, renamings, converters, model.base_model_prefix, kept)

    def canonical_name(key: str) -> str | None:
        name, _ = renamed(key)
        return None if name in computed or (name not in kept and ignored.search(key)) else name

    def weight_conversions(keys: Collection[str]) -> list[Conversion]:
        found: dict[str, dict[str, str]] = {}  # by name: keys of files and their patterns
        for key in sorted(keys, key=dot_natural_key):
            name, pattern = renamed(key)
            if pattern is not None and name in kept:
                found.setdefault(name, {})[key] = pattern
        return [_conversion(model, name, of, converter_of[next(iter(of.values()))]) for name, of in found.items()]

    object.__setattr__(model, "canonical_name", canonical_name)
    object.__setattr__(model, "weight_conversions", weight_conversions)


def _conversion(model: Any, name: str, pattern_of: Mapping[str, str], converter: Any) -> Conversion:
    """Describe a ``WeightConverter`` of transformers. If it stacks experts, each is a part.

    ``name`` is the first of the model's tensors. ``pattern_of`` has the keys of the files' tensors
    in order, each with its pattern of the converter.
    """
    from transformers import core_model_loading as library

    patterns, first, *later = converter.source_patterns, *converter.operations
    columns = [[key for key, own in pattern_of.items() if own == pattern] for pattern in patterns]
    stacks = isinstance(first, library.MergeModulelist) and first.dim == 0
    stacks = stacks and all(isinstance(operation, library.Concatenate) and operation.dim > 0 for operation in later)
    is_complete = len({len(column) for column in columns}) == 1
    parts = list(zip(*columns, strict=True)) if stacks and is_complete else [tuple(itertools.chain(*columns))]

    def join(_: int, tensors: Tensors) -> Tensors:
        once = copy.deepcopy(converter)  # it keeps the tensors that it is given
        for key, tensor in tensors.items():
            once.add_tensor(name, key, pattern_of[key], tensor)
        return once.convert(name, model=model, config=model.config)

    def split(part: int, rows: Tensors) -> Tensors:
        once, target = converter.reverse_transform(), ""
        for own, tensor in rows.items():
            target, pattern = once.rename_source_key(own)
            once.add_tensor(target, own, pattern, tensor)
        keys = {pattern: iter([key for key in parts[part] if pattern_of[key] == pattern]) for pattern in patterns}
        made = once.convert(target, model=model, config=model.config)
        return {next(keys[converter.rename_source_key(key)[1]]): tensor for key, tensor in made.items()}

    names = tuple(name.replace(converter.target_patterns[0], pattern) for pattern in converter.target_patterns)
    return Conversion(names, parts, join, split, None if stacks else _dim_of(converter.operations))


def _dim_of(operations: list[Any]) -> int | None:
    """Return the dimension along which operations of transformers move values, if they have one."""
    from transformers import core_model_loading as library

    kinds = library.Chunk, library.Split, library.Concatenate, library.Interleave
    dims = {one.dim if isinstance(one, kinds) else None for one in operations}
    return dims.pop() if len(dims) == 1 else None


# A branch: the module before which its weights are needed, what counts its neurons, and the
# dimension of each parameter along which they lie. "width" counts the outputs of the first layer,
# "heads" the key/value heads. A dimension such as "3:1" means: queries, keys and values, one after
# the other.
_Part = tuple[str, str, Mapping[str, int | str]]


def _attention(name: str, projections: str, output: str) -> _Part:
    """Describe attention whose projections and output are layers of their own."""
    cut = {f"{layer}.{kind}": 0 for layer in projections.split() for kind in ("weight", "bias")}
    return name, "heads", cut | {f"{output}.weight": 1}


def _feed_forward(name: str, first: str, last: str) -> _Part:
    return name, "width", {f"{first}.weight": 0, f"{first}.bias": 0, f"{last}.weight": 1}


_SELF = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
_LLAMA: list[_Part] = [
    _attention("self_attn", _SELF, "self_attn.o_proj"),
    ("mlp", "width", {"mlp.gate_proj.weight": 0, "mlp.up_proj.weight": 0, "mlp.down_proj.weight": 1}),
]
_GPT2: list[_Part] = [
    ("attn", "heads", {"attn.c_attn.weight": "3:1", "attn.c_attn.bias": "3:0", "attn.c_proj.weight": 0}),
    ("mlp", "width", {"mlp.c_fc.weight": 1, "mlp.c_fc.bias": 0, "mlp.c_proj.weight": 0}),
]
_NEOX = [
    _attention("attention", "attention.query_key_value", "attention.dense"),
    _feed_forward("mlp", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
]
_OPT = [_attention("self_attn", _SELF, "self_attn.out_proj"), _feed_forward("fc1", "fc1", "fc2")]
_BERT = [
    _attention("attention", "attention.self.query attention.self.key attention.self.value", "attention.output.dense"),
    _feed_forward("intermediate", "intermediate.dense", "output.dense"),
]
_ALBERT = [
    _attention("attention", "attention.query attention.key attention.value", "attention.dense"),
    _feed_forward("ffn", "ffn", "ffn_output"),
]
_VIT = [
    _attention("attention", "attention.q_proj attention.k_proj attention.v_proj", "attention.o_proj"),
    _feed_forward("mlp", "mlp.fc1", "mlp.fc2"),
]
# By model_type of the configuration: how the path of the list of layers ends, and the branches of a
# layer.
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
    """Prepare a model of transformers for ``sdp.granularity`` "neuron", in place, and return it.

    Call this before :func:`sdp.initialize`. It adds the hook ``neuron_branches``, which says where
    the neurons are: key/value heads of attention, and hidden units of the feed-forward. GPT-2
    stores weights with inputs and outputs exchanged, so ``sdp.branch_scale`` other than "none" is
    refused for it.

    Raises:
        ModelError: Models of this type are not supported.
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
    """List, layer by layer, the branches of a transformers model whose neurons can be units.

    Raises:
        ModelError: Models of this type are not supported.
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
    """Apply a ``Conv1D`` of transformers with some outputs or inputs: weight (inputs, outputs)."""
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
