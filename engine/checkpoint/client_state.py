"""Stores the caller's own state: JSON for structure and numbers, safetensors for tensors and
arrays.

Nothing is pickled. A value that JSON has no form for becomes an object ``{"~": KIND, …}``. Every
kind is rebuilt from checked parts only, so a forged checkpoint cannot run code.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch.distributed.tensor import DTensor

from ..distributed.agreement import Ranks
from ..errors import CheckpointError, quote, shorten
from .storage.files import open_regular
from .storage.metadata import dtype_named

CLIENT_TENSORS = "client_state.safetensors"
ENCODING = 1  # the version of the tags
_WHOLE = "client_state"  # in encoding 2, the key of a state whose outermost keys are not all text

_KIND = "~"
_MOST_BYTES = 16 << 30
# numpy's types without Python objects or fields.
_NUMPY_TYPE = re.compile(r"[<>|=](?:[biufcSUV]\d+|[mM]8(?:\[\d*\w+\])?)")
_NOTHING = torch.empty(0, dtype=torch.uint8)
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "torch.Size"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict"}
_NAMESPACES: dict[type, str] = {argparse.Namespace: "Namespace", types.SimpleNamespace: "SimpleNamespace"}


class ClientState:
    """The caller's own state in the form that a checkpoint stores.

    Attributes:
        encoded: JSON values. They refer to the tensors by number.
        encoding: The version of their form: 1, or 2 if an outermost key is not text.
        tensors: Copies of the tensors in host memory, by number.
    """

    def __init__(self, state: Mapping[str, Any] | None):
        """Encode ``state``.

        Raises CheckpointError that names the first value that cannot be stored.
        """
        self.tensors: dict[str, torch.Tensor] = {}
        self.encoded: dict[str, Any] = {}
        self.encoding = ENCODING
        given: Mapping[str, Any] = state or {}
        if not all(isinstance(key, str) for key in given):
            given, self.encoding = {_WHOLE: dict(given)}, 2
        for key, value in given.items():
            try:
                self.encoded[key] = self._encode(value, f"client_state[{key!r}]")
            except RecursionError:
                raise CheckpointError(
                    f"client_state[{quote(key)}] is not JSON, because it is nested too deep; store flatter values"
                ) from None

    def files(self) -> dict[str, bytes]:
        """Return the file of tensors: its name and content. Empty if there are no tensors."""
        return {CLIENT_TENSORS: save(self.tensors)} if self.tensors else {}

    def _encode(self, value: Any, where: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str, float):
            return value
        if isinstance(value, torch.Tensor):
            return {_KIND: "tensor", "index": self._store(value, where)}
        if isinstance(value, np.ndarray | np.generic):
            return self._encode_numpy(value, where)
        if kind is list:
            return [self._encode(each, f"{where}[{index}]") for index, each in enumerate(value)]
        if kind in _SEQUENCES:
            values = sorted(value, key=repr) if kind in (set, frozenset) else value
            items = [self._encode(each, f"{where}[{index}]") for index, each in enumerate(values)]
            return {_KIND: _SEQUENCES[kind], "items": items}
        if kind in _NAMESPACES:
            return {_KIND: _NAMESPACES[kind], "of": self._encode(vars(value), where)}
        if kind in _MAPPINGS:
            return self._encode_mapping(value, _MAPPINGS[kind], where)
        if kind is complex:
            return {_KIND: "complex", "parts": [value.real, value.imag]}
        if kind in (bytes, bytearray):
            return {_KIND: kind.__name__, "hex": value.hex()}
        if kind in (torch.dtype, torch.device):
            return {_KIND: f"torch.{kind.__name__}", "name": str(value).removeprefix("torch.")}
        if isinstance(value, Path):
            return {_KIND: "Path", "name": str(value)}
        raise CheckpointError(
            f"{shorten(where)}: a {kind.__module__}.{kind.__qualname__} is not JSON, a tensor or an array, and "
            "nothing is pickled; give numbers, text, lists, tuples, dicts, tensors or arrays, such as its "
            "state_dict()"
        )

    def _encode_mapping(self, value: Mapping[Any, Any], kind: str, where: str) -> Any:
        if kind == "dict" and _KIND not in value and all(type(key) is str for key in value):
            return {key: self._encode(each, f"{where}[{key!r}]") for key, each in value.items()}
        pairs = [
            [self._encode(key, f"a key of {where}"), self._encode(each, f"{where}[{key!r}]")]
            for key, each in value.items()
        ]
        return {_KIND: kind, "pairs": pairs}

    def _encode_numpy(self, value: Any, where: str) -> Any:
        array = np.ascontiguousarray(value)
        if not _NUMPY_TYPE.fullmatch(array.dtype.str) or array.dtype.hasobject or array.dtype.fields:
            raise CheckpointError(
                f"{shorten(where)}: an array of type {shorten(array.dtype)} holds Python objects; give an array of "
                "numbers or text"
            )
        if isinstance(value, np.generic):
            return {_KIND: "numpy.scalar", "dtype": array.dtype.str, "hex": array.tobytes().hex()}
        raw = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8) if array.nbytes else _NOTHING
        index = self._store(raw, where)
        return {_KIND: "ndarray", "dtype": array.dtype.str, "shape": list(value.shape), "index": index}

    def _store(self, tensor: torch.Tensor, where: str) -> int:
        if isinstance(tensor, DTensor) or tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            raise CheckpointError(
                f"{shorten(where)}: is a sharded, sparse or quantized tensor, or has no values; give a dense tensor, "
                "such as full_tensor()"
            )
        index = len(self.tensors)
        self.tensors[str(index)] = tensor.detach().to("cpu", copy=True).contiguous()
        return index


def read_client_state(path: Path, state: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Return the caller's own state from the checkpoint at ``path``. Tensors are on the CPU.
    Collective.

    Args:
        path: The directory of the checkpoint.
        state: The content of its ``state.json``.
        ranks: The ranks that load together.

    Raises:
        CheckpointError: On every rank, if a value is damaged or forged, or a newer version wrote
            it.
    """
    found, problem = {}, None
    try:
        found = _read(path, state)
    except CheckpointError as error:
        problem = str(error)
    ranks.agree(problem)
    return found


