"""Reads the pickle with DCP's list of tensors, in a checkpoint of format 2, without running it.

Python's unpickler imports classes, calls them and sets attributes on the results. It can set
attributes on a *class* too, so a list of allowed classes does not make it safe. This reader never
imports, calls or sets anything. It follows the few instructions that DCP writes, and keeps every
object as a ``_Record``: a name with plain values. It refuses any other instruction or name.
"""

from __future__ import annotations

import pickletools
from typing import Any

from .metadata import dtype_named

_DCP = "torch.distributed.checkpoint.metadata"
_CHUNK, _INDEX, _METADATA = f"{_DCP}.ChunkStorageMetadata", f"{_DCP}.MetadataIndex", f"{_DCP}.Metadata"
_PROPERTIES, _TENSOR = f"{_DCP}.TensorProperties", f"{_DCP}.TensorStorageMetadata"
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_SIZE = "torch.Size"
# A pickle makes objects of these classes empty, and fills them with a BUILD instruction.
_MADE_EMPTY = {_CHUNK, _INDEX, _METADATA, _PROPERTIES, _TENSOR, _STORAGE_INFO, f"{_DCP}.StorageMeta"}
_CALLED = {
    _SIZE, f"{_DCP}._MEM_FORMAT_ENCODING", "torch.serialization._get_layout",
    "pathlib.PosixPath", "pathlib.PurePosixPath", "pathlib._local.PosixPath", "pathlib._local.PurePosixPath",
}  # fmt: skip


class _Name:
    """The name of a class or a function in the pickle. It is never looked up."""

    def __init__(self, name: str):
        self.name = name


