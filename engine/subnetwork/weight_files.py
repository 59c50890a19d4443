"""Initial values from safetensors files. A rank reads only the rows that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..errors import ModelError, shorten
from ..json_files import read_json_file
from ..model_interface import get_canonical_name
from ..placement.layout import Layout
from ..placement.tensor_info import TensorInfo
from .initialisation import Filler, ModuleInit

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = {"F64", "F32", "F16", "BF16"}


class WeightFiles:
    """The tensors in ``directory``: one safetensors file, or several with an index.

    Nothing is read before :meth:`fill` needs it. Raises ModelError if there are no files or they
    cannot be read.
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
                f"{self.directory}: holds its weights as {pickles[0]}, a pickle, which can run code and is not read; "
                "convert it where it is trusted: load it with transformers and save_pretrained it again"
            )
        raise ModelError(
            f"{self.directory}: no {WHOLE} and no {INDEX} there; give the directory of a model in Hugging Face's format"
        )

    def _open(self, file: Path) -> Any:
        # Opening a FIFO would hang. Symbolic links are allowed: Hugging Face's cache consists of
        # them.
        if file.exists() and not file.is_file():
            raise ModelError(f"{file}: is not a regular file; download or export the model again")
        try:
            return safe_open(file, framework="pt")
        except SafetensorError as error:
            raise ModelError(f"{file}: cannot be read ({shorten(error)}); download or export the model again") from None
        except FileNotFoundError:
            raise ModelError(f"{file}: is missing, though {INDEX} names it; download the model again") from None
        except OSError as error:
            raise ModelError(f"{file}: cannot be read ({error.strerror}); download or export the model again") from None

    def keys(self) -> list[str]:
        return list(self._tensors)

    def obstacle(self, key: str, info: TensorInfo) -> str | None:
        """The reason why the tensor ``key`` cannot be the value of ``info``, or None."""
        shape, dtype = tuple(self._tensors[key].get_shape()), self._tensors[key].get_dtype()
        if shape != tuple(info.full_shape):
            return f"has shape {shape} there and {tuple(info.full_shape)} here"
        if info.dtype.is_floating_point and dtype not in _FLOATS:
            return (
                f"is {dtype} there, which is not a plain floating-point format; training cannot start "
                "from quantised models"
            )
        return None

    def fill(self, out: torch.Tensor, start: int, key: str) -> None:
        """Copy rows [start, start + len(out)) of the tensor ``key`` into ``out``."""
        tensor = self._tensors[key]
        out.copy_(tensor[start : start + out.shape[0]] if out.dim() else tensor[...])


def fillers_from(files: WeightFiles, directory: Path, model: nn.Module, layout: Layout) -> dict[str, Filler]:
    """Fillers of all parameters and persistent buffers of ``layout``, by canonical name, from open
    ``files``.

    ``directory`` is the user's, for messages; converted files are in another one. The model's hook
    ``canonical_name`` says which tensor a key belongs to. Raises ModelError unless files and model
    have the same tensors.
    """
    canonical = get_canonical_name(model)
    plain = {key.replace("_orig_mod.", ""): key for key in files.keys()}  # noqa: SIM118  a compiled model was saved
    keys = {name: key for shown, key in plain.items() if (name := canonical(shown)) is not None}
    names_of: dict[str, list[str]] = {name: [name] for name in (*layout.wholes, *layout.buffers)}
    for alias, name in layout.aliases.items():
        names_of[name].append(alias)
    fillers: dict[str, Filler] = {}
    for name, names in names_of.items():
        key = next((keys[other] for other in names if other in keys), None)
        if key is None:
            raise ModelError(f"training.init_from: {directory} holds no {name!r}; it is of another model")
        info = layout.wholes[name][0] if name in layout.wholes else layout.buffers[name]
        if (obstacle := files.obstacle(key, info)) is not None:
            raise ModelError(f"training.init_from: {directory}: {key!r} {obstacle}")
        fillers[name] = partial(files.fill, key=key)
    unknown = keys.keys() - {name for names in names_of.values() for name in names}
    if unknown:
        raise ModelError(
            f"training.init_from: {directory} holds {keys[min(unknown)]!r}, which this model does not have; it is of "
            "another model"
        )
    return fillers


def filled_from(plan: Sequence[ModuleInit], fillers: dict[str, Filler]) -> list[ModuleInit]:
    """``plan`` with these ``fillers`` instead of its own.

    A module is only initialised if it has tensors without a filler.
    """

    def merged(init: ModuleInit) -> dict[str, Filler]:
        given = {name: fillers[name] for name in init.names if name in fillers}
        return given if len(given) == len(init.names) else init.fillers() | given

    return [ModuleInit(init.names, partial(merged, init)) for init in plan]


def refuse_zero_checkpoint(directory: Path) -> None:
    """Raise ModelError if DeepSpeed's ZeRO wrote a checkpoint to ``directory``, or to a folder in
    it.
    """
    found = next((path for pattern in ("", "*/") for path in directory.glob(f"{pattern}*_optim_states.pt")), None)
    if found is not None:
        raise ModelError(
            f"{directory}: is a checkpoint of DeepSpeed ({found.name}), a pickle, which can run code and is not read; "
            "convert it where it is trusted: run its zero_to_fp32.py, load the result into the model, save that with "
            "save_pretrained, and give the new folder"
        )
