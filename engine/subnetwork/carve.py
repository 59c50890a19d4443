"""Carves a group's subnetwork out of a model.

Each block that the group does not hold is replaced by a pass-through without parameters, at the
same path. The pass-through returns its input, in the form of the block's result.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from ..errors import ModelError
from ..placement.placement import Placement
from ..placement.units import Unit

log = logging.getLogger("sdp")

ASKS_FOR_WEIGHTS = "output_attentions"
NO_WEIGHTS = "a skipped block has no attention weights to return"


class Structure(NamedTuple):
    """The form of a block's result, in which the pass-through of a skipped block returns its input.

    Attributes:
        spec: the structure of the result, a pytree.
        position: the index of the leaf that is the hidden state.
        others: index of each leaf that is an unchanged argument of the block → the argument's name.
            All leaves but these and the hidden state are None in the result of a pass-through.
        has_weights: whether the block itself returns attention weights.
    """

    spec: TreeSpec
    position: int
    others: dict[int, str]
    has_weights: bool


def read_structure(
    output: Any, hidden: torch.Tensor, inputs: Mapping[str, Any], signature: inspect.Signature
) -> Structure | str:
    """Return the form of a block's ``output``, or the reason why no pass-through can return it.

    Args:
        output: what the block returned.
        hidden: the hidden state that the block got.
        inputs: the block's arguments by name.
        signature: the signature of the block's ``forward``.
    """
    leaves, spec = tree_flatten(output)
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        return "returns no tensor"
    position = tensors[0]
    if leaves[position].shape != hidden.shape:
        return f"returns {tuple(leaves[position].shape)} from {tuple(hidden.shape)}"
    others: dict[int, str] = {}
    weights = 0
    for index, leaf in enumerate(leaves):
        if index != position and leaf is not None:
            name = next((name for name, value in inputs.items() if value is leaf and index in tensors), None)
            if name is not None:
                others[index] = name
            elif index in tensors and _are_attention_weights(leaf, hidden, signature):
                weights += 1
            else:
                return "returns more than its hidden state"
    if weights and inputs.get(ASKS_FOR_WEIGHTS):
        return f"{ASKS_FOR_WEIGHTS}: {NO_WEIGHTS}"
    return Structure(spec, position, others, bool(weights))


def _are_attention_weights(leaf: torch.Tensor, hidden: torch.Tensor, signature: inspect.Signature) -> bool:
    """Whether ``leaf`` is attention weights (batch, heads, tokens, keys) that a caller can ask for.

    Blocks that return attention weights on request often return them without a request, too.
    """
    if ASKS_FOR_WEIGHTS not in signature.parameters or leaf.dim() != 4 or hidden.dim() != 3:
        return False
    return (leaf.shape[0], leaf.shape[2]) == hidden.shape[:2]


def _cannot_skip(reasons: Iterable[str]) -> ModelError:
    """Return one error about all blocks that cannot be skipped, with the reasons."""
    found = list(dict.fromkeys(reasons))
    it, them = ("it cannot", "it") if len(found) == 1 else ("they cannot", "them")
    return ModelError(
        f"{'; '.join(found)}, so {it} be skipped; leave {them} out of sdp.units, list {them} in sdp.protect, or use "
        'sdp.masking "backward"'
    )


def signature_of(block: nn.Module) -> inspect.Signature:
    """The signature of the block's ``forward``."""
    return inspect.signature(block.forward)


