"""Gives parameters their initial values. The same seed gives the same full model in any layout.

If a model has the hook ``parameter_init``, each parameter is filled in blocks of rows on the CPU.
The generator of a block is seeded by sha256(seed, canonical name, block). A rank generates only the
blocks that overlap its shard. Holders get equal values without a broadcast.

Other models run their ``_init_weights`` (Hugging Face), ``init_weights(buffer_device)``
(torchtitan, later ``init_states(buffer_device)``) or ``reset_parameters`` (torch), module by
module, with a separate generator for each module. ``_init_weights`` of enclosing modules runs too,
because they may have rules for the module's tensors. torchtitan's function initialises the whole
model. It runs once for every module, while all other modules are on the meta device.

Initial values may also come from safetensors files. A rank reads only the rows that it holds.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..errors import ModelError, shorten
from ..json_files import read_json_file
from ..model_interface import Constant, Conversion, Init, Normal, Table, find_tensors, get_parameter_init
from ..placement.layout import Layout
from ..placement.tensor_info import TensorInfo

BLOCK_ELEMENTS = 1 << 16
_MARK = 77.0


# Fills rows [start, start + len(out)) of one parameter into ``out``.
Filler = Callable[[torch.Tensor, int], None]
# Joins tensors that the given function reads by key.
_Join = Callable[[Callable[[str], torch.Tensor]], torch.Tensor]


def seed_of(*parts: object) -> int:
    """Return a 63-bit seed from the text of ``parts``. It is the same on all machines."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def fill_rows(out: torch.Tensor, start: int, shape: torch.Size, init: Init, seed: int, name: str) -> None:
    """Write some rows of a parameter's initial value into ``out``.

    Args:
        out: Where to write. As many rows are written as ``out`` has.
        start: The first row of the parameter that is written.
        shape: The shape of the full parameter.
        init: How the parameter is initialised.
        seed: The seed of the run.
        name: The parameter's canonical name.
    """
    if isinstance(init, Constant):
        out.fill_(init.value)
        return
    if isinstance(init, Table):
        out.copy_(init.values[start : start + len(out)])
        return
    rows = shape[0] if shape else 1
    block_rows = max(1, BLOCK_ELEMENTS // max(1, shape[1:].numel()))
    stop = start + (out.shape[0] if shape else 1)
    for block in range(start // block_rows, -(-stop // block_rows)):
        first, last = block * block_rows, min(rows, (block + 1) * block_rows)
        generator = torch.Generator().manual_seed(seed_of(seed, name, block))
        size = (last - first, *shape[1:]) if shape else ()
        if isinstance(init, Normal):
            values = torch.randn(size, generator=generator) * init.std
        else:
            values = (2 * torch.rand(size, generator=generator) - 1) * init.bound
        a, b = max(first, start), min(last, stop)
        if shape:
            out[a - start : b - start].copy_(values[a - first : b - first])
        else:
            out.copy_(values)


@dataclass(frozen=True)
class ModuleInit:
    """How the tensors of one module get their initial values.

    ``names`` are the canonical names of the tensors. ``fillers()`` returns a function for each of
    them, which writes rows of the initial value.
    """

    names: tuple[str, ...]
    fillers: Callable[[], dict[str, Filler]]


def plan_initialisation(model: nn.Module, seed: int) -> list[ModuleInit]:
    """Plan the initial values of ``model``: one ModuleInit for each module with own tensors.

    Call this before the model is sharded, and call the ``fillers()`` after that. ``model`` may be
    on the meta device. A full parameter is in memory only while its module's fillers exist. Tied
    parameters appear once. Raises ModelError if there is no rule for a parameter.
    """
    rule = get_parameter_init(model)
    skeleton = None if rule is not None else _skeleton(model, {})
    plan: list[ModuleInit] = []
    done: set[int] = set()
    for path, module in model.named_modules():
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        fresh = {f"{path}.{key}" if path else key: tensor for key, tensor in tensors if id(tensor) not in done}
        done |= {id(tensor) for tensor in fresh.values()}
        if fresh and rule is not None:
            shapes = {name: tensor.shape for name, tensor in fresh.items()}
            make = partial(_rule_fillers, shapes, {name: rule(name) for name in fresh}, seed)
            plan.append(ModuleInit(tuple(fresh), make))
        elif fresh:
            assert skeleton is not None
            resets = _resets(skeleton, path, next(iter(fresh)))
            make = partial(_module_fillers, skeleton.get_submodule(path), list(fresh), resets, seed_of(seed, path))
            plan.append(ModuleInit(tuple(fresh), make))
    return plan


def _rule_fillers(shapes: dict[str, torch.Size], rules: dict[str, Init], seed: int) -> dict[str, Filler]:
    return {
        name: partial(fill_rows, shape=shape, init=rules[name], seed=seed, name=name)  # type: ignore[misc]
        for name, shape in shapes.items()
    }


def _resets(skeleton: nn.Module, path: str, name: str) -> list[Callable[[], Any]]:
    """Return the functions that initialise the tensors of the module at ``path``, in order.

    In Hugging Face models, first the rule of the module runs, then the rules of the modules around
    it: GPT-2's attention scales its projection. Models of torchtitan have one rule for the whole
    model. Other modules have ``reset_parameters``.
    """
    parts = path.split(".") if path else []
    chain = [skeleton.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)]
    if hasattr(skeleton, "_init_weights"):
        rules, rule = [], skeleton._init_weights
        for module in chain:
            if hasattr(module, "_initialize_weights"):  # Hugging Face: a model inside a model has rules of its own
                rule = module._init_weights
            rules.append(partial(rule, module))  # type: ignore[arg-type]
        return rules[::-1]
    for module in chain:
        for name_of_rule in ("init_states", "init_weights"):
            if _takes_buffer_device(rule := getattr(module, name_of_rule, None)):
                # Tables of positions are large, so they are computed only for the module that has
                # them.
                return [partial(rule, buffer_device=torch.device("cpu" if chain[-1]._buffers else "meta"))]  # type: ignore[arg-type]
    if hasattr(chain[-1], "reset_parameters"):
        return [chain[-1].reset_parameters]  # type: ignore[list-item]
    kind = type(chain[-1]).__name__
    raise ModelError(
        f"{path or kind}: there is no rule to initialise {name!r}; give {kind} a reset_parameters(), or build the "
        "model with its weights instead of on the meta device"
    )


def _takes_buffer_device(rule: Any) -> bool:
    """Whether ``rule`` is torchtitan's initialisation of a whole model."""
    return callable(rule) and "buffer_device" in inspect.signature(rule).parameters


def _module_fillers(
    module: nn.Module, names: list[str], resets: list[Callable[[], Any]], seed: int
) -> dict[str, Filler]:
    """Initialise the skeleton's ``module`` on the CPU, and return fillers that copy its rows.

    The module has a random generator of its own. All other modules stay on the meta device.
    """
    module.to_empty(device="cpu", recurse=False)
    before = {key: _mark(tensor) for key, tensor in _own_tensors(module).items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for reset in resets:
            try:
                reset()
            except NotImplementedError as error:  # torch raises it for values of a meta tensor
                raise ModelError(
                    f"{names[0]}: its initialisation reads values of other modules, which are not in memory "
                    f"({str(error).splitlines()[0]}); build the model with its weights instead of on the meta device"
                ) from error
    values = _own_tensors(module)
    module.to_empty(device="meta", recurse=False)
    for name in names:
        key = name.rpartition(".")[2]
        if values[key].numel() and torch.equal(values[key].nan_to_num(nan=_MARK), before[key].nan_to_num(nan=_MARK)):
            raise ModelError(
                f"{name}: is on the meta device, and initialising {type(module).__name__} does not fill it; build the "
                "model with its values instead, or compute this tensor in forward"
            )
    return {name: partial(_copy_rows, full=values[name.rpartition(".")[2]].detach()) for name in names}


def _mark(tensor: torch.Tensor) -> torch.Tensor:
    """Fill ``tensor`` with a value that no initialisation writes, and return a copy of it."""
    with torch.no_grad():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 1 if tensor.dtype == torch.bool else _MARK)
    return tensor.detach().clone()


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))


