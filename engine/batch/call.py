"""Calls a model with a batch, and finds the loss and the number of labels that the loss averages.

Also keeps the weights of losses: the gradient of a unit is Σ n·∂ℓ / Σ n over the micro-batches of
the unit's holders, where ℓ is a loss and n is the weight of the loss.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..errors import ConfigError, DataError, ModelError
from ..model_interface import shifts_labels

IGNORED_LABEL = -100  # torch's and Hugging Face's ignore_index


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a copy of a batch in which ``function`` is applied to each value.

    The batch may be nested: a torch pytree, a dataclass, or a mapping of any class such as Hugging
    Face's BatchEncoding.
    """

    def leaf(found: Any) -> Any:
        if isinstance(found, MutableMapping):
            new = copy.copy(found)
            for key in found:
                new[key] = map_leaves(function, found[key])
            return new
        if is_dataclass(found) and not isinstance(found, type):
            new = copy.copy(found)
            for field in fields(found):
                object.__setattr__(new, field.name, map_leaves(function, getattr(found, field.name)))
            return new
        return function(found)

    return tree_map(leaf, tree)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return all tensors in a batch, in order, however the batch is nested."""
    found: list[torch.Tensor] = []

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        return leaf

    map_leaves(collect, tree)
    return found


def _bind(module: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``module.forward``, by the rules of :func:`call_model`."""
    signature = inspect.signature(module.forward)
    parameters = signature.parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if isinstance(batch, Mapping):
        by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        known = any(p.kind is p.VAR_KEYWORD for p in parameters) or set(batch) <= by_name
        if known and all(p.name in batch and p.kind is not p.POSITIONAL_ONLY for p in required):
            return (), dict(batch)
    elif isinstance(batch, tuple | list):
        any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        needed = sum(p.default is p.empty for p in positional)
        # A list of texts may be the only argument.
        fits = needed <= len(batch) <= len(positional) and bool(tensors_in(batch))
        if fits or (needed > 1 and len(batch) <= len(positional)) or (any_number and (needed > 1 or not positional)):
            return tuple(batch), {}
    return (batch,), {}


def _surplus(signature: inspect.Signature, batch: Mapping[Any, Any]) -> list[str]:
    """Return the keys of ``batch`` that ``forward`` does not take.

    The result is empty if the batch lacks a key that ``forward`` requires, because then the mapping
    is probably one argument.
    """
    parameters = signature.parameters.values()
    required = {
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    return [str(key) for key in batch if key not in signature.parameters] if required and required <= set(batch) else []


def _fitted(module: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Mapping[str, Any]]:
    """Return the arguments for ``module.forward``, as they are passed and by name.

    Raises DataError if the batch does not fit.
    """
    args, kwargs = _bind(module, batch)
    signature = inspect.signature(module.forward)
    try:
        return args, kwargs, signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        if not kwargs and isinstance(batch, Mapping) and (surplus := _surplus(signature, batch)):
            raise DataError(_too_much(module, surplus)) from None
        what = f"keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
        raise DataError(f"a batch ({what}) does not fit {_forward_of(module)}: {error}") from None


def _too_much(module: nn.Module, surplus: list[str]) -> str:
    return f"a batch has {', '.join(surplus)}, which {_forward_of(module)} does not take; leave it out of the batch"


def _forward_of(module: nn.Module) -> str:
    owner = getattr(module.forward, "__self__", module)  # not a Redirected
    return f"{type(owner).__name__}.forward({', '.join(inspect.signature(module.forward).parameters)})"


def call_model(module: nn.Module, batch: Any) -> Any:
    """Call ``module`` with one batch, and return the result.

    - A mapping is passed by name if ``forward`` takes all keys, and requires no other argument.
    - A tuple or list with tensors is passed by position if ``forward`` takes that many arguments.
      So ``(x, y)`` fits ``forward(x, targets=None)``, but not ``forward(batch)``. A tuple or list
      without tensors is passed by position only if ``forward`` requires several arguments.
    - Anything else is passed as one argument, as in DeepSpeed.

    Raises DataError if the batch does not fit ``forward`` in any of these ways.
    """
    args, kwargs, _ = _fitted(module, batch)
    surplus = _surplus(inspect.signature(module.forward), batch) if not kwargs and isinstance(batch, Mapping) else []
    try:
        return module(*args, **kwargs)
    except (TypeError, AttributeError) as error:  # a mapping where a tensor is expected
        if surplus:
            raise DataError(f"{_too_much(module, surplus)} (and passing it as one argument fails: {error})") from error
        raise


class Redirected(nn.Module):
    """A module that :func:`call_model` calls like ``module``, but whose calls go to ``run``."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]):
        super().__init__()
        self._run, self.forward = run, module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Return ``tree`` with its floating-point tensors in ``dtype``."""
    return tree_map(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, tree)


def loss_of(output: Any) -> torch.Tensor:
    """Return the scalar loss in what a model returned.

    The loss is the output itself, ``output.loss``, ``output["loss"]``, or the first scalar of a
    tuple or list.
    """
    if isinstance(output, torch.Tensor):
        if output.numel() == 1:
            return output.reshape(())
        raise ModelError(
            f"the model returned a tensor of shape {tuple(output.shape)} and no scalar loss; give the model labels"
        )
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and isinstance(output, tuple | list):
        loss = next((leaf for leaf in output if isinstance(leaf, torch.Tensor) and leaf.numel() == 1), None)
    if loss is None:
        raise ModelError(
            f"no loss was found in the {type(output).__name__} that the model returned; give the model labels"
        )
    return loss.reshape(())


def logits_of(output: Any) -> torch.Tensor:
    """Return the logits (rows, tokens, vocabulary) in the output of a language model."""
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(found, torch.Tensor) or found.dim() != 3:
        raise ModelError(
            f"the model's output without labels, a {type(output).__name__}, has no logits of shape (rows, tokens, "
            "vocabulary); use a causal language model"
        )
    return found


def count_targets(module: nn.Module, batch: Any) -> torch.Tensor:
    """Count the labels over which the model averages its loss. The result is an integer tensor.

    Labels are the argument ``labels`` of ``forward``, or if there is none, the batch's last tensor.
    The label -100 does not count. If the model compares each position with the next label, like
    causal language models of transformers, the first label of each row does not count either.
    """
    labels = _fitted(module, batch)[2].get("labels")
    if labels is None and isinstance(batch, Mapping):
        labels = batch.get("labels")
    shifted = labels is not None and shifts_labels(module)
    if labels is None:
        tensors = tensors_in(batch)
        if not tensors:
            raise DataError(f"a batch of type {type(batch).__name__} has no tensor; give batches with tensors")
        labels = tensors[-1]
    if labels.is_floating_point():
        return torch.tensor(labels.numel())
    targets = labels[:, 1:] if shifted and labels.dim() == 2 else labels
    return (targets != IGNORED_LABEL).sum()


def checked_weights(weights: Iterable[Any]) -> list[float]:
    """Return weights of losses as numbers. Raises ConfigError if one is negative or not finite."""
    numbers = [float(weight) for weight in weights]
    wrong = next((number for number in numbers if not 0 <= number < math.inf), None)
    if wrong is not None:
        raise ConfigError(
            f"the weight {wrong:g} of a loss must be finite and not negative; give the number of labels in the batch"
        )
    return numbers


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = True) -> Any:
    """Return a copy of a batch with every tensor on ``device``.

    With ``non_blocking``, the device may still copy page-locked tensors of ``batch`` after the
    return. Do not change these tensors before the device has copied them.
    """
    return map_leaves(
        lambda leaf: leaf.to(device, non_blocking=non_blocking) if isinstance(leaf, torch.Tensor) else leaf, batch
    )