def hidden_state(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Return the tensor to which a block adds: the first argument of ``forward`` that is a tensor.

    Raises ModelError, with the block's name, if it is unclear which tensor is the first, or if
    there is no tensor.
    """
    bound = signature.bind(*args, **kwargs)
    tensors = [value for value in bound.args if isinstance(value, torch.Tensor)]
    named = {key: value for key, value in bound.kwargs.items() if isinstance(value, torch.Tensor)}
    in_order = [named[key] for key in bound.arguments if key in named]  # keyword-only parameters; the rest is **kwargs
    if tensors or in_order or len(named) == 1:
        return [*tensors, *in_order, *named.values()][0]
    if named:
        raise ModelError(
            f"{name}: it is unclear which argument of forward is the hidden state: {', '.join(named)}; make it a "
            "named parameter of forward, or leave the block out of sdp.units"
        )
    raise ModelError(f"{name}: was called without a tensor, so it cannot be skipped; leave it out of sdp.units")


class PassThrough(nn.Module):
    """Takes the place of a block that the group does not hold, and returns the block's input.

    The result has the form of the block's result, with None for attention weights. Other arguments
    that the block would return unchanged, such as T5's position bias, are in the result, too.

    The block itself is kept as the *skeleton* on the meta device, outside the module tree, where it
    takes no memory. It shows the form of the result, and it runs when the full model is evaluated.
    Attributes of the block, such as children and parameters, can be read from this module. They
    have shapes and dtypes, but no values.
    """

    def __init__(self, name: str, block: nn.Module):
        super().__init__()
        self.name = name
        self._hidden = (block.to(device="meta"),)  # in a tuple, so that it does not become a child module
        self._structure: Structure | None = None
        self._refusals: list[str] | None = None  # None: raise at once
        self.training = block.training

    def train(self, mode: bool = True) -> PassThrough:
        """Set training or evaluation mode, also for the block that this module replaces."""
        self.skeleton.train(mode)
        return super().train(mode)

    @property
    def skeleton(self) -> nn.Module:
        """The block that this module replaces, on the meta device."""
        return self._hidden[0]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_hidden"][0], name)

    def collect_refusals(self, refusals: list[str] | None) -> None:
        """Add the reason to ``refusals`` if this block cannot be skipped, instead of raising it.

        The forward pass then continues with zeros, so that one pass finds all blocks that cannot be
        skipped. If ``refusals`` is None, this block raises its error at once.
        """
        self._refusals = refusals

    @property
    def has_learned(self) -> bool:
        """Whether the form of the block's result is known. The first forward pass finds it."""
        return self._structure is not None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        signature = signature_of(self.skeleton)
        hidden = hidden_state(self.name, signature, args, kwargs)
        if self._structure is None:
            output, inputs = self._try(signature, args, kwargs)
            learned = read_structure(output, hidden, inputs, signature)
            if isinstance(learned, str):
                return self._refuse(f"{self.name}: {learned}", output, hidden)
            self._structure = learned
        spec, position, others, has_weights = self._structure
        leaves: list[Any] = [None] * spec.num_leaves
        leaves[position] = hidden
        if others or has_weights:
            given = _named_inputs(signature, args, kwargs)
            if has_weights and given.get(ASKS_FOR_WEIGHTS):
                raise ModelError(f"{self.name}: {ASKS_FOR_WEIGHTS}: {NO_WEIGHTS}; set it to False")
            for other, name in others.items():
                leaves[other] = given.get(name)
        return tree_unflatten(leaves, spec)

    def _refuse(self, reason: str, output: Any, hidden: torch.Tensor) -> Any:
        if self._refusals is None:
            raise _cannot_skip([reason])
        self._refusals.append(reason)
        return tree_map_only(torch.Tensor, lambda tensor: torch.zeros_like(tensor, device=hidden.device), output)

    def _try(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Run the skeleton on zeros. Return the result, and the arguments of the call by name."""
        try:
            return self._run(self.skeleton, "meta", signature, args, kwargs)
        except Exception as on_meta:
            # The block reads values, or an operator does not support the meta device. Run it once
            # on zeros in the host's memory.
            block = copy.deepcopy(self.skeleton).to_empty(device="cpu")
            for tensor in (*block.parameters(), *block.buffers()):
                tensor.detach().zero_()
            try:
                return self._run(block, "cpu", signature, args, kwargs)
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                reason = f"{self.name}: the form of its result is unknown, because it fails on zeros ({reason[:200]})"
                raise _cannot_skip([*(self._refusals or ()), reason]) from on_meta

    @staticmethod
    def _run(
        block: nn.Module, device: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        dtype = next((p.dtype for p in block.parameters() if p.is_floating_point()), None)
        with _CopiesAreZeros(device, dtype):  # also inside other objects, such as a cache that the block writes to
            args, kwargs = copy.deepcopy((args, kwargs))
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return block(*args, **kwargs), _named_inputs(signature, args, kwargs)


def _named_inputs(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, including those in ``**kwargs``."""
    named = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(parameter.name, {})
    return named


class _CopiesAreZeros(TorchFunctionMode):
    """Makes ``copy.deepcopy`` of a tensor return zeros of its shape on ``device``.

    Floating-point tensors get ``dtype``.
    """

    def __init__(self, device: str, dtype: torch.dtype | None):
        super().__init__()
        self._device, self._dtype = device, dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor = args[0]
        return torch.zeros_like(tensor, device=self._device, dtype=self._dtype if tensor.is_floating_point() else None)


def carve(model: nn.Module, units: Sequence[Unit], placement: Placement, group: int) -> dict[str, PassThrough]:
    """Replace blocks that ``group`` does not hold by pass-throughs, which frees the blocks' memory.

    ``model`` is changed in place. Returns the pass-throughs by path.
    """
    replaced = {}
    held = {unit.path for unit in units if placement.holds(group, unit.index)}
    for path in dict.fromkeys(unit.path for unit in units if unit.path not in held):
        replaced[path] = PassThrough(path, model.get_submodule(path))
        model.set_submodule(path, replaced[path])
    refuse_together(model, replaced.values())
    return replaced


def pass_throughs(model: nn.Module) -> list[PassThrough]:
    """Return the modules in ``model`` that take the place of skipped blocks."""
    return [module for module in model.modules() if isinstance(module, PassThrough)]


def with_skeletons(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module for all modules of ``model``, also for those inside skipped blocks."""
    yield from model.named_modules()
    for one in pass_throughs(model):
        yield from one.skeleton.named_modules(prefix=one.name)


def refuse_together(model: nn.Module, blocks: Collection[PassThrough]) -> None:
    """Make the first forward pass of ``model`` raise one error about all unskippable blocks.

    Without this, the pass would stop at the first such block. ``blocks`` are the pass-throughs of a
    group.
    """
    if not blocks:
        return
    refusals: list[str] = []
    for block in blocks:
        block.collect_refusals(refusals)

    def refuse(*_: Any) -> None:
        if refusals or all(block.has_learned for block in blocks):
            handle.remove()
        if refusals:
            for block in blocks:
                block.collect_refusals(None)
            raise _cannot_skip(refusals)

    handle = model.register_forward_hook(refuse)


def freeze(model: nn.Module, units: Sequence[Unit], placement: Placement, group: int, dtype: torch.dtype) -> None:
    """Turn every unit that ``group`` does not hold into a frozen copy in ``dtype``, in place."""
    for unit in units:
        if not placement.holds(group, unit.index):
            for parameter in model.get_submodule(unit.name).parameters():
                parameter.requires_grad_(False)
                kind = dtype if parameter.is_floating_point() else parameter.dtype
                parameter.data = parameter.data.to(kind).contiguous()


class Evaluation:
    """Says when a forward pass in evaluation mode needs no warning (:func:`warn_of_partial_pass`).

    Attributes:
        is_running: Whether the engine itself evaluates now. Then a pass does not warn.
        is_replaced: Whether every pass in evaluation mode runs the full model. Then no pass warns.
    """

    def __init__(self) -> None:
        self.is_running = False
        self.is_replaced = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Mark that the engine evaluates: ``is_running`` is True inside this context."""
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False


def warn_of_partial_pass(module: nn.Module, evaluation: Evaluation, is_partial: Callable[[], bool]) -> None:
    """Make a forward pass in evaluation mode warn once if it runs only a subnetwork.

    Examples are ``engine(batch)`` after ``engine.eval()``, and ``module.generate(...)``. The passes
    of ``engine.evaluate`` do not warn.
    """

    def warn(module: nn.Module, _: Any) -> None:
        if not (module.training or evaluation.is_running or evaluation.is_replaced) and is_partial():
            handle.remove()
            log.warning(
                "the model runs in evaluation mode, but this rank does not have the exact full model; "
                "engine.evaluate(BATCHES) gives the loss of the full model, engine.full_model() and "
                "engine.generate() run it"
            )

    handle = module.register_forward_pre_hook(warn)
