"""Frozen copies that need less memory or traffic (``sdp.copies``): quantised, or refreshed rarely.

A quantised copy of a weight ``KEY`` is two frozen parameters of its module: ``KEY:q`` has the
quantised numbers, and ``KEY:s`` has the bytes of a float16 scale for each block of 64 numbers. When
the module reads ``KEY``, the value is computed from these two. So a copy exists in compute
precision only while an operation uses it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..config.method import CopiesSection
from ..errors import ModelError
from ..module_paths import parents
from ..placement.layout import Layout
from ..placement.tensor_info import QUANTISED_BLOCK as BLOCK
from ..placement.tensor_info import quantised_row

Kind = Literal["compute", "int8", "nf4"]
# The levels of NormalFloat with 4 bits: quantiles of a normal distribution (arXiv 2305.14314).
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
ZERO = LEVELS.index(0.0)


def quantise(weight: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a float32 weight, with a scale for each block of 64 neighbours in a row.

    Args:
        weight: shape (rows, …). All dimensions after the first one make up a row.
        kind: "int8" or "nf4".

    Returns:
        The quantised numbers, and the bytes of the float16 scales. The numbers are int8 in the
        shape of ``weight``, or for "nf4" uint8 of shape (rows, half of a row rounded up), with two
        numbers per byte. The scales are uint8 of shape (rows, 2 · blocks).
    """
    rows, tail = weight.shape[0], weight.shape[1:].numel()
    blocks = -(-tail // BLOCK)
    padded = nn.functional.pad(weight.reshape(rows, tail), (0, blocks * BLOCK - tail)).view(rows, blocks, BLOCK)
    largest = padded.abs().amax(2, keepdim=True)
    scale = (largest / 127 if kind == "int8" else largest).half()
    ratios = torch.where(scale > 0, padded / scale.float(), 0.0).flatten(1)[:, :tail]
    s = scale.view(rows, blocks).view(torch.uint8)
    if kind == "int8":
        return ratios.round().clamp(-127, 127).to(torch.int8).view(weight.shape), s
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    exact = (levels[1:] + levels[:-1]) / 2
    middles = exact.float()  # rounded down, so that a number on the exact middle takes the lower level
    middles = torch.where(middles.double() > exact, torch.nextafter(middles, torch.tensor(-2.0)), middles)
    index = torch.bucketize(ratios.contiguous(), middles.to(weight.device), out_int32=True).to(torch.uint8)
    index = nn.functional.pad(index, (0, tail % 2), value=ZERO)
    return index[:, ::2] << 4 | index[:, 1::2], s


def dequantise(q: torch.Tensor, s: torch.Tensor, tail: torch.Size, kind: Kind, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a weight that :func:`quantise` has turned into ``q`` and ``s``.

    ``tail`` is the shape of a row of the weight. The result has the type ``dtype``.
    """
    rows, count = q.shape[0], tail.numel()
    if kind == "nf4":
        levels = torch.tensor(LEVELS, device=q.device)
        numbers = levels[torch.stack([q >> 4, q & 15], 2).flatten(1)[:, :count].int()]
    else:
        numbers = q.reshape(rows, count).float()
    scale = (s if s.storage_offset() % 2 == 0 and s.is_contiguous() else s.clone()).view(torch.float16).float()
    whole = count // BLOCK * BLOCK
    numbers[:, :whole].unflatten(1, (-1, BLOCK)).mul_(scale[:, : whole // BLOCK, None])
    numbers[:, whole:].mul_(scale[:, whole // BLOCK :])
    return numbers.to(dtype).view(rows, *tail)


# Values of copies that may still be in use, by their storage: the value, its module, and its key.
Made = dict[int, tuple[weakref.ref[torch.Tensor], nn.Module, str]]


class Copies:
    """The frozen copies in one module, from which the module reads its weights.

    Args:
        kind: How copies are quantised.
        dtype: Compute precision.
        tails: The shape of a row of each quantised weight, by key.
        made: All copies of the model that are in compute precision now.

    Attributes:
        exact: Exact weights by key. The module uses them in place of copies in an evaluation.
    """

    def __init__(self, kind: Kind, dtype: torch.dtype, tails: Mapping[str, torch.Size], made: Made):
        self._kind: Kind = kind
        self._made = made
        self._dtype, self._tails = dtype, tails
        self.exact: dict[str, torch.Tensor] = {}

    def read(self, module: nn.Module, key: str) -> torch.Tensor:
        """Return the weight ``key`` of ``module`` in compute precision, from its copy."""
        if key in self.exact:
            return self.exact[key]
        if key not in self._tails:
            return module._parameters[key]  # type: ignore[return-value]
        q, s = module._parameters[f"{key}:q"], module._parameters[f"{key}:s"]
        assert q is not None and s is not None
        value = dequantise(q.detach(), s.detach(), self._tails[key], self._kind, self._dtype)
        self._made[value.untyped_storage()._cdata] = weakref.ref(value), module, key
        return value


def copy_cheaply(model: nn.Module, layout: Layout, group: int, section: CopiesSection, dtype: torch.dtype) -> None:
    """Prepare the frozen copies of ``model`` for ``sdp.copies``: quantised, or refreshed rarely.

    Quantised copies have no values yet; a holder sends them. Call this after the model is cut for
    tensor parallelism, and before it is sharded.

    Raises:
        ModelError: A module, such as an LSTM, keeps its weights in a second place, too.
    """
    infos = {info.name: info for info in layout.frozen(group)}
    if section.are_exact or not infos:
        return
    canonical = {id(p): name for name, p in model.named_parameters()}
    made: Made = {}
    outside: list[str] = []  # modules with copies that are in no block
    pairs: dict[str, dict[str, nn.Parameter]] = {}  # a tied weight has one copy
    for path, module in list(model.named_modules()):
        keys = {
            key: infos[canonical[id(p)]]
            for key, p in module.named_parameters(recurse=False)
            if canonical[id(p)] in infos
        }
        if not keys:
            continue
        if isinstance(module, nn.RNNBase):
            raise ModelError(f"{path}: sdp.copies is not available with {type(module).__name__}; remove sdp.copies")
        tails = {
            key: module.get_parameter(key).shape[1:] for key, info in keys.items() if info.is_quantised(section.dtype)
        }
        for key in tails:
            name = keys[key].name
            if name not in pairs:
                pairs[name] = _empty(module.get_parameter(key), section.dtype)
            del module._parameters[key]
            for suffix, parameter in pairs[name].items():
                module.register_parameter(f"{key}:{suffix}", parameter)
        module.copies = Copies(section.dtype, dtype, tails, made)  # type: ignore[assignment]
        kind = type(module)
        reads = {key: property(lambda module, key=key: module.copies.read(module, key)) for key in keys}
        module.__class__ = type(kind.__name__, (kind,), reads)  # type: ignore[assignment]
        if not any(name in layout.blocks for name in (path, *parents(path))):
            outside.append(path)
    for path in (*layout.blocks, *outside):
        block = model.get_submodule(path)
        block.forward = _making_again(block.forward, made)  # type: ignore[method-assign]


def replace_copies(model: nn.Module, layout: Layout, weights: Mapping[str, torch.Tensor]) -> list[Copies]:
    """Make modules use exact ``weights`` in place of copies.

    To undo this, clear ``exact`` of the returned objects.
    """
    aliases = {alias: weights[name] for alias, name in layout.aliases.items() if name in weights}
    changed = []
    for name, weight in {**weights, **aliases}.items():
        path, _, key = name.rpartition(".")
        copies: Any = model.get_submodule(path).copies
        copies.exact[key] = weight
        changed.append(copies)
    return changed


def _empty(parameter: nn.Parameter, kind: Kind) -> dict[str, nn.Parameter]:
    rows, tail = parameter.shape[0], parameter.shape[1:]
    of_q, of_s = quantised_row(tail.numel(), kind)
    q = torch.empty(
        parameter.shape if kind == "int8" else (rows, of_q),
        dtype=torch.int8 if kind == "int8" else torch.uint8,
        device=parameter.device,
    )
    s = torch.empty((rows, of_s), dtype=torch.uint8, device=parameter.device)
    return {"q": nn.Parameter(q, requires_grad=False), "s": nn.Parameter(s, requires_grad=False)}


def _making_again(forward: Callable[..., Any], made: Made) -> Callable[..., Any]:
    """Let autograd compute a copy again in backward, and not save it in compute precision.

    A block that is recomputed in backward does this anyway.
    """

    def pack(tensor: torch.Tensor) -> Any:
        value, module, key = made.get(tensor.untyped_storage()._cdata, (None, None, ""))
        if value is None or value() is None:
            return tensor
        return module, key, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        module, key, *view = packed
        return module.copies.read(module, key).as_strided(*view)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(pack, unpack):
            result = forward(*args, **kwargs)
        for key in [key for key, (value, *_) in made.items() if value() is None]:
            del made[key]
        return result

    return run