def _read(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    encoded, version = state["client_state"], state.get("client_encoding")
    if version is None:  # an earlier version, which stored plain JSON
        return encoded
    where = f"{path}: the client state"
    if version not in (ENCODING, 2):
        raise CheckpointError(
            f"{where} has encoding {quote(version)}, this version reads {ENCODING} and 2; use the version that wrote it"
        )
    tensors = _read_tensors(path / CLIENT_TENSORS, state["files"].get(CLIENT_TENSORS))
    try:
        found = {key: _decode(value, tensors) for key, value in encoded.items()}
        if version == 2:
            found = found[_WHOLE]
            if not isinstance(found, dict):
                raise ValueError("it is not a mapping")
        return found
    except (LookupError, TypeError, ArithmeticError, ValueError, RuntimeError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"{where} is damaged or forged ({shorten(error)}); resume from an older checkpoint"
        ) from None


def _read_tensors(file: Path, digest: str | None) -> dict[str, torch.Tensor]:
    if digest is None:
        return {}
    try:
        with open_regular(file) as stream:
            content = stream.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it is larger than {_MOST_BYTES >> 30} GiB")
        if hashlib.sha256(content).hexdigest() != digest:
            raise ValueError("its sha256 is another")
        return load(content)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{file}: damaged ({shorten(error)}); resume from an older checkpoint") from None


def _decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: _decode(each, tensors) for key, each in value.items()}
    kind, read = value[_KIND], _READERS.get(str(value[_KIND]))
    if read is None:
        raise ValueError(f"{quote(kind)} is not a kind of value")
    return read(value, tensors)


def _decode_array(value: Mapping[str, Any], raw: bytes, shape: Any) -> Any:
    name = value["dtype"]
    if not isinstance(name, str) or not _NUMPY_TYPE.fullmatch(name):
        raise ValueError(f"{quote(name)} is not a type of numbers or text")
    dtype = np.dtype(name)
    if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{quote(shape)} is not a shape")
    if dtype.itemsize == 0 and not raw:  # an array of empty texts
        return np.zeros(shape, dtype)
    return np.frombuffer(bytearray(raw), dtype).reshape(shape)


def _decode_device_or_dtype(value: Mapping[str, Any], _: Any) -> Any:
    name = str(value["name"])
    if value[_KIND] == "torch.device":
        return torch.device(name)
    dtype = dtype_named(name)
    if dtype is None:
        raise ValueError(f"{quote(name)} is not a type of tensors")
    return dtype


def _pairs(value: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> list[tuple[Any, Any]]:
    return [(_decode(key, tensors), _decode(each, tensors)) for key, each in value["pairs"]]


def _attributes(value: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    found = _decode(value["of"], tensors)
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError("a namespace has attributes that are not text")
    return found


_READERS: dict[str, Callable[[Mapping[str, Any], dict[str, torch.Tensor]], Any]] = {
    # A save stores each tensor once. A tensor that was used a million times would fill the memory.
    "tensor": lambda value, tensors: tensors.pop(str(value["index"])).clone(),
    "ndarray": lambda value, tensors: _decode_array(
        value, tensors.pop(str(value["index"])).numpy().tobytes(), value["shape"]
    ),
    "numpy.scalar": lambda value, tensors: _decode_array(value, bytes.fromhex(value["hex"]), [1])[0],
    "complex": lambda value, tensors: complex(*(float(part) for part in value["parts"])),
    "bytes": lambda value, tensors: bytes.fromhex(value["hex"]),
    "bytearray": lambda value, tensors: bytearray.fromhex(value["hex"]),
    "torch.dtype": _decode_device_or_dtype,
    "torch.device": _decode_device_or_dtype,
    "Path": lambda value, tensors: Path(str(value["name"])),
    "tuple": lambda value, tensors: tuple(_decode(value["items"], tensors)),
    "set": lambda value, tensors: set(_decode(value["items"], tensors)),
    "frozenset": lambda value, tensors: frozenset(_decode(value["items"], tensors)),
    "torch.Size": lambda value, tensors: torch.Size(_decode(value["items"], tensors)),
    "dict": lambda value, tensors: dict(_pairs(value, tensors)),
    "OrderedDict": lambda value, tensors: OrderedDict(_pairs(value, tensors)),
    "Namespace": lambda value, tensors: argparse.Namespace(**_attributes(value, tensors)),
    "SimpleNamespace": lambda value, tensors: types.SimpleNamespace(**_attributes(value, tensors)),
}