def count_labels(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Count the labels in the arguments of a forward pass. The result is a float64 scalar.

    Args:
        module: The model.
        args: The positional arguments of ``forward``. A single argument is taken as the batch.
        kwargs: The arguments of ``forward`` by name.
    """
    batch: Any = args[0] if len(args) == 1 and not kwargs else args
    if kwargs:
        batch = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    return count_targets(module, batch).double()


class LossWeights:
    """Collects the weights n and losses ℓ of a step's micro-batches on this rank.

    Attributes:
        unit: A power of two near the mean weight. Weights are divided by it before backward, so
            that gradients do not overflow in half precision. The division is undone later.
        all: The sum of the weights of all ranks that average their gradients, set by
            :meth:`note_all`.
    """

    def __init__(self) -> None:
        self.unit, self.all, self._next_unit = 1.0, 0.0, 1.0
        self._weights: list[torch.Tensor] = []
        self._losses: list[torch.Tensor] = []

    def __bool__(self) -> bool:
        return bool(self._weights)

    def checked(self, weight: Any, device: torch.device) -> torch.Tensor:
        """Return the ``weight`` that a script gave to ``engine.backward`` as a float64 scalar.

        Raises ConfigError if the weight is not one finite number, or is negative. A tensor with one
        element is not checked, because reading the value would wait for the device.
        """
        if isinstance(weight, torch.Tensor) and weight.numel() == 1:
            return weight.detach().to(device).double().reshape(())
        given = weight.flatten().tolist() if isinstance(weight, torch.Tensor) else weight
        numbers = checked_weights(given if isinstance(given, list | tuple) else [given])
        if len(numbers) != 1:
            raise ConfigError(
                f"backward: weight has {len(numbers)} numbers; give one number, the weight of this rank's loss"
            )
        return torch.tensor(numbers[0], dtype=torch.float64, device=device)

    def begin_after(self, losses: Sequence[torch.Tensor], accumulation: int) -> None:
        """Add the earlier micro-batches of this step, which had no weight, with weight 1.

        Args:
            losses: the mean losses of these micro-batches.
            accumulation: the number by which these losses were divided before backward.
        """
        for loss in losses:
            self.add(loss.new_ones((), dtype=torch.float64), loss)
        self.unit = float(accumulation)

    def add(self, weight: torch.Tensor, loss: torch.Tensor) -> None:
        """Add the weight and the mean loss of a micro-batch, two scalars."""
        self._weights.append(weight)
        # The mean over no labels is NaN.
        self._losses.append(torch.where(weight > 0, loss.detach().double() * weight, 0.0))

    def total(self) -> torch.Tensor:
        """Return the sum of the weights of this rank's losses, Σ n, a float64 scalar."""
        return torch.stack(self._weights).sum()

    def weighted_loss(self) -> torch.Tensor:
        """Return this rank's weighted sum of losses, Σ n·ℓ, a float64 scalar."""
        return torch.stack(self._losses).sum()

    def note_all(self, total: float, ranks: int) -> None:
        """Store the sum of weights over all ranks that average, and the number of these ranks."""
        self.all = total
        if total:
            self._next_unit = 2.0 ** round(math.log2(total / (ranks * len(self._weights))))

    def clear(self) -> None:
        """Forget the micro-batches, and set ``unit`` from their mean weight for the next step."""
        self._weights, self._losses = [], []
        self.unit = self._next_unit
