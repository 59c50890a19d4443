"""What a model may declare about itself, and how the engine reads it.

:class:`ModelHooks` lists every hook. All of them are optional: a plain ``torch.nn.Module`` works
without any, and each hook that a model has makes one more feature available. The engine reads hooks
only through the ``get_…`` functions of this file. The types that hooks return are here too, so a
model needs no other import from the engine.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from .errors import ModelError


@dataclass(frozen=True)
class Branch:
    """A residual branch that is a sum over hidden neurons.

    A neuron is a hidden unit of a feed-forward layer, a channel of a convolution, or a key/value
    head together with the query heads that share it.

    Attributes:
        name: The path of the branch's module.
        neurons: The number of neurons.
        parameters: Pairs of canonical parameter name and the dimension along which the neurons lie.
            Each neuron owns an equal share of the indices, and the shares are in order.
        three_parts: Parameters that hold queries, keys and values one after the other. A neuron
            owns an equal share of each third.
        buffers: Canonical names of the buffers that have one entry per neuron.
        flops: Floating-point operations of a forward pass of one sample; 0 if unknown.
    """

    name: str
    neurons: int
    parameters: tuple[tuple[str, int], ...]
    three_parts: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    flops: int = 0


@dataclass(frozen=True)
class Normal:
    """Initialisation: independent normal values with mean 0 and standard deviation ``std``."""

    std: float


@dataclass(frozen=True)
class Constant:
    """Initialisation: every element equals ``value``."""

    value: float


@dataclass(frozen=True)
class Uniform:
    """Initialisation: independent values, uniform between ``-bound`` and ``bound``."""

    bound: float


@dataclass(frozen=True, eq=False)
class Table:
    """Initialisation: the given ``values``, which have the tensor's own shape."""

    values: torch.Tensor


Init = Normal | Constant | Uniform | Table


@dataclass(frozen=True)
class Whole:
    """Tensor parallelism: every rank has all parameters of the module, and runs it on a part of the
    sequence.

    This is for norms. Their gradients are summed over the ranks.
    """

    dims = None


@dataclass(frozen=True)
class Gather:
    """Tensor parallelism: the first argument of the module is gathered along the sequence."""

    dims = None


@dataclass(frozen=True)
class Column:
    """Tensor parallelism: the output features of a linear layer are cut.

    ``pieces`` is the number of equal pieces that must stay whole, for example attention heads.
    """

    pieces: int | None = None
    dims = 0


@dataclass(frozen=True)
class Row:
    """Tensor parallelism: the input features of a linear layer without a bias are cut.

    The cut is that of the output features of the layer before. Outputs are summed over the ranks
    and cut along the sequence.
    """

    dims = 1


@dataclass(frozen=True)
class Vocabulary:
    """Tensor parallelism: an embedding's rows are cut. Outputs are cut along the sequence."""

    dims = 0


@dataclass(frozen=True)
class Head:
    """Tensor parallelism: the rows of a head over the vocabulary are cut.

    The head's first argument is gathered along the sequence, and its attribute ``tensor_ranks`` is
    set. The head itself must turn its part of the logits into logits or a loss.
    """

    dims = 0


Style = Whole | Gather | Column | Row | Vocabulary | Head


class ModelHooks(Protocol):
    """The hooks. A model defines those that it needs, under exactly these names."""

    config: Any  # the model's configuration; engine.save_pretrained writes that of a Hugging Face model
    loss_type: str  # "ForCausalLM" if the loss compares each position with the next label

    def unit_patterns(self) -> list[str]:
        """Module paths of the blocks that are units; ``*`` stands for one path component.

        Without this hook, ``sdp.units = "auto"`` takes the blocks of all chains; see docs/units.md.
        """
        ...

    def unit_flops(self) -> Mapping[str, int]:
        """Floating-point operations of a forward pass of one sample, by unit name.

        Without this hook, placements weigh units by their numbers of parameters.
        """
        ...

    def neuron_branches(self) -> list[Branch]:
        """The residual branches that can be cut into groups of neurons.

        ``sdp.granularity = "neuron"`` needs it.
        """
        ...

    def tensor_parallel_plan(self) -> Mapping[str, Style]:
        """How tensor parallelism cuts each module, by module pattern.

        Hidden states between these modules are cut along the sequence.
        ``tensor_parallel.autotp_size`` above 1 needs this hook.
        """
        ...

    def parameter_init(self, name: str) -> Init:
        """How the parameter or buffer of this canonical name is initialised.

        Without this hook, a model on the meta device is initialised by ``_init_weights`` (Hugging
        Face's convention) or by each module's ``reset_parameters`` (torch's convention).

        Raises:
            ModelError: The model has no tensor of this name.
        """
        ...

    def canonical_name(self, key: str) -> str | None:
        """The name of the model's tensor for ``key`` of a weight file. None: the key is ignored.

        Without this hook, a key must equal the name of the tensor.
        """
        ...

    def sharding_groups(self) -> list[str]:
        """Paths of modules outside the units, each of which is sharded by itself."""
        ...

    def random_options(self) -> list[str]:
        """The options with which training draws random numbers, as ``"model.KEY VALUE"``. Each rank
        draws numbers of its own, so tensor parallelism is refused with such options.
        """
        ...

    def flops_per_token(self, sequence_length: int) -> Mapping[str, float]:
        """Floating-point operations of forward and backward per token.

        Keys are unit names, and ``"shared"`` for everything else.
        """
        ...


