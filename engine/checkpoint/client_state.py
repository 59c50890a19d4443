"""Saves and loads the values that a script adds to a checkpoint (``client_state``).

JSON values are in ``state.json``, and tensors in a safetensors file. A load returns exactly the
saved values. So values that JSON would change, such as tuples, are refused, and so are values that
need a pickle.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from ..distributed.agreement import Ranks
from ..errors import CheckpointError, shorten
from ..json_files import parse_json

CLIENT_TENSORS = "client_state.safetensors"

_MOST_BYTES = 16 << 30
_REMEDY = "give numbers, text, lists, dicts with text as keys, and dense real tensors"


class ClientState:
    """The values that a script adds to a checkpoint, divided into JSON values and tensors.

    Attributes:
        values: The JSON values, with null in place of each tensor.
        tensors: Copies of the tensors in host memory. A key is the JSON list of the keys and
            indices that lead to the tensor.
    """

    def __init__(self, state: Mapping[str, Any] | None):
        """Divide ``state``. Raises CheckpointError, which names the first value that is refused."""
        self.tensors: dict[str, torch.Tensor] = {}
        try:
            self.values: dict[str, Any] = self._divide(dict(state or {}), [])
        except RecursionError:
            raise CheckpointError("client_state: is nested too deep for JSON; give flatter values") from None

    def files(self) -> dict[str, bytes]:
        """Return the content of the safetensors file by its name, or {} if there are no tensors."""
        return {CLIENT_TENSORS: save(self.tensors)} if self.tensors else {}

    def _divide(self, value: Any, place: list[Any]) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self._divide(item, [*place, index]) for index, item in enumerate(value)]
        if kind in (dict, OrderedDict):
            for key in value:
                if type(key) is not str:
                    found = f"the key {shorten(repr(key))} has the type {_type_of(key)}, but keys in JSON are text"
                    raise CheckpointError(f"{_name(place)}: {found}; {_REMEDY}")
            return {key: self._divide(item, [*place, key]) for key, item in value.items()}
        if kind in (torch.Tensor, nn.Parameter):
            self.tensors[json.dumps(place)] = _copy(value, place)
            return None
        raise CheckpointError(f"{_name(place)}: {_type_of(value)} is neither JSON nor a plain tensor; {_REMEDY}")


def _copy(tensor: torch.Tensor, place: list[Any]) -> torch.Tensor:
    """Return a contiguous copy on the CPU. Raises CheckpointError unless the tensor is plain."""
    kinds = {
        "nested": tensor.is_nested, "sparse": tensor.layout != torch.strided, "quantized": tensor.is_quantized,
        "meta": tensor.is_meta, "complex": tensor.is_complex(),
    }  # fmt: skip
    kind = next((kind for kind, applies in kinds.items() if applies), None)
    if kind is not None:
        raise CheckpointError(f"{_name(place)}: a {kind} tensor is not a plain tensor; {_REMEDY}")
    return tensor.detach().resolve_neg().to("cpu", copy=True).contiguous()


def _name(place: list[Any]) -> str:
    return shorten("client_state" + "".join(f"[{key!r}]" for key in place))


def _type_of(value: Any) -> str:
    kind = type(value)
    return shorten(kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}")


def read_client_state(path: Path, state: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Return the values that a script added to the checkpoint, with tensors on the CPU. Collective.

    Args:
        path: The directory of the checkpoint.
        state: The content of the checkpoint's ``state.json``.
        ranks: The ranks that load together.

    Raises:
        CheckpointError: On every rank, if the file of tensors is damaged.
    """
    values, problem = state["client_state"], None
    try:
        for place, tensor in _read_tensors(path / CLIENT_TENSORS, state["files"].get(CLIENT_TENSORS)).items():
            *above, last = parse_json(place)
            holder = values
            for key in above:
                holder = holder[key]
            holder[last] = tensor
    except (OSError, LookupError, TypeError, ValueError, SafetensorError) as error:
        problem = f"{path / CLIENT_TENSORS}: damaged ({shorten(error)}); resume from an older checkpoint"
    ranks.agree(problem)
    return values


def _read_tensors(file: Path, digest: str | None) -> dict[str, torch.Tensor]:
    if digest is None:
        return {}
    with file.open("rb") as stream:
        content = stream.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES >> 30} GiB")
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError("its sha256 is wrong")
    return load(content)
