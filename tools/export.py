"""``sdp export DIR OUT``: writes a checkpoint's full model and tokenizer for ``transformers``.

Only the tensors of one output file are in memory at a time, and the model's tensors that it has
parts of. Checkpoints of every layout can be exported.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from ..data.clusters import load_router
from ..data.huggingface import write_tokenizer
from ..data.tokenizers import load_tokenizer
from ..engine.accounting.quantities import format_bytes
from ..engine.checkpoint.load import load, shapes_in
from ..engine.checkpoint.state import weights_of
from ..engine.checkpoint.storage.files import damaged_file
from ..engine.environment.process import cache_folder
from ..engine.errors import CheckpointError, ConfigError, escape
from ..engine.json_files import read_json_file
from ..engine.model_interface import Conversion, Tensors, find_tensors
from ..engine.object_store import Store, is_url, upload
from ..models.registry import build_model, huggingface_config
from .runs import saved_run
from .runs.dataset import check_router, router_folder
from .runs.paths import ROUTER, path_folder
from .runs.saved_run import CheckpointChoice, SavedRun
from .runs.start_files import MORE_TEMPLATES, START, TENSORS, has_tokenizer, kept_tensors
from .runs.whole_model import check_exportable
from .shared.arguments import size_in_bytes

WEIGHTS = "model"


# The files of an export: the model's, and those that tokenizers of transformers write.
_WRITTEN = re.compile(
    r"(generation_|tokenizer_)?config\.json|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|tokenizer\.(json|model)|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|chat_template\.jinja"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    saved_run.add_arguments(parser, models=False)
    parser.add_argument(
        "--to",
        choices=["hf"],
        default="hf",
        help="the format: hf writes a model directory for Hugging Face transformers",
    )
    parser.add_argument("out", metavar="OUT", help="the directory or s3://… to write to")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="type of the written weights (default: that of the model that the run started from, or float32)",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=size_in_bytes,
        default="5GB",
        help="largest size of a file, for example 500MB (default: 5GB)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export in OUT")


def run(args: argparse.Namespace) -> int:
    """Export a checkpoint and print what was written. Raises an SDPError if that fails."""
    choice = CheckpointChoice.from_args(args)
    if not is_url(args.out):
        print(escape(saved_run.use(choice, lambda saved: _export(saved, args, Path(args.out)))))
        return 0
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="export-", dir=cache_folder()) as made:
        line = saved_run.use(choice, lambda saved: _export(saved, args, Path(made) / "model"))
        upload(Path(made) / "model", args.out, "config.json", _WRITTEN)
    print(escape(line))
    return 0


def _export(saved: SavedRun, args: argparse.Namespace, out: Path) -> str:
    count = saved.config.sdp.paths.count if saved.config.sdp.paths is not None else 1
    folders = [path_folder(out, path) for path in range(count)] if count > 1 else [out]
    for folder in folders:
        _check_output(args.out, folder.relative_to(out), overwrite=args.overwrite)
    dtype, limit = getattr(torch, args.dtype) if args.dtype is not None else None, args.max_shard_size
    files = [file for path, folder in enumerate(folders) for file in export(saved, folder, dtype, limit, path)]
    size = format_bytes(sum(path.stat().st_size for path in files), "MB", 1)
    written = read_json_file(folders[0] / "config.json")
    dtype_name = written.get("dtype", written.get("torch_dtype", "float32"))
    weights = f"{dtype_name} weights in {len(files)} file(s), {size}, and the tokenizer"
    if count > 1:
        router = _copy_router(saved, out)
        weights += f", in a folder for each of {count} paths; {'the router too' if router else 'there is no router'}"
    return f"{saved.checkpoint} -> {args.out}: {weights}"


def _copy_router(saved: SavedRun, out: Path) -> bool:
    """Copy the router of the paths. Return whether there is one."""
    folder = router_folder(saved.config, saved.data)
    if folder is None or not folder.is_dir():
        return False
    load_router(folder)  # raises a DataError if it is damaged
    check_router(folder, saved.state, saved.checkpoint)
    (out / ROUTER).mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.copytree(path, out / ROUTER / path.name, dirs_exist_ok=True)
        elif path.suffix != ".bin":  # those files have the cluster of each sequence
            shutil.copyfile(path, out / ROUTER / path.name)
    return True


def export(saved: SavedRun, out: Path, dtype: torch.dtype | None, max_shard_bytes: int, path: int = 0) -> list[Path]:
    """Write the model and the tokenizer of ``saved`` to ``out``, and return the weight files.

    If the run has several paths (``sdp.paths``), the model of path number ``path`` is written. The
    earlier content of ``out`` is replaced at the end.

    If the run started from a model of transformers, the tensors get the names of that model. They
    also get its types, unless ``dtype`` is given. Other files of that model are copied.
    Raises ConfigError and CheckpointError.
    """
    out = out.resolve()
    if saved.is_model:
        raise ConfigError(
            f"sdp export: {saved.dump_dir} is a model of transformers already; give the --dump-dir of a run"
        )
    check_exportable(saved, "sdp export")
    tokenizer = load_tokenizer(saved.data)
    model = build_model(saved.config.model, tokenizer.vocab_size)
    started = kept_tensors(saved.dump_dir)
    tensors = _of_this_package(model, dtype) if started is None else _as_at_the_start(model, started, dtype)
    if (damage := damaged_file(saved.checkpoint, saved.state["files"])) is not None:
        raise CheckpointError(damage)
    keys, prefix = shapes_in(saved.checkpoint), f"paths.{path}."
    for key, one in tensors.items():
        names = {name: prefix + name if f"model/{prefix}{name}" in keys else name for name, _ in one.sources}
        tensors[key] = one._replace(sources=tuple((names[name], shape) for name, shape in one.sources))
    partial = out.parent / f".{out.name}.{os.getpid()}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        names = _write_weights(saved.checkpoint, partial, tensors, max_shard_bytes)
        if started is not None:
            _copy_description(saved.dump_dir / START, partial, dtype)
        if not has_tokenizer(partial):
            begin, end = write_tokenizer(tokenizer, partial)
            tokens = {"bos_token_id": begin, "eos_token_id": end}
            if started is None:
                config = huggingface_config(saved.config.model, tokenizer.vocab_size)
                kind = str(dtype or torch.float32).removeprefix("torch.")
                _write_json(partial / "config.json", config | tokens | {"torch_dtype": kind})
                _write_json(partial / "generation_config.json", tokens)
        _replace(partial, out)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{out}: cannot be written ({error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return [out / name for name in names]


class _Tensor(NamedTuple):
    """A tensor of the written files: its shape and type, and how it is made.

    ``sources`` are the names and shapes of tensors of the checkpoint. ``split`` makes this and
    other tensors from them, by key.
    """

    shape: torch.Size
    dtype: torch.dtype
    sources: tuple[tuple[str, torch.Size], ...]
    split: Callable[[Sequence[torch.Tensor]], Tensors]


def _of_this_package(model: nn.Module, dtype: torch.dtype | None) -> dict[str, _Tensor]:
    """The tensors of a model that is also a model of transformers, in the model's order.

    A tied parameter is listed once, under its first name.
    """
    persistent = model.state_dict().keys()
    tensors = (
        *model.named_parameters(),
        *((name, buffer) for name, buffer in model.named_buffers() if name in persistent),
    )
    kind = dtype or torch.float32
    return {n: _Tensor(t.shape, kind, ((n, t.shape),), functools.partial(_unchanged, [n])) for n, t in tensors}


def _as_at_the_start(model: nn.Module, kinds: Mapping[str, str], dtype: torch.dtype | None) -> dict[str, _Tensor]:
    """The tensors of the model that the run started from, with that model's names and order.

    ``kinds`` has the type of each tensor of that model.
    """
    state, plain = model.state_dict(keep_vars=True), {key.replace("_orig_mod.", ""): key for key in kinds}
    first = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    names, conversions = find_tensors(model, plain)
    keys_of, found = dict[str, list[str]](), dict[str, _Tensor]()
    for key, name in names.items():  # a tied tensor may have two keys
        keys_of.setdefault(first[id(state[name])], []).append(plain[key])
    splits = [((name,), functools.partial(_unchanged, keys)) for name, keys in keys_of.items()]
    for split_names, split in splits + [(one.names, functools.partial(_split, one, plain)) for one in conversions]:
        tensors = [state[name] for name in split_names]
        sources = tuple((first[id(tensor)], tensor.shape) for tensor in tensors)
        for key, piece in split([torch.empty_like(tensor, device="meta") for tensor in tensors]).items():
            known = _DTYPES.get(kinds[key])
            found[key] = _Tensor(piece.shape, piece.dtype if known is None else dtype or known, sources, split)
    return {key: found[key] for key in kinds if key in found}


def _unchanged(keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> Tensors:
    """Give the only tensor its keys in the files, which cannot share memory."""
    return {key: tensors[0].clone() if number else tensors[0] for number, key in enumerate(keys)}


def _split(conversion: Conversion, plain: Mapping[str, str], tensors: Sequence[torch.Tensor]) -> Tensors:
    """Split tensors of the model into those of the files, by their keys ``plain`` in the files."""
    rows = zip(*(tensor.chunk(len(conversion.parts)) for tensor in tensors), strict=True)
    pieces = (conversion.split(part, dict(zip(conversion.names, of, strict=True))) for part, of in enumerate(rows))
    return {plain[key]: piece for found in pieces for key, piece in found.items()}


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _copy_description(kept: Path, out: Path, dtype: torch.dtype | None) -> None:
    """Copy the files of the start. Another ``dtype`` is written into the configuration."""
    shutil.copytree(kept, out, ignore=shutil.ignore_patterns(TENSORS), dirs_exist_ok=True)
    config = read_json_file(out / "config.json")
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if dtype is not None and config.get(key) != (kind := str(dtype).removeprefix("torch.")):
        _write_json(out / "config.json", config | {key: kind})


def _write_weights(path: Path, out: Path, tensors: Mapping[str, _Tensor], limit: int) -> list[str]:
    """Write tensors of the checkpoint at ``path`` to files of at most ``limit`` bytes.

    Returns the names of the files. Several files get an index.
    """
    sizes = {key: tensor.shape.numel() * tensor.dtype.itemsize for key, tensor in tensors.items()}
    shards = _divide(sizes, limit)
    files = [f"{WEIGHTS}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    files = files if len(shards) > 1 else [f"{WEIGHTS}.safetensors"]
    for file, keys in zip(files, shards, strict=True):
        makers = {tensors[key].sources: tensors[key] for key in keys}
        widest = dict[str, torch.dtype]()
        for key in keys:
            for name, _ in tensors[key].sources:
                widest[name] = torch.promote_types(widest.get(name, tensors[key].dtype), tensors[key].dtype)
        loaded = {name: torch.empty(shape, dtype=widest[name]) for of in makers for name, shape in of}
        load(path, weights_of(loaded), files={}, alone=True)  # the hashes were checked before
        written = {
            key: piece.to(tensors[key].dtype).contiguous()
            for sources, one in makers.items()
            for key, piece in one.split([loaded.pop(name) for name, _ in sources]).items()
            if key in keys
        }
        save_file(written, out / file, metadata={"format": "pt"})
        del written, loaded  # frees them before the tensors of the next file are allocated
    if len(files) > 1:
        total = sum(tensor.shape.numel() for tensor in tensors.values())
        file_of = {key: file for file, keys in zip(files, shards, strict=True) for key in keys}
        metadata = {"total_parameters": total, "total_size": sum(sizes.values())}
        _write_json(out / f"{WEIGHTS}.safetensors.index.json", {"metadata": metadata, "weight_map": file_of})
    return files


def _divide(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Divide the names among files of at most ``limit`` bytes.

    A larger tensor gets a file of its own.
    """
    shards: list[list[str]] = []
    filled = limit
    for name, size in sizes.items():
        if filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _check_output(place: str, folder: Path, *, overwrite: bool) -> None:
    """Refuse a ``folder`` of ``place`` (a path or a URL) that exists and may not be replaced."""
    if is_url(place):
        out = "/".join((place.rstrip("/"), *folder.parts))
        names = {name.partition("/")[0] for name in Store(out).sizes()}
        if not names:
            return
    elif (out := Path(place) / folder).exists():
        names = {path.name for path in out.iterdir()} if out.is_dir() else {out.name}
    else:
        return
    if not overwrite:
        raise ConfigError(
            f"{out}: exists already; choose another directory, or pass --overwrite to replace an earlier export"
        )
    if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
        raise ConfigError(
            f"{out}: has files that are not from an export, which --overwrite does not remove; choose another directory"
        )


def _replace(new: Path, out: Path) -> None:
    """Move the files in ``new`` to ``out``, in place of the files of an earlier export.

    Other files in ``out`` stay. config.json comes last, so an incomplete directory is not a model.
    """
    if not out.exists():
        new.rename(out)
        return
    for path in out.iterdir():
        if _WRITTEN.fullmatch(path.name):
            path.unlink()
    shutil.rmtree(out / MORE_TEMPLATES, ignore_errors=True)
    for path in sorted(new.iterdir(), key=lambda path: path.name == "config.json"):
        path.replace(out / path.name)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