HOOKS = tuple(name for name in vars(ModelHooks) if not name.startswith("_"))

# Packages whose classes are not checked for misspelt hooks, because they were not written for SDP.
_LIBRARIES = {*"builtins torch torchvision transformers timm diffusers peft accelerate lightning".split()}

# The least similarity (difflib) of a misspelt hook. "num_flops_per_token" has 0.88.
_NEAR_MISS = 0.9


def check_hooks(model: nn.Module) -> None:
    """Refuse a model with a misspelt hook, which would otherwise be ignored silently. A method
    counts as a misspelt hook if its name is similar to that of a hook that the model does not have.
    It is public, and not defined by torch, transformers or a similar library.

    Raises:
        ModelError: The model has such a method.
    """
    missing = [hook for hook in HOOKS if not hasattr(model, hook)]
    for name in _own_methods(model):
        if close := difflib.get_close_matches(name.lower(), missing, n=1, cutoff=_NEAR_MISS):
            raise ModelError(
                f"{type(model).__name__}.{name}: SDP does not read this name, did you mean {close[0]}? "
                f"If so, rename it to {close[0]}; if not, choose a less similar name"
            )


def get_unit_patterns(model: nn.Module) -> list[str] | None:
    """The model's ``unit_patterns()``, or None if it has none."""
    return _call(model, "unit_patterns", None)


def get_unit_flops(model: nn.Module) -> Mapping[str, int]:
    """The model's ``unit_flops()``; empty if it has none."""
    return _call(model, "unit_flops", {})


def get_neuron_branches(model: nn.Module) -> list[Branch] | None:
    """The model's ``neuron_branches()``, or None if it has none."""
    return _call(model, "neuron_branches", None)


def get_tensor_parallel_plan(model: nn.Module) -> Mapping[str, Style] | None:
    """The model's ``tensor_parallel_plan()``, or None if it has none."""
    return _call(model, "tensor_parallel_plan", None)


def get_parameter_init(model: nn.Module) -> Callable[[str], Init] | None:
    """The model's method ``parameter_init``, or None if it has none."""
    return _find_method(model, "parameter_init")


def get_canonical_name(model: nn.Module) -> Callable[[str], str | None]:
    """The model's method ``canonical_name``, or a function that returns the key itself."""
    return _find_method(model, "canonical_name") or (lambda key: key)


def get_sharding_groups(model: nn.Module) -> list[str]:
    """The model's ``sharding_groups()``; empty if it has none."""
    return _call(model, "sharding_groups", [])


def get_random_options(model: nn.Module) -> list[str]:
    """The model's ``random_options()``; empty if it has none."""
    return _call(model, "random_options", [])


def get_flops_per_token(model: nn.Module) -> Callable[[int], Mapping[str, float]] | None:
    """The model's method ``flops_per_token``, or None if it has none."""
    return _find_method(model, "flops_per_token")


def shifts_labels(model: nn.Module) -> bool:
    """Whether the model's loss compares each position with the next label. If it does,
    ``loss_type`` is "ForCausalLM", as in Hugging Face's models. Of Hugging Face's models, decoders
    "for conditional generation" have this loss too, and so have language models whose ``loss_type``
    is None.
    """
    missing = object()
    kind = getattr(model, "loss_type", missing)
    if kind is None:
        return any(word in type(model).__name__ for word in ("LMHead", "CausalLM"))
    if kind == "ForConditionalGeneration":
        return not getattr(get_config(model), "is_encoder_decoder", False)
    return isinstance(kind, str) and "CausalLM" in kind


def get_config(model: nn.Module) -> Any:
    """The model's ``config`` object (Hugging Face's convention, and ours), or None."""
    return getattr(model, "config", None)


def _call(model: nn.Module, name: str, default: Any) -> Any:
    method = _find_method(model, name)
    return default if method is None else method()


def _find_method(model: nn.Module, name: str) -> Callable[..., Any] | None:
    """The hook ``name`` of ``model``, or None. Raises ModelError if it is not a method."""
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