class _Record:
    """An object that the pickle describes: the name of its class, the arguments, and the state."""

    def __init__(self, name: str, arguments: tuple[Any, ...]):
        self.name, self.arguments = name, arguments
        self.state: Any = None


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"}
_GETS, _PUTS = {"BINGET", "LONG_BINGET"}, {"BINPUT", "LONG_BINPUT"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Interpreter:
    """Follows a pickle's instructions. Its stack has only plain values, names and records."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name == "STOP":
                return self._stack.pop()
            self._do(opcode.name, argument)
        raise ValueError("it ends too early")

    def _do(self, opcode: str, argument: Any) -> None:
        stack = self._stack
        if opcode in _LITERALS:
            stack.append(argument)
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif opcode in _GETS:
            stack.append(self._memo[argument])
        elif opcode in _PUTS:
            self._memo[argument] = stack[-1]
        elif opcode in ("PROTO", "FRAME"):
            pass
        elif opcode == "MARK":
            stack.append(_MARK)
        elif opcode in _TUPLES:
            stack.append(tuple(self._take(len(stack) - _TUPLES[opcode])))
        elif opcode == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif opcode in ("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT"):
            stack.append({"EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict}[opcode]())
        elif opcode in ("APPEND", "APPENDS"):
            values = self._since_mark() if opcode == "APPENDS" else self._take(len(stack) - 1)
            self._top(list).extend(values)
        elif opcode in ("SETITEM", "SETITEMS"):
            values = self._since_mark() if opcode == "SETITEMS" else self._take(len(stack) - 2)
            self._set_items(values[::2], values[1::2])
        elif opcode == "GLOBAL":
            stack.append(_named(*argument.split(" ", 1)))
        elif opcode == "STACK_GLOBAL":
            stack.append(_named(*self._take(len(stack) - 2)))
        elif opcode in ("REDUCE", "NEWOBJ"):
            callee, arguments = self._take(len(stack) - 2)
            stack.append(_record(callee, arguments, _CALLED if opcode == "REDUCE" else _MADE_EMPTY))
        elif opcode == "BUILD":
            (state,) = self._take(len(stack) - 1)
            self._build(state)
        else:
            raise ValueError(f"it has the instruction {opcode}, which DCP does not write")

    def _set_items(self, keys: list[Any], values: list[Any]) -> None:
        # Tuples that hold each other need few bytes, but hashing 60 of them takes 2^60 steps.
        if any(type(key) not in (str, _Record) for key in keys):
            raise ValueError("a dictionary has a key that DCP does not write")
        self._top(dict).update(zip(keys, values, strict=True))

    def _build(self, state: Any) -> None:
        record = self._top(_Record)
        if record.name not in _MADE_EMPTY or record.state is not None:
            raise ValueError(f"it sets the state of {record.name}, which DCP does not write")
        if type(state) is not (tuple if record.name == _PROPERTIES else dict):
            kind = type(state).__name__
            raise ValueError(f"it sets the state of {record.name} to a {kind}, which DCP does not write")
        record.state = state

    def _top(self, kind: type) -> Any:
        if not self._stack or type(self._stack[-1]) is not kind:
            raise ValueError("it changes something that DCP does not write")
        return self._stack[-1]

    def _take(self, start: int) -> list[Any]:
        if start < 0:
            raise ValueError("it takes more values than there are")
        taken, self._stack[start:] = self._stack[start:], []
        return taken

    def _since_mark(self) -> list[Any]:
        start = next((at for at in reversed(range(len(self._stack))) if self._stack[at] is _MARK), -1)
        return self._take(start)[1:]


def _named(module: Any, name: Any) -> Any:
    if type(module) is not str or type(name) is not str:
        raise ValueError("it names something by a value that is not text")
    full = f"{module}.{name}"
    if module == "torch" and dtype_named(name) is not None:
        return _Name(full)
    if full not in _MADE_EMPTY | _CALLED:
        raise ValueError(f"it names {full}, which no checkpoint of this engine holds")
    return _Name(full)


def _record(callee: Any, arguments: Any, allowed: set[str]) -> _Record:
    if not isinstance(callee, _Name) or callee.name not in allowed or not isinstance(arguments, tuple):
        raise ValueError(f"it calls {getattr(callee, 'name', 'something')} in a way that DCP does not write")
    return _Record(callee.name, arguments)


def read_pickled_metadata(content: bytes) -> dict[str, Any]:
    """Return the content of DCP's ``.metadata`` in the form of ``metadata.json``.

    The values are not checked yet.

    Raises:
        ValueError: The content is not what DCP writes for a checkpoint of this engine.
    """
    try:
        state = _state(_Interpreter().run(content), _METADATA)
        storage_infos = {}
        for index, stored in state["storage_data"].items():
            of = _state(index, _INDEX)
            storage_infos[_plain(of["fqn"], str), _sizes(of["offset"])] = _state(stored, _STORAGE_INFO)
        return {
            "tensors": {
                key: _tensor(_plain(key, str), value, storage_infos)
                for key, value in state["state_dict_metadata"].items()
            }
        }
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"it is not what DCP writes ({type(error).__name__}: {error})") from None


def _tensor(key: str, value: Any, storage_infos: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    state = _state(value, _TENSOR)
    properties = _state(state["properties"], _PROPERTIES)
    dtype = properties[0].name.removeprefix("torch.")
    chunks = []
    for chunk in state["chunks"]:
        at = _state(chunk, _CHUNK)
        offsets = _sizes(at["offsets"])
        stored = storage_infos[key, offsets]
        if stored.keys() != {"relative_path", "offset", "length"}:
            raise ValueError(f"the location of {key!r} is not described by a path, an offset and a length")
        chunks.append({
            "offsets": offsets, "sizes": _sizes(at["sizes"]), "file": _plain(stored["relative_path"], str),
            "offset": _plain(stored["offset"], int), "length": _plain(stored["length"], int),
        })  # fmt: skip
    return {"dtype": dtype, "size": _sizes(state["size"]), "chunks": chunks}


def _state(value: Any, name: str) -> Any:
    if not isinstance(value, _Record) or value.name != name or value.state is None:
        raise ValueError(f"it has something else where DCP writes a {name.rpartition('.')[2]}")
    return value.state


def _sizes(value: Any) -> tuple[Any, ...]:
    if isinstance(value, _Record) and value.name == _SIZE and [type(item) for item in value.arguments] == [tuple]:
        return tuple(_plain(size, int) for size in value.arguments[0])
    raise ValueError("it has something else where DCP writes a Size")


def _plain(value: Any, kind: type) -> Any:
    """Return ``value``, which must be of this type. A nested one could not be printed or hashed."""
    if type(value) is not kind:
        raise ValueError(f"it has something else where DCP writes {'a text' if kind is str else 'a number'}")
    return value
