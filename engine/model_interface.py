"""Hooks: optional methods with which a model describes itself to the engine.

:class:`ModelHooks` lists all hooks. A plain ``torch.nn.Module`` works without any, and each hook
makes one more feature available. This file also has the types that hooks return, so a model needs
no other import from the engine. The engine calls hooks through the ``get_…`` functions.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from .errors import ModelError


@dataclass(frozen=True)
class Branch:
    """Describes a residual branch that can be cut into groups of neurons.

    A neuron is a hidden unit of a feed-forward layer, a channel of a convolution, or a key/value
    head together with the query heads that share it. The branch must be a sum over neurons.

    Attributes:
        name: The path of the branch's module.
        neurons: The number of neurons.
        parameters: Pairs of a parameter's name and the dimension along which the neurons lie. Along
            this dimension, each neuron has an equal number of neighbouring indices, in order.
        three_parts: Names of parameters that consist of queries, keys and values, one after the
            other. A neuron has indices in each third.
        buffers: Names of the buffers that have one entry per neuron.
        flops: Floating-point operations of a forward pass of one sample; 0 if unknown.
    """

    name: str
    neurons: int
    parameters: tuple[tuple[str, int], ...]
    three_parts: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    flops: int = 0


Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Conversion:
    """Describes tensors that weight files store in another form than the model.

    For example, a file has a matrix for each expert, and the model has all experts in one tensor.

    Attributes:
        names: The names of the model's tensors.
        parts: The keys of the files' tensors, in parts. The rows (indices in the first dimension)
            of the model's tensors are divided evenly among the parts, in order. For Mixtral, a part
            is an expert.
        join: Given the number of a part and its tensors by key, returns the rows by name.
        split: Given the number of a part and its rows by name, returns the tensors by key.
        dim: The dimension along which ``join`` moves values, if a rank shall read only some rows of
            the files' tensors. Only for one part. If 0, each row of the model's tensors is an
            unchanged row of a file's tensor. Then ``join`` is also called with numbers of rows
            (int64), of shape (rows, 1, …), and must work on them in the same way. If 1 or more, row
            i depends on the rows i of the files' tensors alone. Then ``join`` is called with equal
            ranges of their rows.

    Raises:
        ModelError: ``dim`` is negative, or there are several parts.
    """

    names: tuple[str, ...]
    parts: Sequence[tuple[str, ...]]
    join: Callable[[int, Tensors], Tensors]
    split: Callable[[int, Tensors], Tensors]
    dim: int | None = None

    def __post_init__(self) -> None:
        if self.dim is not None and (self.dim < 0 or len(self.parts) != 1):
            raise ModelError(f"weight_conversions: dim {self.dim} of {self.names[0]!r} must be 0 or more, for one part")


@dataclass(frozen=True)
class Normal:
    """An initialisation: independent normal values with mean 0 and standard deviation ``std``."""

    std: float


@dataclass(frozen=True)
class Constant:
    """An initialisation: every element equals ``value``."""

    value: float


@dataclass(frozen=True)
class Uniform:
    """An initialisation: independent values, uniform between ``-bound`` and ``bound``."""

    bound: float


@dataclass(frozen=True, eq=False)
class Table:
    """An initialisation: the tensor gets ``values``, which have the same shape."""

    values: torch.Tensor


Init = Normal | Constant | Uniform | Table


@dataclass(frozen=True)
class Whole:
    """In a tensor-parallel plan: the module is not cut. A rank runs it on a part of the sequence.

    Use it for norms. The ranks sum the gradients of the module's parameters.
    """

    dims = None


@dataclass(frozen=True)
class Gather:
    """In a tensor-parallel plan: the module's first argument is gathered along the sequence.

    Use it for a module that contains linear layers with the style :class:`Column`.
    """

    dims = None


@dataclass(frozen=True)
class Column:
    """In a tensor-parallel plan: the output features of a linear layer are cut among ranks.

    The features are ``pieces`` equal ranges, such as attention heads. A rank gets whole ranges.
    """

    pieces: int | None = None
    dims = 0


@dataclass(frozen=True)
class Row:
    """In a tensor-parallel plan: the input features of a linear layer without a bias are cut.

    Use it for the layer after a :class:`Column` layer, whose outputs are cut in the same way. The
    ranks sum the outputs, and cut the sum along the sequence.
    """

    dims = 1


@dataclass(frozen=True)
class Vocabulary:
    """In a tensor-parallel plan: the rows of an embedding are cut among ranks.

    The outputs are cut along the sequence.
    """

    dims = 0


@dataclass(frozen=True)
class Head:
    """In a tensor-parallel plan: the head is cut along the vocabulary.

    The head's first argument is gathered along the sequence. A rank computes logits of a part of
    the vocabulary only. From these, the head must compute all logits or the loss, with collectives
    of ``tensor_ranks``, an attribute of the head that the engine sets.
    """

    dims = 0


Style = Whole | Gather | Column | Row | Vocabulary | Head


class ModelHooks(Protocol):
    """All hooks that a model may define, under exactly these names. A model needs none of them."""

    config: Any  # the model's configuration; engine.save_pretrained writes that of a Hugging Face model
    loss_type: str  # "ForCausalLM" if the loss compares each position with the next label

    def unit_patterns(self) -> list[str]:
        """A model may define this hook to name its units by module paths, such as "layers.*".

        ``*`` stands for one component of a path. Without this hook, ``sdp.units = "auto"`` searches
        the model for sequences of blocks (docs/units.md).
        """
        ...

    def unit_flops(self) -> Mapping[str, int]:
        """A model may define this hook to state the operations of each unit, by the unit's name.

        The values are floating-point operations of one sample's forward pass. A placement uses them
        to give groups equal work. Without this hook, it uses the units' numbers of parameters.
        """
        ...

    def neuron_branches(self) -> list[Branch]:
        """A model may define this hook to list the branches that can be cut into groups of neurons.

        ``sdp.granularity = "neuron"`` needs this hook.
        """
        ...

    def tensor_parallel_plan(self) -> Mapping[str, Style]:
        """A model may define this hook to choose how tensor parallelism cuts its modules.

        The result maps patterns of module paths to styles, such as :class:`Column`. Hidden states
        between these modules are cut along the sequence. ``tensor_parallel.autotp_size`` above 1
        needs this hook.
        """
        ...

    def parameter_init(self, name: str) -> Init:
        """A model may define this hook to choose the initial values of its tensor ``name``.

        For example, the result ``Normal(0.02)`` stands for random values with standard deviation
        0.02. Without this hook, a model on the meta device is initialised by
        ``_init_weights`` (Hugging Face's convention) or by each module's ``reset_parameters``
        (torch's convention).

        Raises ModelError if the model has no tensor of this name.
        """
        ...

    def canonical_name(self, key: str) -> str | None:
        """A model may define this hook to map a ``key`` of a weight file to a tensor of the model.

        The result is the tensor's name, or None to ignore the ``key``. Without this hook, the keys
        of a weight file must be the names of the model's tensors.
        """
        ...

    def weight_conversions(self, keys: Collection[str]) -> list[Conversion]:
        """A model may define this hook if weight files store a tensor in pieces, or several in one.

        ``keys`` are those of the files. A key of a conversion is not given to ``canonical_name``.
        """
        ...

    def sharding_groups(self) -> list[str]:
        """A model may define this hook to list modules that FSDP2 shall gather one by one.

        The result has paths of modules outside the units. Without this hook, everything outside the
        units is gathered together.
        """
        ...

    def random_options(self) -> list[str]:
        """A model may define this hook to list options that make training random.

        An example is "model.dropout 0.1". If the list is not empty, each rank draws different
        random numbers, and tensor parallelism is refused.
        """
        ...

    def flops_per_token(self, sequence_length: int) -> Mapping[str, float]:
        """A model may define this hook to state the operations of forward and backward per token.

        The values are floating-point operations. Keys are the names of units, and "shared" for
        everything outside the units.
        """
        ...


HOOKS = tuple(name for name in vars(ModelHooks) if not name.startswith("_"))

# Packages whose classes are not checked for misspelt hooks, because they were not written for SDP.
_LIBRARIES = {*"builtins torch torchvision transformers timm diffusers peft accelerate lightning".split()}

# The least similarity (difflib) of a misspelt hook. "num_flops_per_token" has 0.88.
_NEAR_MISS = 0.9


def check_hooks(model: nn.Module) -> None:
    """Raise ModelError if a method of the model seems to be a misspelt hook.

    Otherwise the hook would be silently ignored. A public method counts as misspelt if its name is
    close to the name of a missing hook. Methods of torch and similar libraries do not count.
    """
    missing = [hook for hook in HOOKS if not hasattr(model, hook)]
    for name in _own_methods(model):
        if close := difflib.get_close_matches(name.lower(), missing, n=1, cutoff=_NEAR_MISS):
            raise ModelError(
                f"{type(model).__name__}.{name}: SDP does not read this name, did you mean {close[0]}? "
                f"If so, rename it to {close[0]}; if not, choose a less similar name"
            )


def get_unit_patterns(model: nn.Module) -> list[str] | None:
    """Return the model's ``unit_patterns()``, or None if the model lacks this hook."""
    return _call(model, "unit_patterns", None)


def get_unit_flops(model: nn.Module) -> Mapping[str, int]:
    """Return the model's ``unit_flops()``. Empty if the model lacks this hook."""
    return _call(model, "unit_flops", {})


def get_neuron_branches(model: nn.Module) -> list[Branch] | None:
    """Return the model's ``neuron_branches()``, or None if the model lacks this hook."""
    return _call(model, "neuron_branches", None)


def get_tensor_parallel_plan(model: nn.Module) -> Mapping[str, Style] | None:
    """Return the model's ``tensor_parallel_plan()``, or None if the model lacks this hook."""
    return _call(model, "tensor_parallel_plan", None)


def get_parameter_init(model: nn.Module) -> Callable[[str], Init] | None:
    """Return the model's method ``parameter_init``, or None if the model lacks this hook."""
    return _find_method(model, "parameter_init")


def find_tensors(model: nn.Module, keys: Collection[str]) -> tuple[dict[str, str], list[Conversion]]:
    """Find the model's tensors that weight files with these ``keys`` have.

    Returns the tensor's name for each key, and descriptions of tensors that are stored in pieces,
    or several in one. The model's hooks ``canonical_name`` and ``weight_conversions`` decide.
    Without them, the keys are the names.
    """
    describe, canonical = _find_method(model, "weight_conversions"), _find_method(model, "canonical_name")
    conversions: list[Conversion] = describe(keys) if describe is not None else []
    taken = {key for conversion in conversions for part in conversion.parts for key in part}
    names = {key: canonical(key) if canonical is not None else key for key in keys if key not in taken}
    return {key: name for key, name in names.items() if name is not None}, conversions


def get_sharding_groups(model: nn.Module) -> list[str]:
    """Return the model's ``sharding_groups()``. Empty if the model lacks this hook."""
    return _call(model, "sharding_groups", [])


def get_random_options(model: nn.Module) -> list[str]:
    """Return the model's ``random_options()``. Empty if the model lacks this hook."""
    return _call(model, "random_options", [])


def get_flops_per_token(model: nn.Module) -> Callable[[int], Mapping[str, float]] | None:
    """Return the model's method ``flops_per_token``, or None if the model lacks this hook."""
    return _find_method(model, "flops_per_token")


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model's loss compares each position with the next label.

    True if ``model.loss_type`` contains "CausalLM". If ``loss_type`` is None, the name of the class
    decides. True for "ForConditionalGeneration", unless the model has an encoder and a decoder.
    """
    missing = object()
    kind = getattr(model, "loss_type", missing)
    if kind is None:
        return any(word in type(model).__name__ for word in ("LMHead", "CausalLM"))
    if kind == "ForConditionalGeneration":
        return not getattr(get_config(model), "is_encoder_decoder", False)
    return isinstance(kind, str) and "CausalLM" in kind


def get_config(model: nn.Module) -> Any:
    """Return ``model.config``, which Hugging Face's and SDP's models have, or None."""
    return getattr(model, "config", None)


def _call(model: nn.Module, name: str, default: Any) -> Any:
    method = _find_method(model, name)
    return default if method is None else method()


def _find_method(model: nn.Module, name: str) -> Callable[..., Any] | None:
    """Return the hook ``name`` of ``model``, or None. Raises ModelError if it is not a method."""
    value = getattr(model, name, None)
    if value is not None and (not callable(value) or isinstance(value, nn.Module)):
        raise ModelError(
            f"{type(model).__name__}.{name}: must be a method, but is of type {type(value).__name__}; "
            f"define {name}() as sdp.engine.model_interface describes it, or rename the attribute"
        )
    return value


def _own_methods(model: nn.Module) -> Iterator[str]:
    """Names of the public methods that neither torch nor a similar library defines."""
    spaces: Sequence[Mapping[str, object]] = [
        vars(model),
        *(vars(kind) for kind in type(model).__mro__ if kind.__module__.partition(".")[0] not in _LIBRARIES),
    ]
    for space in spaces:
        for name, value in space.items():
            is_method = callable(value) or isinstance(value, classmethod | property | cached_property)
            if is_method and not name.startswith("_") and not isinstance(value, type):
                yield name