def _copy_rows(out: torch.Tensor, start: int, full: torch.Tensor) -> None:
    out.copy_(full[start : start + out.shape[0]] if full.dim() else full)


def _skeleton(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    """Copy the module tree to the meta device, with the same attributes and untied parameters."""
    if id(module) not in copies:
        copies[id(module)] = bare = copy.copy(module)
        bare._parameters = {
            k: p if p is None else nn.Parameter(torch.empty_like(p, device="meta"))
            for k, p in module._parameters.items()
        }
        bare._buffers = {k: b if b is None else torch.empty_like(b, device="meta") for k, b in module._buffers.items()}
        bare._modules = {
            k: child if child is None else _skeleton(child, copies) for k, child in module._modules.items()
        }
    return copies[id(module)]


INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = {"F64", "F32", "F16", "BF16"}


class WeightFiles:
    """Reads tensors from safetensors files in ``directory``: one file, or several with an index.

    Data is read only when :meth:`fill` needs it. Raises ModelError if files are missing or cannot
    be read.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._tensors: dict[str, Any] = {}  # the library's slices, which read only the rows that are asked for
        for path in self._paths():
            file = self._open(path)
            self._tensors |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118

    def _paths(self) -> Iterable[Path]:
        refuse_zero_checkpoint(self.directory)
        if (index := self.directory / INDEX).is_file():
            try:
                names = set(read_json_file(index)["weight_map"].values())
            except (OSError, ValueError, KeyError, AttributeError, TypeError):
                raise ModelError(f"{index}: is not an index of weights; download or export the model again") from None
            for name in names:
                if not isinstance(name, str) or name in ("", ".", "..") or "/" in name:
                    found = f"names the file {name!r}, which is not in this directory"
                    raise ModelError(f"{index}: {found}; download or export the model again")
            return [self.directory / name for name in sorted(names)]
        if (self.directory / WHOLE).is_file():
            return [self.directory / WHOLE]
        pickles = sorted(path.name for path in self.directory.glob("*.bin"))
        if pickles:
            raise ModelError(
                f"{self.directory}: the weights are in {pickles[0]}, a pickle, which can run code and is not read; "
                "if you trust it, load it with transformers, and save it with save_pretrained"
            )
        raise ModelError(
            f"{self.directory}: has neither {WHOLE} nor {INDEX}; give the directory of a model in Hugging Face's format"
        )

    def _open(self, file: Path) -> Any:
        # Opening a FIFO would hang. Symbolic links are allowed: Hugging Face's cache consists of
        # them.
        if file.exists() and not file.is_file():
            raise ModelError(f"{file}: is not a regular file; download or export the model again")
        try:
            return safe_open(file, framework="pt")
        except FileNotFoundError:
            raise ModelError(f"{file}: is missing, though {INDEX} names it; download the model again") from None
        except (SafetensorError, OSError) as error:
            reason = shorten(getattr(error, "strerror", None) or error)
            raise ModelError(f"{file}: cannot be read ({reason}); download or export the model again") from None

    def keys(self) -> list[str]:
        return list(self._tensors)

    def dtypes(self) -> dict[str, str]:
        """Return the type of every tensor, as safetensors names it (for example "BF16")."""
        return {key: tensor.get_dtype() for key, tensor in self._tensors.items()}

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._tensors[key].get_shape())

    def obstacle(self, key: str, info: TensorInfo, shape: Sequence[int]) -> str | None:
        """Return why the file's tensor ``key`` does not fit the model's ``info``, or None.

        ``shape`` is the shape that its values have in the model.
        """
        dtype = self._tensors[key].get_dtype()
        if tuple(shape) != tuple(info.full_shape):
            return f"has shape {tuple(shape)} in the files, and {tuple(info.full_shape)} in the model"
        if info.dtype.is_floating_point and dtype not in _FLOATS:
            return (
                f"is {dtype} in the files, which is not a plain floating-point format; training cannot start from "
                "quantised models"
            )
        return None

    def fill(self, out: torch.Tensor, start: int, key: str) -> None:
        """Copy rows [start, start + len(out)) of the tensor ``key`` into ``out``."""
        tensor = self._tensors[key]
        out.copy_(tensor[start : start + out.shape[0]] if out.dim() else tensor[...])


def fillers_from(files: WeightFiles, directory: Path, model: nn.Module, layout: Layout) -> dict[str, Filler]:
    """Return functions that fill the parameters and persistent buffers of ``model`` from ``files``.

    The keys of the result are paths in the model, which :func:`find_tensors` finds. ``directory``
    is only for messages, because ``files`` may be a converted copy. Raises ModelError unless files
    and model have the same tensors.
    """
    buffers = layout.buffers_at(0)
    plain = {key.replace("_orig_mod.", ""): key for key in files.keys()}  # noqa: SIM118  a compiled model was saved
    found, conversions = find_tensors(model, plain)
    keys, joined = {name: plain[key] for key, name in found.items()}, {n: one for one in conversions for n in one.names}
    names_of: dict[str, list[str]] = {path: [path] for path in (*layout.by_path, *buffers)}
    for alias, name in layout.aliases.items():
        names_of[name].append(alias)
    fillers: dict[str, Filler] = {}
    for name, names in names_of.items():
        info = layout.by_path[name][0] if name in layout.by_path else buffers[name]
        if (source := next((other for other in names if other in joined), None)) is not None:
            fillers[name] = _joining(files, directory, plain, joined[source], source, info)
            continue
        key = next((keys[other] for other in names if other in keys), None)
        if key is None:
            raise ModelError(
                f"training.init_from: {directory} has no {name!r}, so these weights belong to "
                "another model; give the directory of this model"
            )
        if (obstacle := files.obstacle(key, info, files.shape(key))) is not None:
            raise ModelError(f"training.init_from: {directory}: {key!r} {obstacle}")
        fillers[name] = partial(files.fill, key=key)
    known = {name for names in names_of.values() for name in names}
    if unknown := [keys[name] for name in keys.keys() - known]:
        raise ModelError(
            f"training.init_from: {directory} has {min(unknown)!r}, which this model does not have, so "
            "these weights belong to another model; give the directory of this model"
        )
    return fillers


def _joining(
    files: WeightFiles, directory: Path, plain: Mapping[str, str], conversion: Conversion, name: str, info: TensorInfo
) -> Filler:
    """Return a function that fills the tensor ``name`` from several tensors of ``files``.

    Raises ModelError if they do not fit.
    """

    def join(part: int, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        return conversion.join(part, {key: read(plain[key]) for key in conversion.parts[part]})[name]

    def read(key: str, rows: slice = slice(None)) -> torch.Tensor:
        start, shape = 0, list(files.shape(key))
        if shape:
            start, stop, _ = rows.indices(shape[0])
            shape[0] = stop - start
        files.fill(out := torch.empty(shape, dtype=info.dtype), start, key)
        return out

    def shape_of(rows: slice = slice(None)) -> torch.Size:
        empty = partial(torch.empty, dtype=info.dtype, device="meta")
        return join(0, lambda key: empty(shape)[rows] if (shape := files.shape(key)) else empty(())).shape

    keys, joined = [plain[key] for part in conversion.parts for key in part], torch.Size()
    shapes = {tuple(files.shape(plain[key]) for key in part) for part in conversion.parts}
    with suppress(Exception):  # each kind of model has operations of its own
        if len(shapes) == 1 and name not in plain:
            found = shape_of()
            if conversion.dim == 0:
                _find_rows(files, keys, found, partial(join, 0))
            elif conversion.dim is not None and shape_of(slice(1)) != (1, *found[1:]):
                raise ValueError(name)
            joined = found
    obstacle = "cannot be made: their number or their shapes are wrong, or the files have it already"
    if joined:
        shape = (joined[0] * len(conversion.parts), *joined[1:])
        obstacle = next(filter(None, (files.obstacle(key, info, shape) for key in keys)), None)
    if obstacle is not None:
        source = f"{name!r}, which is joined from {keys[0]!r} and the tensors like it, {obstacle}"
        raise ModelError(f"training.init_from: {directory}: {source}; download or export the model again")

    def fill(out: torch.Tensor, start: int) -> None:
        stop = start + len(out)
        if conversion.dim == 0:
            sources, rows = _find_rows(files, keys, joined, partial(join, 0))
            sources, rows = sources[start:stop], rows[start:stop]
            breaks = ((sources.diff() != 0) | (rows.diff() != 1)).nonzero().flatten() + 1
            for begin, end in itertools.pairwise([0, *breaks.tolist(), len(out)] if len(out) else []):
                files.fill(out[begin:end], int(rows[begin]), keys[int(sources[begin])])
        elif conversion.dim is not None:
            out.copy_(join(0, lambda key: read(key, slice(start, stop))))
        else:
            size = info.full_shape[0] // len(conversion.parts)  # the rows of a part
            for part in range(start // size, -(-stop // size)):
                first, last = max(start, part * size), min(stop, (part + 1) * size)
                out[first - start : last - start] = join(part, read)[first - part * size : last - part * size]

    return fill


def _find_rows(files: WeightFiles, keys: Sequence[str], joined: torch.Size, join: _Join) -> tuple[torch.Tensor, ...]:
    """Return where each row of a joined tensor is in the files: the index of its key, and its row.

    ``join`` gets tensors with a number for each row of the files' tensors, and returns the numbers
    in their new order. ``joined`` is the shape of the joined tensor. Raises ValueError if a row of
    it is not a whole row of a file's tensor.
    """
    counts = torch.tensor([files.shape(key)[0] for key in keys])
    ends = counts.cumsum(0)
    first = dict(zip(keys, (ends - counts + 1).tolist(), strict=True))  # with 0, rows of zeros would seem to be rows

    def numbered(key: str) -> torch.Tensor:
        count, *others = files.shape(key)
        return torch.arange(first[key], first[key] + count).reshape(count, *(1 for _ in others))

    numbers = join(numbered)
    is_whole = numbers.dtype == torch.int64 and numbers.numel() == len(numbers) == joined[0]
    numbers = numbers.flatten() - 1
    is_whole = is_whole and all(tuple(files.shape(key)[1:]) == joined[1:] for key in keys)
    if not is_whole or ((numbers < 0) | (numbers >= ends[-1])).any():
        raise ValueError(keys)
    sources = torch.searchsorted(ends, numbers, right=True)
    return sources, numbers - (ends - counts)[sources]


def filled_from(plan: Sequence[ModuleInit], fillers: dict[str, Filler]) -> list[ModuleInit]:
    """Return ``plan``, changed so that functions in ``fillers`` give the values of their tensors.

    A module is initialised only if one of its tensors has no such function.
    """

    def merged(init: ModuleInit) -> dict[str, Filler]:
        given = {name: fillers[name] for name in init.names if name in fillers}
        return given if len(given) == len(init.names) else init.fillers() | given

    return [ModuleInit(init.names, partial(merged, init)) for init in plan]


def refuse_zero_checkpoint(directory: Path) -> None:
    """Raise ModelError if ``directory`` or a folder in it has a checkpoint of DeepSpeed's ZeRO."""
    found = next((path for pattern in ("", "*/") for path in directory.glob(f"{pattern}*_optim_states.pt")), None)
    if found is not None:
        raise ModelError(
            f"{directory}: is a checkpoint of DeepSpeed ({found.name}), a pickle, which can run code and is not "
            "read; if you trust it, run its zero_to_fp32.py, load the result into the model, save the model with "
            "save_pretrained, and give the new folder"
        )
